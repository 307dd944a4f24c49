"""Run-ahead: its bounds under any sequence of steps, and what it saves and costs in a model of a run."""

from __future__ import annotations

import heapq
import json
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.staleness.invariants import check_invariants
from areal.staleness.ledger import Ledger, Waiting
from areal.staleness.ledger_state import Batch, GroupState, LedgerSettings, LedgerState
from areal.staleness.run_ahead import RunAhead

STEPS = st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 1000))

# ------------------------------------------------------------------------------------------------- a model of a run


@dataclass(frozen=True)
class Run:
    """`capacity`: groups that full generators finish for each that the trainer takes; `slots`: batches they run at
    once, which share them; `spread`: sigma of the log-normal work of a group."""

    batch_size: int
    max_staleness: int
    capacity: float
    slots: float
    spread: float
    steps: int = 200
    seed: int = 1


@dataclass(frozen=True)
class Outcome:
    seconds: float
    staleness: float
    wait_share: float
    limit: int | None


class Simulation:
    """A run of the real ledger on simulated time: a step takes about 1 s, permits and weights take none."""

    def __init__(self, run: Run, run_ahead: RunAhead | None) -> None:
        self.run = run
        self.run_ahead = run_ahead
        self.ledger = Ledger(
            LedgerState(
                LedgerSettings(
                    run.batch_size,
                    run.max_staleness,
                    on_straggler="wait",
                    steps=1_000_000,
                    max_attempts=3,
                    on_failed_sample="requeue",
                )
            )
        )
        self.slots = math.ceil(run.slots * run.batch_size)
        self.work, self.training = random.Random(f"work {run.seed}"), random.Random(f"training {run.seed}")
        self.now = 0.0
        self.served = 0.0  # work done so far for each group that has been running all the time
        self.running: list[tuple[float, str, int]] = []  # (`served` at its end, id, start version)
        self.staleness: list[float] = []
        self.waited = 0.0

    def result(self) -> Outcome:
        for _ in range(self.run.steps):
            self.step()
        limit = self.run_ahead.limit if self.run_ahead else None
        return Outcome(self.now, sum(self.staleness) / len(self.staleness), self.waited / self.now, limit)

    def step(self) -> None:
        begun, short, version = self.now, 0.0, self.ledger.version
        self.admit()
        while isinstance(batch := self.ledger.next_batch(version), Waiting):
            assert self.running, "nobody waits for ever"
            time_before = self.now
            self.generate(until=math.inf)
            short += self.now - time_before if batch.ready < batch.needed else 0.0
        assert isinstance(batch, Batch)
        left_over = self.ledger.state.groups.count(GroupState.READY)
        self.waited += self.now - begun
        end = self.now + log_normal(self.training, 0.2)
        while self.now < end:
            self.generate(until=end)
        self.staleness.append(self.ledger.commit(version).mean_staleness)
        if self.run_ahead:
            self.run_ahead.stepped(short, self.now - begun, left_over)

    def admit(self) -> None:
        allowed = (
            max(0, self.run_ahead.limit - len(self.ledger.state.groups))
            if self.run_ahead
            else self.ledger.state.room.for_rows
        )
        for permit in self.ledger.admit("manager", min(self.slots - len(self.running), allowed), 0.0, 1.0):
            work = log_normal(self.work, self.run.spread)
            heapq.heappush(self.running, (self.served + work, permit.group_id, self.ledger.version))

    def generate(self, until: float) -> None:
        """Go on to `until`, or to the end of the next group if that is earlier."""
        rate = self.rate()
        end = self.now + (self.running[0][0] - self.served) / rate if self.running else math.inf
        if end > until:
            self.served += rate * (until - self.now)
            self.now = until
            return
        self.now = end
        self.served, group_id, version = heapq.heappop(self.running)
        self.ledger.ready(group_id, version)
        self.admit()

    def rate(self) -> float:
        """Work a second for each running group: n groups get n / (n + slots / 4) of what no number would exceed."""
        half = self.slots / 4
        limit = self.run.capacity * self.run.batch_size * (self.slots + half) / self.slots
        return limit / (len(self.running) + half)


