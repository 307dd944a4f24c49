"""The trainer: keeps scored samples on disk, asks the master which batch to train, and publishes the weights.

| loop, besides the loops of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| main | the batch; shared devices; the publication of the step before | begins commit, publication, checkpoint |
| store sample, store calls | the spool on disk; with a group's last sample, `GroupReady` | the manager's group |
| publish | the commit, the weights on disk | the master's event, so the generators; the next commit |
| save | the checkpoint on disk, its version published, its rollouts written | empties spool and old checkpoints |
| keep rollouts | 1 s; enough to write | |
| per rank | a command of rank 0 | the step |

The weights of a step are published (`weight_publisher.py`), and a checkpoint is written (`checkpoints.py`), while the
next steps are computed. A trainer that is told to leave first ends the step and saves a checkpoint, if recent durations
say that there is time.

A sample is acknowledged once it is in the spool on disk. The spool keeps the sample until the rollouts of its group are
written and two checkpoints cover the step that trained it, or until its group is discarded. The spool also has the
calls of unfinished samples, from time to time. So a killed rollout manager loses only the tokens since the last save. A
killed trainer loses nothing: after its restart it loads the last checkpoint, or the checkpoint before if the last is
damaged. The trainer redoes, in order, the batches that the master has logged since, and publishes the current version
under a new lineage.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import structlog

from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from actors.trainer import kept_rollouts
from actors.trainer.checkpoints import Checkpoints, ask_recovery
from actors.trainer.learner import Learner
from actors.trainer.phases import Phases
from actors.trainer.probes import Probes
from actors.trainer.ranks import Ranks, failure_of_step
from actors.trainer.sample_store import SampleStore
from actors.trainer.turns import Turns
from actors.trainer.weight_publisher import VERSIONS_KEPT, WeightPublisher, remove_folder, remove_weights
from areal.base import extensions
from areal.config import Config
from areal.devices import visible_devices
from areal.samples.trajectory import Group
from areal.storage.disk import DiskRetry
from areal.storage.rollouts import RolloutWriter
from areal.storage.run_folder import checkpoints_in, first_version, version_of
from areal.storage.spool import Spool
from areal.training.guard import Guard, limits_of
from protocols.bus_errors import BusError
from protocols.messages import AskBatch, BatchAnswer, Done
from protocols.training_messages import Recovery, TrainingFailed, TrainingFinished

ASK_BATCH_SECONDS = 20.0
# Interval at which the trainer repeats TrainingFailed, in case the master dies before it has ended the run.
REPEAT_SECONDS = 5.0
log = structlog.get_logger()


class Trainer(Actor):
    role = "trainer"
    drains_at_a_stop = True

    @classmethod
    async def start(
        cls,
        member: Membership,
        start_learner: Callable[[Config, DiskRetry], Awaitable[Learner]] = Ranks.start,
        open_spool: Callable[[Path], Spool] = Spool.open,
        open_rollouts: Callable[[Config], RolloutWriter] = kept_rollouts.open_rollouts,
    ) -> Self:
        config, used = member.config, member.used
        member.activity = "starting DeepSpeed"
        used.push_async_callback(remove_weights, member)
        spool = await member.on_disk("the spool", open_spool, config.folder / "spool.db")
        used.callback(spool.close)
        rollouts = await asyncio.to_thread(open_rollouts, config)
        used.push_async_callback(kept_rollouts.write_rollouts, member, rollouts)
        member.spawn(kept_rollouts.write_rollouts_regularly(member, rollouts), "keep rollouts")
        turns = Turns(member)
        member.serve(turns)
        phases = Phases(member.works, member.took)
        await turns.begin(lambda phase: phases.timed(phase, 0, lambda: 0.0))
        learner = await start_learner(config, member.disk)
        used.callback(learner.close)
        direct = None
        if config.weights.direct:
            sender = extensions.need("direct", "sender", "weights.transport=direct").load()
            direct = await sender.start(member, VERSIONS_KEPT)
        recovery = await ask_recovery(member, spool, rollouts)
        return cls(member, _Parts(learner, spool, rollouts, turns, phases, direct), recovery)

    def __init__(self, member: Membership, parts: "_Parts", recovery: Recovery) -> None:
        self.member = member
        self.config, self.directory = member.config, member.directory
        self._learner, self._spool, self._rollouts, self._turns, self._phases, direct = parts
        self._recovery = recovery
        limits = limits_of(self.config, cuda=bool(visible_devices()))
        self._guard = Guard(limits, self.config.trainer.objective)
        self._probes = Probes(self.config, self.directory, member.ask, member.spawn)
        self._version = recovery.checkpoint_version
        learner, remove = self._learner, functools.partial(remove_folder, member, self._learner)
        self._publisher = WeightPublisher(member, learner, recovery.lineage, self._timed, remove, direct)
        kept = self._learner, self._spool, self._rollouts, recovery.checkpoint_version
        self._checkpoints = Checkpoints(member, *kept, self._timed, remove)
        self._samples = SampleStore(
            self.config, self._learner.vocab_size, self._spool, self._rollouts, member.on_disk, member.ask_master
        )
        member.serve(self._samples)
        member.serve(self._samples.pictures)
        member.serve(self._samples.unfinished)
        self._step: tuple[int, float] | None = None  # number and start of the step in progress
        self._at_rest = asyncio.Event()  # set once no further step begins

    async def catch_up(self) -> None:
        """Recover, in the turn in which the learner has started."""
        await self._recover(self._recovery)
        await self._save_if_due()
        await self._turns.end(self._learner, self._timed)

    async def main(self) -> None:
        await self.member.become_healthy()
        while True:
            if self._version - self._checkpoints.version >= 2 * self.config.trainer.checkpoint_every:
                await self._checkpoints.wait()  # only after a restart, so that a kill adds no more steps to redo
            batch = await self._next_batch()
            if batch is None:
                break
            async with self._turns.turn(self._learner, self._timed):
                await self._do_step(batch)
                await self._save_if_due()
        if not self.member.leaving:
            await self._finish_run()
        self._at_rest.set()

    async def _finish_run(self) -> None:
        await self._publisher.wait()
        await self._checkpoints.wait()
        if self._checkpoints.version < self._version:
            async with self._turns.turn(self._learner, self._timed):
                await self._checkpoints.save(self._version, self._publisher.last)
            if error := await self._checkpoints.wait():
                raise error
        self.member.activity = "finished"
        await self.member.ask_master(TrainingFinished(), Done)

    async def hand_over(self) -> None:
        """End the step and save a checkpoint, if recent durations fit into the rest of `master.drain_seconds`. A
        checkpoint in progress is written to the end. Sets the outcome of the membership."""
        ends = asyncio.get_running_loop().time() + self.config.master.drain_seconds
        outcome = f"abandons step {self._step[0]}" if self._step else "abandons the checkpoint"
        try:
            if self._step and (lack := self._checkpoints.durations.why_too_late("step", self._step[1], ends)):
                outcome += f": {lack}"
                await self._checkpoints.wait()
            else:
                await self._at_rest.wait()
            if self._at_rest.is_set():
                outcome = await self._save_last(ends)
        except asyncio.CancelledError:
            outcome += ": there is no time left"
            raise
        finally:
            self.member.outcome = f"; the trainer {outcome}; the last checkpoint is of step {self._checkpoints.version}"

    async def _save_last(self, ends: float) -> str:
        """Save a checkpoint of the last step. Returns the outcome, in words."""
        await self._publisher.wait()
        await self._checkpoints.wait()
        outcome = f"has finished step {self._version}"
        if self._checkpoints.version == self._version:
            return outcome
        if self._guard.suspicious:
            return f"{outcome}, but does not save it, because the guard finds its metrics suspicious"
        if lack := self._checkpoints.durations.why_too_late("checkpoint", asyncio.get_running_loop().time(), ends):
            return f"{outcome}, but does not save it: {lack}"
        async with self._turns.turn(self._learner, self._timed):
            await self._checkpoints.save(self._version, self._publisher.last)
        error = await self._checkpoints.wait()
        return f"{outcome}, but could not save it: {error}" if error else f"{outcome} and saved its checkpoint"

    def stats(self) -> dict[str, float]:
        stats: dict[str, float] = {
            "work_done": self._learner.work_done,
            "weight_bytes_sent": self._publisher.bytes_sent,
        }
        return stats | ({"rollouts_lost": self._rollouts.lost} if self._rollouts.lost else {})

    # --- recovery

    async def _recover(self, recovery: Recovery) -> None:
        """Restore the state of the run's last trainer: load the last checkpoint, redo the steps since, and publish."""
        self._version = self._checkpoints.version = await self._checkpoints.load(recovery)
        saved = {*map(version_of, await asyncio.to_thread(checkpoints_in, self.config.folder))}
        versions = {*saved, recovery.covered, self._version} - {first_version(self.config.folder)}
        self._checkpoints.find(version for version in versions if version <= self._version)
        redone = recovery.version - self._version
        for version in range(self._version, recovery.version):
            self.member.activity = f"redoing step {version + 1} of {recovery.version}"
            _, groups = await self._train(await self.member.ask_master(AskBatch(version=version), BatchAnswer))
            self._rollouts.add_trained(self._version, groups, self._learner.values)
            if self._version in {*saved, recovery.checkpoint_version}:  # damaged, or the master has not heard of it
                await self._checkpoints.save(self._version, self._publisher.last)
        if recovery.lineage:
            await self._publisher.publish_again(self._version, redone)
        await self._checkpoints.wait()
        self._phases.take_seconds()

    # --- one step

    async def _next_batch(self) -> BatchAnswer | None:
        """Wait for the next batch. Returns None if the run has reached its end, or the trainer leaves."""
        self.member.activity = f"waiting for the batch of step {self._version + 1}"
        with self._timed("trainer_wait"):
            while not self.member.leaving:
                ask = AskBatch(version=self._version)
                asking = self.member.spawn(
                    self.member.ask_master(ask, BatchAnswer, ASK_BATCH_SECONDS), "ask for a batch"
                )
                ends: list[asyncio.Future[Any]] = [asking, self.member.leave_sign]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self.member.leaving:
                    asking.cancel()
                elif (batch := await asking).status != "waiting":
                    return batch if batch.status == "ready" else None
        return None

    async def _do_step(self, batch: BatchAnswer) -> None:
        """Train, and begin to commit the step and publish its weights, while the next step is computed."""
        began = asyncio.get_running_loop().time()
        self._step = self._version + 1, began
        self.member.activity = f"training step {self._version + 1}"
        metrics, groups = await self._train(batch)
        keep_groups = functools.partial(self._rollouts.add_trained, self._version, groups, self._learner.values)
        await self._publisher.publish(self._version, lambda: metrics | self._phases.take_seconds(), keep_groups)
        self._step = None
        self._checkpoints.durations.add("step", began)

    async def _train(self, batch: BatchAnswer) -> tuple[dict[str, Any], list[Group]]:
        """Do a training step, or redo it after a restart. Returns metrics and groups. If a token is older than the
        bound allows, or the guard rejects the step, the run ends: the step is not published, committed or saved."""
        with self._timed("fetch"):
            groups = await self._samples.load_groups(batch.groups)
        if breach := breach_of_bound(groups, batch.oldest):
            await self._give_up(f"Step {self._version + 1} was not trained: {breach}.")
        if self.member.state == "healthy":  # no engine has the version of a step that is redone
            self._probes.begin(self._recovery.lineage, self._version, groups)
        with self._timed("train"):
            try:
                metrics = await self._learner.step(
                    groups,
                    version=self._version,
                    temperature=self.config.sampling.temperature,
                    mask_older_than=batch.mask_older_than,
                )
            except Exception as error:
                if failure := failure_of_step(self._version, error):  # the next trainer does the step again
                    with suppress(BusError):
                        await self.member.ask(self.member.master, failure, Done)
                raise
        metrics["engine_gap"] = self._probes.result(self._learner.whole_logprobs)
        verdict = self._guard.check(metrics)
        if self._version == first_version(self.config.folder):
            verdict = verdict or self._guard.check_first(metrics, Path(self.config.model))
        if verdict:
            await self._give_up(f"The guard stopped the run at step {self._version + 1}: {verdict}")
        self._version += 1
        return metrics | _metrics(groups), groups

    async def _give_up(self, reason: str) -> NoReturn:
        """Report the failure to the master repeatedly, until the master ends the run."""
        await self._checkpoints.wait()
        self.member.activity = "told the master to end the run"
        log.error(reason)
        while True:
            await self.member.ask_master(TrainingFailed(reason=reason), Done)
            await asyncio.sleep(REPEAT_SECONDS)

    async def _save_if_due(self) -> None:
        due = self._version > self._checkpoints.version and self._version % self.config.trainer.checkpoint_every == 0
        if due and not self._guard.suspicious:
            await self._checkpoints.save(self._version, self._publisher.last)

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return self._phases.timed(phase, self._version, lambda: self._learner.work_done)


