"""Errors of the bus. Each has a `code` that travels in a `Failure` message and comes back as the same type."""


class BusError(Exception):
    """Anything that went wrong between two actors."""

    code = "internal"


class MalformedError(BusError):
    """A frame that breaks the protocol: wrong shape, too large, unknown kind or a body that does not validate."""

    code = "malformed"


class ProtocolVersionError(BusError):
    """The peer speaks another version of the protocol."""

    code = "protocol_version"


class RefusedError(BusError):
    """The peer understood the request and rejects it; a retry will not help."""

    code = "refused"


class HarmfulError(RefusedError):
    """The request, now or in earlier attempts, killed a process of the peer or took all the time allowed for it."""

    code = "harmful"


class FencedError(RefusedError):
    """The sender is not, or no longer, a member: another actor has its place, or the master declared it dead."""

    code = "fenced"


class ForgedError(RefusedError):
    """The request names a sender that it does not come from."""

    code = "forged"


class BusyError(BusError):
    """The peer cannot take the request now, for example because it holds as many as it may; try later."""

    code = "busy"


class PreparingError(BusyError):
    """The master is there but not ready: it makes or downloads the model, for as long as that takes."""

    code = "preparing"


class DeadlineError(BusError):
    """No answer within the deadline."""

    code = "deadline"


class StreamBrokenError(BusError):
    """A stream broke off before its end: the peer died, stopped, or a part was lost."""

    code = "stream_broken"


class ConnectionLostError(StreamBrokenError):
    """The connection to the peer was reset or refused: its process is gone, or the network between."""

    code = "connection_lost"


_BY_CODE = {
    cls.code: cls
    for cls in (
        BusError, MalformedError, ProtocolVersionError, RefusedError, HarmfulError, FencedError, ForgedError, BusyError,
        PreparingError, DeadlineError, StreamBrokenError, ConnectionLostError,
    )
}  # fmt: skip


def from_code(code: str, text: str) -> BusError:
    """The error that a `Failure` message stands for."""
    return _BY_CODE.get(code, BusError)(text)


def text_of(error: object) -> str:
    """The text of an error as a message can hold it: a path or a row in it may not be Unicode."""
    return str(error).encode(errors="replace").decode()[:4096]
