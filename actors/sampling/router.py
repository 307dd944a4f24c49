"""Which actor of a role gets the next job of this one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

from actors.runtime.actor import Notifier
from actors.runtime.directory import Directory
from areal.generation.routing import GeneratorLoad, fullness
from protocols.messages import Member

# After a failed request, other actors of the role are preferred to this one for this long.
AVOID_SECONDS = 5.0
RETRY_SECONDS = 0.1


class Router:
    """Chooses an actor of a role: the least loaded one that has not failed a request recently. A generator that holds a
    version older than `min_version` is chosen only if there is no other.

    `requests`: number of this actor's requests at each server, by its identity, including slots that samples have
    before their first request. `room`: notified when one of them ends. `loads`: the load that each generator has
    reported, as the master passes it on.
    """

    def __init__(self, directory: Directory, role: str, index: int, most: int) -> None:
        """role, index: of this actor. most: the limit of a generator that has reported none."""
        self.directory = directory
        self._role = role
        self._index = index
        self._most = most
        self.requests: Counter[str] = Counter()
        self.room = Notifier()
        self.loads: dict[str, GeneratorLoad] = {}
        self._avoid: dict[str, float] = {}

    async def choose(self, role: str, serves: str | None = None, min_version: int = 0) -> Member:
        """The actor of `role` to ask next. Waits until one is healthy.

        serves: a name that the actor has to serve; None: any. min_version: the oldest version that may sample.
        """

        candidates = await self.directory.until(
            lambda: [m for m in self.directory.with_role(role) if serves in (None, *m.serves)]
        )
        now, askers = asyncio.get_running_loop().time(), self.askers
        # Reported loads are out of date. Each asker begins its choice at another actor, so that not all of them fill
        # the same few.
        first = self._index * len(candidates) // askers % len(candidates)
        candidates = candidates[first:] + candidates[:first]

        def cost(m: Member) -> tuple[bool, bool, float]:
            held_back = m.held is not None and m.held.version < min_version
            return held_back, self._avoid.get(m.identity, 0.0) > now, self._load_of(m, askers, min_version)

        return min(candidates, key=cost)

    def knows(self, member: Member) -> bool:
        """True if the member is still in the run."""
        return member.identity in self.directory.members

    @property
    def askers(self) -> int:
        """Number of healthy actors of this actor's own role, at least 1."""
        return max(1, len(self.directory.with_role(self._role)))

    def limit(self, generator: Member) -> int:
        """Number of sequences that the generator takes from all askers together."""
        load = self.loads.get(generator.identity)
        return load.limit if load else self._most

    def _load_of(self, m: Member, askers: int, min_version: int) -> float:
        if m.role != "generator":
            return self.requests[m.identity]
        load = self.loads.get(m.identity) or GeneratorLoad(0, 0, self.limit(m), min_version)
        return fullness(load, self.requests[m.identity], askers, min_version)

    @contextlib.contextmanager
    def using(self, member: Member) -> Iterator[None]:
        """Count a request to this member until the end of the block."""
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

    async def avoid(self, member: Member) -> None:
        """Prefer other actors for AVOID_SECONDS. Also pauses for RETRY_SECONDS, for the case that there is no other."""
        now = asyncio.get_running_loop().time()
        self._avoid = {identity: until for identity, until in self._avoid.items() if until > now}
        self._avoid[member.identity] = now + AVOID_SECONDS
        await asyncio.sleep(RETRY_SECONDS)
