"""Actors without work of their own, which a test lets speak to a real master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from support.networks import network

from actors.master.master import Master
from areal.config import Config
from areal.data.sources import open_source
from areal.storage.journal import Journal
from areal.storage.run_folder import RunFolder
from protocols.bus import Bus
from protocols.evaluation_messages import AskEvaluation, EvaluationDone
from protocols.membership_messages import DiskShortage, Heartbeat, Join, Policy
from protocols.messages import AskBatch, AskPermits, CommitStep, GroupReady
from protocols.training_messages import AskRecovery, PublishPolicy

SECONDS = 60.0

METRICS = {"trainer_wait_seconds": 0.0, "publish_wait_seconds": 0.0, "tokens_trained": 10.0, "logprob_gap": 1e-6}


class Caller:
    """Someone who has joined."""

    def __init__(self, role: str, address: str, mark: str = "") -> None:
        self.role = role
        self.bus = Bus(f"{role}/?#{mark or role}", network())
        self.address = address

    async def ask(self, message, seconds: float = 20.0):
        return await self.bus.peer(self.address).ask(message, seconds)

    async def join(self, index: int | None = None, listens: str | None = None):
        """listens: where, if this is not to be an address at which somebody does."""
        welcome = await self.ask(Join(role=self.role, index=index, address=listens or self.address))
        self.bus.identity.name = welcome.identity
        return welcome

    async def beat(self, shortage: DiskShortage | None = None, alert: str = "", **stats: float):
        serves = {"reward": ("addition",), "scorer": ("wise",)}.get(self.role, ())
        more = {"shortage": shortage, "alert": alert}
        return await self.ask(Heartbeat(state="healthy", serves=serves, activity="testing", stats=stats, **more))


@contextlib.asynccontextmanager
async def master_of(config: Config) -> AsyncIterator[asyncio.Task]:
    folder = RunFolder(config)
    journal = Journal.open(folder.path / "journal.db")
    source = open_source(config.data, config.seed)
    master = Master(Bus("master/0#m", network()), config, journal=journal, folder=folder, source=source)
    running = asyncio.create_task(master.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def callers(config: Config, *roles: str) -> AsyncIterator[list[Caller]]:
    made = [Caller(role, config.master.address, mark=f"{n}") for n, role in enumerate(roles)]
    try:
        for caller in made:
            await caller.join()
        yield made
    finally:
        for caller in made:
            await caller.bus.close()


def without_evaluation(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"eval_size": 0})})


async def evaluate(evaluator: Caller, version: int, accuracy: float) -> None:
    assert (await evaluator.ask(AskEvaluation())).version == version
    await evaluator.ask(result(version, accuracy))


def result(version: int, accuracy: float = 0.5) -> EvaluationDone:
    return EvaluationDone(
        version=version,
        accuracy=accuracy,
        pass_at={"1": accuracy},
        rows=4,
        failed=0,
        completion_tokens_mean=7.5,
        samples=(),
    )


async def train(trainer: Caller, version: int, folder: str) -> None:
    batch = await trainer.ask(AskBatch(version=version))
    assert batch.status == "ready"
    await commit(trainer, version + 1)
    await publish(trainer, version + 1, folder)


async def commit(trainer: Caller, version: int, lineage: int = 0) -> None:
    await trainer.ask(CommitStep(lineage=lineage, version=version, metrics=METRICS))


async def publish(trainer: Caller, version: int, folder: str = "weights", lineage: int = 0) -> None:
    await trainer.ask(PublishPolicy(policy=Policy(lineage=lineage, version=version, folder=folder)))


async def recover(trainer: Caller):
    return await trainer.ask(AskRecovery(spooled=""))


async def make_ready(manager: Caller, trainer: Caller, version: int) -> list[str]:
    groups = [permit.group for permit in (await manager.ask(AskPermits(count=2))).permits]
    for group in groups:
        await trainer.ask(GroupReady(group=group, start_version=version, reward_mean=0.5, signal=True))
    return groups


def evaluating(config: Config, **evaluator: float) -> Config:
    """Every version is due."""
    own = config.evaluator.model_copy(update={"every": 1, **evaluator})
    return config.model_copy(update={"steps": 4, "evaluator": own})


@contextlib.asynccontextmanager
async def evaluated_at_0(config: Config, generators: int = 2) -> AsyncIterator[list[Caller]]:
    """A run of which version 0 is evaluated, and the trainer, the rollout manager, the evaluator and the generators."""
    roles = ["trainer", "rollout_manager", "evaluator"] + ["generator"] * generators
    async with master_of(config), callers(config, *roles) as actors:
        await recover(actors[0])
        for actor in actors:
            await actor.beat()
        await evaluate(actors[2], 0, 0.25)
        yield actors


async def step(actors: list[Caller], version: int) -> None:
    """Train the step that leads from `version` to the next."""
    trainer, manager, *_ = actors
    await make_ready(manager, trainer, version)
    await train(trainer, version, f"v{version + 1}")


@contextlib.asynccontextmanager
async def callers_of_several_masters(*roles: str, config: Config) -> AsyncIterator[list[Caller]]:
    made = [Caller(role, config.master.address, mark=f"{n}") for n, role in enumerate(roles)]
    try:
        yield made
    finally:
        for caller in made:
            await caller.bus.close()
