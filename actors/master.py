"""The master: keeps the directory of actors and the policy version, grants permits, and chooses the batches to train.

The master never handles a token or a weight. It writes every change to the journal on disk before it answers a request
or publishes an event that depends on the change. So a restarted master knows everything that it has told other actors.
A request that cannot be answered yet is parked until it can be, or until shortly before its deadline.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import structlog

from actors.parts.accounts import StepMeter, evaluation_record, summary
from actors.parts.run_state import RunState
from actors.runtime import delays
from actors.runtime.actor import Ending, HandlesRequests, Signal, first_error, handles, parked
from actors.watching import prometheus
from areal.config import Config, UserError, without_secrets
from areal.devices import CORES, settle
from areal.observe.tracking import flat
from areal.staleness.failures import Failures
from areal.staleness.ledger import Batch, Ledger, LedgerError, ReportAnswer, RunEnded
from areal.storage.events import GONE
from areal.storage.journal import Journal
from protocols.addresses import host_of, is_loopback
from protocols.codec import MAX_BODY_BYTES
from protocols.errors import BusyError, FencedError, ForgedError, MalformedError, RefusedError
from protocols.messages import (
    AskBatch,
    AskConfig,
    AskEvaluation,
    AskPermits,
    AskRecovery,
    AskSnapshot,
    AskStatus,
    BatchAnswer,
    CheckpointSaved,
    CommitStep,
    Configuration,
    Done,
    Engagement,
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
    LoadColumns,
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
    RowScores,
    RowsScored,
    ScoringFailed,
    Shutdown,
    Snapshot,
    Status,
    TrainingFailed,
    TrainingFinished,
    Welcome,
    Work,
    actor_name,
)
from protocols.transport import Bus, Publisher, Request, mark_of

WATCH_SECONDS = 1.0
# Membership changes within this time are published as one event.
GATHER_SECONDS = 0.05
# How long the master waits, after the end of the run, for the other actors to leave.
FAREWELL_SECONDS = 5.0
# Pause before the master exits, so that the answer to the last actor's Leave is still sent.
LAST_WORDS_SECONDS = 0.2
# Size of the range of event sequence numbers of one master. A restarted master uses the next range.
EVENTS_OF_ONE_MASTER = 1 << 32
# The evaluator itself keeps `evaluator.timeout_seconds`. Beyond it, the master gives it this long to report.
EVALUATION_GRACE_SECONDS = 60.0
# All members have to fit into one snapshot, which is one message, and so do the changes that one event tells.
MAX_MEMBERS = 4096
MAX_DIRECTORY_BYTES = MAX_BODY_BYTES * 3 // 4
# An estimate of what a member takes in a message, besides its texts.
MEMBER_BYTES = 64
# So much of the members' numbers is in a status, which is one message too.
MAX_STATUS_BYTES = MAX_BODY_BYTES // 2
ROLES = ("trainer", "generator", "reward", "rollout_manager")
# Number of recent steps kept for monitors that connect late, and the metrics kept of each step.
RECENT_STEPS = 512
RECENT = (
    "step", "reward_mean", "reward_mean_all", "groups_filtered", "groups_ready", "staleness_mean", "staleness_max",
    "tokens_generated", "tokens_trained", "step_seconds", "trainer_wait_seconds",
)  # fmt: skip

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(slots=True)
class _Pulse:
    """Contents of a member's last heartbeat. `time`: its time, by the master's clock. `counters`: the member's
    counters at that time (`StepMeter.count`); None for a member of an earlier master that this master has not
    heard from yet. `engagement`: only of generators. `sequences`: all those in it. `work`: what the member works on
    itself, if it does."""

    time: float
    counters: Counter[str] | None
    activity: str = "starting"
    stats: dict[str, float] = field(default_factory=dict)
    engagement: Engagement | None = None
    sequences: int = 0
    work: Work | None = None


class Records(Protocol):
    """The interface of the run folder, where the master writes its records (areal.storage.run_folder.RunFolder)."""

    @property
    def path(self) -> Path: ...
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
    run, this master continues from them."""

    def __init__(self, bus: Bus, config: Config, *, journal: Journal, folder: Records) -> None:
        self.config = config
        self.bus = bus
        self.folder = folder
        self.journal = journal
        self.state = RunState(config, journal)
        self._pulses: dict[str, _Pulse] = {}
        self._sizes: Counter[str] = Counter()  # of the members' entries in the directory, in bytes
        self._changed = Signal()
        self._end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._outbox: deque[Message] = deque()
        self._mail = Signal()
        self._events: Publisher
        self._meter = StepMeter(self.state)
        self._numbers: dict[str, float] = {}  # for Prometheus, updated every second
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._progressed = 0.0
        self._remedies = 0
        self._held_since = 0.0
        self._evaluator_seen = 0.0
        self._rows_at_loss: tuple[int, int] | None = None  # (version, scored rows) when an evaluator was lost
        # Not journaled: a resumed run, perhaps with other settings, starts all counts at 0.
        self._failures = Failures(config.batch_size, config.outage_seconds, config.max_failed_share)

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    # --- life

    async def run(self) -> Ending:
        """Serve until the run has ended. Returns how it ended. Raises UserError if the address is already in use."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._finish, False, f"told to stop by {sign.name}", True)
        try:
            self._take_over()
            self._open()
            settle(CORES)
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._watch(), name="watch"), tasks.create_task(self._announce())]
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
        self._progressed = self._held_since = self._evaluator_seen = now = self._now()
        self.ledger.renew_all(now, self.config.master.lease_seconds)
        self._pulses = {identity: _Pulse(now, None) for identity in self.state.members}
        self._sizes = Counter({identity: _member_bytes(member) for identity, member in self.state.members.items()})
        if self.state.last_step:
            self.folder.append_metrics(self.state.last_step)
            self._remember(self.state.last_step)
        for evaluation in self.state.evaluations.values():
            self.folder.append_evaluation(evaluation_record(evaluation))
        self._hold_version_0()
        if self.state.masters > 1:
            self._meter.begin(now)
            log.info(
                "the master continues from its journal", version=self.ledger.version, alive=self.ledger.alive,
                members=list(self._pulses),
            )  # fmt: skip

    def _open(self) -> None:
        address = self.config.master.address
        first = self.state.masters * EVENTS_OF_ONE_MASTER
        try:
            self.bus.serve(address, self.dispatch, self._crashed)
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
        return self._durably(super().dispatch(request))

    async def _durably(self, answer: Awaitable[Message]) -> Message:
        try:
            result = await answer
        except LedgerError as error:  # the request was invalid, and the ledger is unchanged
            raise RefusedError(str(error)) from None
        await self.journal.durable()
        return result

    async def _announce(self) -> None:
        """Publish events in order, each one only after the changes that it reports are on disk."""
        while True:
            await self._mail.until(lambda: self._outbox)
            event = self._outbox.popleft()
            if isinstance(event, MembersChanged):
                await asyncio.sleep(GATHER_SECONDS)
                event = self._gathered(event)
            await self.journal.durable()
            try:
                self._events.publish(event)
            except MalformedError as error:  # the others see that one is missing, and ask for a snapshot
                log.error("an event cannot be sent", kind=event.kind, error=str(error))

    def _send_out(self, event: Message) -> None:
        self._outbox.append(event)
        self._mail.notify()

    def _gathered(self, event: MembersChanged) -> MembersChanged:
        """`event`, merged with the membership changes that directly follow it in the outbox, as many as one message
        holds. Thousands of actors may join at once, and each event is sent to all of them."""
        changed, gone = {m.identity: m for m in event.changed}, list(event.gone)
        size = _told_bytes(event)
        while self._outbox and isinstance(following := self._outbox[0], MembersChanged):
            size += _told_bytes(following)
            if size > MAX_DIRECTORY_BYTES:
                break
            self._outbox.popleft()
            changed |= {m.identity: m for m in following.changed}
            gone += following.gone
        return MembersChanged(changed=tuple(m for i, m in changed.items() if i not in gone), gone=tuple(gone))

    def _crashed(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        self._finish(False, f"the master failed: {type(error).__name__}: {error}")

    def _finish(self, ok: bool, reason: str, stopped: bool = False) -> None:
        if not self._end.done():
            self._end.set_result(Ending(ok, reason, stopped=stopped))

    def _finish_if(self, failure: str | None) -> None:
        if failure:
            self._finish(False, failure)

    async def _say_farewell(self, ending: Ending) -> None:
        self.folder.write_summary(summary(self.config, self.state, ending))
        self._send_out(_shutdown(ending))
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._changed.until(lambda: not self._pulses)
        except TimeoutError:
            log.warning("some actors have not left", members=list(self._pulses))
        await asyncio.sleep(LAST_WORDS_SECONDS)

    # --- watching

    async def _watch(self) -> None:
        """Every second: remove silent actors, expire leases, abandon a late evaluation, and react to a stalled run."""
        last = self._now()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._now()
            if (absent := now - last - WATCH_SECONDS) > WATCH_SECONDS:
                self._excuse(absent)
            last = now
            for identity, pulse in list(self._pulses.items()):
                if now - pulse.time > self.config.master.lease_seconds:
                    self._remove(identity, f"silent for {now - pulse.time:.0f} s")
            if lost := self.ledger.expire(now):
                log.warning("leases expired", groups=lost)
            self._watch_evaluation(now)
            self._changed.notify()
            if self._at_work():
                self._progress()
            self._finish_if(self._failures.verdict(self.ledger.counters.discarded, self.ledger.counters.trained, now))
            self.state.compact_if_due()
            counts = self._counts()
            delay = delays.longest()
            self.folder.record_heartbeat("master/0", "healthy", self._who_waits(), counts | delay)
            self._numbers = {
                **{f"groups_{name}": float(n) for name, n in counts.items()},
                **{f"step_{name}": value for name, value in flat(self.state.last_step or {}).items() if name != "step"},
                "version": float(self.ledger.version),
                **delay,
            }
            self._remedy_stall(now - self._progressed)

    def _watch_evaluation(self, now: float) -> None:
        limit, patience = self.config.evaluator.timeout_seconds, self.config.master.lost_seconds
        if any(member.role == "evaluator" for member in self.state.members.values()):
            self._evaluator_seen = now
        if now - self._evaluator_seen > patience:
            self._abandon(f"there has been no evaluator for {patience:g} s")
        elif limit and now - self._held_since > limit + EVALUATION_GRACE_SECONDS:
            self._abandon(f"it took longer than evaluator.timeout_seconds ({limit:g} s)")

    def _excuse(self, absent: float) -> None:
        """This process was suspended for `absent` seconds. Extend all timeouts and leases by that time, so that no
        member loses its place because of it."""
        log.warning("the master process was suspended", seconds=absent)
        self._progressed += absent
        self._held_since += absent
        self._evaluator_seen += absent
        for pulse in self._pulses.values():
            pulse.time += absent
        self.ledger.renew_all(self._now(), self.config.master.lease_seconds)

    def _remedy_stall(self, idle: float) -> None:
        """React to `idle` seconds in which no actor has worked or made progress.

        After a third of `stall_seconds`, re-queue the unfinished groups. After two thirds, fence the actors that the
        run waits for, so that they are restarted. After all of it, end the run. While a role has no healthy member, the
        first two stages are skipped."""
        limit = self.config.master.stall_seconds
        waits = f"the run has made no progress for {idle:.0f} s: {self._waiting_for()}"
        if idle > limit:
            self._finish(False, waits)
        elif self._missing():
            return
        elif idle > limit * 2 / 3 and self._remedies == 1:
            self._remedies = 2
            suspects = self._suspects()
            log.warning("stalled: fencing the actors that the run waits for", waits=waits, members=suspects)
            for identity in suspects:
                self._remove(identity, f"the run waits for it and has made no progress for {idle:.0f} s")
        elif idle > limit / 3 and self._remedies == 0:
            self._remedies = 1
            released = [group for owner in list(self.state.members) for group in self.ledger.release(owner)]
            log.warning("stalled: unfinished groups are re-queued", waits=waits, groups=released)
            self._abandon("the run made no progress")
            self._changed.notify()

    def _suspects(self) -> list[str]:
        """Healthy members of the roles that the run waits for. Members that are still starting are left alone."""
        if self.ledger.version == self.config.steps:
            roles = {"evaluator", "generator", "reward", "trainer"}
        elif self.state.unpublished:
            roles = {"trainer"}
        elif self.ledger.waiting:
            roles = {"rollout_manager", "generator", "reward"} | ({"evaluator"} if self.state.holder else set())
        else:
            roles = {"trainer"}
        return [i for i, m in self.state.members.items() if m.role in roles and m.state == "healthy"]

    # --- helpers

    async def _park(self, request: Request[Message], condition: Callable[[], T]) -> T | None:
        """The first true value of `condition`, or None shortly before the request's deadline."""
        if value := condition():
            return value
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
        return asyncio.get_running_loop().time()

    def _progress(self) -> None:
        self._progressed = self._now()
        self._remedies = 0

    def _member(self, request: Request[Message], role: str | None = None) -> Member:
        """The sender of `request`. Raises FencedError if it is not a member, RefusedError if it has another role than
        `role`."""
        member = self.state.members.get(request.sender)
        if member is None:
            raise FencedError(f"{request.sender} is not a member of this run, or no longer one")
        if role not in (None, member.role):
            raise RefusedError(f"{request.sender} may not send {request.message.kind!r}: only the role {role} may")
        return member

    def _trainer(self, request: Request[Message], lineage: int | None = None) -> None:
        self._member(request, "trainer")
        if request.sender != self.state.trainer or lineage not in (None, self.state.lineage):
            raise FencedError(
                f"{request.sender} does not hold lineage {self.state.lineage}, the current one of this run"
            )

    # --- membership

    @handles(Join)
    async def join(self, request: Request[Join]) -> Welcome:
        request_to_join, mark = request.message, mark_of(request.token)
        member = self._joined_already(request_to_join, mark) or self._admit_member(request_to_join, mark)
        return Welcome(identity=member.identity, config=self.config.model_dump(mode="json"), snapshot=self._snapshot())

    def _joined_already(self, join: Join, mark: str) -> Member | None:
        """The member that this Join already created, if an earlier master answered the same Join."""
        same = (m for m in self.state.members.values() if m.role == join.role and m.identity.endswith(f"#{mark}"))
        return next(same, None)

    def _admit_member(self, join: Join, mark: str) -> Member:
        if len(self.state.members) >= MAX_MEMBERS:
            raise BusyError(f"a run may have at most {MAX_MEMBERS} members")
        # There is one trainer: a new one replaces the one before.
        index = 0 if join.role == "trainer" else join.index
        index = self._free_index(join.role) if index is None else index
        identity = f"{join.role}/{index}#{mark}"
        for occupant in [i for i, m in self.state.members.items() if (m.role, m.index) == (join.role, index)]:
            self._remove(occupant, f"replaced by {identity}")
        member = Member(identity=identity, role=join.role, index=index, address=join.address, state="stale")
        self._check_room(member)
        self.state.emit("joined", member=member.model_dump())
        self._sizes[identity] = _member_bytes(member)
        self._pulses[identity] = _Pulse(self._now(), Counter())
        self._send_out(MembersChanged(changed=(member,)))
        log.info("joined", actor=identity, address=join.address)
        if join.role == "generator":
            self._hold_version_0(member)
        if len({is_loopback(host_of(m.address)) for m in self.state.members.values()}) > 1:
            log.warning(
                "some actors listen on an address that other hosts cannot reach: start those with --host",
                joined=identity,
            )
        return member

    def _check_room(self, new: Member) -> None:
        """Raises BusyError if the directory would not fit into one message with the entry `new`."""
        size = _member_bytes(new)
        if self._sizes.total() - self._sizes[new.identity] + size > MAX_DIRECTORY_BYTES:
            raise BusyError(f"the directory of the run has no room for what {new.identity} tells of itself")

    def _free_index(self, role: str) -> int:
        taken = {m.index for m in self.state.members.values() if m.role == role}
        return next(i for i in range(len(taken) + 1) if i not in taken)

    @handles(Heartbeat)
    async def heartbeat(self, request: Request[Heartbeat]) -> HeartbeatAnswer:
        member, beat = self._member(request), request.message
        updated = member.model_copy(update={"state": beat.state, "serves": beat.serves})
        if updated != member:
            self._check_room(updated)
        self._listen(self._pulses[member.identity], beat)
        spans = [(span.name, span.began, span.seconds) for span in beat.spans]
        self.folder.record_heartbeat(
            actor_name(member.identity), beat.state, beat.activity, beat.stats, beat.clock, spans
        )
        if updated != member:
            self._change(member, state=beat.state, serves=beat.serves)
            self._progress()
        return HeartbeatAnswer(
            policy=self.state.policy, sequence=self._events.sequence,
            ended=_shutdown(self._end.result()) if self._end.done() else None,
            loads=self._loads_for(member.identity) if member.role == "rollout_manager" else None,
        )  # fmt: skip

    def _loads_for(self, asker: str) -> LoadColumns:
        engagements = {name: pulse.engagement for name, pulse in self._pulses.items() if pulse.engagement is not None}
        return LoadColumns(
            names=tuple(engagements),
            sequences=np.array([self._pulses[name].sequences for name in engagements], np.int64),
            own=np.array([engagement.sequences.get(asker, 0) for engagement in engagements.values()], np.int64),
            limits=np.array([engagement.limit for engagement in engagements.values()], np.int64),
            versions=np.array([engagement.version for engagement in engagements.values()], np.int64),
        )

    def _listen(self, pulse: _Pulse, beat: Heartbeat) -> None:
        counters, fresh = self._meter.count(beat.stats, pulse.counters)
        if beat.stats.get("samples_scored", 0.0) > 0:
            self._failures.any_scored = True
        if fresh["tokens_generated"] or beat.stats.get("work_done", 0.0) > pulse.stats.get("work_done", 0.0):
            self._progress()
        pulse.time, pulse.counters, pulse.activity, pulse.stats = self._now(), counters, beat.activity, beat.stats
        pulse.engagement, pulse.work = beat.engagement, beat.work
        pulse.sequences = sum(beat.engagement.sequences.values()) if beat.engagement else 0

    @handles(Leave)
    async def leave(self, request: Request[Leave]) -> Done:
        if request.sender in self.state.members:
            self._remove(request.sender, request.message.reason)
        return Done()

    @handles(AskSnapshot)
    async def ask_snapshot(self, request: Request[AskSnapshot]) -> Snapshot:
        return self._snapshot()

    @handles(AskConfig)
    async def ask_config(self, request: Request[AskConfig]) -> Configuration:
        return Configuration(values=without_secrets(self.config.model_dump(mode="json")))

    def _change(self, member: Member, **fields: Any) -> None:
        member = member.model_copy(update=fields)
        self.state.emit("member_changed", member=member.model_dump())
        self._sizes[member.identity] = _member_bytes(member)
        self._send_out(MembersChanged(changed=(member,)))

    def _remove(self, identity: str, reason: str) -> None:
        if hold := self.state.holder:
            if identity == hold[0].identity:
                self._lose_hold(*hold, f"{identity} is gone")
            elif self.state.members[identity].role == "evaluator":
                self._note_loss(identity, hold[1].version)
        self.state.emit("left", identity=identity)
        self.folder.record_heartbeat(actor_name(identity), GONE, reason, {})
        del self._pulses[identity], self._sizes[identity]
        released = self.ledger.release(identity)
        self._send_out(MembersChanged(gone=(identity,)))
        self._changed.notify()
        self._hold_version_0()
        if not self._end.done():
            log.warning("left", actor=identity, reason=reason, released=released)

    # --- rollouts

    @handles(AskPermits)
    async def ask_permits(self, request: Request[AskPermits]) -> Permits:
        owner = self._member(request, "rollout_manager").identity
        if not await self._park(request, self._free):
            return Permits(permits=())
        self._member(request)  # the sender may have been removed while its request was parked
        self._meter.begin(self._now())
        count = min(request.message.count, self._free())
        granted = self.ledger.admit(owner, count, self._now(), self.config.master.lease_seconds)
        return Permits(
            permits=tuple(
                Permit(group=p.group_id, prompt_index=p.prompt_index, min_version=p.min_version) for p in granted
            )
        )

    def _free(self) -> int:
        """Number of groups that may start now. It is 0 after the end of the run."""
        if self._end.done():
            return 0
        capacity = self.ledger.capacity
        if self._failures.outage:
            alone = self.ledger.alive == self.ledger.ready_count
            return min(capacity, int(alone and self._failures.may_try(self._now())))
        if self.config.run_ahead == "max":
            return capacity
        return min(capacity, max(0, self.state.run_ahead.limit - self.ledger.alive))

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
        if self._fail(failed, owner) is ReportAnswer.ACCEPTED:
            if failed.cause == "long":
                self._finish_if(self._failures.too_long(failed.reason))
            else:
                self._count_failure(failed)
        self._changed.notify()
        return Done()

    def _count_failure(self, failed: GroupFailed) -> None:
        log.warning("group failed", group=failed.group, cause=failed.cause, reason=failed.reason)
        self.state.emit("tokens_discarded", count=failed.discarded)
        paused, now = self._failures.outage, self._now()
        self._failures.failed(failed.cause, failed.reason, now)
        if self._failures.outage and not paused:
            log.error("admission pauses: no group can be finished", why=self._failures.story(now))

    def _fail(self, failed: GroupFailed, owner: str) -> ReportAnswer:
        if failed.cause in ("row", "long"):  # another attempt would fail as well
            group = self.ledger.group(failed.group)
            if group is None or group.owner != owner:
                return ReportAnswer.GONE
            return self.ledger.discard(failed.group, failed.cause)
        if self._failures.in_a_row:
            return self.ledger.put_back(failed.group, owner, failed.cause)
        return self.ledger.failed(failed.group, owner, failed.cause)

    @handles(ScoringFailed)
    async def scoring_failed(self, request: Request[ScoringFailed]) -> Done:
        self._member(request)
        self._finish_if(self._failures.scoring_failed(request.message.reason, self._now()))
        return Done()

    # --- training

    @handles(AskRecovery)
    async def ask_recovery(self, request: Request[AskRecovery]) -> Recovery:
        self._member(request, "trainer")
        if request.sender != self.state.trainer:
            self.state.emit("lineage_opened", lineage=self.state.lineage + 1, trainer=request.sender)
            self._abandon("a new trainer has opened a new lineage")
        return Recovery(
            lineage=self.state.lineage,
            version=self.ledger.version,
            checkpoint_version=self.state.checkpoint_version,
            checkpoint=self.state.checkpoint,
            drop="\n".join(
                group for group in request.message.spooled.splitlines() if not self.ledger.needs_payload(group)
            ),
        )

    @handles(GroupReady)
    async def group_ready(self, request: Request[GroupReady]) -> GroupAccepted:
        ready = request.message
        self._trainer(request)
        answer = self.ledger.ready(ready.group, ready.start_version, ready.signal)
        if answer in (ReportAnswer.ACCEPTED, ReportAnswer.FILTERED):
            self._failures.ready()
            self.state.emit(
                "rewarded", group=ready.group, mean=ready.reward_mean, parts=ready.reward_parts, tokens=ready.tokens,
                discarded=ready.discarded,
            )  # fmt: skip
            self._progress()
            self._changed.notify()
        if answer is ReportAnswer.ACCEPTED:
            self._failures.unfiltered()
        elif answer is ReportAnswer.FILTERED and (why := self._failures.filtered(self.state.score / self.state.scored)):
            self._finish(False, f"{why}, or resume with --resume {self.folder.path} filter_zero_signal=false.")
        return GroupAccepted(accepted=answer in (ReportAnswer.ACCEPTED, ReportAnswer.UNCHANGED))

    @handles(AskBatch)
    async def ask_batch(self, request: Request[AskBatch]) -> BatchAnswer:
        def decided() -> Batch | RunEnded | None:
            if version > self.ledger.version:  # the commit of the step before has not arrived yet
                return None
            answer = self.ledger.next_batch(version)
            if version == self.ledger.version:
                self._meter.note(answer, self._now())
            return answer if isinstance(answer, Batch | RunEnded) else None

        version = request.message.version
        self._trainer(request)
        answer = await self._park(request, decided)
        self._trainer(request)
        match answer:
            case Batch() as batch:
                return BatchAnswer(status="ready", groups=batch.group_ids, mask_older_than=batch.min_token_version)
            case RunEnded():
                return BatchAnswer(status="ended")
            case _:
                return BatchAnswer(status="waiting")

    @handles(CommitStep)
    async def commit_step(self, request: Request[CommitStep]) -> Done:
        commit = request.message
        self._trainer(request, commit.lineage)
        if commit.version <= self.ledger.version:
            return Done()
        if self.state.unpublished:
            raise RefusedError(
                f"version {self.ledger.version} is not published yet, so version {commit.version} cannot be committed"
            )
        record = self.ledger.commit(commit.version - 1)
        metrics = self._meter.metrics(commit, record, self._now())
        self.state.emit("stepped", metrics=metrics, groups=list(record.batch.group_ids))
        self.state.compact_if_due()
        self._failures.unfiltered()
        self._progress()
        self._changed.notify()
        await self.journal.durable()
        self.folder.append_metrics(metrics)
        self._remember(metrics)
        long = ("prompts", "discarded")
        shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in metrics.items() if k not in long}
        log.info("step", **shown)
        return Done()

    def _remember(self, metrics: dict[str, Any]) -> None:
        self._recent.append({name: metrics[name] for name in RECENT if name in metrics})

    @handles(PublishPolicy)
    async def publish_policy(self, request: Request[PublishPolicy]) -> Done:
        policy: Policy = request.message.policy
        self._trainer(request, policy.lineage)
        current = self.state.policy
        if policy.identity <= current.identity:
            return Done()
        if policy.version != self.ledger.version:
            raise RefusedError(
                f"version {policy.version} cannot be published: the run is at version {self.ledger.version}"
            )
        self.state.emit("published", policy=policy.model_dump())
        if policy.version > current.version:
            self._plan_evaluation(policy)
        self._send_out(PolicyPublished(policy=policy))
        self._progress()
        self._changed.notify()
        return Done()

    @handles(CheckpointSaved)
    async def checkpoint_saved(self, request: Request[CheckpointSaved]) -> Done:
        self._trainer(request)
        saved = request.message
        if saved.version > self.state.checkpoint_version:
            self.ledger.checkpointed(saved.version)
            self.state.emit("checkpoint_saved", version=saved.version, folder=saved.folder)
            self._progress()
        return Done()

    @handles(TrainingFinished)
    async def training_finished(self, request: Request[TrainingFinished]) -> Done:
        self._trainer(request)
        if self.state.finished != self.ledger.version:
            self.state.emit("finished", version=self.ledger.version)
            self._progress()
        await self._end_if_complete()
        return Done()

    @handles(TrainingFailed)
    async def training_failed(self, request: Request[TrainingFailed]) -> Done:
        self._trainer(request)
        saved = self.state.checkpoint
        go_on = f"The last checkpoint is {saved}: resume from it with --resume {self.folder.path} and other settings."
        self._finish(False, f"{request.message.reason} {go_on if saved else 'No checkpoint was saved before that.'}")
        return Done()

    async def _end_if_complete(self) -> None:
        # Without steps there is no trainer, which would report that it has finished.
        finished = self.state.finished if self.config.steps else 0
        if finished == self.config.steps and self._evaluated(self.config.steps):
            if not self._evaluated(0):
                self._drop_evaluation(0, "the generator that held it was lost, and no other one came in time")
            await self.journal.durable()
            self._finish(True, "the run reached its end")

    # --- evaluation and monitoring

    def _evaluated(self, version: int) -> bool:
        """True if the evaluation of the first or the last version is over, with a result or without."""
        over = self.state.evaluations.keys() | self.state.not_evaluated.keys()
        return not self.config.evaluates or version in over

    def _hold_version_0(self, fresh: Member | None = None) -> None:
        """Have one generator hold version 0 until it is evaluated, while the run goes on. It has to be a generator that
        still has this version: `fresh`, which has just joined, or any as long as no newer version is published."""
        over = self.ledger.version == self.config.steps or self._end.done()
        if over or self._evaluated(0) or self.state.holder:
            return
        generators = [m for m in self.state.members.values() if m.role == "generator" and m.state != "draining"]
        if self.state.policy.version:
            generators = [fresh] if fresh else []
        if generators:
            self._hold(
                min(generators, key=lambda m: (m.state != "healthy", m.index)),
                Policy(lineage=0, version=0, folder=self.config.model),
            )

    def _plan_evaluation(self, policy: Policy) -> None:
        """Have every `evaluator.every`-th version evaluated while the run continues. One generator, a different one
        each time, holds the version until it is evaluated. The hold is published before any newer version can be."""
        every, version = self.config.evaluator.every, policy.version
        if not every or not self.config.evaluates or version % every or version == self.config.steps:
            return
        generators = [m for m in self.state.members.values() if m.role == "generator" and m.state == "healthy"]
        if hold := self.state.holder:
            self._drop_evaluation(version, f"version {hold[1].version} is still being evaluated")
        elif not generators or not self._healthy("evaluator"):
            self._drop_evaluation(version, "there is no healthy generator or evaluator")
        else:
            generators.sort(key=lambda m: m.index)
            self._hold(generators[version // every % len(generators)], policy)

    def _hold(self, generator: Member, policy: Policy) -> None:
        self._held_since = self._now()
        self._change(generator, held=policy)
        self._changed.notify()

    def _abandon(self, reason: str) -> None:
        """If a generator holds a version in between for evaluation, give up that evaluation and end the hold. The
        generator then loads the newest version. Version 0 is never given up for such a reason: there is no other one to
        compare the result with."""
        hold = self.state.holder
        if hold and hold[1].version:
            self._give_up(*hold, reason)

    def _give_up(self, holder: Member, held: Policy, reason: str) -> None:
        self._drop_evaluation(held.version, reason)
        self._change(holder, held=None)
        self._changed.notify()

    def _lose_hold(self, holder: Member, held: Policy, reason: str) -> None:
        """The holder is gone, and its version with it. Another generator may still have version 0."""
        if held.version:
            self._give_up(holder, held, reason)
        else:
            self._change(holder, held=None)

    def _note_loss(self, evaluator: str, version: int) -> None:
        """An evaluator is gone. The next one goes on with its evaluation, but a generator is not held for evaluators
        that are lost again and again before they have scored another row."""
        previous, self._rows_at_loss = self._rows_at_loss, (version, len(self.state.row_scores(version)))
        if previous == self._rows_at_loss:
            self._abandon(f"{evaluator} is gone, like the one before, and none of them has scored another row")

    def _drop_evaluation(self, version: int, reason: str) -> None:
        self.state.emit("evaluation_dropped", version=version, reason=reason)
        log.warning("not evaluated", version=version, reason=reason)

    def _evaluation_due(self) -> tuple[int, Member | None] | None:
        """The version to evaluate, and the generator that holds it; None: any generator has it."""
        if hold := self.state.holder:
            return hold[1].version, hold[0]
        version = self.state.policy.version
        return (version, None) if version == self.config.steps and not self._evaluated(version) else None

    @handles(AskEvaluation)
    async def ask_evaluation(self, request: Request[AskEvaluation]) -> EvaluationAnswer:
        def ready() -> tuple[int, Member | None] | None:
            due = self._evaluation_due()
            return due if due and (due[1] is None or due[1].state == "healthy") else None

        self._member(request, "evaluator")
        due = await self._park(request, ready)
        if due is None:
            return EvaluationAnswer(version=None)
        self._member(request)  # the sender may have been removed while its request was parked
        self._held_since = self._now()
        version, holder = due
        scored = self.state.row_scores(version)
        return EvaluationAnswer(version=version, holder=holder, scored=RowScores.of(scored) if scored else None)

    @handles(RowsScored)
    async def rows_scored(self, request: Request[RowsScored]) -> Done:
        self._member(request, "evaluator")
        version, scored = request.message.version, request.message.scored.by_row()
        if not all(0 <= row < self.config.data.eval_size for row in scored):
            raise RefusedError(f"there are {self.config.data.eval_size} held-out rows, not {max(scored)}")
        due, earlier = self._evaluation_due(), self.state.row_scores(version)
        if due and due[0] == version and (fresh := {row: scored[row] for row in scored if row not in earlier}):
            self.state.keep_scores(version, fresh)
            self._progress()
        return Done()

    @handles(EvaluationDone)
    async def evaluation_done(self, request: Request[EvaluationDone]) -> Done:
        self._member(request, "evaluator")
        evaluation = request.message
        due = self._evaluation_due()
        if due is None or due[0] != evaluation.version:  # reported before, or abandoned meanwhile
            return Done()
        self.state.emit("evaluated", evaluation=evaluation.model_dump())
        if due[1]:
            self._change(due[1], held=None)
        log.info("evaluated", **evaluation_record(evaluation))
        self._progress()
        await self.journal.durable()
        self.folder.append_evaluation(evaluation_record(evaluation))
        await self._end_if_complete()
        self._changed.notify()
        return Done()

    @handles(EvaluationAbandoned)
    async def evaluation_abandoned(self, request: Request[EvaluationAbandoned]) -> Done:
        self._member(request, "evaluator")
        abandoned = request.message
        due = self._evaluation_due()
        if due is None or due[0] != abandoned.version:
            return Done()
        if hold := self.state.holder:
            self._give_up(*hold, abandoned.reason)
        elif not self.config.steps:  # nothing is noted: whoever starts the evaluation again wants it done
            self._finish(False, f"The model was not evaluated: {abandoned.reason}.")
        else:
            self._drop_evaluation(abandoned.version, abandoned.reason)
            self._progress()
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
                **self._counts(),
                "waiting": self._waiting_for(),
                "metrics": self.state.last_step,
                "recent": [] if since is None else [step for step in self._recent if step["step"] > since],
                "accuracy": {
                    str(version): evaluation.accuracy
                    for version, evaluation in self.state.evaluations.items()
                    if evaluation.accuracy is not None
                },
                "members": self._told_members(),
                "ended": self._end.done(),
                "events": self._events.address,
            }
        )

    def _told_members(self) -> list[dict[str, Any]]:
        """The members with their activities and numbers; without these, once they take MAX_STATUS_BYTES."""
        members, size = [], 0
        for identity, member in self.state.members.items():
            pulse = self._pulses[identity]
            size += len(pulse.activity.encode()) + sum(len(name.encode()) + 11 for name in pulse.stats)
            fits = size <= MAX_STATUS_BYTES
            members.append(
                {
                    "identity": identity,
                    "state": member.state,
                    "activity": pulse.activity if fits else "",
                    "stats": pulse.stats if fits else {},
                }
            )
        return members

    def _counts(self) -> dict[str, int]:
        """Numbers of groups."""
        return {"alive": self.ledger.alive, "ready": self.ledger.ready_count, "capacity": self._free()}

    def _waiting_for(self) -> str:
        """Which actor waits for which, and since when, in one line; and which actor has been at work for longest."""
        if work := self._at_work():
            return f"{self._who_waits()}; {work}"
        return f"{self._who_waits()} (for {self._now() - self._progressed:.0f} s)"

    def _at_work(self) -> str:
        """The member that has been at its present work for longest, what that is, and for how long; empty if every
        member only waits. Work has no deadline: while a member works, the run does not stall."""
        working = [(p.work.seconds, i, p.work.what) for i, p in self._pulses.items() if p.work is not None]
        if not working:
            return ""
        seconds, identity, what = max(working)
        return f"{actor_name(identity)} is {what} (for {seconds:.0f} s)"

    def _who_waits(self) -> str:
        last = self.ledger.version == self.config.steps
        if missing := [role for role in self._missing() if last or role != "evaluator"]:
            return f"everyone waits for a {' and a '.join(missing)} to be ready"
        if self._failures.outage:
            return f"one group at a time is tried, because {self._failures.story(self._now())}"
        if last:
            return f"everyone waits for the {'last checkpoint and ' if self.config.steps else ''}evaluation"
        if waiting := self.ledger.waiting:
            late = ", and the trainer has not published its last version yet" if self.state.unpublished else ""
            return f"the trainer waits for a batch: {waiting}{late}{self._held_back()}"
        if not self._free():
            return f"the rollout managers wait for the trainer, which is {self._activity('trainer')}"
        return "nobody waits"

    def _held_back(self) -> str:
        """If the only generator holds a version, so that no group of a newer version begins: why."""
        hold = self.state.holder
        if hold is None or sum(m.role == "generator" and m.state == "healthy" for m in self.state.members.values()) > 1:
            return ""
        alone = "" if self._healthy("evaluator") else ", but there is no evaluator"
        return f"; the only generator holds version {hold[1].version} until it is evaluated{alone}"

    def _missing(self) -> list[str]:
        roles = ROLES if self.config.steps else ("generator", "reward")
        roles = (*roles, "evaluator") if self.config.evaluates else roles
        missing = [role for role in roles if not self._healthy(role)]
        if "reward" not in missing:
            served = {name for m in self.state.members.values() if m.state == "healthy" for name in m.serves}
            missing += [f"reward that serves {name!r}" for name in self.config.rewards if name not in served]
        return missing

    def _healthy(self, role: str) -> bool:
        return any(m.role == role and m.state == "healthy" for m in self.state.members.values())

    def _activity(self, role: str) -> str:
        return next((self._pulses[i].activity for i, m in self.state.members.items() if m.role == role), "gone")


def _shutdown(ending: Ending) -> Shutdown:
    return Shutdown(ok=ending.ok, reason=ending.reason[:4096])


def _member_bytes(member: Member) -> int:
    """What the entry of a member takes in a message, at the most."""
    held = member.held
    texts = (
        member.identity, member.role, member.address, member.state, *member.serves,
        *((held.folder, held.stamp) if held else ()),
    )  # fmt: skip
    return MEMBER_BYTES + sum(len(text.encode()) + 5 for text in texts) + (MEMBER_BYTES if held else 0)


def _told_bytes(event: MembersChanged) -> int:
    return sum(map(_member_bytes, event.changed)) + sum(len(identity) + 5 for identity in event.gone)
