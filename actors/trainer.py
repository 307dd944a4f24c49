"""The trainer: keeps finished groups on disk, asks the master which batch to train, and publishes the weights.

A group is acknowledged once it is in the spool on disk, and stays there until a checkpoint covers the step that trained
it. So a trainer that was killed loses nothing: it loads the last checkpoint, redoes the batches that the master has
logged since, in order, and publishes the version where the run stands, under a new lineage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import structlog

from actors.ranks import Ranks
from actors.runtime import Actor, handles
from areal.config import Config
from areal.guard import Guard
from areal.spool import Spool
from areal.trajectory import Group, Trajectory
from protocols.errors import BusyError, RefusedError
from protocols.messages import (
    AskBatch,
    AskRecovery,
    BatchAnswer,
    CheckpointSaved,
    CommitStep,
    Done,
    GroupAccepted,
    GroupReady,
    Policy,
    PolicyRestored,
    Recovery,
    StoreGroup,
    TrainingFailed,
    TrainingFinished,
)
from protocols.transport import Request

ASK_BATCH_SECONDS = 20.0
# Between two times that the master is told of the end, in case it dies before it has ended the run.
REPEAT_SECONDS = 5.0
# A generator may still be reading the version before the newest, or be about to.
VERSIONS_KEPT = 4

log = structlog.get_logger()


class Learner(Protocol):
    """The model under training (actors.ranks.Ranks)."""

    @property
    def work_done(self) -> int: ...
    async def step(
        self, groups: list[Group], *, version: int, temperature: float, mask_older_than: int | None
    ) -> dict[str, float | None]: ...
    async def publish(self, folder: Path) -> None: ...
    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def forget(self, folder: Path) -> None: ...
    def close(self) -> None: ...


class Trainer(Actor):
    role = "trainer"
    _learner: Learner | None = None
    _spool: Spool | None = None

    def __init__(
        self, *args: Any, start_learner: Callable[[Config], Awaitable[Learner]] = Ranks.start,
        open_spool: Callable[[Path], Spool] = Spool.open, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self._start_learner = start_learner
        self._open_spool = open_spool
        self._lineage = 0
        self._trained: dict[int, tuple[str, ...]] = {}  # groups by step, as far as no checkpoint covers it

    async def setup(self) -> None:
        self.activity = "starting DeepSpeed"
        self._spool = await asyncio.to_thread(self._open_spool, self.config.folder / "spool.db")
        self._learner = await self._start_learner(self.config)
        self._guard = Guard(self.config.guard)
        await self._recover()

    async def main(self) -> None:
        await self.become_healthy()
        loop = asyncio.get_running_loop()
        while True:
            await self._save_if_due()
            asked = loop.time()
            batch = await self._next_batch()
            if batch is None:
                break
            waited = loop.time() - asked
            policy, metrics = await self._step(batch)
            await self.ask_master(CommitStep(policy=policy, metrics=metrics | {"trainer_wait_seconds": waited}), Done)
            await self._learner.forget(self._weights(self._version - VERSIONS_KEPT))
        if self._saved < self._version:
            await self._save()
        self.activity = "finished"
        await self.ask_master(TrainingFinished(), Done)

    async def teardown(self) -> None:
        if self._learner is not None:
            self._learner.close()
        if self._spool is not None:
            self._spool.close()

    def stats(self) -> dict[str, float]:
        return {"work_done": self._learner.work_done} if self._learner else {}

    # --- the spool

    @handles(StoreGroup)
    async def store_group(self, request: Request) -> Done:
        stored: StoreGroup = request.message
        if self._spool is None:
            raise BusyError("this trainer is not ready yet")
        try:
            trajectories = tuple(
                Trajectory(part.tokens, part.logprobs, part.versions, part.reward, part.finish)
                for part in stored.trajectories
            )
            group = Group(stored.group, stored.prompt_index, trajectories)
            start_version = group.start_version
        except ValueError as error:
            raise RefusedError(f"group {stored.group}: {error}") from None
        await asyncio.to_thread(self._spool.put, group)
        ready = GroupReady(
            group=group.id,
            start_version=start_version,
            reward_mean=sum(t.reward for t in trajectories) / len(trajectories),
            signal=group.has_signal,
            tokens=sum(int(t.sampled.sum()) for t in trajectories),
            discarded=stored.discarded,
        )
        if not (await self.ask_master(ready, GroupAccepted)).accepted:
            await asyncio.to_thread(self._spool.forget, [group.id])
        return Done()

    # --- recovery

    async def _recover(self) -> None:
        """Become what the run's last trainer was."""
        spooled = await asyncio.to_thread(self._spool.ids)
        recovery = await self.ask_master(AskRecovery(spooled=tuple(spooled)), Recovery)
        await asyncio.to_thread(self._spool.forget, recovery.drop)
        self._lineage = recovery.lineage
        self._version = self._saved = recovery.checkpoint_version
        if recovery.checkpoint is not None:
            self.activity = f"loading {recovery.checkpoint}"
            await self._learner.load(Path(recovery.checkpoint))
        for version in range(recovery.checkpoint_version, recovery.version):
            self.activity = f"redoing step {version + 1} of {recovery.version}"
            batch = await self.ask_master(AskBatch(version=version), BatchAnswer)
            await self._train(batch)
        if recovery.lineage:
            await self._publish_restored(self.policy)

    async def _publish_restored(self, before: Policy) -> None:
        policy = Policy(lineage=self._lineage, version=self._version, folder=self.config.model)
        if self._version:
            policy = await self._publish()
        await self.ask_master(PolicyRestored(policy=policy), Done)
        log.info("restored", lineage=policy.lineage, version=policy.version)
        for lineage in range(before.lineage, self._lineage):
            for version in range(self._version - VERSIONS_KEPT, self._version + 2):
                await self._learner.forget(self._weights(version, lineage))

    # --- one step

    async def _next_batch(self) -> BatchAnswer | None:
        """None: the run has reached its end."""
        self.activity = f"waiting for batch {self._version}"
        while True:
            batch = await self.ask_master(AskBatch(version=self._version), BatchAnswer, ASK_BATCH_SECONDS)
            if batch.status == "ended":
                return None
            if batch.status == "ready":
                return batch

    async def _step(self, batch: BatchAnswer) -> tuple[Policy, dict[str, Any]]:
        self.activity = f"training step {self._version + 1}"
        metrics = await self._train(batch)
        return await self._publish(), metrics

    async def _train(self, batch: BatchAnswer) -> dict[str, Any]:
        """Take a step, or take it again. One that the guard does not pass is the last: nothing of it is published,
        committed or saved."""
        groups = await asyncio.to_thread(self._spool.get, batch.groups)
        metrics = await self._learner.step(
            groups,
            version=self._version,
            temperature=self.config.sampling.temperature,
            mask_older_than=batch.mask_older_than,
        )
        if verdict := self._guard.check(metrics):
            await self._give_up(f"The guard stopped the run at step {self._version + 1}: {verdict}")
        self._trained[self._version] = batch.groups
        self._version += 1
        return metrics | _metrics(groups)

    async def _give_up(self, reason: str) -> NoReturn:
        """Tell the master until it ends the run, and with it this actor."""
        self.activity = "stopped by the guard"
        log.error(reason)
        while True:
            await self.ask_master(TrainingFailed(reason=reason), Done)
            await asyncio.sleep(REPEAT_SECONDS)

    async def _publish(self) -> Policy:
        folder = self._weights(self._version)
        await self._learner.publish(folder)
        return Policy(lineage=self._lineage, version=self._version, folder=str(folder))

    def _weights(self, version: int, lineage: int | None = None) -> Path:
        lineage = self._lineage if lineage is None else lineage
        return self.config.folder / "weights" / f"l{lineage}-v{version:06}"

    async def _save_if_due(self) -> None:
        due = self._version > self._saved and self._version % self.config.trainer.checkpoint_every == 0
        if due and not self._guard.suspicious:
            await self._save()

    async def _save(self) -> None:
        """A checkpoint of the current version; what only the steps before it needed goes."""
        self.activity = f"saving version {self._version}"
        folder = self._checkpoint(self._version)
        await self._learner.save(folder)
        await self.ask_master(CheckpointSaved(version=self._version, folder=str(folder)), Done)
        self._saved = self._version
        done = [group for version in list(self._trained) for group in self._trained.pop(version)]
        await asyncio.to_thread(self._spool.forget, done)
        every, kept = self.config.trainer.checkpoint_every, self.config.trainer.checkpoints_kept
        await self._learner.forget(self._checkpoint((self._version - 1) // every * every - (kept - 1) * every))

    def _checkpoint(self, version: int) -> Path:
        return self.config.folder / "checkpoints" / f"step_{version:06}"


def _metrics(groups: list[Group]) -> dict[str, Any]:
    trajectories = [t for group in groups for t in group.trajectories]
    sampled = [int(t.sampled.sum()) for t in trajectories]
    return {
        "completion_tokens_mean": sum(sampled) / len(sampled),
        "completion_tokens_max": max(sampled),
        "cut_share": sum(t.finish == "length" for t in trajectories) / len(trajectories),
        "mixed_groups": sum(group.has_signal for group in groups) / len(groups),
    }
