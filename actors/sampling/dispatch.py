"""Dispatch: does a job at an actor of a role, and continues the job at another actor if the first dies.

A call goes to a generator, a completion to a reward actor or a scorer, a row of tokens to a scorer. The kind of a job
(actors/sampling/jobs.py) makes the difference: the role, the first actor, and the meaning of an error for the job.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from actors.runtime.directory import Directory
from actors.sampling.avoidance import AVOID_SECONDS, Avoidance
from actors.sampling.flows import Flow, Job, Spawn
from actors.sampling.loads import Loads
from protocols.bus import Bus
from protocols.bus_errors import BusError
from protocols.membership_messages import Member

# The pause after a job's first error. The pause doubles with further errors, up to AVOID_SECONDS, unless another actor
# is there or the directory changes. Otherwise a job would use up its attempts on a dead actor in the directory.
RETRY_SECONDS = 0.1


class Dispatch:
    """Chooses an actor of a role for each job: the least loaded actor without a recent failed request. A generator held
    at a version older than `min_version` is the last choice, and never chosen if it serves users. An actor in use has a
    single flow, because an actor does jobs of a single kind.

    users: whether jobs are of users, who get only the generators that serve users.
    """

    def __init__(
        self,
        directory: Directory,
        role: str,
        index: int,
        limit: int,
        on_lost: Callable[[Member], None],
        open_flow: Callable[[Member, type[Job]], Flow[Any]],
        users: bool = False,
    ) -> None:
        """role, index: this actor's place. limit: see Loads. on_lost: see Avoidance. open_flow: opens a flow to an
        actor."""
        self._directory = directory
        self._role = role
        self._index = index
        self._open_flow = open_flow
        self.users = users
        self.loads = Loads(directory, limit)
        self.avoidance = Avoidance(directory, on_lost)
        self._flows: dict[str, Flow[Any]] = {}  # by identity of the server

    async def run(self, job: Job) -> Any:
        """Return the result of a job, from actor after actor. Raises SampleFailed."""
        member, errors = job.begin_dispatch(), 0
        try:
            while True:
                job.check()
                if member is None or self.avoids(member):
                    member = await job.place(self.choose)
                job.run_at(member)
                try:
                    with self._asking(member):
                        return await self._flow_to(member, job).run_job(job)
                except BusError as error:
                    if (result := job.settle(error)) is not None:
                        return result
                    errors += 1
                    member = job.leave(member, await self._next(job, member, error, errors))
        finally:
            job.end_dispatch()

    async def choose(self, role: str, serves: str | None = None, min_version: int = 0) -> Member:
        """Return the actor of `role` to ask next. Waits until an actor is healthy.

        serves: a name that the actor has to serve; None: any. min_version: the oldest version that may sample.
        """
        candidates = await self._directory.until(
            lambda: [
                m for m in self._directory.with_role(role) if serves in (None, *m.serves) and self.may(m, min_version)
            ]
        )
        askers = self.askers
        # Reported loads are out of date. Askers begin at different actors, not all at the same few.
        first = self._index * len(candidates) // askers % len(candidates)
        candidates = candidates[first:] + candidates[:first]

        def cost(m: Member) -> tuple[bool, float, float]:
            held_back = m.held is not None and m.held.version < min_version
            return held_back, self.avoidance.seconds(m), self.loads.of(m, askers, min_version)

        return min(candidates, key=cost)

    def may(self, member: Member, min_version: int = 0) -> bool:
        """Whether the member may get a request."""
        if member.role != "generator":
            return True
        too_old = member.serving and member.held is not None and member.held.version < min_version
        return not too_old and (member.serving or not self.users)

    def avoids(self, member: Member) -> bool:
        """Whether the member gets a request only if there is no other actor."""
        now = self._directory.members.get(member.identity, member)
        return not self.may(now) or self.avoidance.seconds(member) > 0

    @property
    def askers(self) -> int:
        """Number of healthy actors of this actor's own role, at least 1."""
        return max(1, len(self._directory.with_role(self._role)))

    async def _next(self, job: Job, member: Member, error: BusError, errors: int) -> Member | None:
        """The actor at which a job continues after `member` has failed or handed the job over; None: any."""
        if (target := job.target) is not None:
            return target if target.identity in self._directory.members else None
        self.avoidance.failed(member, error)
        await asyncio.sleep(RETRY_SECONDS)
        pause = min(RETRY_SECONDS * 2 ** (errors - 1), AVOID_SECONDS) - RETRY_SECONDS
        listed = self._directory.members.get(member.identity)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._directory.until(lambda: self._has_news(job, member, listed))
        return None

    def _has_news(self, job: Job, member: Member, listed: Member | None) -> bool:
        """Whether another actor may do the job, or the member's entry in the directory is no longer `listed`."""
        others = (m for m in self._directory.with_role(job.role) if m.identity != member.identity)
        changed = self._directory.members.get(member.identity) is not listed
        return changed or any(job.serves in (None, *m.serves) and not self.avoids(m) for m in others)

    @contextlib.contextmanager
    def _asking(self, member: Member) -> Iterator[None]:
        """A request to this member until the end of the block. After a success the member is no longer avoided."""
        self.avoidance.begin_try(member)
        with self.loads.using(member):
            yield
        self.avoidance.succeeded(member)

    def _flow_to(self, member: Member, job: Job) -> Flow[Any]:
        flow = self._flows.get(member.identity)
        if flow is None or flow.broken:
            self._flows = {name: open_flow for name, open_flow in self._flows.items() if not open_flow.broken}
            flow = self._flows[member.identity] = self._open_flow(member, type(job))
        return flow


def flows_of(bus: Bus, spawn: Spawn) -> Callable[[Member, type[Job]], Flow[Any]]:
    """Return a function that opens flows of an actor, with a new number for every flow and job."""
    numbers = itertools.count()

    def open_flow(member: Member, kind: Any) -> Flow[Any]:
        return Flow(bus.peer(member.address), numbers, kind, spawn)

    return open_flow
