"""Evaluations in the simulated cluster: they stop no training, and a new attempt goes on where the last one ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.generator.generator import Generator
from actors.runtime.membership import EventFeed
from actors.sampling.jobs import Call
from areal.data.rows import Row
from areal.samples.trajectory import Trajectory
from protocols.membership_messages import MembersChanged
from simulation.engines import HELDOUT, Mishaps, Pace
from simulation.faults import Fault, Hang, Kill, Leave, Plan
from simulation.model import Model, with_hangs
from simulation.oracle import Oracle
from simulation.watched import WatchedEvaluator
from simulation.world import World

After = Callable[[str, dict[str, Any]], Fault | None]

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

ROWS, SAMPLES = 24, 2


def model(**settings: Any) -> Model:
    """Evaluations take a few seconds, training steps a fraction of one."""
    known = {"steps": 6, "eval_size": ROWS, "samples": SAMPLES, "generators": 2, "pace": Pace(tokens_per_second=20.0)}
    return Model(**{**known, "farewell": False, **settings})


def run(settings: Model, plan: Plan | None = None, after: After = lambda kind, body: None) -> World:
    """A run that reached its end. The oracle has compared each result with its samples. The first fault that `after`
    returns for an event of the journal happens right after that event."""
    world = World(1, settings, plan or Plan(until=60.0))
    appended, befallen = world.oracle.appended, []

    def watched(kind: str, body: dict[str, Any]) -> None:
        appended(kind, body)
        if not befallen and (fault := after(kind, body)):
            befallen.append(fault)
            world.scheduler.call_at(world.scheduler.now + 0.2, world._befall, fault)

    world.oracle.appended = watched
    result = world.run()
    assert result.ok, result.story
    return world


def order(world: World) -> list[tuple[str, int]]:
    """The versions that were published and evaluated, in order."""
    return [
        (kind, body["policy"]["version"] if kind == "published" else body["evaluation"]["version"])
        for kind, body in world.oracle.events
        if kind in ("published", "evaluated")
    ]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How many samples of each (version, held-out row) were finished."""
    count: Counter[tuple[int, int]] = Counter()
    run_workflow = WatchedEvaluator.run_workflow

    async def counted(self: WatchedEvaluator, session: Any, row: Row) -> Trajectory:
        done = await run_workflow(self, session, row)
        count[int(done.versions[-1]), row.index - HELDOUT] += 1
        return done

    monkeypatch.setattr(WatchedEvaluator, "run_workflow", counted)
    return count


def test_training_goes_on_while_version_0_is_evaluated() -> None:
    seen = order(run(model()))
    assert seen.index(("evaluated", 0)) > seen.index(("published", 3))


def test_with_one_generator_training_goes_on_with_the_groups_of_version_0() -> None:
    seen = order(run(model(generators=1, max_staleness=2, steps=8)))
    earlier = seen[: seen.index(("evaluated", 0))]
    assert earlier == [("published", 1), ("published", 2), ("published", 3)]


@pytest.mark.parametrize(
    ("which", "killed"),
    [
        ("first", "evaluator"),
        ("first", "master"),
        ("first", "generator"),
        ("between", "evaluator"),
        ("between", "master"),
        ("last", "evaluator"),
        ("last", "generator"),
    ],
)
def test_rows_that_are_scored_are_not_scored_again(which: str, killed: str, sampled: Counter[tuple[int, int]]) -> None:
    settings = model(pace=Pace(tokens_per_second=20.0, step=0.6), steps=6)
    if which == "between":
        settings = replace(settings, every=3, steps=24)
    known: dict[int, set[int]] = {}
    place = {"evaluator": 0, "master": 0, "generator": 0}

    def some_rows_are_kept(kind: str, body: dict[str, Any]) -> Kill | None:
        if kind == "member_changed" and body["member"]["held"]:
            place["generator"] = body["member"]["index"]
        if kind != "rows_scored":
            return None
        version = body["version"]
        rows = known.setdefault(version, set())
        rows |= {row for row, *_ in body["rows"]}
        now = "first" if version == 0 else "last" if version == settings.steps else "between"
        return Kill(0.0, f"{killed}-{place[killed]}", 0.5) if now == which and len(rows) >= ROWS // 3 else None

    world = run(settings, after=some_rows_are_kept)
    assert world.counters["killed"] == 1
    results = {
        body["evaluation"]["version"]: body["evaluation"] for kind, body in world.oracle.events if kind == "evaluated"
    }
    for version in known:
        if not (which == "between" and str(version) in world.summary["not_evaluated"]):
            rewards = results[version]
            assert (rewards["rows"], rewards["failed"], rewards["unfinished"]) == (ROWS, 0, 0)
    again = {(version, row) for (version, row), count in sampled.items() if count > SAMPLES}
    assert len(again) <= 8  # the two rows whose texts are shown, and those that were not reported yet
    assert sum(sampled.values()) < len(results) * ROWS * SAMPLES * 1.2


