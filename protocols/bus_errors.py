"""Errors of the bus. An error travels as its `code` in a `Failure` message and is raised as the same type again."""


class BusError(Exception):
    """Any failure between two actors."""

    code = "internal"


class MalformedError(BusError):
    """A frame that breaks the protocol: wrong shape, too large, unknown kind, or an invalid body."""

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
    """The request names a sender but comes from another process."""

    code = "forged"


class BusyError(BusError):
    """The peer cannot take the request now, for example because its queue is full; try later."""

    code = "busy"


class PreparingError(BusyError):
    """The master is there but not ready, for example while it makes or downloads the model. The wait has no limit."""

    code = "preparing"


class DeadlineError(BusError):
    """No answer within the deadline."""

    code = "deadline"


class StreamBrokenError(BusError):
    """A stream broke off before its end: the peer died, stopped, or a part was lost."""

    code = "stream_broken"


class ConnectionLostError(StreamBrokenError):
    """The connection to the peer was reset or refused: the peer's process is gone, or the network is down."""

    code = "connection_lost"


_BY_CODE = {
    cls.code: cls
    for cls in (
        BusError, MalformedError, ProtocolVersionError, RefusedError, HarmfulError, FencedError, ForgedError, BusyError,
        PreparingError, DeadlineError, StreamBrokenError, ConnectionLostError,
    )
}  # fmt: skip


def from_code(code: str, text: str) -> BusError:
    """The error for a `Failure` message."""
    return _BY_CODE.get(code, BusError)(text)


def text_of(error: object) -> str:
    """The text of an error, fit for a message: at most 4,096 characters, with `?` for parts that are not Unicode."""
    return str(error).encode(errors="replace").decode()[:4096]
