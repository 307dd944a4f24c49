"""What the master makes of scores: averages, failures, groups without signal, rewards that go and come."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.callers import (
    SECONDS,
    Caller,
    callers,
    callers_of_several_masters,
    master_of,
    recover,
    train,
    without_evaluation,
)
from support.networks import keys_folder

from areal.__main__ import main as areal_tool
from areal.config import Config
from areal.data.history import History
from areal.staleness.failures import UNSCORED_LIMIT
from protocols.attempt_messages import GroupFailed, ScoringFailed
from protocols.bus_errors import RefusedError
from protocols.membership_messages import AddReward, AskStatus, Heartbeat, Leave
from protocols.messages import AskPermits, GroupReady


async def test_the_parts_of_rewards_are_averaged_over_the_groups_of_a_step(config):
    config = without_evaluation(config)
    async with callers_of_several_masters("trainer", "rollout_manager", config=config) as (trainer, manager):
        async with master_of(config):
            await trainer.join()
            await manager.join()
            await recover(trainer)
            for parts in ({"math": 1.0, "format": 0.5}, {"math": 0.0}):
                (permit,) = (await manager.ask(AskPermits(count=1))).permits
                ready = GroupReady(
                    group=permit.group, start_version=0, reward_mean=0.5, signal=True, reward_parts=parts
                )
                assert (await trainer.ask(ready)).accepted
        async with master_of(config):
            await train(trainer, 0, "weights")
    (step,) = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert step["reward_parts"] == {"math": 0.5, "format": 0.5}


async def test_a_run_ends_where_no_completion_at_all_can_be_scored(config):
    async with master_of(config) as running, callers(config, "evaluator", "rollout_manager") as (evaluator, manager):
        for number in range(UNSCORED_LIMIT - 1):
            await evaluator.ask(ScoringFailed(cause="workflow", reason=f"{number}"))
        assert not running.done()
        await evaluator.ask(Leave(reason="it failed too"))
        await manager.ask(ScoringFailed(cause="reward", reason="reward 'own:short': KeyError:\n'x'"))
        await manager.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert "20 have failed. The last failure: reward 'own:short': KeyError: 'x'. Correct" in ending.reason


async def test_a_reward_that_hangs_needs_fewer_failures_to_end_the_run_but_some_time(config, monkeypatch):
    monkeypatch.setattr("areal.staleness.failures.UNSCORED_SECONDS", 0.3)
    async with master_of(config) as running, callers(config, "evaluator") as (evaluator,):
        for _ in range(4):
            await evaluator.ask(ScoringFailed(cause="reward", reason="no score within 10 s"))
        assert not running.done()
        await asyncio.sleep(0.3)
        await evaluator.ask(ScoringFailed(cause="reward", reason="no score within 10 s"))
        await evaluator.ask(Leave(reason="done"))
        assert "no score within 10 s" in (await asyncio.wait_for(running, SECONDS)).reason


async def test_failures_end_no_run_in_which_anybody_has_scored_anything(config):
    async with master_of(config) as running, callers(config, "evaluator", "rollout_manager") as (evaluator, manager):
        await manager.beat(samples_scored=1)
        for number in range(2 * UNSCORED_LIMIT):
            await evaluator.ask(ScoringFailed(cause="workflow", reason=f"{number}"))
        assert (await evaluator.ask(AskStatus())).values["ended"] is False
        assert not running.done()


async def test_the_status_has_the_first_failure_of_each_cause(config):
    async with master_of(config), callers(config, "evaluator", "rollout_manager") as (evaluator, manager):
        await manager.ask(ScoringFailed(cause="workflow", reason="the workflow raised KeyError:\n'b'"))
        await manager.ask(ScoringFailed(cause="workflow", reason="the workflow raised KeyError: 'c'"))
        await evaluator.ask(ScoringFailed(cause="reward", reason="reward 'own:short': no score"))
        (permit,) = (await manager.ask(AskPermits(count=1))).permits
        await manager.ask(GroupFailed(group=permit.group, cause="row", reason="row 0 of the data cannot be used"))
        alerts = (await evaluator.ask(AskStatus())).values["alerts"]
    logs = config.folder / "logs"
    assert [*alerts] == [
        f"first failure (workflow), at rollout_manager/0: the workflow raised KeyError: 'b'. More is in "
        f"{logs}/rollout_manager-0.jsonl",
        f"first failure (reward), at evaluator/0: reward 'own:short': no score. More is in {logs}/reward-* or "
        f"evaluator-0.jsonl",
        f"first failure (row), at rollout_manager/0: row 0 of the data cannot be used. More is in "
        f"{logs}/rollout_manager-0.jsonl",
    ]


def filtering(config: Config) -> Config:
    return without_evaluation(config).model_copy(update={"group_size": 2, "filter_zero_signal": True})


async def report(trainer: Caller, manager: Caller, signal: bool, mean: float) -> bool:
    """One more group is ready; whether it is accepted."""
    permit = (await manager.ask(AskPermits(count=1))).permits[0]
    ready = GroupReady(group=permit.group, start_version=permit.min_version, reward_mean=mean, signal=signal)
    return (await trainer.ask(ready)).accepted


def after_the_dull(history: History, prompt: int) -> int:
    """A sampler: it takes the next row once one was dull, and else the row that it took before."""
    return max(4, history.last) + any(row.flat for row in history.rows.values() if row.index == history.last)


async def test_a_filtered_group_is_replaced_and_still_counts_in_the_reward_of_all(config):
    config = filtering(config)
    sampled = {"sampler": f"{__file__}:{after_the_dull.__name__}", "size": 8}
    config = config.model_copy(update={"data": config.data.model_copy(update=sampled)})
    async with callers_of_several_masters("trainer", "rollout_manager", config=config) as (trainer, manager):
        async with master_of(config):
            await trainer.join()
            await manager.join()
            await recover(trainer)
            permits = (await manager.ask(AskPermits(count=100))).permits
            dull = GroupReady(group=permits[0].group, start_version=0, reward_mean=0.0, signal=False)
            parked = asyncio.create_task(manager.ask(AskPermits(count=1), 60.0))
            assert not (await trainer.ask(dull)).accepted
            (replacement,) = (await parked).permits
            assert [permit.row for permit in (*permits, replacement)] == [4, 4, 4, 4, 5]
            for permit in permits[1:3]:
                ready = GroupReady(group=permit.group, start_version=0, reward_mean=0.75, signal=True)
                assert (await trainer.ask(ready)).accepted
        async with master_of(config):
            assert not (await trainer.ask(dull)).accepted, "a repeat is no second group"
            await train(trainer, 0, "weights")
            for permit in (permits[3], replacement):
                await trainer.ask(GroupReady(group=permit.group, start_version=0, reward_mean=0.5, signal=True))
            await train(trainer, 1, "weights")
    first, second = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [first[key] for key in ("reward_mean", "reward_mean_all", "groups_filtered")] == [0.75, 0.5, 1]
    assert [second[key] for key in ("reward_mean", "reward_mean_all", "groups_filtered")] == [0.5, 0.5, 0]
    assert [step["coverage"] for step in (first, second)] == [2 / 8, 2 / 8]
    assert (first["discarded"], second["discarded"]) == ([[0, "zero signal"]], [])
    assert (first["staleness_histogram"], second["staleness_histogram"]) == ([2], [0, 2])


async def test_a_run_that_filters_nothing_but_dull_groups_ends_and_says_so(config, monkeypatch):
    monkeypatch.setattr("areal.staleness.failures.FILTERED_LIMIT", 2)
    config = filtering(config)
    async with master_of(config) as running, callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        for _ in range(4):
            await report(trainer, manager, signal=False, mean=1.0)
        assert await report(trainer, manager, signal=True, mean=0.5)  # then the count begins anew
        for _ in range(4):
            assert not await report(trainer, manager, signal=False, mean=1.0)
        assert not running.done()
        await report(trainer, manager, signal=False, mean=1.0)
        for actor in (trainer, manager):
            await actor.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert "discarded 5 groups in a row" in ending.reason
    assert "0.950 on average" in ending.reason
    assert "filter_zero_signal=false" in ending.reason


async def test_a_reward_that_no_actor_serves_is_what_a_run_waits_for(config):
    config = without_evaluation(config)
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"functions": {"own:mine": 1.0}})})
    roles = ("trainer", "generator", "rollout_manager", "reward")
    async with master_of(config), callers(config, *roles) as everybody:
        for caller in everybody:
            await caller.beat()
        waiting = (await everybody[0].ask(AskStatus())).values["waiting"]
    assert waiting.startswith("everyone waits for a reward that serves 'own:mine' to be ready (for ")


async def test_a_reward_is_added_from_the_next_prompt_on_for_all_masters(config, monkeypatch):
    monkeypatch.setenv("AREAL_KEYS", keys_folder())
    config = without_evaluation(config)
    rewards = "own:mine", "own:late"
    async with callers_of_several_masters("rollout_manager", "reward", config=config) as (manager, reward):
        async with master_of(config):
            await manager.join()
            await reward.join()
            with pytest.raises(RefusedError, match=r"no actor serves 'own:mine' \(served: none\): start one"):
                await reward.ask(AddReward(name="own:mine", weight=0.5))
            for name in rewards:
                await reward.ask(Heartbeat(state="healthy", serves=rewards, activity="", stats={}))
                before = (await manager.ask(AskPermits(count=1))).permits
                assert name not in before[0].rewards
                await reward.ask(AddReward(name=name, weight=0.5))
            words = ["reward", "add", config.master.address, "own:late", "2"]
            assert await asyncio.to_thread(areal_tool, words) == 0
            (newest,) = (await manager.ask(AskPermits(count=1))).permits
            assert newest.rewards == {"own:mine": 0.5, "own:late": 2.0}
            # A prompt of which a group was admitted before keeps its weights.
            await manager.ask(GroupFailed(group=before[0].group, cause="workflow", reason=""))
        async with master_of(config):
            (again,) = (await manager.ask(AskPermits(count=1))).permits
            assert (again.prompt_index, again.rewards) == (1, {"own:mine": 0.5})
            assert (await manager.ask(AskStatus())).values["rewards"] == {
                "addition": 1.0,
                "own:mine": 0.5,
                "own:late": 2.0,
            }
            assert "reward that serves 'addition'" in (await manager.ask(AskStatus())).values["waiting"]


@pytest.mark.parametrize("role", ["reward", "scorer"])
async def test_admission_pauses_while_a_reward_or_a_scorer_has_gone(config, monkeypatch, role):
    monkeypatch.setattr("actors.master.progress.ABSENT_SECONDS", 0.0)
    config = without_evaluation(config)
    if role == "scorer":
        values = {"trainer": {"teacher": "wise", "minibatches": 1}, "scorers": {"wise": {"model": "m"}}}
        config = Config.model_validate(config.model_dump() | values)
    name = "addition" if role == "reward" else "wise"
    async with master_of(config), callers(config, "rollout_manager", role) as (manager, reward):
        assert (await manager.ask(AskStatus())).values["capacity"] > 0  # nobody has served it yet
        await reward.beat()
        await asyncio.sleep(1.5)
        await reward.ask(Leave(reason="the kernel was restarted"))

        async def status(alerts: int):
            async with asyncio.timeout(20):
                # The master looks every second.
                while len((values := (await manager.ask(AskStatus())).values)["alerts"]) != alerts:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            return values

        paused = await status(alerts=1)
        assert paused["capacity"] == 0
        assert paused["alerts"][0].startswith(f"admission pauses: no actor serves the {role} {name!r} any more.")
        await reward.join()
        await reward.beat()
        assert (await status(alerts=0))["capacity"] > 0