def test_an_evaluation_with_a_token_of_another_version_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run_workflow, rows = WatchedEvaluator.run_workflow, list[int]()

    async def with_another_version(self: WatchedEvaluator, session: Any, row: Row) -> Trajectory:
        done = await run_workflow(self, session, row)
        rows.append(row.index)
        return replace(done, versions=np.where(done.sampled, 1, -1).astype(np.int32)) if len(rows) == 1 else done

    monkeypatch.setattr(WatchedEvaluator, "run_workflow", with_another_version)
    world = run(model())
    assert not world.summary["not_evaluated"]
    assert rows.count(rows[0]) == 1 + 2 * SAMPLES, "the first sample did not count; then both versions"


def test_an_evaluation_waits_for_a_lost_event_that_its_generator_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    on_event, lost = EventFeed._on_event, list[int]()

    def lose_the_first_holder(feed: EventFeed, sequence: int, event: Any) -> None:
        holds = isinstance(event, MembersChanged) and any(member.held for member in event.changed)
        if feed._bus.identity.name.startswith("evaluator") and holds and not lost:
            lost.append(sequence)
        else:
            on_event(feed, sequence, event)

    monkeypatch.setattr(EventFeed, "_on_event", lose_the_first_holder)
    monkeypatch.setattr(Call, "begin_dispatch", lambda call: call.sample.slot.close())  # all calls look where to go
    world = run(model())
    assert lost and not world.summary["not_evaluated"]


def test_version_0_has_no_result_if_its_generator_leaves_for_good() -> None:
    held: list[str] = []

    def a_newer_version_is_published(kind: str, body: dict[str, Any]) -> Leave | None:
        if kind == "member_changed" and body["member"]["held"]:
            held.append(f"generator-{body['member']['index']}")
        return Leave(0.0, held[0], None) if kind == "published" else None

    world = run(model(), after=a_newer_version_is_published)
    assert order(world)[0] == ("published", 1)
    assert list(world.summary["not_evaluated"]) == ["0"]
    assert world.summary["accuracy_after"] is not None


@pytest.mark.parametrize("limit", [None, 2.0])
def test_the_last_version_is_given_up_for_its_users_limit_and_not_for_a_generator_that_hangs(
    limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def the_last_version_comes_next(kind: str, body: dict[str, Any]) -> Hang | None:
        return Hang(0.0, "generator-0", "loading") if kind == "published" and body["policy"]["version"] == 5 else None

    if limit:  # else the oracle expects that it has a result
        monkeypatch.setattr(Oracle, "_check_fates_of_evaluations", lambda oracle, book: None)
    settings = replace(with_hangs(model(generators=1, eval_size=4)), evaluation_seconds=limit)
    world = run(settings, after=the_last_version_comes_next)
    assert any(life.toil.hangs for life in world.incarnations)
    assert list(world.summary["not_evaluated"]) == (["6"] if limit else [])
    assert (world.summary["accuracy_after"] is None) == bool(limit)


def test_no_sequence_has_the_name_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator may still be busy with a sequence whose evaluation was abandoned."""
    names: Counter[tuple[str, int]] = Counter()
    generate = Generator.generate

    async def noted(self: Generator, request: Any) -> Any:
        names.update((request.sender, new.job) for new in request.message.sequences)
        return await generate(self, request)

    monkeypatch.setattr(Generator, "generate", noted)
    settings = model(eval_size=8, samples=1, every=1, max_staleness=2)
    world = run(settings, Plan(until=8.0, mishaps=Mishaps(load_fails=0.8)))
    assert world.summary["not_evaluated"]
    assert len([sender for sender, _ in names if sender.startswith("evaluator")]) > 16
    assert set(names.values()) == {1}
