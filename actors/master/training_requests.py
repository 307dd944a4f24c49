"""Requests of the trainer to the master."""

import structlog

from actors.master import changes
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.staleness.ledger import ReportAnswer, RunEnded
from areal.staleness.ledger_state import Batch
from protocols.bus_errors import PreparingError, RefusedError
from protocols.membership_messages import Policy, PolicyPublished
from protocols.messages import AskBatch, AskReuse, BatchAnswer, CommitStep, Done, GroupAccepted, GroupReady, ReuseAnswer
from protocols.training_messages import (
    AskRecovery,
    CheckpointAnswer,
    CheckpointSaved,
    PublishPolicy,
    Recovery,
    StepFailed,
    TrainingFailed,
    TrainingFinished,
)
from protocols.transport import Request

log = structlog.get_logger()


class TrainingRequests(HandlesRequests):
    """Answers the trainer."""

    def __init__(self, run: RunControl) -> None:
        self._run = run

    @handles(AskRecovery)
    async def ask_recovery(self, request: Request[AskRecovery]) -> Recovery:
        self._run.member(request, "trainer")
        if request.sender != self._run.state.trainer:
            self._run.state.emit(changes.LineageOpened(lineage=self._run.state.lineage + 1, trainer=request.sender))
            self._run.evaluations.abandon("a new trainer has opened a new lineage")
        return Recovery(
            run=self._run.journal.run,
            lineage=self._run.state.lineage,
            version=self._run.ledger.version,
            checkpoint_version=self._run.state.checkpoint_version,
            drop=self._needless_payloads(request.message.spooled),
            covered=self._run.ledger.covered,
        )

    def _needless_payloads(self, spooled: str) -> str:
        return "\n".join(group for group in spooled.splitlines() if not self._run.ledger.state.needs_payload(group))

    @handles(AskReuse)
    async def ask_reuse(self, request: Request[AskReuse]) -> ReuseAnswer:
        self._run.check_trainer(request)
        return ReuseAnswer(oldest=self._run.ledger.reuse(request.message.group, request.message.versions))

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

    @handles(PublishPolicy)
    async def publish_policy(self, request: Request[PublishPolicy]) -> Done:
        policy: Policy = request.message.policy
        self._run.check_trainer(request, policy.lineage)
        current = self._run.state.policy
        if policy.identity <= current.identity:
            return Done()
        if policy.version != self._run.ledger.version:
            raise RefusedError(
                f"version {policy.version} cannot be published: the run is at version {self._run.ledger.version}"
            )
        self._run.state.emit(changes.PublishedChange(policy=policy))
        if policy.version > current.version:
            self._run.evaluations.plan(policy)
        self._run.send_out(PolicyPublished(policy=policy))
        self._run.progress.note_progress()
        return Done()

    @handles(CheckpointSaved)
    async def checkpoint_saved(self, request: Request[CheckpointSaved]) -> CheckpointAnswer:
        self._run.check_trainer(request)
        saved = request.message
        if saved.version > self._run.state.checkpoint_version:
            self._run.ledger.checkpointed(saved.covered)
            self._run.state.emit(changes.CheckpointSavedChange(version=saved.version, folder=saved.folder))
            self._run.progress.note_progress()
        return CheckpointAnswer(drop=self._needless_payloads(saved.spooled))

    @handles(TrainingFinished)
    async def training_finished(self, request: Request[TrainingFinished]) -> Done:
        self._run.check_trainer(request)
        if self._run.state.finished != self._run.ledger.version:
            self._run.state.emit(changes.Finished(version=self._run.ledger.version))
            self._run.progress.note_progress()
        await self._run.end_if_complete()
        return Done()

    @handles(TrainingFailed)
    async def training_failed(self, request: Request[TrainingFailed]) -> Done:
        self._run.check_trainer(request)
        self._fail_training(request.message.reason)
        return Done()

    @handles(StepFailed)
    async def step_failed(self, request: Request[StepFailed]) -> Done:
        failed, trainer = request.message, self._run.state.trainer
        if not (trainer and request.sender.startswith("trainer/")) or failed.version > self._run.ledger.version + 1:
            raise RefusedError(f"{request.sender} has no step {failed.version + 1} to compute")
        log.error("a training step failed", step=failed.version + 1, reason=failed.reason)
        if reason := self._run.failures.step_failed(failed.version + 1, failed.reason, trainer):
            self._fail_training(reason)
        return Done()

    def _fail_training(self, reason: str) -> None:
        """End the run for `reason`, and say where the run can go on."""
        saved, folder = self._run.state.checkpoint, self._run.folder.path
        go_on = f"The last checkpoint is {saved}: resume from it with --resume {folder} and other settings."
        self._run.end_if(f"{reason} {go_on if saved else 'No checkpoint was saved before that.'}")
