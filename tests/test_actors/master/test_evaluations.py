"""Decisions about evaluations and what a stalled run does, without sockets and on the test's own clock."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes.quiet_master import QuietMaster

from actors.master.evaluations import GRACE_SECONDS
from protocols.membership_messages import Engagement, Heartbeat, Work

ROWS = {1: ([1.0], 5)}


@pytest.fixture
def run() -> QuietMaster:
    """Two generators and an evaluator, and version 0 is evaluated."""
    run = QuietMaster()
    for role in ("generator", "generator", "evaluator"):
        run.join(role)
    run.evaluations.hold_version_0()
    assert run.held == {0: 0}
    assert run.finish(0) and not run.finish(0)
    assert run.held == {}
    return run


def test_version_0_is_held_by_a_generator_that_still_has_it():
    run = QuietMaster()
    run.evaluations.hold_version_0()
    assert run.held == {}
    first, second = run.join("generator", state="stale"), run.join("generator")
    run.evaluations.hold_version_0()
    assert run.held == {1: 0}, "a healthy one is preferred"
    run.leave(run.state.members[second.identity])
    assert run.held == {0: 0}
    assert run.evaluations.due and not run.evaluations.ready, "it is not healthy yet"
    run.publish(1)
    run.leave(run.state.members[first.identity])
    run.join("generator")
    run.evaluations.hold_version_0()
    assert run.held == {}, "it may have loaded version 1"
    run.evaluations.hold_version_0(run.join("generator"))
    assert run.held == {1: 0}


def test_every_second_version_is_held_by_another_generator(run):
    for version, held in ((1, {}), (2, {1: 2}), (3, {1: 2})):
        run.publish(version)
        assert run.held == held
    assert not run.finish(3) and run.finish(2)
    run.publish(4)
    assert run.held == {0: 4}
    run.publish(6)
    assert run.held == {0: 4}
    assert run.state.results.not_evaluated == {6: "version 4 is still being evaluated"}


def test_users_get_what_is_evaluated_and_no_worse_from_a_generator_that_keeps_it():
    run = QuietMaster(generator={"count": 3}, gateway={"serve": "evaluated", "accuracy_drop": 0.1})
    run.join("evaluator")
    for _ in range(3):
        run.join("generator")
    run.evaluations.hold_version_0()
    assert (run.evaluations.served.version, run.held) == (0, {0: 0}), "the first model is served at once"
    run.finish(0, 0.5)
    assert (run.evaluations.served.version, run.held, run.evaluations.due) == (0, {0: 0}, None)
    run.publish(2)
    (evaluating,) = run.held.keys() - {0}
    run.finish(2, 0.39)
    assert (run.evaluations.served.version, run.held) == (0, {0: 0}), "it is too bad"
    run.publish(4)
    run.finish(4, 0.41)
    (server,) = run.held.keys() - {0}
    assert run.evaluations.served.version == 4 and run.held == {0: 0, server: 4} and evaluating
    busy = Heartbeat(
        state="healthy",
        serves=(),
        activity="",
        stats={},
        engagement=Engagement(sequences={"gateway/0#a": 1}, limit=8, version=0),
    )
    before = next(m for m in run.state.members.values() if m.role == "generator" and m.index == 0)
    run.members.heartbeats.record(before.identity, busy)
    run.evaluations.watch()
    assert run.held == {0: 0, server: 4}, "it still answers a user"
    waits = Engagement(sequences={"evaluator/0#a": 1}, limit=8, version=0)  # for newer weights
    run.members.heartbeats.record(before.identity, busy.model_copy(update={"engagement": waits}))
    run.evaluations.watch()
    assert run.held == {server: 4}
    run.publish(6)
    run.finish(6, None)
    assert run.evaluations.served.version == 4, "nothing is known of version 6"
    run.leave(run.evaluations.served.server)
    assert run.evaluations.served.version is None
    run.publish(8)
    run.finish(8, 0.2)
    assert run.evaluations.served.version is None, "it is compared with version 4 all the same"


def test_the_last_version_is_due_without_a_hold(run):
    run.publish(10)
    assert run.held == {}
    assert run.evaluations.ready == (10, None)
    assert not run.evaluations.is_over(10)
    run.evaluations.give_up(run.evaluations.due, "a test")
    assert run.evaluations.is_over(10) and run.evaluations.due is None


def test_no_generator_is_held_without_an_evaluator_or_for_longer_than_it_may_take(run):
    run.publish(2)
    for seconds, held in ((50.0 + GRACE_SECONDS, {1: 2}), (1.0, {})):
        run.now += seconds
        run.evaluations.watch()
        assert run.held == held
    run.publish(4)
    run.leave(next(m for m in run.state.members.values() if m.role == "evaluator"))
    for seconds, held in ((30.0, {0: 4}), (1.0, {})):
        run.now += seconds
        run.evaluations.watch()
        assert run.held == held
    run.publish(6)
    assert run.held == {}
    assert list(run.state.results.not_evaluated) == [2, 4, 6]


def test_scores_count_once_and_only_for_the_version_that_is_due(run):
    run.publish(2)
    assert not run.evaluations.keep_scores(4, ROWS)
    assert run.evaluations.keep_scores(2, ROWS)
    assert not run.evaluations.keep_scores(2, {1: ([0.0], 9)})
    assert run.state.results.row_scores(2) == ROWS


def test_a_generator_is_held_for_evaluators_only_while_they_score_rows(run):
    run.publish(2)
    for n, rows in enumerate((ROWS, {2: ([1.0], 5)}, ROWS)):
        assert run.held == {1: 2}
        run.evaluations.keep_scores(2, rows)
        run.leave(next(m for m in run.state.members.values() if m.role == "evaluator"))
        run.join("evaluator", f"{n}")
    assert run.held == {}
    assert "none of them has scored another row" in run.state.results.not_evaluated[2]


def test_version_0_is_not_given_up_for_what_may_pass():
    run = QuietMaster()
    run.join("generator")
    run.evaluations.hold_version_0()
    run.evaluations.abandon("a test")
    run.now += 1000.0
    run.evaluations.watch()
    assert run.held == {0: 0}
    run.evaluations.close()
    assert run.evaluations.is_over(0)


async def test_a_restarted_master_knows_what_is_held_and_scored(run):
    run.publish(2)
    run.evaluations.keep_scores(2, ROWS)
    await run.state.journal.durable()
    again = QuietMaster(run.connection)
    assert again.held == {1: 2}
    assert again.state.results.row_scores(2) == ROWS
    assert again.finish(2)


def test_a_stall_has_two_remedies_before_its_end():
    run = QuietMaster()
    remedies = Counter(remedy for _ in range(100) if (remedy := next_second(run)))
    assert remedies == {"end": 10}, "no role has a member, so that nothing else helps"
    for role in ("trainer", "generator", "rollout_manager", "evaluator"):
        run.join(role)
    run.join("reward", serves=("addition",))
    run.progress.note_progress()
    remedies = [next_second(run) for _ in range(91)]
    assert {n: remedy for n, remedy in enumerate(remedies, 1) if remedy} == {31: "requeue", 61: "fence", 91: "end"}


def next_second(run: QuietMaster) -> str | None:
    run.now += 1.0
    return run.progress.remedy()


def test_the_longest_work_is_named_beside_who_waits():
    run = QuietMaster()
    assert "everyone waits for a trainer and a generator" in run.progress.describe()
    assert run.progress.describe().endswith("(for 0 s)")
    run.join("trainer", works=(Work(what="training", seconds=7.0),))
    run.join("generator", works=(Work(what="loading", seconds=9.0),))
    assert run.progress.describe().endswith("; generator/0 is loading (for 9 s)")
