"""The code of a sample's workflow itself: how long it may run, how it ends, and where it was."""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

from actors.sampling.services import Services
from areal.base.text import LIBRARIES, error_text, place_in
from areal.workflows.tools import waiting


class OwnCode:
    """The code of a sample's workflow itself: it runs while the sample waits for no actor of the run. It counts as work
    of this actor, and each stretch of it has a limit."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._waits = 0
        self._timer: asyncio.Timeout | None = None  # while the workflow runs
        self._next_look: asyncio.TimerHandle | None = None
        self._longest = 0.0  # stretch

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the block as waiting for other actors. While a sample does not wait, its workflow's own code runs, which
        counts as work of this actor, and has a limit."""
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
        """End the workflow if its own code has run since the last look, for as long as it may. Otherwise look again
        when it may have: a timer that is moved with each wait takes a tenth of the CPU time of a sample. seen: since
        when it ran at the last look, which a clock that is a little early does not undo."""
        loop = asyncio.get_running_loop()
        since = self._services.own_code.get(self, now := loop.time())
        if since != seen:
            self._next_look = loop.call_at(since + self._services.sample_seconds, self._limit, since)
        elif self._timer is not None:
            self._timer.reschedule(now)

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Mark the block as the run of the workflow. Raises TimeoutError if the workflow waits for too long
        for something else than the actors of the run."""
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
    """A task, by asyncio's protocol of task factories. In one that a workflow has begun, sys.exit and KeyboardInterrupt
    are errors like others: asyncio would end this process."""
    if waiting.get() is contextlib.nullcontext:
        return asyncio.Task(work, loop=loop, **settings)

    async def contained() -> Any:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(error_text(error)) from error

    task = asyncio.Task(contained(), loop=loop, **settings)
    task.add_done_callback(lambda _: work.close())  # it may not have begun
    return task


def place_of(error: BaseException | None, libraries: tuple[str, ...] = LIBRARIES) -> str:
    """The line of the user's code at which `error` was raised, in words. libraries: folders of other code."""
    return place_in(traceback.extract_tb(error.__traceback__) if error else [], libraries)
