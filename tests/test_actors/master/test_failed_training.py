"""A training or a step that fails ends the run with its reason."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.callers import SECONDS, Caller, callers, make_ready, master_of, recover, train, without_evaluation

from protocols.bus_errors import RefusedError
from protocols.membership_messages import Leave
from protocols.training_messages import CheckpointSaved, StepFailed, TrainingFailed


@pytest.mark.parametrize("saved", [None, "checkpoints/step_1"])
async def test_a_training_that_failed_ends_the_run_with_its_reason_and_the_last_checkpoint(config, saved):
    config = without_evaluation(config)
    async with master_of(config) as running, callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await train(trainer, 0, "weights")
        if saved:
            await trainer.ask(CheckpointSaved(version=1, covered=1, folder=saved, spooled=""))
        for _ in range(2):  # it says so until it hears of the end
            await trainer.ask(TrainingFailed(reason="loss is nan."))
        assert (await trainer.beat()).ended
        for actor in (trainer, manager):
            await actor.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert ending.reason.startswith("loss is nan. ")
    assert (f"The last checkpoint is {saved}: resume" if saved else "No checkpoint was saved") in ending.reason
    assert json.loads((config.folder / "summary.json").read_text())["reason"] == ending.reason


async def test_a_step_that_fails_twice_in_the_same_way_ends_the_run(config):
    config = without_evaluation(config)

    def failed(rank: Caller, reason: str, version: int = 0):
        return rank.ask(StepFailed(version=version, reason=reason))

    async with master_of(config) as running, callers(config, "trainer", "rollout_manager") as (trainer, manager):
        restarted = Caller("trainer", config.master.address, mark="restarted")
        other_rank = Caller("trainer", config.master.address, mark="other")  # which is no member
        await recover(trainer)
        for rank in (trainer, other_rank):
            await failed(rank, "ValueError: at 0x7f0a, 12 tokens")
        await restarted.join()
        await recover(restarted)
        await failed(restarted, "ValueError: at 0x7f0a, 12 tokens", version=1)
        await failed(restarted, "KeyError: at 0x7f0a, 12 tokens")
        with pytest.raises(RefusedError, match="has no step 10 to compute"):
            await failed(restarted, "ValueError", version=9)
        with pytest.raises(RefusedError, match="rollout_manager/0#.* has no step 1 to compute"):
            await failed(manager, "ValueError: at 0x7f0a, 12 tokens")
        assert not (await manager.beat()).ended
        await failed(other_rank, "ValueError: at 0x55d1, 8 tokens")  # only numbers differ
        assert (await manager.beat()).ended
        for actor in (restarted, manager):
            await actor.ask(Leave(reason="done"))
        for rank in (restarted, other_rank):
            await rank.bus.close()
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    reason = "Step 1 failed twice alike: ValueError: at 0x55d1, 8 tokens. The traceback is in "
    assert ending.reason == f"{reason}{config.folder}/logs. No checkpoint was saved before that."
