"""Bugs that are put into the real actors on purpose: seeds find them, or plans that provoke them."""

from __future__ import annotations

import warnings

import pytest

from simulation.faults import FailPoint, Plan, Storm
from simulation.mutants import MUTANTS
from simulation.network import Weather
from simulation.world import Model, World, simulate

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

# A seed that catches it soon, and how many are tried from there on, since every change to the actors draws other
# simulations.
CAUGHT_BY = {
    "bounds of now": (25, 120),
    "capacity from a counter": (6, 40),
    "no de-duplication": (4, 20),
    "no batch gate": (101, 200),
    "no lease expiry": (12, 500),
    "replies not matched": (0, 10),
    "version kept on roll-back": (2, 120),
    "payloads dropped once trained": (0, 120),
    "answers before the commit": (0, 10),
    "no fencing": (2, 300),
    "min_version ignored": (0, 160),
    "no filter": (6, 120),
    "checkpoints in a streak": (0, 120),
    "hold ignored": (28, 400),
    "published before it is written": (0, 10),
    "no wait for the write": (5, 10),
    "checkpoint before it is written": (3, 10),
    "tokens twice after a break": (6, 160),
    "shared tokens trained twice": (5, 60),
    "branches lost on the way": (5, 60),
    "start versions not reported": (0, 10),
    "min_version stays": (16, 300),
    "rollouts written at the end": (0, 10),
    "rollouts written again": (62, 200),
    "rejected payloads kept": (6, 60),
    "payloads not dropped at a start": (8, 240),
    "spool never emptied": (0, 10),
    "lineages ignored": (80, 200),
    "leases not renewed at a start": (6, 300),
    "work not reported": (16, 120),
    "awake in a turn": (5, 30),
    "old trainers give devices": (820, 40),
    "failures in parts are lost": (6, 120),
    "columns mixed up": (84, 120),
    "rewards negated": (0, 10),
    "scores exchanged": (0, 10),
    "next row sampled": (0, 10),
    "log-probs reversed after a break": (0, 60),
    "hangs not noticed": (115, 1),
    "own code without a limit": (143, 1),
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


def test_a_lease_that_nobody_knows_of_has_to_expire() -> None:
    """The master dies between the commit of a permit and its answer: seeds alone find this once in 200."""
    plan = Plan(until=3.0, points=[FailPoint("master", "ask_permits", "handled", 1, 0.5)])
    assert simulate(1, Model(), plan).ok
    with MUTANTS["leases nobody knows of"]():
        result = simulate(1, Model(), plan)
    assert "no progress" in result.violation


def test_the_last_part_of_a_stream_for_long_may_be_lost() -> None:
    """Everything is lost for a moment, which is the wrong one if nothing follows on a flow."""
    for moment in range(40):
        plan = Plan(until=3.0, faults=[Storm(0.2 + 0.02 * moment, Weather(loss=1.0), 0.02)])
        assert simulate(2, Model(), plan).ok
        with MUTANTS["keep-alives count nothing"]():
            if (result := simulate(2, Model(), plan)).violation:
                assert "no progress" in result.violation
                return
    pytest.fail("no moment is the wrong one")


def test_all_mutants_are_tested_and_described() -> None:
    assert set(MUTANTS) == {*CAUGHT_BY, "leases nobody knows of", "keep-alives count nothing"}
    assert not [name for name, mutant in MUTANTS.items() if not mutant.__doc__]
