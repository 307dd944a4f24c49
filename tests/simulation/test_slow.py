"""Slow is not dead: work that takes longer than any patience of the master is neither repeated nor fenced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from areal.base.errors import UserError
from areal.generation.engine_process import EngineError
from areal.generation.offered_weights import WeightLoadError
from areal.rewards.functions import Result
from areal.rewards.worker import RewardFailed
from areal.staleness import failures
from simulation.cluster.engines import ModelTokenizer
from simulation.engines import HELDOUT, Mishaps, Pace, SimEngine, SimRewards, SimSource, score_of
from simulation.faults import Kill, Pause, Plan
from simulation.model import Model
from simulation.world import World

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

PATIENCE = 6000.0


def model(**settings: Any) -> Model:
    """A small cluster with the patience of real ones."""
    known = {"batch_size": 1, "run_ahead": "auto", "stall_seconds": 300.0, "lease_seconds": 60.0, "lost_seconds": 60.0}
    return Model(**{**known, "patience": PATIENCE, "farewell": False, **settings})


def world_of(settings: Model, plan: Plan | None = None) -> World:
    """A world in which a test itself lets groups fail."""
    world = World(1, settings, plan or Plan())
    world.oracle.causes = None
    return world


def run(settings: Model, plan: Plan | None = None) -> tuple[World, Counter[str]]:
    """The world after a run that reached its end, and how often each event was journaled."""
    world = world_of(settings, plan)
    result = world.run()
    assert result.ok, result.story
    return world, Counter(kind for kind, _ in world.oracle.events)


def lives(world: World) -> set[int]:
    return {process.lives for process in world.processes.values()}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"pace": Pace(score=400.0)}, id="score"),
        pytest.param({"pace": Pace(save=700.0), "checkpoint_every": 2}, id="checkpoint"),
        pytest.param({"pace": Pace(write=500.0)}, id="publish"),
        pytest.param({"pace": Pace(start=700.0)}, id="start"),
        pytest.param({"pace": Pace(step=700.0)}, id="step"),
        pytest.param({"pace": Pace(load=700.0)}, id="load"),
        pytest.param({"pace": Pace(score=400.0), "eval_size": 4, "evaluation_seconds": 1e5}, id="evaluation"),
    ],
)
def test_slow_work_is_neither_repeated_nor_fenced(settings: dict[str, Any]) -> None:
    world, events = run(model(steps=2, **settings))
    assert lives(world) == {1}
    assert events["requeued"] == events["discarded"] == events["left"] == 0


def test_a_recovery_that_loads_for_long_ends_no_run() -> None:
    settings = model(steps=8, max_staleness=2, checkpoint_every=2, pace=Pace(restore=1000.0))
    world, _ = run(settings, Plan(until=6.0, faults=[Kill(3.0, "trainer-0", 0.5)]))
    assert world.processes["trainer-0"].lives == 2
    assert world.scheduler.now > 600.0


def in_workflow(monkeypatch: pytest.MonkeyPatch, code: Callable[[], Any]) -> None:
    """Let every workflow run `code` of its own between sampling and scoring."""
    from actors.sampling.sessions import SampleSession

    score = SampleSession.score

    async def after_code(self: SampleSession, *args: Any) -> float:
        await code()
        return await score(self, *args)

    monkeypatch.setattr(SampleSession, "score", after_code)


def test_a_workflow_may_take_its_time_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    in_workflow(monkeypatch, lambda: asyncio.sleep(700.0))
    world, events = run(model(steps=2))
    assert lives(world) == {1}
    assert events["requeued"] == 0


def test_each_score_is_computed_once_however_long_the_queue_is(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = 0

    async def one_at_a_time(self: Any, name: str, prompt: str, texts: Sequence[str], row: Any, *_: Any) -> Any:
        nonlocal scored
        lock = self.__dict__.setdefault("lock", asyncio.Lock())
        async with lock:
            await asyncio.sleep(30.0)
        scored += 1
        return [Result(score_of(prompt, text, row), {}) for text in texts]

    monkeypatch.setattr(SimRewards, "score_all", one_at_a_time)
    run(model(steps=4, batch_size=4, group_size=4, max_staleness=2, run_ahead="max", concurrent=32))
    assert scored == 4 * 4 * 4


def test_a_reward_that_is_away_for_minutes_costs_no_prompt() -> None:
    plan = Plan(until=20.0, faults=[Kill(5.0, "reward-0", 280.0)])
    _, events = run(model(steps=30, batch_size=2, max_staleness=2), plan)
    assert events["discarded"] == 0
    assert events["requeued"] == 0


def judge_is_down(monkeypatch: pytest.MonkeyPatch, down: Callable[[int], bool]) -> None:
    """Scoring number n raises where `down(n)`."""
    score, calls = SimRewards.score_all, 0

    async def perhaps(self: Any, *args: Any, **kwargs: Any) -> list[Result]:
        nonlocal calls
        calls += 1
        if down(calls):
            await asyncio.sleep(0.02)
            raise RewardFailed(f"ConnectionError: the judge is down, request {calls}", "raised")
        return await score(self, *args, **kwargs)

    monkeypatch.setattr(SimRewards, "score_all", perhaps)


def test_failures_of_everybody_pause_admission_and_scoring_that_works_again_resumes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge_is_down(monkeypatch, lambda n: 20 < n < 200)
    _, events = run(model(steps=30, batch_size=2, max_staleness=2))
    assert events["discarded"] == 0
    assert events["committed"] == 30


def test_failures_of_everybody_end_the_run_after_the_stated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_is_down(monkeypatch, lambda n: n > 20)
    world = world_of(model(steps=30, batch_size=2, max_staleness=2))
    world.config = world.config.model_copy(update={"outage_seconds": 600.0})
    result = world.run()
    assert result.violation is not None
    assert "longer than outage_seconds (600 s)" in result.violation
    assert "the judge is down" in result.violation
    events = Counter(kind for kind, _ in world.oracle.events)
    assert events["discarded"] == 0
    assert events["admitted"] < 150


def test_a_bad_row_is_discarded_for_its_reason_and_hurts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimSource.row

    def with_a_bad_one(self: SimSource, index: int) -> Any:
        if index == 3:
            raise UserError("row 3 has as 'prompt' neither text nor a list of messages: correct it")
        return row(self, index)

    monkeypatch.setattr(SimSource, "row", with_a_bad_one)
    world, _ = run(model(steps=20, managers=2))
    assert lives(world) == {1}
    assert [body["reason"] for kind, body in world.oracle.events if kind == "discarded"] == ["row"]


def test_too_many_bad_rows_end_the_run_and_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimSource.row

    def with_bad_ones(self: SimSource, index: int) -> Any:
        if index % 3 == 0:
            raise UserError(f"row {index} has no prompt")
        return row(self, index)

    monkeypatch.setattr(SimSource, "row", with_bad_ones)
    result = world_of(model(steps=200, batch_size=2)).run()
    assert result.violation is not None
    assert "max_failed_share (0.1)" in result.violation
    assert "has no prompt" in result.violation


def long_from(monkeypatch: pytest.MonkeyPatch, every: int) -> World:
    """A world in which the prompts of every so many rows, and of the last of six held-out rows, have more tokens than
    data.max_prompt_tokens."""
    encode = ModelTokenizer.encode

    def longer(self: ModelTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens = encode(self, text, add_special_tokens=add_special_tokens)
        held_out = int(text) - HELDOUT
        return tokens * 5 if held_out == 5 or (held_out < 0 and int(text) % every == 0) else tokens

    monkeypatch.setattr(ModelTokenizer, "encode", longer)
    monkeypatch.setattr(failures, "LONG_LIMIT", 30)
    world = world_of(model(steps=20, managers=2, eval_size=6))
    data = world.config.data.model_copy(update={"max_prompt_tokens": 10})
    world.config = world.config.model_copy(update={"data": data})
    return world


def test_a_long_prompt_is_left_out_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    world = long_from(monkeypatch, 3)  # many more than max_failed_share allows to fail
    assert world.run().violation is None
    discarded = [body["reason"] for kind, body in world.oracle.events if kind == "discarded"]
    assert set(discarded) == {"long"}
    assert len(discarded) >= 10
    evaluated = [body["evaluation"]["rows"] for kind, body in world.oracle.events if kind == "evaluated"]
    assert evaluated == [5, 5]


def test_a_run_whose_prompts_are_all_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    result = long_from(monkeypatch, 1).run()
    assert result.violation is not None
    assert "30 prompts in a row were too long" in result.violation
    assert "the prompt has 15 tokens, and data.max_prompt_tokens is 10" in result.violation


def test_a_generator_that_cannot_load_weights_is_avoided_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = World._start_engine
    broken: list[SimEngine] = []

    async def with_a_broken_one(self: World, one: Any, *args: Any, **kwargs: Any) -> SimEngine:
        engine = await start(self, one, *args, **kwargs)
        if one.process.name == "generator-3" and one.process.lives == 1:
            broken.append(engine)

            async def load(folder: Any, version: int) -> Any:
                raise WeightLoadError(f"{folder} cannot be read: stale file handle")

            engine.load = load  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(World, "_start_engine", with_a_broken_one)
    # Steps are slow, so that the run outlasts the time after which such a generator ends itself.
    settings = model(
        steps=12,
        batch_size=2,
        max_staleness=2,
        generators=4,
        max_new_tokens=200,
        stream_interval=16,
        pace=Pace(step=12.0),
    )
    world, events = run(settings)
    assert broken
    assert world.processes["generator-3"].lives == 2
    assert events["requeued"] == 0


def test_weights_that_are_removed_while_sequences_finish_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[int, bool]] = []
    swap = SimEngine._swap

    async def watched(self: SimEngine, folder: Any, version: int) -> Any:
        loaded.append((version, str(folder) in self._files.folders))
        return await swap(self, folder, version)

    monkeypatch.setattr(SimEngine, "_swap", watched)
    settings = model(
        steps=40,
        batch_size=4,
        max_staleness=8,
        run_ahead="max",
        generators=4,
        concurrent=16,
        interrupt=False,
        max_new_tokens=120,
        stream_interval=16,
        pace=Pace(step=0.3, write=0.1),
        checkpoint_every=20,
    )
    plan = Plan(until=1000.0, mishaps=Mishaps(straggler=0.5, straggler_times=3.0))
    world, _ = run(settings, plan)
    assert len(loaded) > 20
    assert all(there for _, there in loaded)
    assert lives(world) == {1}


def test_an_evaluation_that_reaches_its_limit_reports_what_it_has() -> None:
    settings = model(steps=2, eval_size=12, samples=2, pace=Pace(score=20.0), evaluation_seconds=18.0)
    world, _ = run(settings)
    evaluations = [body["evaluation"] for kind, body in world.oracle.events if kind == "evaluated"]
    assert all(0 < evaluation["unfinished"] < 24 for evaluation in evaluations)
    assert len(evaluations) == 2


def test_engines_that_die_while_they_load_are_started_again() -> None:
    world, _ = run(model(steps=16), Plan(until=100.0, mishaps=Mishaps(load_tears=0.4)))
    assert world.processes["generator-0"].lives > 1
    assert issubclass(WeightLoadError, Exception) and not issubclass(WeightLoadError, EngineError)


@pytest.mark.parametrize("at", [1.0, 2.0, 3.0])
def test_a_suspended_master_fences_nobody_and_ends_no_lease(at: float) -> None:
    settings = model(steps=30, managers=2, lease_seconds=6.0, lost_seconds=30.0)
    world, events = run(settings, Plan(until=8.0, faults=[Pause(at, "master-0", 10.0)]))
    assert lives(world) == {1}
    assert not events["requeued"] and not events["left"]
