"""Requests of the trainer that are about no sample: recovery, publication, checkpoints, the end."""

import structlog

from actors.master import changes
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from protocols.bus_errors import RefusedError
from protocols.membership_messages import Policy, PolicyPublished
from protocols.messages import Done
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
    """Answers the trainer. `GroupRequests` answers for the groups that the trainer has."""

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
