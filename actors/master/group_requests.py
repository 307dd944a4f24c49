"""Requests on the way of a group: its permit, its start, its samples on disk, the batch, the commit of the step."""

import asyncio

import structlog

from actors.master import changes
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.staleness.ledger import ReportAnswer, RunEnded
from areal.staleness.ledger_state import Batch
from protocols.bus_errors import PreparingError, RefusedError
from protocols.messages import (
    AskBatch,
    AskPermits,
    BatchAnswer,
    CommitStep,
    Done,
    GroupAccepted,
    GroupReady,
    GroupStarted,
    Permit,
    Permits,
)
from protocols.transport import Request

log = structlog.get_logger()


class GroupRequests(HandlesRequests):
    """Answers rollout managers and gateways, which sample groups, and the trainer, which stores and trains groups."""

    def __init__(self, run: RunControl) -> None:
        self._run = run
        self._turn = asyncio.Lock()  # after a change only the first waiting asker looks

    @handles(AskPermits)
    async def ask_permits(self, request: Request[AskPermits]) -> Permits:
        owner = self._run.member(request, "rollout_manager").identity
        if not await self._run.park(request, self._run.admission.free_groups, self._turn):
            return Permits(permits=())
        self._run.member(request)  # the sender may have been removed while its request was parked
        self._run.meter.begin()
        count = min(request.message.count, self._run.admission.free_groups())
        granted = self._run.ledger.admit(owner, count, self._run.now(), self._run.config.master.lease_seconds)
        return Permits(
            permits=tuple(
                Permit(
                    group=p.group_id,
                    prompt_index=p.prompt_index,
                    row=p.row,
                    min_version=p.min_version,
                    resumed=p.resumed,
                    rewards=self._run.state.rewards_of(p.prompt_index),
                )
                for p in granted
            )
        )

    @handles(GroupStarted)
    async def group_started(self, request: Request[GroupStarted]) -> Done:
        owner = self._run.member(request, "rollout_manager", "gateway").identity
        self._run.ledger.started(request.message.group, owner, request.message.start_version)
        self._run.changed.notify()
        return Done()

    @handles(GroupReady)
    async def group_ready(self, request: Request[GroupReady]) -> GroupAccepted:
        ready = request.message
        self._run.check_trainer(request)
        group = self._run.ledger.state.groups.get(ready.group)
        answer = self._run.ledger.ready(ready.group, ready.start_version, ready.signal)
        if group is not None and answer in (ReportAnswer.ACCEPTED, ReportAnswer.FILTERED):
            rewarded = changes.Rewarded(
                group=ready.group,
                row=group.row,
                version=self._run.ledger.version,
                mean=ready.reward_mean,
                spread=ready.reward_spread,
                signal=ready.signal,
                parts=ready.reward_parts,
                tokens=ready.tokens,
                discarded=ready.discarded,
                marks=ready.marks,
                gave=ready.gave,
            )
            self._run.state.emit(rewarded)
            self._run.progress.note_progress()
            self._run.changed.notify()
            mean = self._run.state.tally.score / self._run.state.tally.scored
            self._run.end_if(self._run.failures.end_reason_after_ready(answer is ReportAnswer.FILTERED, mean))
        return GroupAccepted(accepted=answer in (ReportAnswer.ACCEPTED, ReportAnswer.UNCHANGED))

    @handles(AskBatch)
    async def ask_batch(self, request: Request[AskBatch]) -> BatchAnswer:
        version = request.message.version

        def decide() -> Batch | RunEnded | None:
            if version > self._run.ledger.version:  # the commit of the step before has not arrived yet
                return None
            answer = self._run.ledger.next_batch(version)
            if version == self._run.ledger.version:
                self._run.meter.record_wait(answer)
            return answer if isinstance(answer, Batch | RunEnded) else None

        self._run.check_trainer(request)
        answer = await self._run.park(request, decide)
        self._run.check_trainer(request)
        match answer:
            case Batch() as batch:
                return BatchAnswer(
                    status="ready",
                    groups=batch.group_ids,
                    mask_older_than=batch.min_token_version,
                    oldest=self._oldest_allowed(batch),
                )
            case RunEnded():
                return BatchAnswer(status="ended")
            case _:
                return BatchAnswer(status="waiting")

    def _oldest_allowed(self, batch: Batch) -> int | None:
        """The oldest version of a token that the bound allows in a batch; None: any version, or the batch is redone."""
        groups = [group for name in batch.group_ids if (group := self._run.ledger.state.groups.get(name)) is not None]
        if not self._run.state.settings.bounds_groups or not groups:
            return None
        return batch.version - max(group.deadline - (group.start_version or 0) for group in groups)

    @handles(CommitStep)
    async def commit_step(self, request: Request[CommitStep]) -> Done:
        commit = request.message
        self._run.check_trainer(request, commit.lineage)
        if self._run.unrecorded:  # a restarted master would know only the metrics of the next step
            raise PreparingError(str(self._run.shortage or f"step {self._run.unrecorded} is not recorded yet"))
        if commit.version <= self._run.ledger.version:
            return Done()
        if self._run.state.unpublished:
            now = self._run.ledger.version
            raise RefusedError(f"version {now} is not published yet, so version {commit.version} cannot be committed")
        record = self._run.ledger.commit(commit.version - 1)
        self._run.unrecorded, metrics = commit.version, self._run.meter.metrics(commit, record)
        self._run.state.emit(changes.Stepped(metrics=metrics, groups=record.batch.group_ids))
        self._run.keep_state()
        self._run.state.compact_if_due()
        self._run.failures.filtered_in_a_row = 0
        self._run.progress.note_progress()
        self._run.changed.notify()
        await self._run.journal.durable()
        await self._run.record_step(metrics)
        long = ("prompts", "discarded")
        shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in metrics.items() if k not in long}
        log.info("step", **shown)
        return Done()
