"""A run at the master, from its first evaluation to its last: permits, metrics, what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json

import pytest
from fakes.callers import (
    METRICS,
    SECONDS,
    Caller,
    callers,
    callers_of_several_masters,
    commit,
    evaluate,
    make_ready,
    master_of,
    recover,
    train,
    without_evaluation,
)

from areal.extensions.desk.timeline import spans
from areal.storage.record import Record
from areal.storage.records import read_records
from areal.storage.run_folder import RunFolder
from protocols.attempt_messages import GroupFailed, RenewLeases
from protocols.bus_errors import DeadlineError, FencedError, PreparingError
from protocols.membership_messages import AskStatus, Heartbeat, Leave, Span
from protocols.messages import AskBatch, AskPermits, CommitStep
from protocols.training_messages import CheckpointSaved, TrainingFinished


async def test_what_a_member_tells_the_user_is_an_alert_until_it_takes_it_back(config):
    async with master_of(without_evaluation(config)), callers(config, "trainer", "reward") as (trainer, reward):
        for said in ["the newest checkpoint is damaged", ""]:
            await trainer.beat(alert=said)
            await reward.beat()
            assert [*(await reward.ask(AskStatus())).values["alerts"]] == [said] * bool(said)


async def test_a_run_goes_from_the_first_evaluation_to_the_last(config):
    roles = ("trainer", "rollout_manager", "evaluator", "generator")
    async with master_of(config) as running, callers(config, *roles) as actors:
        trainer, manager, evaluator, generator = actors
        await generator.beat()
        await recover(trainer)
        await evaluate(evaluator, 0, 0.25)
        for version in range(2):
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
        assert (await trainer.ask(AskBatch(version=2))).status == "ended"
        await trainer.ask(CheckpointSaved(version=2, covered=2, folder="checkpoint", spooled=""))
        await trainer.ask(TrainingFinished())
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
        await manager.ask(GroupFailed(group=groups[0], cause="reward", reason="a test"))
        assert len((await parked).permits) == 1


async def test_groups_of_a_manager_that_leaves_are_admitted_again(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "rollout_manager", "rollout_manager") as (first, second):
        left = {permit.prompt_index for permit in (await first.ask(AskPermits(count=100))).permits}
        await first.ask(Leave(reason="a test"))
        again = {permit.prompt_index for permit in (await second.ask(AskPermits(count=100))).permits}
        assert again == left


async def test_a_run_in_which_nothing_moves_says_who_waits_for_whom(config):
    config = config.model_copy(update={"master": config.master.model_copy(update={"stall_seconds": 0.5})})
    async with master_of(config) as running, callers(config, "trainer") as (trainer,):
        await trainer.beat()
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert "the run has made no progress" in ending.reason
    assert "generator" in ending.reason


async def test_a_stalled_run_takes_the_remedies_there_are_before_it_gives_up(config):
    config = without_evaluation(config)
    config = config.model_copy(
        update={"master": config.master.model_copy(update={"stall_seconds": 3.0, "lease_seconds": 8.0})}
    )
    roles = ("trainer", "generator", "reward", "rollout_manager")
    async with master_of(config) as running, callers(config, *roles) as actors:
        trainer, *_, manager = actors
        permits = (await manager.ask(AskPermits(count=1))).permits
        lost = ()
        while not lost:  # the unfinished group starts anew
            for actor in actors:  # while one is silent, no time counts
                await actor.beat()
            lost = (await manager.ask(RenewLeases(groups=(permits[0].group,)))).groups
            await asyncio.sleep(0.1)
        assert not running.done()
        beats = asyncio.create_task(beat_on(trainer))
        with pytest.raises(FencedError):  # then those waited for do
            await beat_on(manager)
        ending = await asyncio.wait_for(running, SECONDS)
        beats.cancel()
    assert not ending.ok
    assert "the run has made no progress" in ending.reason


async def beat_on(actor: Caller) -> None:
    while True:
        await actor.beat()
        await asyncio.sleep(0.1)


async def test_no_step_is_committed_before_the_metrics_of_the_one_before_are_on_disk(config, monkeypatch):
    def refuse(*_) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    config, roles = without_evaluation(config), ("trainer", "rollout_manager")
    async with callers_of_several_masters(*roles, config=config) as (trainer, manager):
        async with master_of(config):
            for actor in (trainer, manager):
                await actor.join()
            await recover(trainer)
            await make_ready(manager, trainer, 0)
            await trainer.ask(AskBatch(version=0))
            with monkeypatch.context() as full:
                full.setattr(RunFolder, "append_metrics", refuse)
                with pytest.raises(DeadlineError):
                    await trainer.ask(CommitStep(lineage=0, version=1, metrics=METRICS), 1.0)
                with pytest.raises(PreparingError, match=r"waits to write the metrics: the disk of .* is full"):
                    await commit(trainer, 1)
        async with master_of(config):
            while True:
                with contextlib.suppress(PreparingError):
                    await commit(trainer, 1)
                    break
    assert [record["step"] for record in read_records(config.folder / "metrics.jsonl")] == [1]


async def test_what_actors_say_and_measure_is_recorded(config, monkeypatch):
    monkeypatch.setattr("areal.storage.events.FLUSH_SECONDS", 0.0)
    async with master_of(config), callers(config, "trainer", "generator") as (trainer, generator):
        await generator.beat(running=3.0)
        said = {"state": "healthy", "serves": (), "activity": "training step 1", "stats": {}}
        await trainer.ask(Heartbeat(**said, clock=70.0, spans=(Span(name="train", began=68.0, seconds=1.5),)))
        await trainer.ask(Leave(reason="done"))
    events = Record(config.folder).events
    (span,) = spans(events)
    assert (span.actor, span.name, span.seconds) == ("trainer/0", "train", 1.5)
    heard = [(e["actor"], e["state"], e["activity"], e["stats"]) for e in events if "activity" in e]
    assert ("generator/0", "healthy", "testing", {"running": 3.0}) in heard
    assert [activity for actor, _, activity, _ in heard if actor == "trainer/0"] == ["training step 1", "done"]


async def test_a_monitor_is_told_the_steps_it_has_not_seen(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        for version in (0, 1):
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
        for since, steps in ((None, []), (0, [1, 2]), (1, [2]), (2, [])):
            recent = (await trainer.ask(AskStatus(since=since))).values["recent"]
            assert [step["step"] for step in recent] == steps
