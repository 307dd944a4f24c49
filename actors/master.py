"""The master: who exists, which version is current, who may generate, what is trained next.

It owns the ledger and never touches a token or a weight. Requests that cannot be answered yet are parked until they
can, or until the asker's time is nearly over. One record a step goes to metrics.jsonl.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from actors.logs import write_log_file
from actors.runtime import Ending, HandlesRequests, Signal, first_error, handles
from areal.config import Config, UserError
from areal.ledger import Answer, Batch, Ledger, LedgerSettings, RunEnded
from areal.run_folder import RunFolder
from protocols.errors import RefusedError
from protocols.messages import (
    AskBatch,
    AskConfig,
    AskEvaluation,
    AskPermits,
    AskSnapshot,
    AskStatus,
    BatchAnswer,
    CommitStep,
    Configuration,
    Done,
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
    Permit,
    Permits,
    Policy,
    PolicyPublished,
    RenewLeases,
    Shutdown,
    Snapshot,
    Status,
    TrainingFinished,
    Welcome,
)
from protocols.transport import Publisher, Request, ZmqBus

# A parked request is answered this long before its asker gives up.
PARK_MARGIN_SECONDS = 1.0
WATCH_SECONDS = 1.0
# How long the others have to leave after the end before the master goes.
FAREWELL_SECONDS = 5.0
# The answer to the last one's Leave is still on its way when it is off the list.
LAST_WORDS_SECONDS = 0.2

log = structlog.get_logger()


@dataclass(slots=True)
class _Row:
    """A member and what its last heartbeat said."""

    member: Member
    heard: float
    activity: str
    stats: dict[str, float]


class Master(HandlesRequests):
    """One per run. `config.model` is a folder by now. The run ends when the last step is trained, its checkpoint
    saved and the last version evaluated."""

    def __init__(self, bus: ZmqBus, config: Config) -> None:
        super().__init__()
        self.config = config
        self.bus = bus
        self.folder = RunFolder(config)
        write_log_file(self.folder.path / "logs" / "master-0.jsonl")
        self.ledger = Ledger(
            LedgerSettings(
                batch_size=config.batch_size,
                max_staleness=config.max_staleness,
                on_straggler=config.on_straggler,
                steps=config.steps,
                prompts=None,
                max_attempts=config.max_attempts,
                on_failed_sample=config.on_failed_sample,
            )
        )
        self.policy = Policy(lineage=0, version=0, folder=config.model)
        self._rows: dict[str, _Row] = {}
        self._changed = Signal()
        self._end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._events: Publisher
        self._events_address = ""
        self._rewards: dict[str, float] = {}  # mean reward of each alive ready group
        self._evaluations: dict[int, EvaluationDone] = {}
        self._checkpoint: str | None = None
        self._generated_before = 0.0
        self._tokens_of_the_gone = 0.0
        self._last_metrics: dict[str, Any] = {}
        self._begun: float | None = None
        self._step_begun = 0.0
        self._progressed = 0.0

    # --- life

    async def run(self) -> Ending:
        """Serve until the run has ended; returns how. Raises UserError where the address is taken."""
        loop = asyncio.get_running_loop()
        self._progressed = self._step_begun = loop.time()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._finish, False, f"told to stop by {sign.name}")
        try:
            self._open()
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(), name="watch")
                log.info("master ready", address=self.config.master.address, run=str(self.folder.path))
                ending = await self._end
                await self._say_farewell(ending)
                watch.cancel()
            return ending
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            await self.bus.close()

    def _open(self) -> None:
        address = self.config.master.address
        host = address.removeprefix("tcp://").rpartition(":")[0]
        try:
            self.bus.serve(address, self.dispatch, self._crashed)
        except OSError as error:
            raise UserError(
                f"The master cannot listen at {address} ({error.strerror}): stop what uses the port, "
                f"or choose another with master.address=tcp://HOST:PORT."
            ) from None
        self._events, self._events_address = self.bus.publisher(f"tcp://{host}:*")

    def _crashed(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        self._finish(False, f"the master failed: {type(error).__name__}: {error}")

    def _finish(self, ok: bool, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(Ending(ok, reason))

    async def _say_farewell(self, ending: Ending) -> None:
        self.folder.write_summary(self._summary(ending))
        self._events.publish(Shutdown(ok=ending.ok, reason=ending.reason))
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._changed.until(lambda: not self._rows)
        except TimeoutError:
            log.warning("some have not left", members=list(self._rows))
        await asyncio.sleep(LAST_WORDS_SECONDS)

    async def _watch(self) -> None:
        """Every second: actors that fell silent, leases that ran out, and a run in which nothing moves."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = loop.time()
            for identity, row in list(self._rows.items()):
                if now - row.heard > self.config.master.lease_seconds:
                    self._remove(identity, f"silent for {now - row.heard:.0f} s")
            if lost := self.ledger.expire(now):
                log.warning("leases expired", groups=lost)
            self._changed.notify()
            if now - self._progressed > self.config.master.stall_seconds:
                self._finish(False, f"nothing has moved for {now - self._progressed:.0f} s: {self._waiting_for()}")

    # --- helpers

    async def _park(self, request: Request, condition: Callable[[], Any]) -> Any:
        """The condition's value once it is true, or None when the asker's time is nearly over."""
        try:
            async with asyncio.timeout(max(0.0, request.remaining - PARK_MARGIN_SECONDS)):
                return await self._changed.until(condition)
        except TimeoutError:
            return None

    def _snapshot(self) -> Snapshot:
        members = tuple(row.member for row in self._rows.values())
        return Snapshot(policy=self.policy, members=members, sequence=self._events.sequence)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _progress(self) -> None:
        self._progressed = self._now()

    def _known(self, request: Request) -> str:
        if request.sender not in self._rows:
            raise RefusedError(f"{request.sender} is not a member of this run (any more): start it anew")
        return request.sender

    # --- membership

    @handles(Join)
    async def join(self, request: Request) -> Welcome:
        asked: Join = request.message
        mark = request.sender.rpartition("#")[2]
        index = self._free_index(asked.role) if asked.index is None else asked.index
        identity = f"{asked.role}/{index}#{mark}"
        for other in [i for i, row in self._rows.items() if (row.member.role, row.member.index) == (asked.role, index)]:
            self._remove(other, f"replaced by {identity}")
        member = Member(identity=identity, role=asked.role, index=index, address=asked.address, state="stale")
        self._rows[identity] = _Row(member, self._now(), "starting", {})
        self._members_changed()
        log.info("joined", actor=identity, address=asked.address)
        return Welcome(
            identity=identity,
            config=self.config.model_dump(mode="json"),
            events=self._events_address,
            snapshot=self._snapshot(),
        )

    def _free_index(self, role: str) -> int:
        taken = {row.member.index for row in self._rows.values() if row.member.role == role}
        return next(i for i in range(len(taken) + 1) if i not in taken)

    @handles(Heartbeat)
    async def heartbeat(self, request: Request) -> HeartbeatAnswer:
        row = self._rows[self._known(request)]
        beat: Heartbeat = request.message
        if beat.stats.get("tokens_generated", 0) > row.stats.get("tokens_generated", 0):
            self._progress()
        row.heard, row.activity, row.stats = self._now(), beat.activity, beat.stats
        if (beat.state, beat.serves) != (row.member.state, row.member.serves):
            row.member = row.member.model_copy(update={"state": beat.state, "serves": beat.serves})
            self._progress()
            self._members_changed()
        return HeartbeatAnswer(policy=self.policy, sequence=self._events.sequence, ended=self._end.done())

    @handles(Leave)
    async def leave(self, request: Request) -> Done:
        if request.sender in self._rows:
            self._remove(request.sender, request.message.reason)
            self._changed.notify()
        return Done()

    @handles(AskSnapshot)
    async def ask_snapshot(self, request: Request) -> Snapshot:
        return self._snapshot()

    @handles(AskConfig)
    async def ask_config(self, request: Request) -> Configuration:
        return Configuration(values=self.config.model_dump(mode="json"))

    def _remove(self, identity: str, reason: str) -> None:
        row = self._rows.pop(identity)
        self._tokens_of_the_gone += row.stats.get("tokens_generated", 0.0)
        released = self.ledger.release(identity)
        self._members_changed()
        if not self._end.done():
            log.warning("left", actor=identity, reason=reason, released=len(released))
            if row.member.role == "trainer" and self._checkpoint is None:
                self._finish(False, f"{identity} is gone ({reason}) and the run cannot go on without its trainer")

    def _members_changed(self) -> None:
        self._events.publish(MembersChanged(members=tuple(row.member for row in self._rows.values())))

    # --- rollouts

    @handles(AskPermits)
    async def ask_permits(self, request: Request) -> Permits:
        owner = self._known(request)
        if not await self._park(request, lambda: self._may_generate() and self.ledger.capacity):
            return Permits(permits=())
        self._begin()
        granted = self.ledger.admit(owner, request.message.count, self._now(), self.config.master.lease_seconds)
        return Permits(
            permits=tuple(
                Permit(group=p.group_id, prompt_index=p.prompt_index, min_version=p.min_version) for p in granted
            )
        )

    def _may_generate(self) -> bool:
        # The first evaluation is of version 0 and by generators that are otherwise idle.
        return self._evaluated(0) and not self._end.done()

    def _begin(self) -> None:
        if self._begun is None:
            self._begun = self._step_begun = self._now()

    @handles(RenewLeases)
    async def renew_leases(self, request: Request) -> LostLeases:
        lost = self.ledger.renew(
            self._known(request), request.message.groups, self._now(), self.config.master.lease_seconds
        )
        return LostLeases(groups=tuple(lost))

    @handles(GroupStarted)
    async def group_started(self, request: Request) -> Done:
        self.ledger.started(request.message.group, self._known(request), request.message.start_version)
        self._changed.notify()
        return Done()

    @handles(GroupFailed)
    async def group_failed(self, request: Request) -> Done:
        failed: GroupFailed = request.message
        log.warning("group failed", group=failed.group, reason=failed.reason)
        self.ledger.failed(failed.group, self._known(request), failed.reason)
        self._changed.notify()
        return Done()

    # --- training

    @handles(GroupReady)
    async def group_ready(self, request: Request) -> GroupAccepted:
        ready: GroupReady = request.message
        answer = self.ledger.ready(ready.group, ready.start_version)
        if answer is Answer.ACCEPTED:
            self._rewards[ready.group] = ready.reward_mean
            self._progress()
            self._changed.notify()
        return GroupAccepted(accepted=answer is not Answer.GONE)

    @handles(AskBatch)
    async def ask_batch(self, request: Request) -> BatchAnswer:
        def decided() -> Batch | RunEnded | None:
            found = self.ledger.next_batch(request.message.version)
            return found if isinstance(found, Batch | RunEnded) else None

        match await self._park(request, decided):
            case Batch() as batch:
                return BatchAnswer(status="ready", groups=batch.group_ids, mask_older_than=batch.min_token_version)
            case RunEnded():
                return BatchAnswer(status="ended")
            case _:
                return BatchAnswer(status="waiting")

    @handles(CommitStep)
    async def commit_step(self, request: Request) -> Done:
        commit: CommitStep = request.message
        if commit.policy.version == self.policy.version:
            return Done()
        record = self.ledger.commit(commit.policy.version - 1)
        self.policy = commit.policy
        self._events.publish(PolicyPublished(policy=commit.policy))
        self._record_step(commit, record)
        self._progress()
        self._changed.notify()
        return Done()

    def _record_step(self, commit: CommitStep, record: Any) -> None:
        now = self._now()
        rewards = [self._rewards.pop(group) for group in record.batch.group_ids]
        generated = self._tokens_of_the_gone + sum(r.stats.get("tokens_generated", 0.0) for r in self._rows.values())
        metrics = {
            "step": commit.policy.version,
            "reward_mean": sum(rewards) / len(rewards),
            "staleness_mean": record.mean_staleness,
            "staleness_max": record.max_staleness,
            "tokens_generated": int(generated - self._generated_before),
            "step_seconds": now - self._step_begun,
            "groups_trained": len(rewards),
            "groups_ready": self.ledger.ready_count,
            "groups_alive": self.ledger.alive,
            **commit.metrics,
        }
        # Before its first step the trainer also waits for the others to start, which is no part of the step.
        metrics["trainer_wait_seconds"] = min(metrics["trainer_wait_seconds"], metrics["step_seconds"])
        self._generated_before, self._step_begun = generated, now
        self._last_metrics = metrics
        self.folder.append_metrics(metrics)
        log.info("step", **{k: round(v, 5) if isinstance(v, float) else v for k, v in metrics.items()})

    @handles(TrainingFinished)
    async def training_finished(self, request: Request) -> Done:
        self._checkpoint = request.message.checkpoint
        self._progress()
        self._end_if_complete()
        return Done()

    def _end_if_complete(self) -> None:
        if self._checkpoint and self._evaluated(self.policy.version):
            self._finish(True, "the run reached its end")

    # --- evaluation and monitoring

    def _evaluated(self, version: int) -> bool:
        return not self.config.data.eval_size or version in self._evaluations

    def _evaluation_due(self) -> EvaluationAnswer | None:
        version = self.policy.version
        due = version in (0, self.config.steps) and not self._evaluated(version)
        return EvaluationAnswer(version=version) if due else None

    @handles(AskEvaluation)
    async def ask_evaluation(self, request: Request) -> EvaluationAnswer:
        self._known(request)
        return await self._park(request, self._evaluation_due) or EvaluationAnswer(version=None)

    @handles(EvaluationDone)
    async def evaluation_done(self, request: Request) -> Done:
        done: EvaluationDone = request.message
        self._evaluations[done.version] = done
        log.info(
            "evaluated", version=done.version, accuracy=round(done.accuracy, 4), rows=done.rows, failed=done.failed
        )
        self._progress()
        self._end_if_complete()
        self._changed.notify()
        return Done()

    @handles(AskStatus)
    async def ask_status(self, request: Request) -> Status:
        return Status(
            values={
                "run": self.config.name,
                "version": self.policy.version,
                "steps": self.config.steps,
                "max_staleness": self.config.max_staleness,
                "alive": self.ledger.alive,
                "ready": self.ledger.ready_count,
                "capacity": self.ledger.capacity,
                "waiting": self._waiting_for(),
                "metrics": self._last_metrics,
                "accuracy": {str(version): done.accuracy for version, done in self._evaluations.items()},
                "members": [
                    {"identity": i, "state": row.member.state, "activity": row.activity, "stats": row.stats}
                    for i, row in self._rows.items()
                ],
                "ended": self._end.done(),
                "events": self._events_address,
            }
        )

    def _waiting_for(self) -> str:
        """Who waits for whom, in one line."""
        missing = [role for role in ("trainer", "generator", "reward", "rollout_manager") if not self._healthy(role)]
        if self.config.data.eval_size and not self._healthy("evaluator"):
            missing.append("evaluator")
        if missing:
            return f"waiting for a {' and a '.join(missing)} to be ready"
        if not self._evaluated(0):
            return "everyone waits for the evaluation of version 0"
        if self.ledger.version == self.config.steps:
            return "waiting for the last checkpoint and evaluation"
        if waiting := self.ledger.waiting:
            return f"the trainer waits: {waiting}"
        return "the rollout managers wait for the trainer" if not self.ledger.capacity else "nobody waits"

    def _healthy(self, role: str) -> bool:
        return any(row.member.role == role and row.member.state == "healthy" for row in self._rows.values())

    def _summary(self, ending: Ending) -> dict[str, Any]:
        before, after = self._evaluations.get(0), self._evaluations.get(self.config.steps)
        samples = self.ledger.counters.trained * self.config.group_size
        seconds = self._step_begun - self._begun if self._begun is not None else 0.0
        return {
            "ok": ending.ok,
            "reason": ending.reason,
            "steps": self.ledger.version,
            "accuracy_before": before and before.accuracy,
            "accuracy_after": after and after.accuracy,
            "max_staleness": self.config.max_staleness,
            "samples_trained": samples,
            "samples_per_second": samples / seconds if seconds else None,
            "seconds": seconds,
            "checkpoint": self._checkpoint,
            "groups_discarded": dict(self.ledger.counters.discarded),
            "groups_requeued": dict(self.ledger.counters.requeued),
            "samples_before": [s.model_dump() for s in before.samples] if before else [],
            "samples_after": [s.model_dump() for s in after.samples] if after else [],
        }
