"""The master on a real bus, with the test in the place of the other actors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from actors.master import Master
from areal.config import Config
from protocols.errors import RefusedError
from protocols.messages import (
    AskBatch,
    AskEvaluation,
    AskPermits,
    AskSnapshot,
    CommitStep,
    EvaluationDone,
    GroupFailed,
    GroupReady,
    Heartbeat,
    Join,
    Leave,
    Policy,
    TrainingFinished,
)
from protocols.transport import ZmqBus

SECONDS = 5.0
METRICS = {"trainer_wait_seconds": 0.0, "tokens_trained": 10.0, "logprob_gap": 1e-6}


@pytest.fixture
def config(tmp_path, free_port) -> Config:
    return Config.model_validate(
        {
            "model": str(tmp_path), "run_dir": tmp_path, "steps": 2, "batch_size": 2, "group_size": 1,
            "max_staleness": 1, "data": {"source": "addition", "eval_size": 4}, "sampling": {"max_new_tokens": 8},
            "reward": {"functions": ["addition"]}, "trainer": {"minibatches": 1},
            "master": {"address": f"tcp://127.0.0.1:{free_port}", "lease_seconds": 30},
        }
    )  # fmt: skip


class Caller:
    """Someone who has joined."""

    def __init__(self, role: str, address: str) -> None:
        self.role = role
        self.bus = ZmqBus(f"{role}/?#{role}")
        self.address = address

    async def ask(self, message, seconds: float = SECONDS):
        return await self.bus.peer(self.address).ask(message, seconds)

    async def join(self, index: int | None = None):
        welcome = await self.ask(Join(role=self.role, index=index, address="tcp://127.0.0.1:1"))
        self.bus.identity.name = welcome.identity
        return welcome

    async def beat(self, **stats: float):
        return await self.ask(Heartbeat(state="healthy", serves=(), activity="testing", stats=stats))


@contextlib.asynccontextmanager
async def master_of(config: Config) -> AsyncIterator[asyncio.Task]:
    running = asyncio.create_task(Master(ZmqBus("master/0#m"), config).run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def callers(config: Config, *roles: str) -> AsyncIterator[list[Caller]]:
    made = [Caller(role, config.master.address) for role in roles]
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
    await evaluator.ask(EvaluationDone(version=version, accuracy=accuracy, rows=4, failed=0, samples=()))


async def train(trainer: Caller, version: int, folder: str) -> None:
    batch = await trainer.ask(AskBatch(version=version))
    assert batch.status == "ready"
    policy = Policy(lineage=0, version=version + 1, folder=folder)
    await trainer.ask(CommitStep(policy=policy, metrics=METRICS))


async def make_ready(manager: Caller, trainer: Caller, version: int) -> list[str]:
    groups = [permit.group for permit in (await manager.ask(AskPermits(count=2))).permits]
    for group in groups:
        await trainer.ask(GroupReady(group=group, start_version=version, reward_mean=0.5, tokens=7))
    return groups


async def test_a_run_goes_from_the_first_evaluation_to_the_last(config):
    async with master_of(config) as running, callers(config, "trainer", "rollout_manager", "evaluator") as actors:
        trainer, manager, evaluator = actors
        assert (await manager.ask(AskPermits(count=1), 2.0)).permits == ()  # not before version 0 is evaluated
        await evaluate(evaluator, 0, 0.25)
        for version in range(2):
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
        assert (await trainer.ask(AskBatch(version=2))).status == "ended"
        await trainer.ask(TrainingFinished(checkpoint="checkpoint"))
        await evaluate(evaluator, 2, 0.75)
        for actor in actors:
            await actor.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert ending.ok
    summary = json.loads((config.folder / "summary.json").read_text())
    assert (summary["steps"], summary["accuracy_before"], summary["accuracy_after"]) == (2, 0.25, 0.75)
    assert summary["samples_trained"] == 4
    steps = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward_mean"] == 0.5 for step in steps)


async def test_no_more_groups_are_alive_than_eta_plus_one_batches(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "rollout_manager") as (manager,):
        first = await manager.ask(AskPermits(count=100))
        assert len(first.permits) == (config.max_staleness + 1) * config.batch_size
        assert (await manager.ask(AskPermits(count=1), 1.5)).permits == ()


async def test_a_parked_request_is_answered_as_soon_as_it_can_be(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "rollout_manager", "trainer") as (manager, trainer):
        groups = [permit.group for permit in (await manager.ask(AskPermits(count=100))).permits]
        parked = asyncio.create_task(manager.ask(AskPermits(count=100), 60.0))
        await manager.ask(GroupFailed(group=groups[0], reason="a test"))
        assert len((await parked).permits) == 1


async def test_groups_of_a_manager_that_leaves_are_admitted_again(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "rollout_manager", "rollout_manager") as (first, second):
        left = {permit.prompt_index for permit in (await first.ask(AskPermits(count=100))).permits}
        await first.ask(Leave(reason="a test"))
        again = {permit.prompt_index for permit in (await second.ask(AskPermits(count=100))).permits}
        assert again == left


async def test_an_actor_that_fell_silent_is_removed_and_then_refused(config):
    config = without_evaluation(config)
    config = config.model_copy(update={"master": config.master.model_copy(update={"lease_seconds": 0.5})})
    async with master_of(config), callers(config, "rollout_manager", "generator") as (manager, generator):
        while (await manager.ask(AskSnapshot())).members:  # noqa: ASYNC110 - the master is what changes
            await asyncio.sleep(0.05)
        with pytest.raises(RefusedError, match="not a member"):
            await manager.beat()
        with pytest.raises(RefusedError, match="not a member"):
            await manager.ask(AskPermits(count=1))


async def test_who_joins_in_the_place_of_another_replaces_it(config):
    async with master_of(config), callers(config, "generator") as (old,):
        new = Caller("generator", config.master.address)
        new.bus.identity.name = "generator/0#newer"
        welcome = await new.join(index=0)
        assert [member.identity for member in welcome.snapshot.members] == ["generator/0#newer"]
        with pytest.raises(RefusedError, match="not a member"):
            await old.beat()
        await new.bus.close()


async def test_a_run_whose_trainer_is_gone_ends_and_says_so(config):
    async with master_of(config) as running, callers(config, "trainer") as (trainer,):
        await trainer.ask(Leave(reason="out of memory"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert "out of memory" in ending.reason


async def test_a_run_in_which_nothing_moves_says_who_waits_for_whom(config):
    config = config.model_copy(update={"master": config.master.model_copy(update={"stall_seconds": 0.5})})
    async with master_of(config) as running, callers(config, "trainer") as (trainer,):
        await trainer.beat()
        ending = await asyncio.wait_for(running, 15.0)
    assert not ending.ok
    assert "nothing has moved" in ending.reason
    assert "generator" in ending.reason
