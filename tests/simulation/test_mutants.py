"""Bugs that are put into the real actors on purpose: seeds find them, or plans that provoke them."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from areal.staleness.ledger import Ledger
from simulation.engines import Mishaps, Pace
from simulation.faults import (
    Damage,
    FailPoint,
    Fault,
    FullDisk,
    Hang,
    Kill,
    Leave,
    Partition,
    Pause,
    Plan,
    Replace,
    Resume,
    SlowDisk,
    Storm,
)
from simulation.model import DIFFICULTY, with_hangs
from simulation.mutants import MUTANTS
from simulation.network import Weather
from simulation.world import Model, Result, World, simulate

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

# A seed that catches it soon, and how many are tried from there on, since every change to the actors draws other
# simulations.
CAUGHT_BY = {
    "capacity from a counter": (6, 40),
    "no de-duplication": (10, 20),
    "no lease expiry": (20, 40),
    "replies not matched": (0, 10),
    "version kept on roll-back": (22, 40),
    "payloads dropped once trained": (14, 40),
    "answers before the commit": (19, 20),
    "min_version ignored": (10, 40),
    "no filter": (6, 40),
    "checkpoints in a streak": (23, 40),
    "published before it is written": (14, 20),
    "no wait for the write": (6, 10),
    "checkpoint before it is written": (3, 10),
    "tokens twice after a break": (6, 40),
    "end tokens dropped": (2, 20),
    "the same random numbers": (20, 40),
    "shared tokens trained twice": (5, 40),
    "branches lost on the way": (5, 40),
    "start versions not reported": (19, 20),
    "rollouts written at the end": (14, 20),
    "rejected payloads kept": (6, 40),
    "spool never emptied": (4, 20),
    "payloads of one checkpoint": (14, 20),
    "work not reported": (16, 40),
    "awake in a turn": (5, 30),
    "rewards negated": (19, 20),
    "scores exchanged": (20, 20),
    "rows for another scorer": (7, 40),
    "next row sampled": (19, 20),
    "log-probs reversed after a break": (16, 40),
    "ready with the newest version": (5, 20),
    "leases of leavers stay": (20, 40),
    "only the newest weights": (12, 20),
    "discarded at the first failure": (36, 40),
}


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_a_mutant_is_caught(mutant: str) -> None:
    first, tried = CAUGHT_BY[mutant]
    with MUTANTS[mutant](), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + tried):
            if not World(seed).run().ok:
                return
    pytest.fail(f"{mutant!r} is not caught by {tried} seeds from {first} on")


AIMED = "last checkpoint left to the dead"


def test_a_fault_right_before_an_event_finds_what_the_others_of_its_seed_do_not() -> None:
    with MUTANTS[AIMED](), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(250, 310):
            if World(seed).run().ok and not simulate(seed).ok:
                return
    pytest.fail(f"{AIMED!r} is not caught by 60 seeds")


class Provoked(NamedTuple):
    """A mutant that seeds find seldom. `plan`: gives the n-th plan, of `tries` from `first` on; with one of them, the
    violation has these words. Without the mutant there is none."""

    words: str
    plan: Callable[[int], Plan]
    model: Model = Model()
    tries: int = 8
    first: int = 0


def plan(*plan_faults: Fault, until: float = 20.0, mishaps: Mishaps | None = None) -> Plan:
    return Plan(until, list(plan_faults), mishaps=mishaps or Mishaps())


FAILING = Model(steps=12, batch_size=2, group_size=1)
MOVING = Model(steps=6, batch_size=2, generators=2, moves=0.5, max_new_tokens=60)
# Samples begin late, and move so often that the weights change between the beginnings of two.
LATE = replace(MOVING, group_size=3, max_staleness=3, concurrent=2, pace=Pace(first_token=0.3))
EVALUATING = Model(steps=12, eval_size=20, every=4, generators=2, max_staleness=2)
# Groups have several samples, some of which take long, and two managers die again and again.
WITH_SIBLINGS = Model(steps=6, batch_size=2, group_size=4, managers=2, max_new_tokens=30, concurrent=16)


def managers_die(n: int = 0) -> Plan:
    deaths = (Kill(0.5 * (1 + i), f"rollout_manager-{i % 2}", 0.1) for i in range(12))
    return plan(*deaths, until=7.0, mishaps=Mishaps(straggler=0.15, straggler_times=4.0))


SAVED = replace(WITH_SIBLINGS, save_every=4)
# They are scored together, which takes so long that managers and reward actors die meanwhile.
TOGETHER = replace(WITH_SIBLINGS, steps=4, groups=True, oversample=1, rewards=2, pace=Pace(score=0.3))


def scorers_die(n: int = 0) -> Plan:
    """With managers, reward actors die. The trainer is so slow that some die while it stores what is scored."""
    deaths = [
        kill
        for i in range(8)
        for kill in (
            Kill(0.8 * (1 + i), f"rollout_manager-{i % 2}", 0.1),
            Kill(0.8 * (1 + i) + 0.05, f"reward-{i % 2}", 0.1),
        )
    ]
    return plan(SlowDisk(0.1, "trainer-0", 0.1, 8.0), *deaths, until=8.0)


# Users whose sessions end by their own rewards alone, beside rows and without any.
MIXED = Model(
    steps=8, batch_size=2, group_size=1, gateways=2, users=4, share=0.8, session_seconds=3600.0, idle_seconds=3600.0
)
ALONE = Model(steps=8, batch_size=2, group_size=1, gateways=2, users=4, share=1.0, managers=0)
# Users get versions that are evaluated, and older than the newest.
EVALUATED = replace(MIXED, steps=12, serve="evaluated", generators=3, eval_size=2, every=3)


# Sessions alone, and many checkpoints.
WITH_CHECKPOINTS = replace(ALONE, users=8, checkpoint_every=1)


# Many sessions expire, and their samples may arrive at the time of a checkpoint.
EXPIRING = replace(MIXED, steps=12, users=12, checkpoint_every=1, max_staleness=1, lease_seconds=24.0, generators=2)


def goes_back(n: int = 0) -> Plan:
    return plan(Resume(8.0 + n / 2, 0, 2, back=1))


def gateways_die(n: int = 0) -> Plan:
    return plan(*(Kill(0.7 * (1 + i) + n / 10, f"gateway-{i % 2}", 0.2) for i in range(8)), until=8.0)


def samples_unreported(n: int = 0) -> Plan:
    """Gateways die while the trainer has samples of which it cannot tell the master."""
    cut = (Partition(0.8 + 3 * i, ("trainer-0",), ("master-0",), 2.0) for i in range(4))
    return plan(*cut, *(Kill(1.8 + 3 * i + n / 20, f"gateway-{i % 2}", 0.2) for i in range(4)), until=10.0)


def gateways_are_replaced(n: int = 0) -> Plan:
    """Those of before still serve, while the master does not hear them."""
    cut = (Partition(0.8 + 2 * i, (f"gateway-{i % 2}",), ("master-0",), 1.5) for i in range(4))
    return plan(*cut, *(Replace(1.2 + 2 * i + n / 10, f"gateway-{i % 2}") for i in range(4)), until=10.0)


BRANCHES_SAVED = replace(SAVED, branching=True, save_every=2)

PROVOKED = {
    "only the last checkpoint": Provoked("no progress", lambda n: plan(Damage(2.0 + n)), Model(steps=12)),
    "choices not journaled": Provoked(
        ", of row ", lambda n: plan(Kill(2.0, "master-0", 0.1)), Model(steps=8, sampler=DIFFICULTY), 1
    ),
    # The spool is lost, and with it groups that were ready.
    "lost groups stay ready": Provoked(
        "the ledger does not have the groups",
        lambda n: plan(Resume(2.0 + n, 0, 2, 0, spool_lost=True)),
        Model(steps=12, batch_size=2, max_staleness=2, generators=2),
    ),
    # The master dies between the commit of a permit and its answer.
    "leases nobody knows of": Provoked(
        "no progress", lambda n: Plan(3.0, points=[FailPoint("master", "ask_permits", "handled", 1, 0.5)])
    ),
    # Everything is lost for a moment, which is the wrong one if nothing follows on a flow.
    "keep-alives count nothing": Provoked(
        "no progress", lambda n: plan(Storm(1.7 + 0.02 * n, Weather(loss=1.0), 0.06), until=3.0), tries=20
    ),
    # The trainer is replaced between two steps, and does not know it when a generator asks for the devices.
    "old trainers give devices": Provoked(
        "awake while trainer-0 computes",
        lambda n: plan(Replace(2.0 + n / 16, "trainer-0")),
        Model(steps=8, colocate=True, checkpoint_every=4),
        24,
    ),
    "nothing saved on leaving": Provoked(
        "left at version",
        lambda n: plan(Leave(1.0 + n / 10, "trainer-0", 0.3), until=4.0),
        Model(steps=8, checkpoint_every=3, max_staleness=2),
    ),
    "hangs not noticed": Provoked(
        "no progress", lambda n: plan(Hang(2.5, "generator-0", "sampling")), with_hangs(Model(steps=12)), 2
    ),
    "own code without a limit": Provoked(
        "no progress", lambda n: plan(Hang(2.5, "rollout_manager-0", "workflow")), with_hangs(Model(steps=12)), 2
    ),
    # A long sequence after short ones.
    "evidence ignored": Provoked(
        "but nothing hangs in it",
        lambda n: plan(until=200.0, mishaps=Mishaps(straggler=0.15, straggler_times=8.0)),
        Model(steps=20, group_size=1, max_staleness=0, hang_seconds=5.0, max_new_tokens=60),
    ),
    # Nobody works, nobody is silent, and nothing moves, for longer than the run may stand still.
    "no remedies": Provoked(
        "the run has made no progress",
        lambda n: plan(Partition(1.0, ("rollout_manager-0",), ("generator-0",), 60.0), until=80.0),
        Model(steps=6, group_size=1, stall_seconds=36.0, patience=120.0),
    ),
    "own pause not excused": Provoked("was heard", lambda n: plan(Pause(2.0, "master-0", 10.0)), Model(steps=12)),
    "never discarded for failures": Provoked(
        "is re-queued after 3 failures", lambda n: plan(until=60.0, mishaps=Mishaps(score_fails=0.7)), FAILING, 24
    ),
    "each failure counts": Provoked(
        "counted True, not False", lambda n: plan(until=60.0, mishaps=Mishaps(score_fails=0.7)), FAILING
    ),
    "shortages are failures": Provoked(
        "no fault has made it fail", lambda n: plan(FullDisk(2.0 + n / 4, "trainer-0", 3.0)), Model(steps=6)
    ),
    "snapshots without failures": Provoked(
        "['ledger']",
        lambda n: plan(*(Kill(2.0 + i, "master-0", 0.1) for i in range(6)), mishaps=Mishaps(score_fails=0.6)),
        replace(FAILING, compact_events=20),
    ),
    "snapshots without run-ahead": Provoked(
        "['run_ahead']",
        lambda n: plan(Kill(6.0, "master-0", 0.1)),
        replace(FAILING, max_staleness=3, run_ahead="auto", compact_events=20, pace=Pace(tokens_per_second=10.0)),
    ),
    "snapshots without lost evaluations": Provoked(
        "['not_evaluated']",
        lambda n: plan(*(Kill(at, "master-0", 0.1) for at in (2.0, 5.0))),
        replace(EVALUATING, every=1, compact_events=20),
    ),
    "evaluations of dead lineages": Provoked(
        "of a dead lineage", lambda n: plan(Kill(2.0 + n / 2, "trainer-0", 0.1)), EVALUATING
    ),
    "started with the newest version": Provoked("was reported to start at version", lambda n: plan(), LATE),
    "min_version stays": Provoked("but goes on from", lambda n: plan(), LATE),
    "columns mixed up": Provoked("tokens of several sequences", lambda n: plan(), LATE),
    "failures in parts are lost": Provoked("no progress", lambda n: plan(), MOVING),
    "hold ignored": Provoked("although it holds", lambda n: plan(), EVALUATING),
    "no batch gate": Provoked(
        "every group fits before its deadline",
        lambda n: plan(until=60.0, mishaps=Mishaps(straggler=0.2, straggler_times=8.0)),
        replace(FAILING, generators=2),
    ),
    "bounds of now": Provoked("every group fits", lambda n: plan(Resume(2.0, 0, 0)), replace(FAILING, max_staleness=2)),
    "lineages ignored": Provoked("but knows of", lambda n: plan(Kill(2.0 + n / 4, "trainer-0", 0.3)), Model(steps=8)),
    "rollouts written again": Provoked(
        "twice or not in order",
        lambda n: plan(
            SlowDisk(1.0, "trainer-0", 0.5, 8.0),
            *(Kill(1.7 + n / 32 + 1.43 * i, "trainer-0", 0.1) for i in range(4)),
            until=10.0,
        ),
        Model(steps=12, checkpoint_every=2),
    ),
    # The old trainer goes on after its successor.
    "no fencing": Provoked(
        "is published in lineage",
        lambda n: plan(*(Replace(1.5 + n / 16 + 1.3 * i, "trainer-0") for i in range(3)), until=8.0),
        Model(steps=12, checkpoint_every=2, max_staleness=2),
    ),
    # Slow groups, and a master whose clock is ahead of that of the one before.
    "leases not renewed at a start": Provoked(
        "after it was renewed", lambda n: plan(Kill(2.0, "master-0", 0.1)), Model(pace=Pace(tokens_per_second=2.0)), 16
    ),
    # The trainer dies while it has samples of groups that fail.
    "payloads not dropped at a start": Provoked(
        "which nobody needs any more",
        lambda n: plan(
            *(Kill(1.5 * (1 + i), "trainer-0", 0.1) for i in range(4)), until=7.0, mishaps=Mishaps(score_fails=0.55)
        ),
        Model(steps=6, batch_size=2, group_size=4, checkpoint_every=3, concurrent=16),
    ),
    "stored samples sampled again": Provoked("are stored, and neither in it", managers_die, WITH_SIBLINGS),
    "stored samples of another group": Provoked("", managers_die, WITH_SIBLINGS),
    "stored samples however old": Provoked("every group fits before its deadline", managers_die, WITH_SIBLINGS),
    "scored groups stored in parts": Provoked("but is scored", scorers_die, TOGETHER),
    "groups in order of arrival": Provoked("but is scored", lambda n: plan(), TOGETHER, 1),
    "saved calls sampled again": Provoked("begins anew, but calls of it are stored", managers_die, SAVED),
    "saved calls of another sample": Provoked("goes on with calls that it has not saved", managers_die, SAVED),
    "saved calls whatever their prompts": Provoked("tokens", managers_die, BRANCHES_SAVED),
    "newest version of saved calls": Provoked("start version", managers_die, SAVED),
    "latest deadlines first": Provoked(
        "have earlier deadlines",
        lambda n: plan(),
        Model(steps=12, batch_size=2, group_size=1, max_staleness=2, generators=2),
    ),
    "steps wait for sessions": Provoked("no progress", lambda n: plan(), MIXED, 4),
    "sessions beyond the bound": Provoked("every group fits before its deadline", lambda n: plan(), MIXED, 4),
    "sessions expire at each step": Provoked("no step had to go on without it", lambda n: plan(), MIXED, 4),
    "served versions however old": Provoked("every group fits before its deadline", lambda n: plan(), EVALUATED),
    "sessions without a limit": Provoked("has room for", lambda n: plan(), MIXED, 4),
    "sessions lost with their gateway": Provoked("is discarded for", gateways_die, MIXED, 4),
    "sessions taken from gateways": Provoked("but is held by", lambda n: plan(), MIXED, 4),
    "rewards acknowledged at once": Provoked("its reward is taken, but", lambda n: plan(), ALONE, 4),
    "answers before they are saved": Provoked("before it is on the trainer's disk", lambda n: plan(), MIXED, 4),
    "calls sampled again": Provoked("and before with", lambda n: plan(), ALONE),
    "left sessions begin anew": Provoked("", gateways_die, ALONE),
    "rewards without receipts": Provoked("does not count", lambda n: plan(), ALONE, 4),
    "stored sessions begin anew": Provoked("has calls, but", samples_unreported, ALONE),
    "deleted sessions stay": Provoked("is told that it is deleted", lambda n: plan(), ALONE),
    "evaluations sampled as for training": Provoked("at the temperature", lambda n: plan(), EVALUATING, 1),
    "forgotten samples accepted": Provoked(
        "its reward is taken, but",
        lambda n: plan(SlowDisk(0.5, "trainer-0", 0.5 + n / 20, 60.0), until=60.0),
        EXPIRING,
        40,
        first=17,
    ),
    "journal not synced": Provoked(
        "events were on disk", lambda n: plan(Kill(1.0 + n, "master-0", 0.1, silent=True)), Model(), 4
    ),
    "spool not synced": Provoked("", lambda n: plan(Kill(1.0 + n, "trainer-0", 0.1, silent=True)), Model(), 4),
    "deletions of the last session": Provoked("is told that it is deleted, but", lambda n: plan(), ALONE, 4),
    "receipts kept on a way back": Provoked("which were undone", goes_back, WITH_CHECKPOINTS, 8),
    "deletions undone on a way back": Provoked("otherwise than the journal", goes_back, WITH_CHECKPOINTS, 40),
    "snapshots without receipts": Provoked(
        "restored another state", lambda n: plan(Kill(9.0 + n, "master-0", 0.1)), replace(ALONE, compact_events=20), 8
    ),
    "trained sessions not counted": Provoked("have trained it, but", lambda n: plan(), replace(ALONE, users=8), 8),
    "tokens of steps alone": Provoked("otherwise than the journal", goes_back, WITH_CHECKPOINTS, 4),
    "sessions trained twice": Provoked("an answer of", lambda n: plan(), replace(ALONE, eval_size=1, idle_seconds=1.0)),
    "sessions of two gateways": Provoked("the answer", gateways_are_replaced, ALONE, 40),
    "expiry not told": Provoked("its reward is taken, but", lambda n: plan(), MIXED),
}


SLOW = {
    "started with the newest version",
    "only the last checkpoint",
    "rollouts written again",
    "payloads not dropped at a start",
    "sessions of two gateways",
    "sessions without a limit",
    "sessions lost with their gateway",
    "sessions taken from gateways",
    "calls sampled again",
    "deleted sessions stay",
    "expiry not told",
    "never discarded for failures",
    "evidence ignored",
    "own code without a limit",
    "hangs not noticed",
    "stored samples however old",
    "saved calls whatever their prompts",
    "newest version of saved calls",
    "evaluations of dead lineages",
    "leases not renewed at a start",
    "scored groups stored in parts",
    "snapshots without failures",
    "snapshots without lost evaluations",
    "saved calls sampled again",
    "stored samples of another group",
}
"""Half of the time of all: long simulations, or many until it is found. Cheaper mutants break the same rules."""


SOUND: dict[str, Result] = {}


def without_mutant(seed: int, model: Model, provoking: Plan) -> Result:
    """The simulation of the actors as they are, once for all mutants that one plan provokes."""
    key = repr((seed, model, provoking))
    if key not in SOUND:
        SOUND[key] = simulate(seed, model, provoking)
    return SOUND[key]


@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PROVOKED]
)
def test_a_plan_that_provokes_a_mutant_finds_it(mutant: str) -> None:
    words, plan_of, model, tries, first = PROVOKED[mutant]
    for n in range(first, first + tries):
        with MUTANTS[mutant]():
            violation = World(n, model, plan_of(n)).run().violation
        if violation is not None:
            assert words in violation
            assert (result := without_mutant(n, model, plan_of(n))).ok, result.story
            return
    pytest.fail(f"{mutant!r} is not caught by {tries} plans")


def test_what_is_scored_of_a_group_outlives_its_manager_and_is_not_sampled_again() -> None:
    for seed in range(2):
        world = World(seed, WITH_SIBLINGS, managers_die())
        assert (result := world.run()).ok, result.story
        assert world.counters["reused"] > 20
        assert len(world.oracle.disk.trained) == 12


@pytest.mark.parametrize("model", [SAVED, BRANCHES_SAVED])
def test_what_is_sampled_of_an_unfinished_sample_outlives_its_manager(model: Model) -> None:
    for seed in range(2):
        world = World(seed, model, managers_die())
        assert (result := world.run()).ok, result.story
        assert world.oracle.reused_tokens > 200


def test_a_group_that_waits_for_its_score_outlives_its_manager_and_its_reward_actor() -> None:
    for seed in range(2):
        world = World(seed, TOGETHER, scorers_die())
        assert (result := world.run()).ok, result.story
        assert world.oracle.reused_tokens > 100 and len(world.oracle.disk.trained) == 8


def test_all_mutants_are_tested_and_described() -> None:
    assert sorted(MUTANTS) == sorted([*CAUGHT_BY, *PROVOKED, AIMED])
    assert not [name for name, mutant in MUTANTS.items() if not mutant.__doc__]


ROOT = Path(__file__).parents[2]
SOURCES = "\n".join(
    file.read_text()
    for folder in ("areal", "actors", "protocols", "tests/simulation")
    for file in (ROOT / folder).rglob("*.py")
    if file.name not in ("mutants.py", "test_mutants.py")
)


def flaw_of(patcher: Any) -> str:
    """Why a mutant's patch of an attribute changes nothing any more, or breaks what calls it; empty: it applies."""
    target, name, new = patcher.getter(), patcher.attribute, patcher.new
    use = name if isinstance(target, ModuleType) else rf"\.{name}"
    answers = getattr(target, "_handlers", {}).values()
    if not (name.startswith("__") or name in answers or re.search(rf"(?<!def ){use}\b", SOURCES)):
        return f"nothing uses {name} of {target.__name__}"
    if not hasattr(target, name):
        return "" if patcher.create else f"{target.__name__} has no {name}"
    original = inspect.getattr_static(target, name)
    if inspect.isroutine(new) and isinstance(original, property):
        return f"{name} of {target.__name__} is a property"
    if inspect.isroutine(new) and callable(original):
        takes = inspect.signature(getattr(target, name)).parameters.values()
        positional = [p.name for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {p.name: p for p in takes if p.kind is p.KEYWORD_ONLY}
        with contextlib.suppress(TypeError):
            inspect.signature(new).bind(*positional, **named)
            return ""
        return f"{name} of {target.__name__} takes other arguments"
    return ""


@pytest.mark.parametrize(
    ("attribute", "new", "flaw"),
    [
        ("expires", lambda ledger, now: [], "nothing uses expires of Ledger"),
        ("unlink", lambda ledger: [], "Ledger has no unlink"),
        ("discard", lambda ledger: None, "discard of Ledger takes other arguments"),
        ("ended", lambda ledger: None, "ended of Ledger is a property"),
        ("discard", lambda ledger, group, reason: None, ""),
    ],
)
def test_a_mutant_of_what_is_no_longer_there_or_is_called_otherwise_is_noticed(
    attribute: str, new: Any, flaw: str
) -> None:
    assert flaw_of(patch.object(Ledger, attribute, new)) == flaw


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_still_applies(mutant: str) -> None:
    """Whether it is found is tested with seeds, which many runs of the tests leave out."""
    mutation: Any = MUTANTS[mutant]()
    flaws = [flaw_of(patcher) for patcher in (mutation, *mutation.additional_patchers)]
    assert not any(flaws), flaws
    with mutation:  # all of it at once
        pass