def log_normal(chance: random.Random, sigma: float) -> float:
    """With a mean of 1."""
    return math.exp(chance.gauss(-(sigma**2) / 2, sigma))


def run_both(run: Run) -> tuple[Outcome, Outcome]:
    """As far ahead as rule 1 allows, and held back."""
    ahead = RunAhead(run.batch_size, run.max_staleness)
    return Simulation(run, None).result(), Simulation(run, ahead).result()


# ------------------------------------------------------------------------------------------------ what it is good for


@pytest.mark.parametrize(
    "run",
    [
        Run(batch_size=64, max_staleness=8, capacity=1.1, slots=0.5, spread=0.5),
        Run(batch_size=64, max_staleness=8, capacity=1.3, slots=2, spread=0.8, steps=120),
        Run(batch_size=64, max_staleness=8, capacity=3, slots=1, spread=1.0, steps=120),
        Run(batch_size=16, max_staleness=8, capacity=1.1, slots=1, spread=0.8),
        Run(batch_size=16, max_staleness=4, capacity=1.3, slots=0.5, spread=0.3),
        Run(batch_size=16, max_staleness=4, capacity=1.3, slots=0.5, spread=1.0),
        Run(batch_size=16, max_staleness=4, capacity=2, slots=2, spread=0.8),
    ],
    ids=str,
)
def test_where_the_trainer_is_the_slower_it_is_fed_as_well_with_half_the_staleness(run):
    furthest, held = run_both(run)
    assert furthest.staleness > 0.8 * run.max_staleness
    assert held.staleness <= furthest.staleness / 2
    assert held.seconds <= furthest.seconds / 0.98


@pytest.mark.parametrize(
    "run",
    [
        Run(batch_size=64, max_staleness=8, capacity=0.7, slots=0.5, spread=0.8, steps=100),
        Run(batch_size=16, max_staleness=4, capacity=0.7, slots=1, spread=0.3),
        Run(batch_size=16, max_staleness=4, capacity=0.7, slots=2, spread=1.0),
        Run(batch_size=16, max_staleness=4, capacity=1, slots=0.5, spread=0.5),
    ],
    ids=str,
)
def test_where_the_generators_are_the_slower_they_are_not_held_back(run):
    furthest, held = run_both(run)
    assert held.seconds <= furthest.seconds / 0.98
    assert held.staleness <= furthest.staleness


@pytest.mark.parametrize("capacity", [1.1, 3])
def test_a_larger_bound_for_late_feedback_of_users_does_not_make_rows_older(capacity):
    runs = [Run(16, bound, capacity, slots=1, spread=0.8, steps=100) for bound in (8, 32)]
    usual, large = (Simulation(run, RunAhead(run.batch_size, run.max_staleness)).result() for run in runs)
    assert large.staleness < usual.staleness + 0.1


def test_what_one_bad_time_has_added_is_given_back():
    run = Run(batch_size=16, max_staleness=8, capacity=1.5, slots=1, spread=0.5, steps=300)
    ahead = RunAhead(run.batch_size, run.max_staleness)
    for _ in range(100):
        ahead.stepped(waited_seconds=1.0, step_seconds=2.0, left_over=0)
    assert ahead.limit == 9 * 16
    held = Simulation(run, ahead).result()
    assert held.limit is not None and held.limit < 4 * 16


def test_waits_for_single_groups_do_not_drive_it_to_the_bound():
    run = Run(batch_size=16, max_staleness=4, capacity=2, slots=4, spread=1.0)
    furthest, held = run_both(run)
    assert furthest.wait_share > 0.05, "rule 3 makes this run wait with more than a batch ready"
    assert held.staleness <= furthest.staleness / 2
    assert held.seconds <= furthest.seconds / 0.98


# ------------------------------------------------------------------------------------------------------- single steps


def test_it_begins_with_one_batch_beside_the_one_in_training():
    assert RunAhead(batch_size=16, max_staleness=4).limit == 32


