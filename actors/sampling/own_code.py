"""The own code of a sample's workflow: time limit, errors, and the line of an error."""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

from actors.sampling.services import Services
from areal.base.text import LIBRARIES, error_text, place_in
from areal.workflows.tools import waiting


class OwnCode:
    """The own code of a sample's workflow runs while the sample waits for no actor of the run. Own code counts as work
    of this actor, and the time of every stretch is limited."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._waits = 0
        self._timer: asyncio.Timeout | None = None  # while the workflow runs
        self._next_look: asyncio.TimerHandle | None = None
        self._longest = 0.0  # stretch

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the block as waiting for other actors: the workflow's own code does not run meanwhile."""
        self._waits += 1
        self._leave()
        try:
            yield
        finally:
            self._waits -= 1
            self._enter()

    def _enter(self) -> None:
        if self._timer is not None and not self._waits and not self._timer.expired():
            self._services.own_code[self] = asyncio.get_running_loop().time()

    def _leave(self) -> None:
        since = self._services.own_code.pop(self, None)
        if since is not None and self._timer is not None and not self._timer.expired():
            self._longest = max(self._longest, asyncio.get_running_loop().time() - since)

    def _limit(self, seen: float | None = None) -> None:
        """End the workflow if its own code has run without a wait since the last look. Otherwise look again when the
        limit may be reached: a timer that moves with each wait takes a tenth of the CPU time of a sample. seen: the
        start of the stretch at the last look, so that a clock that is slightly early changes nothing."""
        loop = asyncio.get_running_loop()
        since = self._services.own_code.get(self, now := loop.time())
        if since != seen:
            self._next_look = loop.call_at(since + self._services.sample_seconds, self._limit, since)
        elif self._timer is not None:
            self._timer.reschedule(now)

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Mark the block as the run of the workflow. Raises TimeoutError if the workflow waits too long for anything
        but actors of the run."""
        try:
            async with asyncio.timeout(None) as self._timer:
                self._enter()
                self._limit()
                waiting.set(self.waiting)
                try:
                    yield
                finally:
                    self._leave()
            self._services.own_limits.end("sample", self._longest)
        except TimeoutError as error:
            if not self._timer or not self._timer.expired():
                raise
            seconds = self._services.sample_seconds
            raise TimeoutError(
                f"it has waited for {seconds:.0f} s for something that is no actor of the run "
                f"(rollout_manager.sample_seconds){place_of(error.__cause__ or error.__context__)}"
            ) from error
        finally:
            self._timer = None
            if self._next_look is not None:
                self._next_look.cancel()


def contained_task(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> asyncio.Task[Any]:
    """Make a task, by asyncio's protocol of task factories. In a task of a workflow, sys.exit and KeyboardInterrupt
    become ordinary errors: asyncio would end this process."""
    if waiting.get() is contextlib.nullcontext:
        return asyncio.Task(work, loop=loop, **settings)

    async def contained() -> Any:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(error_text(error)) from error

    task = asyncio.Task(contained(), loop=loop, **settings)
    task.add_done_callback(lambda _: work.close())  # the work may not have begun
    return task


def place_of(error: BaseException | None, libraries: tuple[str, ...] = LIBRARIES) -> str:
    """Return the line of the user's code that raised `error`, in words. libraries: folders of other code."""
    return place_in(traceback.extract_tb(error.__traceback__) if error else [], libraries)
