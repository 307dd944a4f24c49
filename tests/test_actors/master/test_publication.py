"""A version is committed first, and published once its files stand."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.callers import (
    Caller,
    callers,
    commit,
    evaluated_at_0,
    evaluating,
    make_ready,
    master_of,
    publish,
    recover,
    train,
    without_evaluation,
)

from protocols.bus_errors import RefusedError
from protocols.membership_messages import AskSnapshot
from protocols.messages import AskBatch, AskPermits


async def test_what_is_committed_and_not_published_yet_is_asked_of_new_groups_and_told_to_nobody(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await trainer.ask(AskBatch(version=0))
        await commit(trainer, 1)
        assert (await trainer.beat()).policy.version == 0
        assert {permit.min_version for permit in (await manager.ask(AskPermits(count=1))).permits} == {1}
        await publish(trainer, 1)
        assert (await trainer.beat()).policy.version == 1


async def test_no_step_is_committed_before_the_last_one_is_published_nor_anything_published_before_its_commit(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await trainer.ask(AskBatch(version=0))
        with pytest.raises(RefusedError, match="version 1 cannot be published: the run is at version 0"):
            await publish(trainer, 1)
        await commit(trainer, 1)
        await make_ready(manager, trainer, 1)
        await trainer.ask(AskBatch(version=1))
        with pytest.raises(RefusedError, match="version 1 is not published"):
            await commit(trainer, 2)


async def test_a_batch_may_be_asked_for_before_the_step_that_leads_to_it_is_committed(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await trainer.ask(AskBatch(version=0))
        groups = await make_ready(manager, trainer, 0)
        asked = asyncio.create_task(trainer.ask(AskBatch(version=1), 60.0))
        await trainer.beat()  # comes after it
        assert not asked.done()
        await commit(trainer, 1)
        assert (await asked).groups == tuple(groups)


async def test_a_trainer_that_takes_over_publishes_what_the_dead_one_had_only_committed(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        old, manager = actors[:2]
        await make_ready(manager, old, 0)
        await old.ask(AskBatch(version=0))
        await commit(old, 1)
        new = Caller("trainer", config.master.address, mark="new")
        await new.join()
        assert (await recover(new)).version == 1
        await publish(new, 1, "again", lineage=1)
        policy = (await new.beat()).policy
        assert (policy.lineage, policy.version, policy.folder) == (1, 1, "again")
        holders = [member.held for member in (await new.ask(AskSnapshot())).members if member.held]
        assert holders == [policy]  # what is due at version 1 is decided when it is published
        await new.bus.close()


async def test_what_weight_updates_cost_is_summed_over_the_generators_and_told_step_by_step(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager", "generator", "generator") as actors:
        trainer, manager, *generators = actors
        await recover(trainer)
        for version, reloads in enumerate((1, 3)):
            for generator in generators:
                await generator.beat(
                    reloads=reloads,
                    pause_seconds=0.25 * reloads,
                    load_seconds=0.5 * reloads,
                    resume_seconds=0.0,
                    sequences_interrupted=4 * reloads,
                    tokens_recomputed=100 * reloads,
                )
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
    steps = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    names = ("reloads", "pause_seconds", "load_seconds", "resume_seconds", "sequences_interrupted", "tokens_recomputed")
    assert [[step[name] for name in names] for step in steps] == [[2, 0.5, 1, 0, 8, 200], [4, 1, 2, 0, 16, 400]]