def filled(batch_size: int, max_staleness: int) -> RunAhead:
    """One whose first steps are over."""
    ahead = RunAhead(batch_size, max_staleness)
    for _ in range(2):
        ahead.stepped(waited_seconds=0.0, step_seconds=1.0, left_over=0)
    return ahead


def test_the_waits_of_the_first_steps_say_nothing():
    ahead = RunAhead(batch_size=16, max_staleness=4)
    for _ in range(2):
        ahead.stepped(waited_seconds=3.0, step_seconds=3.0, left_over=0)
    assert ahead.limit == 32
    ahead.stepped(waited_seconds=3.0, step_seconds=3.0, left_over=0)
    assert ahead.limit == 48


def test_a_step_spent_waiting_adds_a_batch_and_half_of_it_half_a_batch():
    ahead = filled(batch_size=16, max_staleness=4)
    ahead.stepped(waited_seconds=3.0, step_seconds=3.0, left_over=0)
    assert ahead.limit == 48
    ahead.stepped(waited_seconds=1.5, step_seconds=3.0, left_over=0)
    assert ahead.limit == 56


def test_groups_left_over_lower_it_slowly():
    ahead = filled(batch_size=100, max_staleness=4)
    ahead.stepped(waited_seconds=1.0, step_seconds=1.0, left_over=0)
    ahead.stepped(waited_seconds=0.0, step_seconds=1.0, left_over=100)
    assert ahead.limit == 299


def test_with_nothing_left_over_and_no_wait_it_stays():
    ahead = filled(batch_size=16, max_staleness=4)
    ahead.stepped(waited_seconds=1.0, step_seconds=2.0, left_over=0)
    for _ in range(1000):
        ahead.stepped(waited_seconds=0.0, step_seconds=2.0, left_over=0)
    assert ahead.limit == 40


# ------------------------------------------------------------------------------------------------------------- bounds


@given(st.integers(1, 200), st.integers(0, 16), st.lists(STEPS))
def test_any_steps_leave_room_for_a_batch_beside_the_one_in_training_and_keep_to_rule_1(batch_size, eta, steps):
    ahead = RunAhead(batch_size, eta)
    for step in steps:
        ahead.stepped(*step)
        assert batch_size * min(2, eta + 1) <= ahead.limit <= batch_size * (eta + 1)


@given(st.integers(1, 3), st.integers(0, 3), st.lists(STEPS, min_size=1, max_size=20))
def test_after_any_steps_a_run_goes_on(batch_size, eta, steps):
    class Misled(RunAhead):
        def stepped(self, waited_seconds: float, step_seconds: float, left_over: int) -> None:
            super().stepped(*steps[simulation.ledger.version % len(steps)])

    run = Run(batch_size, eta, capacity=1, slots=1, spread=1.0, steps=20)
    simulation = Simulation(run, Misled(batch_size, eta))
    simulation.result()
    assert simulation.ledger.version == 20
    check_invariants(simulation.ledger.state)


def test_one_group_a_batch_and_no_staleness_train_one_after_the_other():
    furthest, held = run_both(Run(batch_size=1, max_staleness=0, capacity=1, slots=4, spread=0.5, steps=50))
    assert held.staleness == 0
    assert held.seconds == furthest.seconds


@given(st.lists(STEPS, max_size=20), STEPS)
def test_a_restarted_master_goes_on_where_it_was(steps, step):
    ahead, restarted = RunAhead(16, 4), RunAhead(16, 4)
    for earlier in steps:
        ahead.stepped(*earlier)
    restarted.load(json.loads(json.dumps(ahead.dump())))
    assert restarted.limit == ahead.limit
    for pair in (ahead, restarted):
        pair.stepped(*step)
    assert restarted.dump() == ahead.dump()


def test_a_dump_of_a_run_with_a_wider_bound_is_brought_within_this_one():
    wide, narrow = RunAhead(16, 8), RunAhead(16, 2)
    for _ in range(20):
        wide.stepped(waited_seconds=1.0, step_seconds=1.0, left_over=0)
    narrow.load(wide.dump())
    assert narrow.limit == 48
