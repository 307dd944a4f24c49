"""The master: keeps the directory of actors and the policy version, grants permits, and chooses the batches to train.

The master never handles a token or a weight. It writes every change to the journal on disk before it answers a request
or publishes an event that depends on the change. So a restarted master knows everything that it has told other actors.
A request that cannot be answered yet is parked until it can be, or until shortly before its deadline.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from actors.mastering.accounts import StepMeter, evaluation_record, summary
from actors.mastering.disks import Disks
from actors.mastering.evaluations import Evaluations
from actors.mastering.hangs import Hangs
from actors.mastering.members import Members, next_event
from actors.mastering.progress import Progress
from actors.mastering.run_state import RunState
from actors.runtime import delays
from actors.runtime.actor import Ending, HandlesRequests, Signal, first_error, handles, parked
from actors.watching import prometheus
from areal.config import Config, UserError
from areal.data.sources import PromptSource
from areal.devices import CORES, settle
from areal.hiding import without_secrets
from areal.observe.tracking import flat
from areal.staleness.failures import Failures
from areal.staleness.ledger import Batch, Ledger, LedgerError, ReportAnswer, RunEnded
from areal.storage.disk import DiskShortageError, Patience, Shortage
from areal.storage.events import GONE
from areal.storage.journal import Journal
from protocols.addresses import host_of, is_loopback
from protocols.errors import FencedError, ForgedError, MalformedError, PreparingError, RefusedError, text_of
from protocols.messages import (
    MAX_SERVED,
    AddReward,
    AskBatch,
    AskConfig,
    AskEvaluation,
    AskPermits,
    AskRecovery,
    AskReuse,
    AskSnapshot,
    AskStatus,
    BatchAnswer,
    Cause,
    CheckpointAnswer,
    CheckpointSaved,
    CommitStep,
    Configuration,
    Done,
    EvaluationAbandoned,
    EvaluationAnswer,
    EvaluationDone,
    GroupAccepted,
    GroupFailed,
    GroupReady,
    GroupStarted,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Leave,
    LostLeases,
    Member,
    MembersChanged,
    Message,
    Permit,
    Permits,
    Policy,
    PolicyPublished,
    PublishPolicy,
    Recovery,
    RenewLeases,
    ReuseAnswer,
    RowScores,
    RowsScored,
    ScoringFailed,
    Shutdown,
    Snapshot,
    Status,
    StepFailed,
    TrainingFailed,
    TrainingFinished,
    Welcome,
    actor_name,
)
from protocols.transport import Bus, Publisher, Request, mark_of

WATCH_SECONDS = 1.0
# A member that has missed some heartbeats: its process may be suspended. Until it is heard or fenced, nothing stalls.
SILENT_SECONDS = 5.0
# Membership changes within this time are published as one event.
GATHER_SECONDS = 0.05
# How long the master waits, after the end of the run, for the other actors to leave.
FAREWELL_SECONDS = 5.0
# Pause before the master exits, so that the answer to the last actor's Leave is still sent.
LAST_WORDS_SECONDS = 0.2
# States that are kept besides those of the checkpoints that are: their checkpoints are being written.
SPARE_STATES = 2
# Size of the range of event sequence numbers of one master. A restarted master uses the next range.
EVENTS_OF_ONE_MASTER = 1 << 32
T = TypeVar("T")
log = structlog.get_logger()


class Records(Protocol):
    """The interface of the run folder, where the master writes its records (areal.storage.run_folder.RunFolder)."""

    @property
    def path(self) -> Path: ...
    @property
    def filling(self) -> str: ...
    def free_reserve(self) -> None: ...
    def append_metrics(self, metrics: dict[str, Any]) -> None: ...
    def append_evaluation(self, evaluation: dict[str, Any]) -> None: ...
    def write_summary(self, summary: dict[str, Any]) -> None: ...
    def record_heartbeat(
        self, actor: str, state: str, activity: str, stats: Mapping[str, float], clock: float | None = None,
        spans: Iterable[tuple[str, float, float]] = (),
    ) -> None: ...  # fmt: skip


class Master(HandlesRequests):
    """The master of a run; there is one. `config.model` has to be a folder. The run ends when the last step is trained,
    its checkpoint is saved and the last version is evaluated. If `journal` holds events of an earlier master of the
    run, this master continues from them. `source`: the rows, needed by every `data.sampler` but shuffle. `supervised`:
    it is stopped by SIGINT alone."""

    def __init__(
        self, bus: Bus, config: Config, *, journal: Journal, folder: Records, source: PromptSource | None = None,
        supervised: bool = False,
    ) -> None:  # fmt: skip
        if source is None and config.steps and config.data.sampler != "shuffle":
            raise ValueError(f"data.sampler={config.data.sampler} chooses from rows, and the master was given none")
        self.config = config
        self._supervised = supervised
        self.bus = bus
        self.folder = folder
        self.journal = journal
        self.state = RunState(config, journal, source)
        self._changed = Signal()
        self._patience, self._recording = Patience(folder.path, "the master"), asyncio.Lock()
        self._unrecorded: int | None = self.state.last_step.get("step")  # the step whose metrics may not be on disk
        self._end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._trainer_may_end = False  # the run is stopped, and the trainer has time to save a checkpoint
        self._outbox: deque[Message] = deque()
        self._mail = Signal()
        self._events: Publisher
        self._suspended = 0.0  # seconds
        self._meter = StepMeter(self.state, asyncio.get_running_loop().time)
        self._numbers: dict[str, float] = {}  # for Prometheus, updated every second
        # Not journaled: a resumed run, perhaps with other settings, starts all counts at 0.
        self._failures = Failures(
            config.batch_size, config.outage_seconds, config.max_failed_share, folder.path, self.ledger.counters
        )
        self.members = Members(self.state, self._send_out, self._now)
        self._hangs = Hangs(self.members, config.master.hang_seconds)
        self._disks = Disks()
        self._evaluations = Evaluations(self.state, self.members)
        self._progress = Progress(self.state, self.members, self._failures, self._free_groups)

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    # --- life

    async def run(self) -> Ending:
        """Serve until the run has ended. Returns how it ended. Raises UserError if the address is already in use."""
        loop = asyncio.get_running_loop()
        stop = self._stop_run
        if self._supervised:
            loop.add_signal_handler(signal.SIGINT, stop, "the supervisor")
            loop.add_signal_handler(signal.SIGTERM, self._ignore_signal, signal.SIGTERM.name)
        else:
            for sign in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sign, stop, sign.name)
        try:
            self._take_over()
            self._open()
            settle(CORES)
            async with asyncio.TaskGroup() as tasks:
                works = {"records": self._repeat_records(), "watch": self._watch(), "announce": self._announce()}
                helpers = [tasks.create_task(work, name=name) for name, work in works.items()]
                await self._end_if_complete()
                ending = await self._end
                await self._say_farewell(ending)
                for helper in helpers:
                    helper.cancel()
            return ending
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            await self.bus.close()
            self.journal.close()

    def _take_over(self) -> None:
        """Continue from the state in the journal. All leases are renewed, and every member counts as heard from now."""
        self.state.emit("master_started")
        self.ledger.change_settings(self.state.settings)
        self.ledger.renew_all(self._now(), self.config.master.lease_seconds)
        self._evaluations.hold_version_0()
        if self.ledger.version not in self.journal.kept_versions():
            self._keep_state()
        if self.state.masters > 1:
            self._meter.begin()
            log.info(
                "the master continues from its journal", version=self.ledger.version, alive=self.ledger.alive,
                members=list(self.state.members),
            )  # fmt: skip

    def _keep_state(self) -> None:
        """Keep the state of a version that gets a checkpoint, so that the run can go back to it."""
        version, trainer = self.ledger.version, self.config.trainer
        if version and (version % trainer.checkpoint_every == 0 or version == self.config.steps):
            self.journal.keep(version, self.state.dump(), trainer.checkpoints_kept + SPARE_STATES)

    async def _repeat_records(self) -> None:
        """Write what the master before has not written, before any other record."""
        if self.state.last_step:
            await self._record_step(self.state.last_step)
        for evaluation in list(self.state.evaluations.values()):
            await self._record("an evaluation", self.folder.append_evaluation, evaluation_record(evaluation))

    def _open(self) -> None:
        address = self.config.master.address
        first = self.state.masters * EVENTS_OF_ONE_MASTER
        try:
            self.bus.serve(address, self.dispatch, self._on_crash)
            self._events = self.bus.publisher(f"tcp://{host_of(address)}:{self.config.network.ports_text}", first)
        except OSError as error:
            raise UserError(
                f"The master cannot listen at {error.filename} ({error.strerror}): stop the process that uses the "
                f"port, or choose another port with master.address=tcp://HOST:PORT or network.ports."
            ) from None
        prometheus.serve(self.config.observe, "master", 0, lambda: self._numbers)
        log.info("master ready", address=address, run=str(self.folder.path))

    def dispatch(self, request: Request[Message]) -> Awaitable[Message]:
        """The answer to a request. It is returned only after every change behind it is on disk. Raises ForgedError if
        the sender is a member and the request is not from it."""
        if request.sender in self.state.members and not request.sender.endswith(f"#{mark_of(request.token)}"):
            log.warning("a request in the name of another was refused", kind=request.message.kind, name=request.sender)
            raise ForgedError(
                f"this {request.message.kind!r} is not from {request.sender}, which it names as its sender"
            )
        answer = super().dispatch(request)
        return answer if isinstance(request.message, AskStatus) else self._durably(request.sender, answer)

    async def _durably(self, sender: str, answer: Awaitable[Message]) -> Message:
        """Raises PreparingError while the journal waits for its disk."""
        try:
            result = await answer
        except LedgerError as error:  # the request was invalid, and the ledger is unchanged
            raise RefusedError(str(error)) from None
        try:
            await self.journal.durable(wait_for_room=False)
        except DiskShortageError as error:
            if isinstance(result, Permits):
                self.ledger.withdraw(sender, [permit.group for permit in result.permits])
            raise PreparingError(str(error)) from None
        return result

    async def _record(self, what: str, write: Callable[[dict[str, Any]], None], record: dict[str, Any]) -> None:
        """Write a record into the run folder, after those before, once its disk has room."""
        async with self._recording:
            await self._patience.write(lambda: asyncio.to_thread(write, record), what)

    async def _record_step(self, metrics: dict[str, Any]) -> None:
        await self._record("the metrics", self.folder.append_metrics, metrics)
        self._unrecorded = None

    @property
    def _shortage(self) -> Shortage | None:
        """Why the master waits for its disk; None if it does not."""
        return self.journal.shortage or self._patience.shortage

    def _shortages(self) -> Iterator[Shortage]:
        """Who waits for a disk now."""
        yield from filter(None, (self.journal.shortage, self._patience.shortage))
        for pulse in self.members.pulses.values():
            if short := pulse.beat.shortage:
                yield Shortage(**short.model_dump())

    async def _announce(self) -> None:
        """Publish events in order, each one only after the changes that it reports are on disk."""
        while True:
            await self._mail.until(lambda: self._outbox)
            if isinstance(self._outbox[0], MembersChanged):
                await asyncio.sleep(GATHER_SECONDS)
            event = next_event(self._outbox)
            await self.journal.durable()
            try:
                self._events.publish(event)
            except MalformedError as error:  # the others see that one is missing, and ask for a snapshot
                log.error("an event cannot be sent", kind=event.kind, error=str(error))

    def _send_out(self, event: Message) -> None:
        self._outbox.append(event)
        self._mail.notify()
        self._changed.notify()

    def _on_crash(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        self._fail(f"the master failed: {type(error).__name__}: {error}")

    def _ignore_signal(self, sign: str) -> None:
        """Somebody else than the supervisor sent a signal, perhaps to all processes of the run."""
        log.warning(f"the master ignores {sign}: what stops the run is a signal to its supervisor")

    def _stop_run(self, by: str) -> None:
        """The first signal lets the trainer save a checkpoint, a second one ends the run at once."""
        self._trainer_may_end = not self._end.done() and not self._shortage
        self._finish(False, f"told to stop by {by}", stopped=True)
        self._changed.notify()

    def _finish(self, ok: bool, reason: str, stopped: bool = False) -> None:
        if not self._end.done():
            self._end.set_result(Ending(ok, reason, stopped=stopped))

    def _fail(self, reason: str | None) -> None:
        """End the run if there is a reason."""
        if reason:
            self._finish(False, reason)

    async def _let_trainer_end(self, ending: Ending) -> None:
        """Serve the trainer until it has left, for at most `master.drain_seconds`."""
        self._send_out(self._shutdown(ending))
        here = self.members.with_role
        try:
            async with asyncio.timeout(self.config.master.drain_seconds):
                await self._changed.until(lambda: not (self._trainer_may_end and here("trainer", healthy=False)))
        except TimeoutError:
            log.warning("the trainer has not left", seconds=self.config.master.drain_seconds)
        self._trainer_may_end = False

    async def _say_farewell(self, ending: Ending) -> None:
        self.folder.free_reserve()
        if self._trainer_may_end:
            await self._let_trainer_end(ending)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._record("the summary", self.folder.write_summary, summary(self.config, self.state, ending))
        except TimeoutError:
            log.error("the run ends without a summary", why=str(self._shortage))
        self._send_out(self._shutdown(ending))
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._changed.until(lambda: not self.state.members)
        except TimeoutError:
            log.warning("some actors have not left", members=list(self.state.members))
        await asyncio.sleep(LAST_WORDS_SECONDS)

    # --- watching

    async def _watch(self) -> None:
        """Every second: remove actors that are silent or hang, expire leases, abandon a late evaluation, and react to a
        stalled run."""
        last = self._now()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (absent := self._now() - last - WATCH_SECONDS) > WATCH_SECONDS:
                log.warning("the master process was suspended", seconds=absent)
                self._suspended += absent
                self.ledger.renew_all(self._now(), self.config.master.lease_seconds)
            last = now = self._now()
            for identity, silence in self.members.silent(self.config.master.lease_seconds):
                self._remove(identity, f"silent for {silence:.0f} s")
                self._progress.await_successor()
            for identity, hang in self._hangs.find():
                self._remove(identity, hang)
                self._progress.await_successor()
            if lost := self.ledger.expire(now):
                log.warning("leases expired", groups=lost)
            self._evaluations.watch()
            self._progress.look_for_servers()
            self._changed.notify()
            self._disks.look([*self._shortages()], now)
            if self._shortage or self._progress.longest_work() or self.members.silent(SILENT_SECONDS):
                self._progress.made()
            self._fail(self._failures.verdict(self.ledger.counters, now))
            self.state.compact_if_due()
            counts = self._counts()
            delay = delays.longest()
            doing = "; ".join([str(self._shortage or self._progress.who_waits()), *self._hangs.alerts.values()])
            self.folder.record_heartbeat("master/0", "healthy", doing, counts | delay)
            self._numbers = {
                **{f"groups_{name}": float(n) for name, n in counts.items()},
                **{f"step_{name}": value for name, value in flat(self.state.last_step or {}).items() if name != "step"},
                "version": float(self.ledger.version),
                **delay,
            }
            self._remedy_stall()

    def _remedy_stall(self) -> None:
        match self._progress.remedy():
            case "end":
                self._fail(self._progress.describe_stall())
            case "fence":
                suspects, stall = self._progress.suspects(), self._progress.describe_stall()
                log.warning("stalled: fencing the actors that the run waits for", waits=stall, members=suspects)
                for identity in suspects:
                    self._remove(identity, f"the run waits for it: {stall}")
            case "requeue":
                released = [group for owner in self.state.members for group in self.ledger.release(owner)]
                log.warning("stalled: groups are re-queued", waits=self._progress.describe_stall(), groups=released)
                self._evaluations.abandon("the run made no progress")
                self._changed.notify()

    # --- helpers

    async def _park(self, request: Request[Message], condition: Callable[[], T]) -> T | None:
        """The first true value of `condition`, or None shortly before the request's deadline."""
        try:
            async with parked(request):
                return await self._changed.until(condition)
        except TimeoutError:
            return None

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            policy=self.state.policy,
            members=tuple(self.state.members.values()),
            sequence=self._events.sequence,
            events=self._events.address,
        )

    def _now(self) -> float:
        """The master's clock. Time in which this process was suspended does not count: no member loses its place for
        it."""
        return asyncio.get_running_loop().time() - self._suspended

    def _member(self, request: Request[Message], role: str | None = None) -> Member:
        """The sender of `request`. Raises FencedError if it is not a member, RefusedError if it has another role than
        `role`."""
        member = self.state.members.get(request.sender)
        if member is None:
            why = self.members.removed.get(request.sender, "")
            raise FencedError(f"{request.sender} is not a member of this run, or no longer one{why and f': {why}'}")
        if role not in (None, member.role):
            raise RefusedError(f"{request.sender} may not send {request.message.kind!r}: only the role {role} may")
        return member

    def _check_trainer(self, request: Request[Message], lineage: int | None = None) -> None:
        """Raises FencedError if the sender is not the trainer of the run, or if `lineage` is not the current one."""
        self._member(request, "trainer")
        if request.sender != self.state.trainer or lineage not in (None, self.state.lineage):
            raise FencedError(
                f"{request.sender} does not hold lineage {self.state.lineage}, the current one of this run"
            )

    # --- membership

    @handles(Join)
    async def join(self, request: Request[Join]) -> Welcome:
        join, mark = request.message, mark_of(request.token)
        member = self.members.find_joined(join, mark) or self._admit(self.members.new_entry(join, mark))
        return Welcome(identity=member.identity, config=self.config.model_dump(mode="json"), snapshot=self._snapshot())

    def _admit(self, member: Member) -> Member:
        for occupant in self.members.with_role(member.role, healthy=False):
            if occupant.index == member.index:
                self._remove(occupant.identity, f"replaced by {member.identity}")
        self.members.add(member)
        log.info("joined", actor=member.identity, address=member.address)
        if member.role == "generator" and not self._end.done():
            self._evaluations.hold_version_0(member)
        if len({is_loopback(host_of(m.address)) for m in self.state.members.values()}) > 1:
            log.warning(
                "some actors listen on an address that other hosts cannot reach: start those with --host",
                joined=member.identity,
            )
        return member

    @handles(Heartbeat)
    async def heartbeat(self, request: Request[Heartbeat]) -> HeartbeatAnswer:
        member, beat = self._member(request), request.message
        pulse = self.members.pulses[member.identity]
        changed = self.members.update(member, beat)
        self.members.record_heartbeat(member.identity, beat)
        self._hangs.hear(member, beat)
        fresh = self._meter.count(beat.stats, None if pulse.restored else pulse.beat.stats)
        if beat.stats.get("samples_scored", 0.0) > 0:
            self._failures.any_succeeded = True
        worked = beat.stats.get("work_done", 0.0) > pulse.beat.stats.get("work_done", 0.0)
        if changed or worked or fresh["tokens_generated"] > 0:
            self._progress.made()
        name, spans = actor_name(member.identity), [(span.name, span.began, span.seconds) for span in beat.spans]
        self.folder.record_heartbeat(name, beat.state, beat.activity, beat.stats, beat.clock, spans)
        return HeartbeatAnswer(
            policy=self.state.policy, sequence=self._events.sequence,
            ended=self._shutdown(self._end.result()) if self._end.done() else None,
            loads=self.members.loads_for(member.identity) if member.role == "rollout_manager" else None,
        )  # fmt: skip

    @handles(Leave)
    async def leave(self, request: Request[Leave]) -> Done:
        if request.sender in self.state.members:
            self._remove(request.sender, request.message.reason)
            self._progress.await_successor()
        return Done()

    @handles(AskSnapshot)
    async def ask_snapshot(self, request: Request[AskSnapshot]) -> Snapshot:
        return self._snapshot()

    @handles(AskConfig)
    async def ask_config(self, request: Request[AskConfig]) -> Configuration:
        return Configuration(values=without_secrets(self.config.model_dump(mode="json")))

    def _shutdown(self, ending: Ending) -> Shutdown:
        return Shutdown(ok=ending.ok, reason=text_of(ending.reason), stopped=self._trainer_may_end)

    def _remove(self, identity: str, reason: str) -> None:
        self._evaluations.lose_member(self.state.members[identity])
        self.members.remove(identity, reason)
        self.folder.record_heartbeat(actor_name(identity), GONE, reason, {})
        released = self.ledger.release(identity)
        if not self._end.done():
            self._evaluations.hold_version_0()
            log.warning("left", actor=identity, reason=reason, released=released)

    # --- rollouts

    @handles(AskPermits)
    async def ask_permits(self, request: Request[AskPermits]) -> Permits:
        owner = self._member(request, "rollout_manager").identity
        if not await self._park(request, self._free_groups):
            return Permits(permits=())
        self._member(request)  # the sender may have been removed while its request was parked
        self._meter.begin()
        count = min(request.message.count, self._free_groups())
        granted = self.ledger.admit(owner, count, self._now(), self.config.master.lease_seconds)
        return Permits(
            permits=tuple(
                Permit(
                    group=p.group_id,
                    prompt_index=p.prompt_index,
                    row=p.row,
                    min_version=p.min_version,
                    resumed=p.resumed,
                    rewards=self.state.rewards_of(p.prompt_index),
                )
                for p in granted
            )
        )

    def _free_groups(self) -> int:
        """Number of groups that may start now. It is 0 after the end of the run, while the disk is full, and while a
        reward is absent."""
        if self._end.done() or self._shortage or self._progress.absent:
            return 0
        capacity = self.ledger.capacity
        if self._failures.outage:
            alone = self.ledger.alive == self.ledger.ready_count
            return min(capacity, int(alone and self._failures.may_try(self._now())))
        if self.config.run_ahead == "max":
            return capacity
        return min(capacity, max(0, self.state.run_ahead.limit - self.ledger.alive))

    @handles(AddReward)
    async def add_reward(self, request: Request[AddReward]) -> Done:
        name, weight = request.message.name, request.message.weight
        served = {name for m in self.state.members.values() if m.role == "reward" for name in m.serves}
        if name not in served | self.state.reward_names | {*self.config.policy_judges}:
            names = ", ".join(sorted(served)) or "none"
            raise RefusedError(f"no actor serves {name!r} (served: {names}): start one, --role reward --reward {name}")
        prompt = self.ledger.next_prompt
        changed = self.state.rewards_of(prompt)
        if len({*changed, name}) > MAX_SERVED:
            raise RefusedError(f"the weights of at most {MAX_SERVED} rewards can be changed")
        if changed.get(name) != weight:
            self.state.emit("reward_added", prompt=prompt, name=name, weight=weight)
            log.info("a reward has a new weight", reward=name, weight=weight, first_prompt=prompt)
        return Done()

    @handles(RenewLeases)
    async def renew_leases(self, request: Request[RenewLeases]) -> LostLeases:
        owner = self._member(request, "rollout_manager").identity
        lost = self.ledger.renew(owner, request.message.groups, self._now(), self.config.master.lease_seconds)
        return LostLeases(groups=tuple(lost))

    @handles(GroupStarted)
    async def group_started(self, request: Request[GroupStarted]) -> Done:
        owner = self._member(request, "rollout_manager").identity
        self.ledger.started(request.message.group, owner, request.message.start_version)
        self._changed.notify()
        return Done()

    @handles(GroupFailed)
    async def group_failed(self, request: Request[GroupFailed]) -> Done:
        owner, failed = self._member(request, "rollout_manager").identity, request.message
        if self._give_back(failed, owner) is ReportAnswer.ACCEPTED:
            if failed.cause == "long":
                self._fail(self._failures.too_long(failed.reason))
            else:
                self._count_failure(failed)
            self._log_first_failure(failed.cause, failed.reason, owner)
        self._changed.notify()
        return Done()

    def _count_failure(self, failed: GroupFailed) -> None:
        log.warning("group failed", group=failed.group, cause=failed.cause, reason=failed.reason)
        self.state.emit("tokens_discarded", count=failed.discarded)
        paused, now = self._failures.outage, self._now()
        self._failures.failed(failed.cause, failed.reason, now)
        if self._failures.outage and not paused:
            log.error("admission pauses: no group can be finished", why=self._failures.describe_outage(now))

    def _give_back(self, failed: GroupFailed, owner: str) -> ReportAnswer:
        if failed.cause in ("row", "long"):  # another attempt would fail as well
            group = self.ledger.group(failed.group)
            if group is None or group.owner != owner:
                return ReportAnswer.GONE
            return self.ledger.discard(failed.group, failed.cause)
        return self.ledger.failed(failed.group, owner, failed.cause, counts=not self._failures.in_a_row)

    @handles(ScoringFailed)
    async def scoring_failed(self, request: Request[ScoringFailed]) -> Done:
        sender, failed = self._member(request).identity, request.message
        self._log_first_failure(failed.cause, failed.reason, sender)
        self._fail(self._failures.sample_failed(failed.reason, self._now()))
        return Done()

    def _log_first_failure(self, cause: Cause, reason: str, sender: str) -> None:
        if self._failures.is_first(cause, reason, actor_name(sender)):
            log.error(self._failures.firsts[cause])

    # --- training

    @handles(AskRecovery)
    async def ask_recovery(self, request: Request[AskRecovery]) -> Recovery:
        self._member(request, "trainer")
        if request.sender != self.state.trainer:
            self.state.emit("lineage_opened", lineage=self.state.lineage + 1, trainer=request.sender)
            self._evaluations.abandon("a new trainer has opened a new lineage")
        return Recovery(
            run=self.journal.run,
            lineage=self.state.lineage,
            version=self.ledger.version,
            checkpoint_version=self.state.checkpoint_version,
            drop=self._needless_payloads(request.message.spooled),
            covered=self.ledger.covered,
        )

    def _needless_payloads(self, spooled: str) -> str:
        return "\n".join(group for group in spooled.splitlines() if not self.ledger.needs_payload(group))

    @handles(AskReuse)
    async def ask_reuse(self, request: Request[AskReuse]) -> ReuseAnswer:
        self._check_trainer(request)
        return ReuseAnswer(oldest=self.ledger.reuse(request.message.group, request.message.versions))

    @handles(GroupReady)
    async def group_ready(self, request: Request[GroupReady]) -> GroupAccepted:
        ready = request.message
        self._check_trainer(request)
        group = self.ledger.group(ready.group)
        answer = self.ledger.ready(ready.group, ready.start_version, ready.signal)
        if group is not None and answer in (ReportAnswer.ACCEPTED, ReportAnswer.FILTERED):
            self.state.emit(
                "rewarded", group=ready.group, row=group.row, version=self.ledger.version, mean=ready.reward_mean,
                spread=ready.reward_spread, signal=ready.signal, parts=ready.reward_parts, tokens=ready.tokens,
                discarded=ready.discarded,
            )  # fmt: skip
            self._progress.made()
            self._changed.notify()
            mean = self.state.score / self.state.scored
            self._fail(self._failures.ready(answer is ReportAnswer.FILTERED, mean))
        return GroupAccepted(accepted=answer in (ReportAnswer.ACCEPTED, ReportAnswer.UNCHANGED))

    @handles(AskBatch)
    async def ask_batch(self, request: Request[AskBatch]) -> BatchAnswer:
        version = request.message.version

        def decide() -> Batch | RunEnded | None:
            if version > self.ledger.version:  # the commit of the step before has not arrived yet
                return None
            answer = self.ledger.next_batch(version)
            if version == self.ledger.version:
                self._meter.record_wait(answer)
            return answer if isinstance(answer, Batch | RunEnded) else None

        self._check_trainer(request)
        answer = await self._park(request, decide)
        self._check_trainer(request)
        match answer:
            case Batch() as batch:
                return BatchAnswer(
                    status="ready", groups=batch.group_ids, mask_older_than=batch.min_token_version,
                    oldest=self._oldest_allowed(batch),
                )  # fmt: skip
            case RunEnded():
                return BatchAnswer(status="ended")
            case _:
                return BatchAnswer(status="waiting")

    def _oldest_allowed(self, batch: Batch) -> int | None:
        """The oldest version of a token that the bound allows in a batch; None: any, or the batch is redone."""
        groups = [group for name in batch.group_ids if (group := self.ledger.group(name)) is not None]
        if not self.state.settings.bounds_groups or not groups:
            return None
        return batch.version - max(self.ledger.deadline(group) - (group.start_version or 0) for group in groups)

    @handles(CommitStep)
    async def commit_step(self, request: Request[CommitStep]) -> Done:
        commit = request.message
        self._check_trainer(request, commit.lineage)
        if self._unrecorded:  # a restarted master would know only the metrics of the step after it
            raise PreparingError(str(self._shortage or f"step {self._unrecorded} is not recorded yet"))
        if commit.version <= self.ledger.version:
            return Done()
        if self.state.unpublished:
            raise RefusedError(
                f"version {self.ledger.version} is not published yet, so version {commit.version} cannot be committed"
            )
        record = self.ledger.commit(commit.version - 1)
        self._unrecorded, metrics = commit.version, self._meter.metrics(commit, record)
        self.state.emit("stepped", metrics=metrics, groups=list(record.batch.group_ids))
        self._keep_state()
        self.state.compact_if_due()
        self._failures.filtered_in_a_row = 0
        self._progress.made()
        self._changed.notify()
        await self.journal.durable()
        await self._record_step(metrics)
        long = ("prompts", "discarded")
        shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in metrics.items() if k not in long}
        log.info("step", **shown)
        return Done()

    @handles(PublishPolicy)
    async def publish_policy(self, request: Request[PublishPolicy]) -> Done:
        policy: Policy = request.message.policy
        self._check_trainer(request, policy.lineage)
        current = self.state.policy
        if policy.identity <= current.identity:
            return Done()
        if policy.version != self.ledger.version:
            raise RefusedError(
                f"version {policy.version} cannot be published: the run is at version {self.ledger.version}"
            )
        self.state.emit("published", policy=policy.model_dump())
        if policy.version > current.version:
            self._evaluations.plan(policy)
        self._send_out(PolicyPublished(policy=policy))
        self._progress.made()
        return Done()

    @handles(CheckpointSaved)
    async def checkpoint_saved(self, request: Request[CheckpointSaved]) -> CheckpointAnswer:
        self._check_trainer(request)
        saved = request.message
        if saved.version > self.state.checkpoint_version:
            self.ledger.checkpointed(saved.covered)
            self.state.emit("checkpoint_saved", version=saved.version, folder=saved.folder)
            self._progress.made()
        return CheckpointAnswer(drop=self._needless_payloads(saved.spooled))

    @handles(TrainingFinished)
    async def training_finished(self, request: Request[TrainingFinished]) -> Done:
        self._check_trainer(request)
        if self.state.finished != self.ledger.version:
            self.state.emit("finished", version=self.ledger.version)
            self._progress.made()
        await self._end_if_complete()
        return Done()

    @handles(TrainingFailed)
    async def training_failed(self, request: Request[TrainingFailed]) -> Done:
        self._check_trainer(request)
        self._fail_training(request.message.reason)
        return Done()

    @handles(StepFailed)
    async def step_failed(self, request: Request[StepFailed]) -> Done:
        failed, trainer = request.message, self.state.trainer
        if not (trainer and request.sender.startswith("trainer/")) or failed.version > self.ledger.version + 1:
            raise RefusedError(f"{request.sender} has no step {failed.version + 1} to compute")
        log.error("a training step failed", step=failed.version + 1, reason=failed.reason)
        if reason := self._failures.step_failed(failed.version + 1, failed.reason, trainer):
            self._fail_training(reason)
        return Done()

    def _fail_training(self, reason: str) -> None:
        """End the run for this reason, and say where it can go on."""
        saved = self.state.checkpoint
        go_on = f"The last checkpoint is {saved}: resume from it with --resume {self.folder.path} and other settings."
        self._fail(f"{reason} {go_on if saved else 'No checkpoint was saved before that.'}")

    async def _end_if_complete(self) -> None:
        # Without steps there is no trainer, which would report that it has finished.
        finished = self.state.finished if self.config.steps else 0
        if finished == self.config.steps and self._evaluations.is_over(self.config.steps):
            self._evaluations.close()
            await self.journal.durable()
            self._finish(True, "the run reached its end")

    # --- evaluation and monitoring

    @handles(AskEvaluation)
    async def ask_evaluation(self, request: Request[AskEvaluation]) -> EvaluationAnswer:
        self._member(request, "evaluator")
        due = await self._park(request, lambda: self._evaluations.ready)
        if due is None:
            return EvaluationAnswer(version=None)
        self._member(request)  # the sender may have been removed while its request was parked
        self._evaluations.begin_attempt()
        scored = self.state.row_scores(due.version)
        return EvaluationAnswer(version=due.version, holder=due.holder, scored=RowScores.of(scored) if scored else None)

    @handles(RowsScored)
    async def rows_scored(self, request: Request[RowsScored]) -> Done:
        self._member(request, "evaluator")
        version, scored = request.message.version, request.message.scored.by_row()
        if not all(0 <= row < self.config.data.eval_size for row in scored):
            raise RefusedError(f"there are {self.config.data.eval_size} held-out rows, not {max(scored)}")
        if self._evaluations.keep_scores(version, scored):
            self._progress.made()
        return Done()

    @handles(EvaluationDone)
    async def evaluation_done(self, request: Request[EvaluationDone]) -> Done:
        self._member(request, "evaluator")
        if not self._evaluations.finish(request.message):
            return Done()
        record = evaluation_record(request.message)
        log.info("evaluated", **record)
        self._progress.made()
        await self.journal.durable()
        await self._record("an evaluation", self.folder.append_evaluation, record)
        await self._end_if_complete()
        self._changed.notify()
        return Done()

    @handles(EvaluationAbandoned)
    async def evaluation_abandoned(self, request: Request[EvaluationAbandoned]) -> Done:
        self._member(request, "evaluator")
        abandoned, due = request.message, self._evaluations.due
        if due is None or due.version != abandoned.version:
            return Done()
        if not self.config.steps:  # nothing is noted: whoever starts the evaluation again wants it done
            self._fail(f"The model was not evaluated: {abandoned.reason}.")
            return Done()
        self._evaluations.give_up(due, abandoned.reason)
        self._progress.made()
        await self._end_if_complete()
        self._changed.notify()
        return Done()

    @handles(AskStatus)
    async def ask_status(self, request: Request[AskStatus]) -> Status:
        since = request.message.since
        return Status(
            values={
                "run": self.config.name,
                "time": time.time(),
                "version": self.ledger.version,
                "lineage": self.state.lineage,
                "steps": self.config.steps,
                "max_staleness": self.config.max_staleness,
                "rewards": self.config.reward.functions | self.state.rewards_of(self.ledger.next_prompt),
                **self._counts(),
                "waiting": str(self._shortage or self._progress.describe()),
                "alerts": self._alerts(),
                "metrics": self.state.last_step,
                "recent": [] if since is None else self._meter.recent(since),
                "accuracy": {
                    str(version): evaluation.accuracy
                    for version, evaluation in self.state.evaluations.items()
                    if evaluation.accuracy is not None
                },
                "members": self.members.status_rows(),
                "ended": self._end.done(),
                "events": self._events.address,
            }
        )

    def _alerts(self) -> list[str]:
        """What the user of the run is told on its console, in the order in which it began within each kind."""
        disks = filter(None, (self.folder.filling, self._disks.alert))
        pauses = filter(None, [self._progress.pause])
        return [*self._failures.firsts.values(), *self._hangs.alerts.values(), *disks, *pauses]

    def _counts(self) -> dict[str, int]:
        """Numbers of groups."""
        return {"alive": self.ledger.alive, "ready": self.ledger.ready_count, "capacity": self._free_groups()}
