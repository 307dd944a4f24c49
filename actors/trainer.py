"""The trainer: DeepSpeed ranks. Rank 0 is the actor: it keeps the trajectory buffer, asks the master which batch to
train, and publishes the weights. The other ranks hear from it through torch.distributed alone.

The engine runs in one thread of its own, so that groups are taken in while a step is computed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from actors.runtime import Actor, handles
from areal.trajectory import Group, Trajectory
from protocols.errors import RefusedError
from protocols.messages import (
    AskBatch,
    BatchAnswer,
    CommitStep,
    Done,
    GroupAccepted,
    GroupReady,
    Policy,
    StoreGroup,
    TrainingFinished,
)
from protocols.transport import Request

if TYPE_CHECKING:
    from areal.config import Config
    from areal.engines.training import TrainingEngine

ASK_BATCH_SECONDS = 20.0
# A generator may still be reading the version before the newest, or be about to.
VERSIONS_KEPT = 4

T = TypeVar("T")
log = structlog.get_logger()


class Trainer(Actor):
    role = "trainer"
    _engine: TrainingEngine | None = None

    async def setup(self) -> None:
        self.activity = "starting DeepSpeed"
        self._buffer: dict[str, Group] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._engine = await self._compute(lambda: start_engine(self.config))

    async def main(self) -> None:
        self.state = "healthy"
        loop = asyncio.get_running_loop()
        version = self.policy.version
        while True:
            asked = loop.time()
            batch = await self._next_batch(version)
            if batch is None:
                break
            waited = loop.time() - asked
            policy, metrics = await self._step(batch, version)
            await self.ask_master(CommitStep(policy=policy, metrics=metrics | {"trainer_wait_seconds": waited}), Done)
            version = policy.version
            await self._save_if_due(version)
            self._forget_old_weights(version)
        checkpoint = await self._save(version)
        self.activity = "finished"
        await self.ask_master(TrainingFinished(checkpoint=str(checkpoint)), Done)

    async def teardown(self) -> None:
        # A step that is being computed cannot be cancelled: the process does not wait for it.
        if self._engine is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, float]:
        return {"buffered": len(self._buffer)} if self._engine else {}

    # --- the trajectory buffer

    @handles(StoreGroup)
    async def store_group(self, request: Request) -> Done:
        stored: StoreGroup = request.message
        if self._engine is None:
            raise RefusedError("this trainer is not ready yet")
        try:
            trajectories = tuple(
                Trajectory(part.tokens, part.logprobs, part.versions, part.reward, part.finish)
                for part in stored.trajectories
            )
            group = Group(stored.group, stored.prompt_index, trajectories)
            start_version = group.start_version
        except ValueError as error:
            raise RefusedError(f"group {stored.group}: {error}") from None
        self._buffer.setdefault(group.id, group)
        ready = GroupReady(
            group=group.id,
            start_version=start_version,
            reward_mean=sum(t.reward for t in trajectories) / len(trajectories),
            tokens=sum(len(t) for t in trajectories),
        )
        if not (await self.ask_master(ready, GroupAccepted)).accepted:
            self._buffer.pop(group.id, None)
        return Done()

    # --- one step

    async def _next_batch(self, version: int) -> BatchAnswer | None:
        """None: the run has reached its end."""
        self.activity = f"waiting for batch {version}"
        while True:
            batch = await self.ask_master(AskBatch(version=version), BatchAnswer, ASK_BATCH_SECONDS)
            if batch.status == "ended":
                return None
            if batch.status == "ready":
                return batch

    async def _step(self, batch: BatchAnswer, version: int) -> tuple[Policy, dict[str, Any]]:
        self.activity = f"training step {version + 1}"
        groups = [self._buffer.pop(group) for group in batch.groups]
        result = await self._on_all_ranks(
            {
                "do": "step",
                "version": version,
                "temperature": self.config.sampling.temperature,
                "mask_older_than": batch.mask_older_than,
            },
            groups,
        )
        folder = self.config.folder / "weights" / f"v{version + 1:06}"
        await self._on_all_ranks({"do": "publish", "folder": str(folder)})
        policy = Policy(lineage=self.policy.lineage, version=version + 1, folder=str(folder))
        return policy, _metrics(result, groups)

    async def _save_if_due(self, version: int) -> None:
        every = self.config.trainer.checkpoint_every
        if every and version % every == 0 and version < self.config.steps:
            await self._save(version)

    async def _save(self, version: int) -> Path:
        self.activity = f"saving version {version}"
        folder = self.config.folder / "checkpoints" / f"step_{version:06}"
        await self._on_all_ranks({"do": "save", "folder": str(folder)})
        return folder

    def _forget_old_weights(self, version: int) -> None:
        old = self.config.folder / "weights" / f"v{version - VERSIONS_KEPT:06}"
        shutil.rmtree(old, ignore_errors=True)

    async def _on_all_ranks(self, command: dict[str, Any], groups: list[Group] | None = None) -> Any:
        def run() -> Any:
            self._engine.broadcast(command)
            return obey(self._engine, command, groups)

        return await self._compute(run)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def start_engine(config: Config) -> TrainingEngine:
    """The engine of this rank (all ranks)."""
    from areal.engines.training import TrainingEngine

    return TrainingEngine(config.model, config.trainer, seed=config.seed)


def obey(engine: TrainingEngine, command: dict[str, Any], groups: list[Group] | None) -> Any:
    """Carry out one command of rank 0 (all ranks)."""
    arguments = {key: value for key, value in command.items() if key != "do"}
    match command["do"]:
        case "step":
            return engine.step(groups, **arguments)
        case "publish":
            return engine.publish(Path(arguments["folder"]))
        case "save":
            return engine.save(Path(arguments["folder"]))


def follow(config: Config) -> None:
    """The life of a rank beside rank 0: obey until the process is ended."""
    engine = start_engine(config)
    while True:
        obey(engine, engine.broadcast(None), None)


def _metrics(result: Any, groups: list[Group]) -> dict[str, Any]:
    trajectories = [t for group in groups for t in group.trajectories]
    sampled = [int(t.sampled.sum()) for t in trajectories]
    return asdict(result) | {
        "completion_tokens_mean": sum(sampled) / len(sampled),
        "completion_tokens_max": max(sampled),
        "cut_share": sum(t.finish == "length" for t in trajectories) / len(trajectories),
        "mixed_groups": sum(len({t.reward for t in g.trajectories}) > 1 for g in groups) / len(groups),
    }