class _Parts(NamedTuple):
    """The parts of a trainer that exist before the state of the run is known."""

    learner: Learner
    spool: Spool
    rollouts: RolloutWriter
    turns: Turns
    phases: Phases
    direct: Any


def breach_of_bound(groups: Sequence[Group], oldest: int | None) -> str | None:
    """Return how these groups break the bound on staleness, if they have a token older than version `oldest`; else
    None. The ledger keeps the bound by reported versions; this looks at the tokens."""
    group = min(groups, key=lambda group: group.start_version)
    if oldest is None or group.start_version >= oldest:
        return None
    return f"group {group.id} has tokens of version {group.start_version}: max_staleness allows none before {oldest}"


def _metrics(groups: list[Group]) -> dict[str, Any]:
    samples = [t for group in groups for t in group.trajectories]
    of_rows = [group for group in groups if group.prompt_index >= 0]  # a session has no siblings to differ from
    sampled = [int(t.sampled.sum()) for t in samples]
    return {
        "completion_tokens_mean": sum(sampled) / len(sampled),
        "completion_tokens_max": max(sampled),
        "cut_share": sum(t.finish == "length" for t in samples) / len(samples),
        "branches_mean": sum(max(1, len(t.branches)) for t in samples) / len(samples),
        "mixed_groups": sum(group.has_signal for group in of_rows) / len(of_rows) if of_rows else None,
    }
