"""The evaluation of a version while the run goes on: a generator holds it until it is evaluated."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.callers import (
    SECONDS,
    Caller,
    callers,
    callers_of_several_masters,
    evaluate,
    evaluated_at_0,
    evaluating,
    make_ready,
    master_of,
    recover,
    result,
    step,
    train,
)

from areal.config import Config
from areal.storage.journal import Journal
from areal.storage.records import read_records
from protocols.bus_errors import RefusedError
from protocols.evaluation_messages import (
    AskEvaluation,
    BenchmarkScores,
    EvaluationAbandoned,
    EvaluationDone,
    RowScores,
    RowsScored,
)
from protocols.membership_messages import AskSnapshot, AskStatus, Leave, MembersChanged, PolicyPublished
from protocols.training_messages import CheckpointSaved, TrainingFinished


async def holds(caller: Caller) -> dict[int, int]:
    """The versions that are held, by the generators' index."""
    members = (await caller.ask(AskSnapshot())).members
    return {member.index: member.held.version for member in members if member.held is not None}


def fates(config: Config) -> tuple[list[int], dict[int, str]]:
    """The versions with a result, and why others have none."""
    journal = Journal.open(config.folder / "journal.db")
    _, events = journal.read()
    journal.close()
    results = [body["evaluation"]["version"] for kind, body in events if kind == "evaluated"]
    return results, {body["version"]: body["reason"] for kind, body in events if kind == "evaluation_dropped"}


