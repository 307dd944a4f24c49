"""The state and the decisions of a run, shared by the parts of a master."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from actors.master import changes
from actors.master.accounts import StepMeter, evaluation_record
from actors.master.admission import Admission
from actors.master.announcements import Announcements
from actors.master.evaluations import Evaluations
from actors.master.members import Members
from actors.master.progress import Progress
from actors.master.run_state import RunState
from actors.runtime.actor import Ending, Notifier, parked
from areal.config import Config
from areal.data.prompt_sources import PromptSource
from areal.staleness.failures import Failures
from areal.staleness.ledger import Ledger
from areal.storage.disk import DiskRetry, Shortage
from areal.storage.journal import Journal
from protocols.bus_errors import FencedError, RefusedError
from protocols.membership_messages import Member
from protocols.messages import Message
from protocols.transport import Request

# States kept beyond the kept checkpoints: their checkpoints are being written.
SPARE_STATES = 2
# The turn of a request that waits for no other request.
ALONE = nullcontext()

T = TypeVar("T")
log = structlog.get_logger()


class Records(Protocol):
    """The interface of the run folder, for the master's records (areal.storage.run_folder.RunFolder)."""

    @property
    def path(self) -> Path: ...
    @property
    def filling(self) -> str: ...
    def free_reserve(self) -> None: ...
    def append_metrics(self, metrics: dict[str, Any]) -> None: ...
    def append_evaluation(self, evaluation: dict[str, Any]) -> None: ...
    def write_summary(self, summary: dict[str, Any]) -> None: ...
    def record_heartbeat(
        self,
        actor: str,
        state: str,
        activity: str,
        stats: Mapping[str, float],
        clock: float | None = None,
        spans: Iterable[tuple[str, float, float]] = (),
    ) -> None: ...


class RunControl:
    """The state of the run, and the parts that decide on the run. `changed`: notified after every change that a parked
    request may wait for. `end`: the end of the run. `unrecorded`: the step whose metrics may not be on disk."""

    def __init__(self, config: Config, journal: Journal, folder: Records, source: PromptSource | None) -> None:
        self.config = config
        self.folder = folder
        self.journal = journal
        self.state = RunState(config, journal, source)
        self.changed = Notifier()
        self.disk_retry = DiskRetry(folder.path, "the master")
        self._recording = asyncio.Lock()
        self.unrecorded: int | None = self.state.last_step.get("step")
        self.end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.announcements = Announcements(journal)
        self.suspended = 0.0  # seconds
        self.meter = StepMeter(self.state, asyncio.get_running_loop().time)
        # Not journaled: a resumed run, perhaps with other settings, starts all counts at 0.
        self.failures = Failures(
            config.batch_size, config.outage_seconds, config.max_failed_share, folder.path, self.ledger.state.counters
        )
        self.members = Members(self.state, self.send_out, self.now)
        self.evaluations = Evaluations(self.state, self.members)
        self.admission = Admission(self.state, self.failures, self._is_closed, self.now)
        self.progress = Progress(self.state, self.members, self.failures, self.admission.free_groups)

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    def keep_state(self) -> None:
        """Keep the state of a version that gets a checkpoint. The run can go back to a kept state."""
        version, trainer = self.ledger.version, self.config.trainer
        if version and (version % trainer.checkpoint_every == 0 or version == self.config.steps):
            self.journal.keep(version, self.state.dump(), trainer.checkpoints_kept + SPARE_STATES)

    async def record(self, what: str, write: Callable[[dict[str, Any]], None], record: dict[str, Any]) -> None:
        """Write a record into the run folder, after all earlier records, once the disk has room."""
        async with self._recording:
            await self.disk_retry.write(lambda: asyncio.to_thread(write, record), what)

    async def record_step(self, metrics: dict[str, Any]) -> None:
        await self.record("the metrics", self.folder.append_metrics, metrics)
        self.unrecorded = None

    @property
    def shortage(self) -> Shortage | None:
        """The reason why the master waits for the disk; None without a wait."""
        return self.journal.shortage or self.disk_retry.shortage

    def send_out(self, event: Message) -> None:
        """Publish an event, and wake parked requests."""
        self.announcements.send(event)
        self.changed.notify()

    def finish(self, ok: bool, reason: str, stopped: bool = False) -> None:
        if not self.end.done():
            self.end.set_result(Ending(ok, reason, stopped=stopped))

    def end_if(self, reason: str | None) -> None:
        """End the run if there is a reason."""
        if reason:
            self.finish(False, reason)

    async def park(
        self, request: Request[Message], condition: Callable[[], T], turn: AbstractAsyncContextManager[Any] = ALONE
    ) -> T | None:
        """The first true value of `condition`, or None shortly before the request's deadline. turn: held by the request
        during the wait."""
        with suppress(TimeoutError):
            async with parked(request), turn:
                return await self.changed.until(condition)
        return None

    def now(self) -> float:
        """The master's clock. Time in which the process was suspended does not count for leases."""
        return asyncio.get_running_loop().time() - self.suspended

    def member(self, request: Request[Message], *roles: str) -> Member:
        """The sender of `request`. Raises FencedError for a non-member, RefusedError for another role."""
        member = self.state.members.get(request.sender)
        if member is None:
            why = self.members.removed.get(request.sender, "")
            raise FencedError(f"{request.sender} is not a member of this run, or no longer one{why and f': {why}'}")
        if roles and member.role not in roles:
            only = " or ".join(roles)
            raise RefusedError(f"{request.sender} may not send {request.message.kind!r}: only the role {only} may")
        return member

    def check_trainer(self, request: Request[Message], lineage: int | None = None) -> None:
        """Raises FencedError if the sender is not the trainer of the run, or `lineage` is not the current lineage."""
        self.member(request, "trainer")
        if request.sender != self.state.trainer or lineage not in (None, self.state.lineage):
            raise FencedError(f"{request.sender} does not hold lineage {self.state.lineage}, the current one")

    def _is_closed(self) -> bool:
        return self.end.done() or self.shortage is not None or bool(self.progress.servers.absent)

    async def end_if_complete(self) -> None:
        # Without steps there is no trainer to report the end.
        finished = self.state.finished if self.config.steps else 0
        if finished == self.config.steps and self.evaluations.is_over(self.config.steps):
            self.evaluations.close()
            await self.journal.durable()
            self.finish(True, "the run reached its end")


def take_over(run: RunControl) -> None:
    """Continue from the state in the journal. Renew all leases, and count every member as heard from now."""
    run.state.emit(changes.MasterStarted())
    run.ledger.change_settings(run.state.settings)
    run.ledger.leases.renew_all(run.now(), run.config.master.lease_seconds)
    run.evaluations.hold_version_0()
    if run.ledger.version not in run.journal.kept_versions():
        run.keep_state()
    if run.state.masters > 1:
        run.meter.begin()
        log.info(
            "the master continues from its journal",
            version=run.ledger.version,
            alive=len(run.ledger.state.groups),
            members=list(run.state.members),
        )


async def repeat_records(run: RunControl) -> None:
    """Write the records that the master before may not have written, before all other records."""
    if run.state.last_step:
        await run.record_step(run.state.last_step)
    for evaluation in list(run.state.results.evaluations.values()):
        await run.record("an evaluation", run.folder.append_evaluation, evaluation_record(evaluation))
