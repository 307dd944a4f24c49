"""Which actor of a role gets the next job of this one."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from actors.runtime.actor import Notifier
from actors.runtime.directory import Directory
from areal.generation.routing import GeneratorLoad, fullness
from protocols.bus_errors import BusError, BusyError, ConnectionLostError, RefusedError
from protocols.messages import Member
from protocols.transport import STREAM_SILENCE_SECONDS

# After a failed request, other actors of the role are preferred to this one for this long. The wait for one that does
# not answer doubles with each further try, up to the second value.
AVOID_SECONDS, AVOID_MOST_SECONDS = 5.0, 60.0
# A request to an actor that is gone has failed after this long.
TRY_SECONDS = 2 * STREAM_SILENCE_SECONDS
RETRY_SECONDS = 0.1

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


class Router:
    """Chooses an actor of a role: the least loaded one that has not failed a request recently. A generator that holds a
    version older than `min_version` is chosen only if there is no other, and never if it serves users.

    users: whether the requests are of users, whose generator is the one that serves them alone.

    `requests`: number of this actor's requests at each server, by its identity, including slots that samples have
    before their first request. `room`: notified when one of them ends. `loads`: the load that each generator has
    reported, as the master passes it on.
    """

    def __init__(
        self, directory: Directory, role: str, index: int, most: int, on_lost: Callable[[Member], None]
    ) -> None:
        """role, index: of this actor. most: the limit of a generator that has reported none. on_lost: called when the
        connection to an actor is lost for the first time."""
        self.directory = directory
        self._role = role
        self._index = index
        self._most = most
        self._on_lost = on_lost
        self.requests: Counter[str] = Counter()
        self.room = Notifier()
        self.loads: dict[str, GeneratorLoad] = {}
        self.users = False
        self._avoid: dict[str, _Avoided] = {}
        self._counted: tuple[list[Member], dict[str, GeneratorLoad], int] = [], {}, 0  # what `places` is of, and it

    async def choose(self, role: str, serves: str | None = None, min_version: int = 0) -> Member:
        """The actor of `role` to ask next. Waits until one is healthy.

        serves: a name that the actor has to serve; None: any. min_version: the oldest version that may sample.
        """
        candidates = await self.directory.until(
            lambda: [
                m for m in self.directory.with_role(role) if serves in (None, *m.serves) and self.may(m, min_version)
            ]
        )
        askers = self.askers
        # Reported loads are out of date. Each asker begins at another actor, not all at the same few.
        first = self._index * len(candidates) // askers % len(candidates)
        candidates = candidates[first:] + candidates[:first]

        def cost(m: Member) -> tuple[bool, float, float]:
            held_back = m.held is not None and m.held.version < min_version
            return held_back, self._seconds_avoided(m), self._load_of(m, askers, min_version)

        return min(candidates, key=cost)

    def may(self, member: Member, min_version: int = 0) -> bool:
        """Whether the member may get a request."""
        if member.role != "generator":
            return True
        too_old = member.serving and member.held is not None and member.held.version < min_version
        return not too_old and (member.serving or not self.users)

    @property
    def askers(self) -> int:
        """Number of healthy actors of this actor's own role, at least 1."""
        return max(1, len(self.directory.with_role(self._role)))

    @property
    def places(self) -> int:
        """Number of sequences that all healthy generators take. Each sample that ends asks, and there may be thousands
        of generators, so they are only looked at again after a change."""
        generators = self.directory.with_role("generator")
        if self._counted[0] is not generators or self._counted[1] is not self.loads:
            self._counted = generators, self.loads, sum(map(self.limit, generators))
        return self._counted[2]

    @property
    def sequences(self) -> int:
        """Number of this actor's sequences at healthy generators."""
        members = ((self.directory.members.get(identity), n) for identity, n in self.requests.items())
        return sum(n for m, n in members if m is not None and m.role == "generator" and m.state == "healthy")

    def limit(self, generator: Member) -> int:
        """Number of sequences that the generator takes from all askers together."""
        load = self.loads.get(generator.identity)
        return load.limit if load else self._most

    def _load_of(self, m: Member, askers: int, min_version: int) -> float:
        if m.role != "generator":
            return self.requests[m.identity]
        load = self.loads.get(m.identity) or GeneratorLoad(0, 0, self.limit(m), min_version)
        return fullness(load, self.requests[m.identity], askers, min_version)

    def trusts(self, member: Member) -> bool:
        """False if the last request to the member has failed, and none has succeeded since."""
        avoided = self._avoid.get(member.identity)
        if avoided and self._is_over(avoided) and (avoided.tried or not avoided.lost):
            del self._avoid[member.identity]
            avoided = None
        return avoided is None

    def avoids(self, member: Member) -> bool:
        """True if the member is to get a request only if there is no other."""
        now = self.directory.members.get(member.identity, member)
        return not self.may(now) or self._seconds_avoided(member) > 0

    def _seconds_avoided(self, member: Member) -> float:
        """The longer, the more tries have failed; 0: it is not avoided, or a try is due."""
        if self.trusts(member):
            return 0.0
        avoided = self._avoid[member.identity]
        renewed = (
            avoided.lost and not avoided.tried and avoided.listed is not self.directory.members.get(member.identity)
        )
        return 0.0 if self._is_over(avoided) or renewed else avoided.seconds

    @staticmethod
    def _is_over(avoided: _Avoided) -> bool:
        return avoided.until <= asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def asking(self, member: Member) -> Iterator[None]:
        """A request to this member until the end of the block. If it succeeds, the member is not avoided any more."""
        if not self.trusts(member) and not self.avoids(member):
            avoided = self._avoid[member.identity]
            avoided.tried, avoided.until = True, asyncio.get_running_loop().time() + TRY_SECONDS
        with self.using(member):
            yield
        if (after := self._avoid.get(member.identity)) and after.lost:
            del self._avoid[member.identity]

    @contextlib.contextmanager
    def using(self, member: Member) -> Iterator[None]:
        """Count a request to this member, or a slot for one, until the end of the block."""
        self.requests[member.identity] += 1
        try:
            yield
        finally:
            self.requests[member.identity] -= 1
            if not self.requests[member.identity]:
                del self.requests[member.identity]
            self.room.notify()

    def slot_at(self, generator: Member) -> ExitStack:
        """A slot in the load of a generator, until it is closed."""
        slot = ExitStack()
        slot.enter_context(self.using(generator))
        return slot

    async def avoid(self, member: Member, error: BusError) -> None:
        """Prefer other actors, because a request to this one has failed: for AVOID_SECONDS, or until it answers again
        if it is lost. Also pauses for RETRY_SECONDS, for the case that there is no other."""
        now, identity, listed = asyncio.get_running_loop().time(), member.identity, self.directory.members
        self._avoid = {name: avoided for name, avoided in self._avoid.items() if avoided.until > now or name in listed}
        lost, before = not isinstance(error, RefusedError | BusyError), self._avoid.get(identity)
        if before is None or not (lost and before.lost):
            self._avoid[identity] = _Avoided(now + AVOID_SECONDS, AVOID_SECONDS, lost, listed.get(identity))
            if lost:
                log.warning("others get its work until it answers again", actor=identity, error=str(error))
            if isinstance(error, ConnectionLostError):
                self._on_lost(member)
        elif before.tried or before.until <= now:  # not one of those that have failed together
            seconds = min(2 * before.seconds, AVOID_MOST_SECONDS)
            self._avoid[identity] = _Avoided(now + seconds, seconds, lost, listed.get(identity))
        await asyncio.sleep(RETRY_SECONDS)
