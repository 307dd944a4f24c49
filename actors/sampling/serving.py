"""The base class of the roles that score: a role serves names and does jobs on flows."""

import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from actors.runtime.actor import Actor, handles
from actors.runtime.membership import Membership
from actors.sampling.flows import Flows, JobFunction
from protocols.bus_errors import BusyError, RefusedError
from protocols.messages import (
    Completion,
    CompletionsScored,
    Done,
    EndJobs,
    JobFailed,
    Message,
    OpenFlow,
    Score,
    Scored,
)
from protocols.transport import Request


class Serving(Actor):
    """A subclass implements `score_completions` and `size`."""

    def __init__(self, member: Membership, names: tuple[str, ...]) -> None:
        """names: the served names."""
        self.member = member
        self.config = member.config
        self._names = names
        self._flows = Flows[Any](self.size, self.part, member.spawn)
        self._scored = self._failed = 0

    def serves(self) -> tuple[str, ...]:
        return self._names

    def size(self, result: Any) -> int:
        """Return the approximate bytes of a result in a message."""
        raise NotImplementedError

    def part(self, results: list[Any], failed: list[JobFailed]) -> Message:
        """Return a part of a flow."""
        return CompletionsScored(scored=tuple(results), failed=tuple(failed))

    async def score_completions(
        self, key: str, completion: Completion, row: Mapping[str, Any], add: Callable[[Scored], None]
    ) -> None:
        """Score a completion, or all completions of a group. key: a unique name of the job. Raises a BusError."""
        raise NotImplementedError

    async def hand_over(self) -> None:
        await self._flows.wait_until_empty()

    def stats(self) -> dict[str, float]:
        return {"scored": self._scored, "failed": self._failed}

    @handles(OpenFlow)
    def open_flow(self, request: Request[OpenFlow]) -> AsyncIterator[Message]:
        return self._flows.serve(request)

    @handles(Score)
    async def score(self, request: Request[Score]) -> Done:
        rows = request.message.rows
        completions = {
            completion.job: functools.partial(
                self.score_completions, f"{request.owner} {completion.job}", completion, rows[completion.row]
            )
            for completion in request.message.completions
        }
        return self.begin(request, request.message.flow, completions)

    @handles(EndJobs)
    async def end_jobs(self, request: Request[EndJobs]) -> Done:
        self._flows.cancel(request)
        return Done()

    def begin(self, request: Request[Message], flow: int, jobs: Mapping[int, JobFunction[Any]]) -> Done:
        """Begin jobs. A job has no deadline while this actor is alive, however long the queue is. Raises BusError."""
        if self.member.state != "healthy":
            raise BusyError(f"this {self.role} actor accepts no jobs: it is {self.member.state}")
        self._flows.begin(request, flow, jobs)
        return Done()

    def check_served(self, name: str) -> None:
        """Raises RefusedError if this actor does not serve the name."""
        if name not in self.serves():
            served = ", ".join(self.serves())
            raise RefusedError(f"this {self.role} actor does not serve {self.role} {name!r}, only {served}")
