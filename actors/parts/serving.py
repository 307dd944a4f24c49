"""The base class of the roles that score, which serve names and do jobs on flows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.parts.flows import Flows, Work
from actors.runtime.actor import Actor, handles
from protocols.errors import BusyError, RefusedError
from protocols.messages import Done, EndJobs, Message
from protocols.transport import Request


class Serving(Actor):
    """size: bytes of a result in a message, about."""

    def __init__(self, *args: Any, size: Callable[[Any], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flows = Flows[Any](size, self.spawn)
        self._scored = self._failed = 0

    async def hand_over(self) -> None:
        await self._flows.emptied()

    def stats(self) -> dict[str, float]:
        return {"scored": self._scored, "failed": self._failed}

    @handles(EndJobs)
    async def end_jobs(self, request: Request[EndJobs]) -> Done:
        self._flows.cancel(request)
        return Done()

    def begin(self, request: Request[Message], flow: int, jobs: Mapping[int, Work[Any]]) -> Done:
        """Begin jobs, which have no deadline while this actor is alive, however long its queue is. Raises BusError."""
        if self.state != "healthy":
            raise BusyError(f"this {self.role} actor accepts no jobs: it is starting or draining")
        self._flows.begin(request, flow, jobs)
        return Done()

    def check_served(self, name: str) -> None:
        """Raises RefusedError if this actor does not serve the name."""
        if name not in self.serves():
            served = ", ".join(self.serves())
            raise RefusedError(f"this {self.role} actor does not serve {self.role} {name!r}, only {served}")