async def test_a_version_that_is_due_is_held_by_one_generator_until_it_is_evaluated(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        for version, index in ((1, 1), (2, 0), (3, 1)):  # another generator each time
            await step(actors, version - 1)
            assert await holds(evaluator) == {index: version}
            due = await evaluator.ask(AskEvaluation())
            assert (due.version, due.holder.index, due.holder.held.folder) == (version, index, f"v{version}")
            await evaluator.ask(result(version))
            assert await holds(evaluator) == {}
        await step(actors, 3)
        due = await evaluator.ask(AskEvaluation())
        assert (due.version, due.holder) == (4, None)  # nothing newer will come
    assert fates(config) == ([0, 1, 2, 3], {})
    records = list(read_records(config.folder / "evaluations.jsonl"))
    assert [record["version"] for record in records] == [0, 1, 2, 3]
    assert records[1].pop("time") > 0
    assert records[1].pop("run") == ""
    assert records[1] == {
        "version": 1,
        "accuracy": 0.5,
        "standard_error": None,
        "pass_at": {"1": 0.5},
        "rows": 4,
        "failed": 0,
        "unfinished": 0,
        "completion_tokens_mean": 7.5,
        "benchmarks": {},
    }


async def test_a_generator_hears_that_it_holds_a_version_before_there_is_that_version(config):
    async with evaluated_at_0(evaluating(config)) as actors:
        heard: list[object] = []
        events = (await actors[2].ask(AskSnapshot())).events
        subscriber = actors[2].bus.subscribe(events, lambda sequence, event: heard.append(event))
        await asyncio.sleep(0.5)  # a subscription takes its time
        await step(actors, 0)
        while not any(isinstance(event, PolicyPublished) for event in heard):  # noqa: ASYNC110 - the bus calls back
            await asyncio.sleep(0.05)
        before = heard[: [isinstance(event, PolicyPublished) for event in heard].index(True)]
        changed = [member for event in before if isinstance(event, MembersChanged) for member in event.changed]
        assert [member.held.version for member in changed if member.held] == [1]
        await subscriber.close()


def alone(config: Config) -> Config:
    benchmark = {"source": "addition", "size": 2, "reward": "addition"}
    values = {"steps": 0, "data": {"eval_size": 0}, "evaluator": {"benchmarks": {"sums": benchmark}}}
    return Config.model_validate(config.model_dump() | values)


async def test_an_evaluation_alone_ends_with_its_result_and_without_a_trainer(config):
    config = alone(config)
    async with master_of(config) as running, callers(config, "generator", "reward", "evaluator") as actors:
        for actor in actors:
            await actor.beat()
        status = (await actors[2].ask(AskStatus())).values
        assert "everyone waits for the evaluation" in status["waiting"]
        scores = {"accuracy": 0.5, "pass_at": {}, "rows": 2, "failed": 0, "completion_tokens_mean": 4.0}
        sums = BenchmarkScores(**scores, samples=1, scored=2, cut_share=0.0)
        nothing = scores | {"accuracy": None, "rows": 0, "completion_tokens_mean": None}
        due = await actors[2].ask(AskEvaluation())
        assert (due.version, due.holder) == (0, None)
        await actors[2].ask(EvaluationDone(version=0, **nothing, samples=(), benchmarks={"sums": sums}))
        assert (await asyncio.wait_for(running, SECONDS)).ok
    summary = json.loads((config.folder / "summary.json").read_text())
    assert summary["evaluations"][0]["benchmarks"]["sums"]["accuracy"] == 0.5
    async with master_of(config) as again:
        assert (await asyncio.wait_for(again, SECONDS)).ok


async def test_an_evaluation_alone_that_is_given_up_fails_and_may_be_started_again(config):
    config = alone(config)
    async with master_of(config) as running, callers(config, "evaluator") as (evaluator,):
        await evaluator.ask(EvaluationAbandoned(version=0, reason="none of the rows of sums could be scored"))
        ending = await asyncio.wait_for(running, SECONDS)
        assert not ending.ok and "none of the rows of sums could be scored" in ending.reason
    async with master_of(config), callers(config, "evaluator") as (evaluator,):
        assert (await evaluator.ask(AskEvaluation())).version == 0


async def test_training_does_not_wait_for_the_evaluation_of_version_0(config):
    roles = ["trainer", "rollout_manager", "evaluator", "generator", "generator"]
    async with master_of(config), callers(config, *roles) as actors:
        trainer, manager, evaluator, *generators = actors
        await recover(trainer)
        assert await holds(manager) == {0: 0}
        assert (await evaluator.ask(AskEvaluation(), 6.0)).version is None  # the generator is still starting
        for generator in generators:
            await generator.beat()
        for version in range(2):
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
        due = await evaluator.ask(AskEvaluation())
        assert (due.version, due.holder.index, due.holder.held.version) == (0, 0, 0)
        await evaluator.ask(result(0, 0.25))
        assert await holds(manager) == {}
        due = await evaluator.ask(AskEvaluation())
        assert (due.version, due.holder) == (2, None)


async def test_version_0_passes_to_another_generator_that_still_has_it(config):
    config = config.model_copy(update={"steps": 4})
    roles = ["trainer", "rollout_manager", "evaluator", "generator", "generator"]
    async with master_of(config), callers(config, *roles) as actors:
        trainer, manager, evaluator, *generators = actors
        await recover(trainer)
        await generators[1].beat()
        await generators[0].ask(Leave(reason="a test"))
        assert await holds(manager) == {1: 0}
        await step(actors, 0)
        await generators[0].join()
        assert await holds(manager) == {1: 0}
        await generators[1].ask(Leave(reason="a test"))
        assert await holds(manager) == {}  # the other one may have version 1 by now
        await generators[1].join()
        assert await holds(manager) == {1: 0}
        await generators[1].beat()
        trainer = Caller("trainer", config.master.address, mark="new")
        await trainer.join()
        await recover(trainer)
        await trainer.bus.close()
        assert await holds(manager) == {1: 0}  # a lineage changes nothing for version 0
        await evaluate(evaluator, 0, 0.25)
        assert await holds(manager) == {}
    assert fates(config) == ([0], {})


async def test_a_run_whose_generators_have_all_left_version_0_ends_without_its_result(config):
    async with (
        master_of(config) as running,
        callers(config, "trainer", "rollout_manager", "evaluator", "generator") as actors,
    ):
        trainer, _, evaluator, generator = actors
        await recover(trainer)
        await generator.beat()
        for version in range(2):
            await step(actors, version)
        await generator.ask(Leave(reason="a test"))
        await generator.join()
        assert await holds(trainer) == {}  # training is over: only the last version is evaluated
        await trainer.ask(CheckpointSaved(version=2, covered=2, folder="checkpoint", spooled=""))
        await trainer.ask(TrainingFinished())
        await evaluate(evaluator, 2, 0.75)
        for actor in actors:
            await actor.ask(Leave(reason="done"))
        assert (await asyncio.wait_for(running, SECONDS)).ok
    summary = json.loads((config.folder / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, 0.75)
    assert list(summary["not_evaluated"]) == ["0"]


async def test_only_every_kth_version_is_due(config):
    async with evaluated_at_0(evaluating(config, every=2)) as actors:
        await step(actors, 0)
        assert await holds(actors[2]) == {}
        await step(actors, 1)
        assert list((await holds(actors[2])).values()) == [2]


async def test_a_version_that_comes_while_another_is_evaluated_is_skipped(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        await step(actors, 0)
        await step(actors, 1)
        assert list((await holds(evaluator)).values()) == [1]
        await evaluate(evaluator, 1, 0.5)
        await step(actors, 2)
        assert list((await holds(evaluator)).values()) == [3]
        await step(actors, 3)
        assert (await evaluator.ask(AskEvaluation())).version == 3
        await evaluate(evaluator, 3, 0.5)
        await evaluate(evaluator, 4, 0.5)  # the last one waits, and is never skipped
    assert fates(config) == ([0, 1, 3, 4], {2: "version 1 is still being evaluated"})


@pytest.mark.parametrize("who", ["evaluator", "holder", "trainer"])
async def test_an_evaluation_that_cannot_be_finished_is_abandoned_and_the_next_one_is_tried(config, who):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        _, manager, evaluator, *generators = actors
        await step(actors, 0)
        await evaluator.ask(AskEvaluation())
        match who:
            case "evaluator":
                await evaluator.ask(EvaluationAbandoned(version=1, reason="tokens of other versions came"))
            case "holder":
                await generators[1].ask(Leave(reason="a test"))
            case "trainer":
                trainer = Caller("trainer", config.master.address, mark="new")
                await trainer.join()
                await recover(trainer)
                await trainer.bus.close()
        assert await holds(manager) == {}
        await evaluator.ask(result(1))  # too late
        if who != "trainer":
            await step(actors, 1)
            assert list((await holds(manager)).values()) == [2]
    results, dropped = fates(config)
    assert results == [0]
    assert list(dropped) == [1]


async def score_rows(evaluator: Caller, version: int, rows: dict[int, tuple[list[float], int]]) -> None:
    await evaluator.ask(RowsScored(version=version, scored=RowScores.of(rows)))


async def known(evaluator: Caller) -> dict[int, tuple[list[float], int]]:
    """The rows that an evaluator which asks now does not have to score."""
    due = await evaluator.ask(AskEvaluation())
    return due.scored.by_row() if due.scored else {}


async def test_an_evaluator_that_is_started_again_gets_the_scores_of_the_one_before(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        await step(actors, 0)
        assert await known(evaluator) == {}
        await score_rows(evaluator, 1, {2: ([0.1, 1.0], 17)})
        await score_rows(evaluator, 1, {2: ([0.0], 1), 3: ([0.7], 5)})  # the first score of a row counts
        await score_rows(evaluator, 0, {1: ([1.0], 5)})  # of a version that is not due
        await evaluator.ask(Leave(reason="a test"))
        await evaluator.join()
        await evaluator.beat()
        assert await holds(evaluator) == {1: 1}
        assert await known(evaluator) == {2: ([0.1, 1.0], 17), 3: ([0.7], 5)}
        await evaluator.ask(result(1))
        await step(actors, 1)
        assert [*(await holds(evaluator)).values()] == [2]
        assert await known(evaluator) == {}  # another version
        with pytest.raises(RefusedError, match="held-out rows"):
            await score_rows(evaluator, 2, {4: ([1.0], 1)})


async def test_a_generator_is_not_held_for_evaluators_that_die_before_they_score_a_row(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        await step(actors, 0)
        for row in range(2):
            await score_rows(evaluator, 1, {row: ([1.0], 1)})
            await evaluator.ask(Leave(reason="a test"))
            await evaluator.join()
            assert await holds(evaluator) == {1: 1}
        await evaluator.ask(Leave(reason="a test"))
        await evaluator.join()
        assert await holds(evaluator) == {}
    assert "none of them has scored another row" in fates(config)[1][1]


async def test_no_generator_is_held_where_there_is_no_evaluator_for_long(config):
    config = evaluating(config)
    config = config.model_copy(update={"master": config.master.model_copy(update={"lost_seconds": 0.5})})
    async with evaluated_at_0(config) as actors:
        await step(actors, 0)
        await actors[2].ask(Leave(reason="a test"))
        while await holds(actors[0]):  # noqa: ASYNC110 - the master is what changes
            await asyncio.sleep(0.05)
    assert "no evaluator" in fates(config)[1][1]


async def test_scores_outlive_the_master_but_not_a_change_of_how_rows_are_sampled(config, monkeypatch):
    config = evaluating(config, samples=2)
    roles = ("trainer", "rollout_manager", "evaluator", "generator")
    async with callers_of_several_masters(*roles, config=config) as actors:
        trainer, _, evaluator, generator = actors
        async with master_of(config):
            for actor in actors:
                await actor.join()
            await generator.beat()
            await recover(trainer)
            await score_rows(evaluator, 0, {2: ([0.5, 1.0], 9)})
        monkeypatch.setattr("actors.master.run_state.COMPACT_EVENTS", 1)
        for _ in range(2):  # from events, and from a snapshot
            async with master_of(config):
                assert await known(evaluator) == {2: ([0.5, 1.0], 9)}
                await asyncio.sleep(1.5)  # the journal is compacted
        greedy = config.model_copy(update={"evaluator": config.evaluator.model_copy(update={"top_p": 0.5})})
        async with master_of(greedy):
            assert await known(evaluator) == {}
            await score_rows(evaluator, 0, {3: ([0.0, 1.0], 9)})
            assert await known(evaluator) == {3: ([0.0, 1.0], 9)}


async def test_nothing_is_held_where_nobody_could_evaluate(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        await actors[2].ask(Leave(reason="a test"))
        await step(actors, 0)
        assert await holds(actors[1]) == {}
    assert list(fates(config)[1]) == [1]


async def test_no_generator_is_held_beyond_the_deadline(config, monkeypatch):
    monkeypatch.setattr("actors.master.evaluations.GRACE_SECONDS", 0.0)
    config = evaluating(config, timeout_seconds=0.5)
    async with evaluated_at_0(config) as actors:
        await step(actors, 0)
        while await holds(actors[2]):  # noqa: ASYNC110 - the master is what changes
            await asyncio.sleep(0.05)
    assert "longer than evaluator.timeout_seconds (0.5 s)" in fates(config)[1][1]


async def test_a_master_started_again_knows_what_is_held_and_has_each_result_once(config):
    config = evaluating(config)
    roles = ("trainer", "rollout_manager", "evaluator", "generator")
    async with callers_of_several_masters(*roles, config=config) as actors:
        evaluator = actors[2]
        async with master_of(config):
            for actor in actors:
                await actor.join()
                await actor.beat()
            await recover(actors[0])
            await evaluate(evaluator, 0, 0.25)
            await step(actors, 0)
        async with master_of(config):
            assert list((await holds(evaluator)).values()) == [1]
            await evaluator.ask(result(1))
            assert await holds(evaluator) == {}
        async with master_of(config):
            await evaluator.ask(result(1, accuracy=0.75))  # an answer that was lost is asked for again
            assert (await evaluator.ask(AskStatus())).values["accuracy"] == {"0": 0.25, "1": 0.5}
    records = [json.loads(line) for line in (config.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(record["version"], record["accuracy"]) for record in records] == [(0, 0.25), (1, 0.5)]
