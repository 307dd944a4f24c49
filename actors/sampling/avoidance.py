"""The actors to which others are preferred for a while, because a request to them has failed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from actors.runtime.directory import Directory
from protocols.bus_errors import BusError, BusyError, ConnectionLostError, RefusedError
from protocols.membership_messages import Member
from protocols.transport import STREAM_SILENCE_SECONDS

# After a failed request, other actors of the role are preferred to this one for this long. The wait for one that does
# not answer doubles with each further try, up to the second value.
AVOID_SECONDS, AVOID_MOST_SECONDS = 5.0, 60.0
# A request to an actor that is gone has failed after this long.
TRY_SECONDS = 2 * STREAM_SILENCE_SECONDS

log = structlog.get_logger()


@dataclass(slots=True)
class _Avoided:
    """Others are preferred to an actor `until` then (the loop's time), for `seconds`. Afterwards one that is `lost`,
    because it did not answer, gets a single request: it is `tried`. That is due earlier if the directory has changed
    since, which had it as `listed`."""

    until: float
    seconds: float
    lost: bool
    listed: Member | None
    tried: bool = False


class Avoidance:
    """The actors to which others are preferred, because a request to them has failed. on_lost: called when the
    connection to an actor is lost for the first time."""

    def __init__(self, directory: Directory, on_lost: Callable[[Member], None]) -> None:
        self._directory = directory
        self._on_lost = on_lost
        self._avoided: dict[str, _Avoided] = {}

    def trusts(self, member: Member) -> bool:
        """False if the last request to the member has failed, and none has succeeded since."""
        avoided = self._avoided.get(member.identity)
        if avoided and self._is_over(avoided) and (avoided.tried or not avoided.lost):
            del self._avoided[member.identity]
            avoided = None
        return avoided is None

    def seconds(self, member: Member) -> float:
        """The longer, the more tries have failed; 0: the member is not avoided, or a try is due."""
        if not self._avoided or self.trusts(member):
            return 0.0
        avoided = self._avoided[member.identity]
        renewed = (
            avoided.lost and not avoided.tried and avoided.listed is not self._directory.members.get(member.identity)
        )
        return 0.0 if self._is_over(avoided) or renewed else avoided.seconds

    def begin_try(self, member: Member) -> None:
        """A request goes to this member. If it is avoided, no other goes there until this one has ended."""
        if self._avoided and not self.trusts(member) and not self.seconds(member):
            avoided = self._avoided[member.identity]
            avoided.tried, avoided.until = True, asyncio.get_running_loop().time() + TRY_SECONDS

    def succeeded(self, member: Member) -> None:
        if self._avoided and (avoided := self._avoided.get(member.identity)) and avoided.lost:
            del self._avoided[member.identity]

    def failed(self, member: Member, error: BusError) -> None:
        """Prefer other actors for AVOID_SECONDS, or until this one answers again if it is lost."""
        now, identity, listed = asyncio.get_running_loop().time(), member.identity, self._directory.members
        self._avoided = {
            name: avoided for name, avoided in self._avoided.items() if avoided.until > now or name in listed
        }
        lost, earlier = not isinstance(error, RefusedError | BusyError), self._avoided.get(identity)
        if earlier is None or not (lost and earlier.lost):
            self._avoided[identity] = _Avoided(now + AVOID_SECONDS, AVOID_SECONDS, lost, listed.get(identity))
            if lost:
                log.warning("others get its work until it answers again", actor=identity, error=str(error))
            if isinstance(error, ConnectionLostError):
                self._on_lost(member)
        elif earlier.tried or earlier.until <= now:  # not one of those that have failed together
            seconds = min(2 * earlier.seconds, AVOID_MOST_SECONDS)
            self._avoided[identity] = _Avoided(now + seconds, seconds, lost, listed.get(identity))

    @staticmethod
    def _is_over(avoided: _Avoided) -> bool:
        return avoided.until <= asyncio.get_running_loop().time()
