"""The end of a run: the trainer saves a checkpoint if a signal stopped the run, the summary is written, actors go."""

import asyncio
from collections.abc import Callable

import structlog

from actors.master.accounts import summary
from actors.master.run_control import RunControl
from actors.runtime.actor import Ending
from protocols.bus_errors import text_of
from protocols.membership_messages import Shutdown

# How long the master waits, after the end of the run, for the other actors to leave.
FAREWELL_SECONDS = 5.0
# Pause before the master exits, for the answer to the last actor's Leave.
LAST_WORDS_SECONDS = 0.2

log = structlog.get_logger()


class Farewell:
    """Ends a run in order."""

    def __init__(self, run: RunControl) -> None:
        self._run = run
        self._trainer_may_end = False  # the run is stopped, and the trainer has time to save a checkpoint

    def stop_run(self, by: str) -> None:
        """End the run. The first signal lets the trainer save a checkpoint; a second signal ends the run at once."""
        self._trainer_may_end = not self._run.end.done() and not self._run.shortage
        self._run.finish(False, f"told to stop by {by}", stopped=True)
        self._run.changed.notify()

    @property
    def shutdown(self) -> Shutdown | None:
        """The end of the run, for members; None while the run goes on."""
        return self._shutdown(self._run.end.result()) if self._run.end.done() else None

    def _shutdown(self, ending: Ending) -> Shutdown:
        return Shutdown(ok=ending.ok, reason=text_of(ending.reason), stopped=self._trainer_may_end)

    async def say(self, ending: Ending) -> None:
        """Write the summary, tell the actors that the run has ended, and wait until all actors have left."""
        self._run.folder.free_reserve()
        if self._trainer_may_end:
            await self._let_trainer_end(ending)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                numbers = summary(self._run.config, self._run.state, ending, self._run.meter.tokens_sampled)
                await self._run.record("the summary", self._run.folder.write_summary, numbers)
        except TimeoutError:
            log.error("the run ends without a summary", why=str(self._run.shortage))
        if self._run.shortage:  # events wait for the journal, so the shutdown would wait for ever
            self._run.announcements.publisher.publish(self._shutdown(ending))
        else:
            self._run.send_out(self._shutdown(ending))
        if not await self._until(lambda: not self._run.state.members, FAREWELL_SECONDS):
            log.warning("some actors have not left", members=list(self._run.state.members))
        await asyncio.sleep(LAST_WORDS_SECONDS)

    async def _let_trainer_end(self, ending: Ending) -> None:
        """Serve the trainer for at most `master.drain_seconds`, until the trainer has left."""
        self._run.send_out(self._shutdown(ending))
        seconds, here = self._run.config.master.drain_seconds, self._run.members.with_role
        gone = await self._until(lambda: not (self._trainer_may_end and here("trainer", healthy=False)), seconds)
        if not gone:
            log.warning("the trainer has not left", seconds=seconds)
        self._trainer_may_end = False

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for `condition`, for at most `seconds`. Returns False if the time is over."""
        try:
            async with asyncio.timeout(seconds):
                return await self._run.changed.until(condition)
        except TimeoutError:
            return False
