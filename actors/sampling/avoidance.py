"""Actors that are avoided for a while after a failed request: other actors of the role are preferred."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from actors.runtime.directory import Directory
from protocols.bus_errors import BusError, BusyError, ConnectionLostError, RefusedError
from protocols.membership_messages import Member
from protocols.transport import STREAM_SILENCE_SECONDS

# How long an actor is avoided after a failed request. After every further failed try, the time for an actor that does
# not answer doubles, up to the second value.
AVOID_SECONDS, AVOID_MOST_SECONDS = 5.0, 60.0
# A request to a vanished actor has failed after this time.
TRY_SECONDS = 2 * STREAM_SILENCE_SECONDS

log = structlog.get_logger()


@dataclass(slots=True)
class _Avoided:
    """An actor is avoided for `seconds`, up to the time `until` (by the loop's clock). Afterwards a `lost` actor, which
    did not answer, gets a single request as a try (`tried`). The try is due earlier if the actor's entry in the
    directory is no longer `listed`."""

    until: float
    seconds: float
    lost: bool
    listed: Member | None
    tried: bool = False


class Avoidance:
    """The actors that are avoided after a failed request. on_lost: called when the connection to an actor is lost for
    the first time."""

    def __init__(self, directory: Directory, on_lost: Callable[[Member], None]) -> None:
        self._directory = directory
        self._on_lost = on_lost
        self._avoided: dict[str, _Avoided] = {}

    def trusts(self, member: Member) -> bool:
        """Whether no request to the member has failed since its last success."""
        avoided = self._avoided.get(member.identity)
        if avoided and self._is_over(avoided) and (avoided.tried or not avoided.lost):
            del self._avoided[member.identity]
            avoided = None
        return avoided is None

    def seconds(self, member: Member) -> float:
        """The time for which a member is avoided, longer after every failed try; 0 if none, or if a try is due."""
        if not self._avoided or self.trusts(member):
            return 0.0
        avoided = self._avoided[member.identity]
        renewed = (
            avoided.lost and not avoided.tried and avoided.listed is not self._directory.members.get(member.identity)
        )
        return 0.0 if self._is_over(avoided) or renewed else avoided.seconds

    def begin_try(self, member: Member) -> None:
        """Note that a request goes to this member. An avoided member gets no other request until the end."""
        if self._avoided and not self.trusts(member) and not self.seconds(member):
            avoided = self._avoided[member.identity]
            avoided.tried, avoided.until = True, asyncio.get_running_loop().time() + TRY_SECONDS

    def succeeded(self, member: Member) -> None:
        if self._avoided and (avoided := self._avoided.get(member.identity)) and avoided.lost:
            del self._avoided[member.identity]

    def failed(self, member: Member, error: BusError) -> None:
        """Avoid the member for AVOID_SECONDS; if the member is lost, until it answers again."""
        now, identity, listed = asyncio.get_running_loop().time(), member.identity, self._directory.members
        self._avoided = {
            name: avoided for name, avoided in self._avoided.items() if avoided.until > now or name in listed
        }
        lost, earlier = not isinstance(error, RefusedError | BusyError), self._avoided.get(identity)
        if earlier is None or not (lost and earlier.lost):
            self._avoided[identity] = _Avoided(now + AVOID_SECONDS, AVOID_SECONDS, lost, listed.get(identity))
            if lost:
                log.warning(
                    "other actors get the work of this actor until it answers", actor=identity, error=str(error)
                )
            if isinstance(error, ConnectionLostError):
                self._on_lost(member)
        elif earlier.tried or earlier.until <= now:  # a failure after the first batch of failures
            seconds = min(2 * earlier.seconds, AVOID_MOST_SECONDS)
            self._avoided[identity] = _Avoided(now + seconds, seconds, lost, listed.get(identity))

    @staticmethod
    def _is_over(avoided: _Avoided) -> bool:
        return avoided.until <= asyncio.get_running_loop().time()
