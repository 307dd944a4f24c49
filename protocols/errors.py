"""Errors of the bus. Each has a `code` that travels in a `Failure` message and comes back as the same type."""

from __future__ import annotations


class BusError(Exception):
    """Anything that went wrong between two actors."""

    code = "internal"


class MalformedError(BusError):
    """A frame that is not of this protocol: wrong shape, too large, unknown kind or a body that does not validate."""

    code = "malformed"


class ProtocolVersionError(BusError):
    """The peer speaks another version of the protocol."""

    code = "protocol_version"


class RefusedError(BusError):
    """The peer understood and says no; asking again will not help."""

    code = "refused"


class HarmfulError(RefusedError):
    """What was asked has cost the peer a process or all the time there was for it."""

    code = "harmful"


class FencedError(RefusedError):
    """The sender is not (any more) a member: another has its place, or it was given up for dead."""

    code = "fenced"


class BusyError(BusError):
    """The peer holds as many requests as it may; try later."""

    code = "busy"


class DeadlineError(BusError):
    """No answer within the deadline."""

    code = "deadline"


class StreamBrokenError(BusError):
    """A stream ended without its end: the peer died, stopped, or a part was lost."""

    code = "stream_broken"


_BY_CODE = {
    cls.code: cls
    for cls in (
        BusError, MalformedError, ProtocolVersionError, RefusedError, HarmfulError, FencedError, BusyError,
        DeadlineError, StreamBrokenError,
    )
}  # fmt: skip


def from_code(code: str, text: str) -> BusError:
    """The error that a `Failure` message stands for."""
    return _BY_CODE.get(code, BusError)(text)
