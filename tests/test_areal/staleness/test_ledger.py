"""The ledger: sentences about single rules, then arbitrary sequences of commands, then mutants that must be caught."""

from __future__ import annotations

import heapq
import json
import operator
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actors.gateway.ledger_sessions import LedgerSessions
from areal.staleness import ledger_records
from areal.staleness.invariants import check_invariants
from areal.staleness.leases import Leases
from areal.staleness.ledger import Ledger, ReportAnswer, RunEnded, Schedule, Waiting, schedulable
from areal.staleness.ledger_records import event_of, event_record, snapshot_of
from areal.staleness.ledger_state import (
    EXPIRED,
    LEASE_EXPIRED,
    RELEASED,
    Admitted,
    Batch,
    BatchLogged,
    Checkpointed,
    Committed,
    Discarded,
    Event,
    GroupState,
    LedgerError,
    LedgerGroup,
    LedgerSettings,
    LedgerState,
    Opened,
    OwnerChanged,
    Ready,
    Renewed,
    Requeued,
    Room,
    Started,
)

LEASE = 30.0


def make_settings(**changes: object) -> LedgerSettings:
    defaults = LedgerSettings(
        batch_size=2, max_staleness=1, on_straggler="wait", steps=100, max_attempts=3, on_failed_sample="requeue"
    )
    return replace(defaults, **changes)


def make(**changes: object) -> Ledger:
    return new(make_settings(**changes))


def new(settings: LedgerSettings, journal: Callable[[Event], None] | None = None) -> Ledger:
    return Ledger(LedgerState(settings, journal))


def admit(ledger: Ledger, n: int, owner: str = "manager/0#1") -> list[str]:
    return [permit.group_id for permit in ledger.admit(owner, n, now=0.0, lease_seconds=LEASE)]


def finish(ledger: Ledger, *group_ids: str, start: int | None = None) -> None:
    for group_id in group_ids:
        row = ledger.state.groups.get(group_id)
        assert row is not None
        assert ledger.ready(group_id, row.admission_version if start is None else start) is ReportAnswer.ACCEPTED


def replay(events: list[Event], settings: LedgerSettings) -> Ledger:
    """The ledger that emitted `events`."""
    ledger = new(settings)
    for event in events:
        ledger.state.apply(event)
    return ledger


def load(dump: dict[str, Any]) -> Ledger:
    return Ledger(ledger_records.state_of(dump))


def unbatched(ledger: Ledger) -> list[LedgerGroup]:
    """The groups that are in no batch, earliest deadline first."""
    groups = [
        group for row in snapshot_of(ledger.state)["groups"] if (group := ledger.state.groups.get(row["group_id"]))
    ]
    groups = [group for group in groups if group.state is not GroupState.BATCHED]
    return sorted(groups, key=lambda group: (group.deadline, group.prompt_index, group.group_id))


def train(ledger: Ledger) -> tuple[str, ...]:
    batch = ledger.next_batch(ledger.version)
    assert isinstance(batch, Batch), batch
    ledger.commit(batch.version)
    return batch.group_ids


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def state_of(ledger: Ledger) -> dict[str, Any]:
    """All but what its owner has set."""
    state, groups = ledger.state, ledger.state.groups
    parts = {**vars(state), **vars(groups), **vars(groups.lines), **vars(state.prompts), **vars(state.steps)}
    objects = ("journal", "groups", "lines", "prompts", "steps", "room")
    return {name: value for name, value in parts.items() if name not in objects} | {"order": list(groups._rows)}


def all_but_the_story(ledger: Ledger) -> dict[str, Any]:
    return state_of(ledger) | {"_story": None}


# --------------------------------------------------------------------------------------------------------- admission


def test_no_more_than_eta_plus_one_batches_are_alive():
    ledger = make(batch_size=2, max_staleness=3)
    assert len(admit(ledger, 100)) == 8
    assert admit(ledger, 1) == []


def test_with_eta_zero_nothing_is_admitted_while_a_batch_is_trained():
    ledger = make(max_staleness=0)
    finish(ledger, *admit(ledger, 100))
    ledger.next_batch(0)
    assert ledger.state.room.for_rows == 0
    ledger.commit(0)
    assert ledger.state.room.for_rows == 2


def test_a_permit_carries_the_version_of_its_admission():
    ledger = make()
    finish(ledger, *admit(ledger, 2))
    train(ledger)
    assert [permit.min_version for permit in ledger.admit("m", 1, 0.0, LEASE)] == [1]


def test_discards_give_capacity_back_and_another_prompt_is_admitted():
    ledger = make()
    first = admit(ledger, 4)
    assert ledger.discard(first[0], "all samples alike") is ReportAnswer.ACCEPTED
    assert admit(ledger, 4) == ["g4.0"]
    assert ledger.state.counters.discarded == {"all samples alike": 1}


def test_no_group_is_admitted_that_the_run_cannot_train():
    ledger = make(batch_size=2, max_staleness=4, steps=2)
    groups = admit(ledger, 100)
    assert len(groups) == 4
    finish(ledger, *groups)
    train(ledger)
    assert ledger.state.room.for_rows == 0
    train(ledger)
    assert ledger.next_batch(2) == RunEnded(2)
    assert len(ledger.state.groups) == 0


def test_what_was_admitted_for_more_steps_is_left_over_and_trained_once_there_are_steps_again():
    events: list[Event] = []
    settings = make_settings(batch_size=2, max_staleness=2, steps=9)
    ledger = new(settings, events.append)
    finish(ledger, *admit(ledger, 100))
    first = train(ledger)
    ledger.change_settings(replace(settings, steps=2))
    assert (len(ledger.state.groups), ledger.state.room.for_rows) == (4, 0)
    train(ledger)
    assert ledger.next_batch(2) == RunEnded(2)
    check_invariants(ledger.state)
    assert state_of(replay(events, settings)) == state_of(ledger)
    ledger.change_settings(replace(settings, steps=4))
    assert ledger.state.room.for_rows == 2
    finish(ledger, *admit(ledger, 100))
    trained = [*first, *train(ledger), *train(ledger)]
    assert trained == [f"g{n}.0" for n in (0, 1, 4, 5, 6, 7)]


def test_no_step_is_committed_beyond_the_last_one():
    ledger = make(steps=9)
    finish(ledger, *admit(ledger, 100))
    train(ledger)
    ledger.next_batch(1)
    ledger.change_settings(make_settings(steps=1))
    assert ledger.next_batch(1) == RunEnded(1)
    with pytest.raises(LedgerError, match="does not fit the state at version 1"):
        ledger.commit(1)
    with pytest.raises(LedgerError, match="does not fit the state at version 1"):
        ledger.change_settings(make_settings(steps=0))


@pytest.mark.parametrize("bounds", [(1, 3), (3, 1)])
def test_a_group_keeps_the_bound_of_its_admission(bounds: tuple[int, int]):
    events: list[Event] = []
    earlier, later = (make_settings(batch_size=1, max_staleness=bound) for bound in bounds)
    ledger = new(earlier, events.append)
    old = admit(ledger, 2)
    ledger.change_settings(later)
    recent = admit(ledger, 100)
    assert len(recent) == max(0, later.max_staleness + 1 - 2)
    assert [group.deadline for group in unbatched(ledger)] == sorted(bounds[:1] * len(old) + bounds[1:] * len(recent))
    # It would be the same if the settings were not events.
    assert state_of(replay(events, later)) != state_of(ledger)
    assert state_of(replay(events, earlier)) == state_of(ledger)


def test_the_row_of_a_prompt_is_chosen_once_and_outlives_replays_dumps_and_attempts():
    events: list[Event] = []
    ledger = new(make_settings(max_staleness=2), events.append)
    ledger.row_of_prompt = lambda prompt: 70 + prompt % 2
    assert [permit.row for permit in ledger.admit("manager/0#1", 3, 0.0, 30.0)] == [70, 71, 70]
    ledger.leases.release("manager/0#1")
    for copy in (replay(events, ledger.state.settings), load(through_json(snapshot_of(ledger.state)))):
        permits = copy.admit("manager/0#2", 4, 0.0, 30.0)
        rows = [(permit.prompt_index, permit.row) for permit in permits]
        assert rows[:3] == [(0, 70), (1, 71), (2, 70)]
        assert rows[3:] == [(3, 3)] * (len(rows) - 3), "without a sampler a prompt has its own row"


def test_requeued_prompts_come_first_and_oldest_first():
    ledger = make()
    first = admit(ledger, 4)
    ledger.failed(first[2], "manager/0#1", "reward down")
    ledger.failed(first[1], "manager/0#1", "reward down")
    assert admit(ledger, 3) == ["g2.1", "g1.1"]


# ------------------------------------------------------------------------------------------------------------ signal


def test_a_group_without_signal_is_discarded_once_it_is_ready_and_its_place_is_free():
    ledger = make(filter_zero_signal=True)
    dull, *further_permits = admit(ledger, 4)
    assert ledger.ready(dull, 0, signal=False) is ReportAnswer.FILTERED
    assert ledger.ready(dull, 0, signal=False) is ReportAnswer.GONE, "a repeat changes nothing"
    assert ledger.state.counters.discarded == {"zero signal": 1}
    assert not ledger.state.needs_payload(dull)
    assert admit(ledger, 4) == ["g4.0"]
    finish(ledger, *further_permits[:2])
    assert train(ledger) == tuple(further_permits[:2])


def test_without_the_filter_a_group_without_signal_is_trained():
    ledger = make()
    groups = admit(ledger, 2)
    for group_id in groups:
        assert ledger.ready(group_id, 0, signal=False) is ReportAnswer.ACCEPTED
    assert train(ledger) == tuple(groups)


def test_a_filter_that_is_turned_on_later_leaves_ready_groups_alone():
    ledger = make()
    groups = admit(ledger, 3)
    for group_id in groups:
        ledger.ready(group_id, 0, signal=False)
    ledger.next_batch(0)
    ledger.change_settings(replace(ledger.state.settings, filter_zero_signal=True))
    for group_id in groups:
        assert ledger.ready(group_id, 0, signal=False) is ReportAnswer.UNCHANGED
    assert train(ledger) == tuple(groups[:2])


# ------------------------------------------------------------------------------------------------------------ leases


def test_a_silent_owner_loses_its_groups_and_hears_of_it_when_it_renews():
    ledger = make()
    mine = admit(ledger, 1, "a")
    further_permits = admit(ledger, 1, "b")
    assert ledger.leases.renew("b", further_permits, now=20.0, lease_seconds=LEASE) == []
    assert ledger.leases.expire(now=LEASE) == mine
    assert ledger.leases.renew("a", mine, now=31.0, lease_seconds=LEASE) == mine
    assert ledger.leases.renew("a", further_permits, now=31.0, lease_seconds=LEASE) == further_permits
    assert ledger.state.counters.requeued == {"lease expired": 1}


def test_permits_that_nobody_got_are_granted_again_without_a_failure():
    ledger = make()
    mine, their_permits = admit(ledger, 2, "a"), admit(ledger, 1, "b")
    finish(ledger, mine[1])
    assert ledger.leases.withdraw("a", [*mine, *their_permits]) == mine[:1]
    assert ledger.state.counters.requeued == {"its permit was not answered": 1}
    assert admit(ledger, 1, "b") == [mine[0].replace(".0", ".1")]


def test_a_ready_group_outlives_its_owner():
    ledger = make()
    groups = admit(ledger, 2)
    finish(ledger, *groups)
    assert ledger.leases.expire(now=1e9) == []
    assert ledger.leases.release("manager/0#1") == []
    assert ledger.leases.renew("manager/0#1", groups, 0.0, LEASE) == []
    assert train(ledger) == tuple(groups)


def test_an_owner_that_leaves_returns_its_leases_at_once():
    ledger = make()
    mine, their_permits = admit(ledger, 1, "a"), admit(ledger, 1, "b")
    assert ledger.leases.release("a") == mine
    assert ledger.state.groups.get(their_permits[0]) is not None


def test_the_alive_groups_of_an_owner_are_those_it_holds_leases_of():
    ledger = make()
    (ready,), (their_permits,), mine = admit(ledger, 1, "a"), admit(ledger, 1, "b"), admit(ledger, 2, "a")
    finish(ledger, ready)
    leased = [[group.group_id for group in ledger.state.groups.leased(owner)] for owner in ("a", "b", "c")]
    assert leased == [mine, [their_permits], []]


def test_leases_do_not_run_out_because_the_master_was_away():
    ledger = make()
    admit(ledger, 3)
    ledger.leases.renew_all(now=1000.0, lease_seconds=LEASE)
    assert ledger.leases.expire(now=1020.0) == []


def test_a_group_whose_lease_was_lost_may_have_older_samples_as_far_as_all_are_trained_in_time():
    ledger = make(batch_size=1, max_staleness=2)
    slow, middle, quick = admit(ledger, 3)
    finish(ledger, quick)
    train(ledger)
    ledger.leases.release("manager/0#1")
    first, second, _ = admit(ledger, 3, "manager/1#1")
    assert (first, second) == ("g0.1", "g1.1")
    assert ledger.reuse(first, [1, 0, 0]) == 0
    assert ledger.state.groups[first].deadline == 2
    assert ledger.reuse(second, [0]) == 0, "the steps 1 and 2 are left for both"
    assert ledger.reuse(first, [0]) == 0, "once more"
    assert ledger.ready(first, 0) is ledger.ready(second, 0) is ReportAnswer.ACCEPTED
    assert ledger.reuse(first, [0]) is None, "it is complete"
    assert train(ledger) + train(ledger) == (first, second)
    assert ledger.reuse("g2.0", [0]) is ledger.reuse("g77.0", []) is None


def test_stored_samples_that_would_make_a_group_late_stay_out_of_it():
    ledger = make(batch_size=1, max_staleness=1)
    slow, quick = admit(ledger, 2)
    finish(ledger, quick)
    train(ledger)
    ledger.leases.release("manager/0#1")
    again, new = admit(ledger, 2, "manager/1#1")
    finish(ledger, new)
    ledger.next_batch(1)
    assert ledger.reuse(again, [0, 1]) == 1, "step 1, the last one for a sample of version 0, has its batch"
    with pytest.raises(LedgerError, match="start version 0 is not between 1 and 1"):
        ledger.ready(again, 0)
    assert ledger.ready(again, 1) is ReportAnswer.ACCEPTED


def test_an_attempt_after_one_that_failed_begins_anew():
    ledger = make()
    (group_id,) = admit(ledger, 1)
    ledger.failed(group_id, "manager/0#1", "reward")
    (permit,) = ledger.admit("manager/0#1", 1, now=0.0, lease_seconds=LEASE)
    assert not permit.resumed and ledger.reuse(permit.group_id, [0]) is None
    assert not ledger.state.needs_payload(group_id)
    ledger.leases.expire(LEASE + 1)
    assert ledger.state.needs_payload(permit.group_id), "while its prompt waits"
    (permit,) = ledger.admit("manager/0#1", 1, now=0.0, lease_seconds=LEASE)
    assert permit.resumed and ledger.state.needs_payload("g0.1"), "and until the next attempt is complete"
    finish(ledger, "g0.2")
    assert not ledger.state.needs_payload("g0.1")


def test_expiry_is_no_failure_of_the_prompt():
    ledger = make(max_attempts=1)
    for _ in range(5):
        admit(ledger, 1)
        ledger.leases.expire(now=1e9)
    assert ledger.state.counters.discarded == {}


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_prompt_that_fails_max_attempts_times_is_discarded_for_the_last_reason():
    ledger = make(max_attempts=2)
    (group_id,) = admit(ledger, 1)
    ledger.failed(group_id, "manager/0#1", "timeout")
    (group_id,) = admit(ledger, 1)
    ledger.failed(group_id, "manager/0#1", "cannot be scored")
    assert ledger.state.counters.requeued == {"timeout": 1}
    assert ledger.state.counters.discarded == {"cannot be scored": 1}
    assert admit(ledger, 1) == ["g1.0"]


def test_failed_samples_are_discarded_where_so_configured():
    ledger = make(on_failed_sample="discard")
    (group_id,) = admit(ledger, 1)
    ledger.failed(group_id, "manager/0#1", "timeout")
    assert ledger.state.counters.discarded == {"timeout": 1}


# ----------------------------------------------------------------------------------------------- repeats and mistakes


def test_reports_about_groups_that_are_gone_say_so():
    ledger = make()
    (group_id,) = admit(ledger, 1)
    ledger.discard(group_id, "filtered")
    for unknown in (group_id, "g77.0"):
        assert ledger.started(unknown, "manager/0#1", 0) is ReportAnswer.GONE
        assert ledger.ready(unknown, 0) is ReportAnswer.GONE
        assert ledger.failed(unknown, "manager/0#1", "late") is ReportAnswer.GONE
        assert ledger.discard(unknown, "late") is ReportAnswer.GONE


def test_a_trained_group_keeps_its_payload_until_a_checkpoint_covers_it():
    ledger = make()
    groups = admit(ledger, 2)
    finish(ledger, *groups)
    train(ledger)
    assert ledger.ready(groups[0], 0) is ReportAnswer.UNCHANGED
    assert ledger.state.needs_payload(groups[0])
    assert ledger.checkpointed(1) is ReportAnswer.ACCEPTED
    assert ledger.checkpointed(1) is ReportAnswer.UNCHANGED
    assert ledger.ready(groups[0], 0) is ReportAnswer.GONE
    assert not ledger.state.needs_payload(groups[0])


def test_a_payload_is_needed_while_the_group_is_alive():
    ledger = make()
    a, b, c, d = admit(ledger, 4)
    finish(ledger, a, b, c)
    ledger.next_batch(0)
    assert [ledger.state.needs_payload(group_id) for group_id in (a, b, c, d, "g77.0")] == [
        True,
        True,
        True,
        True,
        False,
    ]
    ledger.discard(c, "filtered")
    assert not ledger.state.needs_payload(c)


def test_only_the_owner_of_a_group_reports_on_it():
    ledger = make()
    (group_id,) = admit(ledger, 1, "a")
    assert ledger.started(group_id, "b", 0) is ReportAnswer.GONE
    assert ledger.failed(group_id, "b", "not mine") is ReportAnswer.GONE
    assert ledger.state.groups.get(group_id) is not None


def test_a_failure_reported_after_the_group_is_ready_changes_nothing():
    ledger = make()
    (group_id,) = admit(ledger, 1)
    finish(ledger, group_id)
    assert ledger.failed(group_id, "manager/0#1", "no acknowledgement") is ReportAnswer.UNCHANGED
    assert ledger.state.groups.count(GroupState.READY) == 1


def test_a_logged_batch_never_changes():
    ledger = make()
    groups = admit(ledger, 4)
    finish(ledger, *groups[2:])
    batch = ledger.next_batch(0)
    finish(ledger, *groups[:2])
    assert ledger.next_batch(0) == batch
    with pytest.raises(LedgerError):
        ledger.discard(groups[2], "too late")
    ledger.commit(0)
    assert ledger.next_batch(0) == batch, "a restarted trainer redoes the same batch"


def test_a_commit_is_idempotent_and_skips_no_version():
    ledger = make()
    finish(ledger, *admit(ledger, 2))
    with pytest.raises(LedgerError):
        ledger.commit(0)
    ledger.next_batch(0)
    record = ledger.commit(0)
    assert ledger.commit(0) == record
    assert (ledger.version, record.staleness) == (1, (0, 0))
    with pytest.raises(LedgerError):
        ledger.commit(2)
    with pytest.raises(LedgerError):
        ledger.next_batch(2)


def test_start_versions_below_the_permit_or_above_the_policy_are_errors_that_tell_the_story():
    ledger = make(max_staleness=2)
    finish(ledger, *admit(ledger, 2))
    train(ledger)
    (group_id,) = admit(ledger, 1)
    with pytest.raises(LedgerError, match="Admitted.*g2.0"):
        ledger.started(group_id, "manager/0#1", 0)
    with pytest.raises(LedgerError):
        ledger.ready(group_id, 2)


def test_the_least_start_version_counts():
    ledger = make(max_staleness=2)
    (slow, *further_permits) = admit(ledger, 5)
    finish(ledger, *further_permits)
    train(ledger)
    assert ledger.started(slow, "manager/0#1", 1) is ReportAnswer.ACCEPTED
    assert ledger.started(slow, "manager/0#1", 1) is ReportAnswer.UNCHANGED
    assert ledger.started(slow, "manager/0#1", 0) is ReportAnswer.ACCEPTED
    row = ledger.state.groups.get(slow)
    assert row is not None and row.deadline == 2


def test_a_start_version_that_falls_too_late_voids_the_attempt_instead_of_the_bound():
    ledger = make(batch_size=1, max_staleness=1)
    second, slow = admit(ledger, 2)
    finish(ledger, second)
    train(ledger)
    ledger.started(slow, "manager/0#1", 1)
    (newer,) = admit(ledger, 1)
    finish(ledger, newer)
    assert train(ledger) == (newer,), "the slow group has until version 2"
    assert ledger.ready(slow, 0) is ReportAnswer.GONE
    assert ledger.state.counters.requeued == {"start version fell": 1}


def test_a_journal_that_fails_leaves_the_ledger_as_it_was():
    def full(event: Event) -> None:
        raise OSError("no space left on device")

    ledger = make()
    ledger.state.journal = full
    with pytest.raises(OSError, match="no space"):
        admit(ledger, 1)
    assert state_of(ledger) == state_of(new(ledger.state.settings))


def test_an_event_that_does_not_fit_is_refused_with_nothing_changed():
    ledger = make()
    for event in (Ready("g0.0", 0), Committed(0), BatchLogged(0, ("g0.0",)), Admitted("g5.0", 5, 0, "a", 0, 1.0, 5)):
        with pytest.raises(LedgerError):
            ledger.state.apply(event)
    assert state_of(ledger) == state_of(make())


def test_every_kind_of_event_comes_back_from_its_record():
    events = [
        (make_settings(), "ledger_settings"),
        (Admitted("g3.1", 3, 1, "manager/0#1", 7, 30.5, 9), "admitted"),
        (Opened("s2.0", "user 1", "gateway/0#1", 7, 30.5), "opened"),
        (OwnerChanged(("s2.0",), "", None), "owner_changed"),
        (Renewed(("g3.1", "g4.0"), 60.0), "renewed"),
        (Started("g3.1", 7), "started"),
        (Ready("g3.1", 7), "ready"),
        (Requeued("g3.1", "timeout", failed=True), "requeued"),
        (Discarded("g3.1", "filtered"), "discarded"),
        (BatchLogged(7, ("g3.1", "g4.0")), "batch_logged"),
        (Committed(7), "committed"),
        (Checkpointed(8), "checkpointed"),
    ]
    for event, kind in events:
        record = event_record(event)
        assert record[0] == kind
        assert event_of(*through_json(record)) == event


def test_among_groups_of_one_deadline_the_older_prompt_is_trained_first():
    ledger = make(batch_size=2)
    first, *_ = admit(ledger, 3)
    ledger.failed(first, "manager/0#1", "timeout")
    finish(ledger, "g1.0", "g2.0", *admit(ledger, 1))
    assert train(ledger) == ("g0.1", "g1.0")


def test_a_replay_rebuilds_the_story_too_and_a_dump_starts_it_anew():
    events: list[Event] = []
    ledger = new(make_settings(), events.append)
    finish(ledger, *admit(ledger, 2))
    ledger.next_batch(0)
    assert state_of(replay(events, ledger.state.settings)) == state_of(ledger)
    loaded = load(snapshot_of(ledger.state))
    assert ledger.state.story("g0.0") and not loaded.state.story("g0.0")
    loaded.commit(0)
    assert not len(loaded.state.groups) and len(ledger.state.groups) == 2, "a dump shares nothing with its ledger"


def test_memory_does_not_grow_with_the_run():
    ledger = make(steps=1000)
    for version in range(500):
        finish(ledger, *admit(ledger, 2))
        train(ledger)
        ledger.checkpointed(version)
    assert not len(ledger.state.groups) and len(ledger.state.steps.versions) <= 2
    assert not ledger.state.prompts.requeued
    assert len(ledger.state.steps._groups) <= 4 and not ledger.state.groups.lines.deadlines()


# -------------------------------------------------------------------------------------------------------- stragglers


def overtake(ledger: Ledger, slow: str) -> Batch | Waiting | RunEnded:
    """Train all but `slow` until it is `eta + 1` versions old or the ledger waits for it."""
    for _ in range(ledger.state.settings.max_staleness + 1):
        for group in unbatched(ledger) + [g for i in admit(ledger, 100) if (g := ledger.state.groups.get(i))]:
            if group.group_id != slow and group.state is GroupState.ADMITTED:
                finish(ledger, group.group_id)
        batch = ledger.next_batch(ledger.version)
        if not isinstance(batch, Batch):
            return batch
        ledger.commit(batch.version)
    finish(ledger, slow, start=0)
    return ledger.next_batch(ledger.version)


def test_the_papers_admission_alone_trains_a_straggler_past_the_bound():
    ledger = make(on_straggler="admission_only", max_staleness=3)
    slow = admit(ledger, 100)[0]
    batch = overtake(ledger, slow)
    assert isinstance(batch, Batch) and slow in batch.group_ids
    record = ledger.commit(batch.version)
    assert record.max_staleness == 4
    assert sum(record.staleness_histogram) == 2 and record.staleness_histogram[4] == 1


def test_wait_holds_the_step_that_would_leave_the_straggler_behind():
    ledger = make(on_straggler="wait", max_staleness=3)
    slow = admit(ledger, 100)[0]
    assert overtake(ledger, slow) == Waiting(3, ready=7, needed=2, stragglers=(slow,))
    assert str(ledger.schedule.waiting) == "step 3: 7 ready, 2 needed, waiting for g0.0"
    finish(ledger, slow, start=0)
    batch = ledger.next_batch(3)
    assert isinstance(batch, Batch) and batch.group_ids[0] == slow
    assert ledger.commit(3).max_staleness == 3


def test_requeue_aborts_the_straggler_and_its_owner_hears_of_it():
    ledger = make(on_straggler="requeue", max_staleness=3)
    slow = admit(ledger, 100)[0]
    for _ in range(3):
        finish(ledger, *(g.group_id for g in unbatched(ledger)[1:] if g.state is GroupState.ADMITTED))
        train(ledger)
        admit(ledger, 100)
    finish(ledger, *(g.group_id for g in unbatched(ledger)[1:] if g.state is GroupState.ADMITTED))
    assert slow not in train(ledger)
    assert ledger.state.counters.requeued == {"straggler": 1}
    assert ledger.leases.renew("manager/0#1", [slow], 0.0, LEASE) == [slow]
    assert ledger.ready(slow, 0) is ReportAnswer.GONE
    assert admit(ledger, 1) == ["g0.1"]


def test_mask_trains_the_straggler_and_names_the_tokens_that_count():
    ledger = make(on_straggler="mask", max_staleness=3)
    slow = admit(ledger, 100)[0]
    batch = overtake(ledger, slow)
    assert isinstance(batch, Batch) and batch.group_ids[0] == slow
    assert (batch.version, batch.min_token_version) == (4, 1)


def test_an_unfinished_group_that_still_has_time_holds_nothing_up():
    ledger = make(batch_size=2, max_staleness=2)
    groups = admit(ledger, 6)
    finish(ledger, *groups[4:])
    assert train(ledger) == tuple(groups[4:])


def test_many_unfinished_groups_of_one_deadline_hold_a_step_before_that_deadline():
    ledger = make(batch_size=1, max_staleness=2)
    a, b, c = admit(ledger, 3)
    finish(ledger, c)
    assert train(ledger) == (c,)
    (d,) = admit(ledger, 1)
    finish(ledger, d)
    assert ledger.next_batch(1) == Waiting(1, ready=1, needed=1, stragglers=(a,)), "a and b both end at version 2"
    assert schedulable([2, 2], 1, 1) and not schedulable([2, 2], 2, 1)


# ---------------------------------------------------------------------------------------------------------- sessions


def open_sessions(ledger: Ledger, n: int, owner: str = "gateway/0#1") -> list[str]:
    opened = [LedgerSessions(ledger.state).open(f"user {i}", owner, now=0.0, lease_seconds=LEASE) for i in range(n)]
    return [group.group_id for group in opened if group]


@pytest.mark.parametrize("on_straggler", ["wait", "requeue", "mask", "admission_only"])
def test_an_open_session_expires_at_its_deadline_and_no_step_waits_for_it(on_straggler: str):
    ledger = make(max_sessions=1, on_straggler=on_straggler)
    (session,) = open_sessions(ledger, 1)
    for _ in range(2):
        finish(ledger, *admit(ledger, 2))
        train(ledger)
    assert ledger.state.groups.get(session) is None and ledger.state.story(session)[-1] == Discarded(session, EXPIRED)
    assert ledger.ready(session, 0) is ReportAnswer.GONE, "its reward has come too late"


def test_a_session_with_a_version_that_is_served_begins_with_it_and_expires_by_it_unless_it_is_too_old():
    ledger = make(batch_size=1, max_staleness=2, max_sessions=2)
    for _ in range(3):
        finish(ledger, *admit(ledger, 1))
        train(ledger)
    assert LedgerSessions(ledger.state).open("a", "gateway/0#1", 0.0, LEASE, served=0) is None, "no step is left for it"
    group = LedgerSessions(ledger.state).open("a", "gateway/0#1", 0.0, LEASE, served=1)
    assert (group.start_version, group.deadline) == (1, 3)
    assert LedgerSessions(ledger.state).open("b", "gateway/0#1", 0.0, LEASE, served=1) is None, (
        "two would have one step"
    )
    assert ledger.started(group.group_id, "gateway/0#1", 2) is ReportAnswer.UNCHANGED
    assert ledger.ready(group.group_id, 2) is ReportAnswer.ACCEPTED
    assert train(ledger) == (group.group_id,) and ledger.commit(3).staleness == (1,), "users have got a newer one"


def test_a_session_is_not_expired_while_a_step_waits_for_a_row_anyway():
    ledger = make(batch_size=1, max_staleness=2, max_sessions=1)
    slow, quick = admit(ledger, 2)
    finish(ledger, quick)
    train(ledger)
    (session,) = open_sessions(ledger, 1)
    for _ in range(2):
        finish(ledger, *admit(ledger, 1))
        waiting = ledger.next_batch(ledger.version)
        if isinstance(waiting, Batch):
            ledger.commit(1)
    assert isinstance(waiting, Waiting) and waiting.stragglers == (slow,)
    finish(ledger, slow)
    assert train(ledger) == (slow,)
    assert ledger.state.groups.get(session), "with the row in time, there is still a step for it"


def test_a_session_with_a_reward_is_trained_like_any_group_and_signal_is_not_asked_of_it():
    ledger = make(max_sessions=1, filter_zero_signal=True)
    (session,), (group,) = open_sessions(ledger, 1), admit(ledger, 1)
    assert ledger.ready(session, 0, signal=False) is ReportAnswer.ACCEPTED
    finish(ledger, group)
    assert train(ledger) == (group, session)
    assert ledger.state.groups.of_session("user 0") == []


def test_sessions_have_their_share_and_rows_theirs():
    ledger = make(batch_size=2, max_staleness=1, max_sessions=2)
    assert (ledger.state.room.for_rows, ledger.state.room.for_sessions) == (2, 2)
    assert open_sessions(ledger, 9) == ["s0.0", "s1.0"] and admit(ledger, 9) == ["g0.0", "g1.0"]
    alone = make(batch_size=2, max_staleness=1, max_sessions=4)
    assert (alone.state.room.for_rows, alone.state.room.for_sessions) == (0, 4)


def test_sessions_make_room_for_rows_in_the_last_step():
    ledger = make(batch_size=2, max_staleness=1, max_sessions=2, steps=2)
    finish(ledger, *admit(ledger, 2))
    sessions = open_sessions(ledger, 2)
    train(ledger)
    assert ledger.state.room.for_rows == 0
    assert isinstance(ledger.next_batch(1), Waiting)
    assert ledger.state.counters.discarded == {EXPIRED: 2} and ledger.state.room.for_rows == 2
    assert not any(map(ledger.state.groups.get, sessions))


def test_a_session_outlives_its_owner_and_is_adopted_once():
    ledger = make(max_sessions=1)
    (session,) = open_sessions(ledger, 1, "gateway/0#1")
    ledger.leases.expire(now=LEASE)
    assert LedgerSessions(ledger.state).ownerless() == [session] and ledger.leases.renew(
        "gateway/0#1", [session], 40.0, LEASE
    ) == [session]
    assert [
        group.group_id for group in LedgerSessions(ledger.state).adopt([session, "s9.0"], "gateway/1#1", 40.0, LEASE)
    ] == [session]
    assert LedgerSessions(ledger.state).adopt([session], "gateway/2#1", 40.0, LEASE) == []
    assert ledger.leases.release("gateway/1#1") == [session] and LedgerSessions(ledger.state).ownerless() == [session]
    ledger.leases.renew_all(50.0, LEASE)
    assert ledger.leases.expire(now=1e9) == [], "nobody holds it"
    assert ledger.ready(session, 0) is ReportAnswer.ACCEPTED, "its samples may have been on their way"


def test_a_session_is_never_re_queued():
    ledger = make(batch_size=1, max_staleness=1, max_sessions=2)
    failed, unanswered = open_sessions(ledger, 2)
    assert ledger.failed(failed, "gateway/0#1", "prompt", counts=False) is ReportAnswer.ACCEPTED
    assert ledger.leases.withdraw("gateway/0#1", [unanswered]) == [unanswered]
    assert ledger.state.counters.discarded.total() == 2 and not ledger.state.counters.requeued
    assert ledger.state.open_prompts() == []


# ----------------------------------------------------------------------------------------------- arbitrary sequences

OWNERS = ("manager/0#1", "manager/1#1")


class LedgerMachine(RuleBasedStateMachine):
    """Any order of commands and repeats. The model keeps its own account from the answers and the journal."""

    @initialize(
        batch_size=st.integers(1, 4),
        max_staleness=st.integers(0, 4),
        on_straggler=st.sampled_from(["wait", "wait", "requeue", "mask", "admission_only"]),
        steps=st.integers(1, 8),
        max_attempts=st.integers(1, 3),
        on_failed_sample=st.sampled_from(["requeue", "discard"]),
        filter_zero_signal=st.booleans(),
    )
    def begin(self, **chosen: object) -> None:
        self.events: list[Event] = []
        self.first_settings = self.settings = LedgerSettings(**chosen)
        self.ledger = new(self.settings, self.events.append)
        self.now = 0.0
        self.leases: dict[str, str] = {}
        """Owners of the groups that are admitted and not known to be ready."""
        self.ready_groups: set[str] = set()
        self.admitted_at: dict[str, int] = {}
        self.bounds: dict[str, int] = {}
        self.most_alive = (self.settings.max_staleness + 1) * self.settings.batch_size
        self.starts: dict[str, int] = {}
        self.batches: dict[int, tuple[str, ...]] = {}
        self.trained: list[str] = []
        self.pasts: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def remember(self) -> None:
        """A version is committed just now."""

    # -- what actors do

    @rule(owner=st.sampled_from(OWNERS), n=st.integers(1, 24))
    def admit(self, owner: str, n: int) -> None:
        for permit in self.ledger.admit(owner, n, self.now, LEASE):
            assert permit.group_id not in self.admitted_at
            self.admitted_at[permit.group_id] = self.ledger.version
            self.bounds[permit.group_id] = self.settings.max_staleness
            self.leases[permit.group_id] = owner

    def some_group(self, data: st.DataObject, groups: set[str] | None = None) -> str:
        """Often a live one; else any that ever was, or one that never was."""
        live = sorted(groups if groups is not None else self.leases)
        if live and data.draw(st.integers(0, 4)):
            return data.draw(st.sampled_from(live))
        return data.draw(st.sampled_from([*self.admitted_at, "g999.0"]))

    def some_start(self, data: st.DataObject, group_id: str) -> int:
        bounded = self.settings.on_straggler != "admission_only"
        return data.draw(st.integers(self.admitted_at.get(group_id, 0) if bounded else 0, self.ledger.version))

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        group_id = self.some_group(data)
        version = self.some_start(data, group_id)
        answer = self.ledger.started(group_id, self.leases.get(group_id, OWNERS[0]), version)
        if answer is ReportAnswer.GONE:
            self.leases.pop(group_id, None)
        elif group_id in self.leases:
            self.learn_start(group_id, version)

    @rule()
    def all_begin(self) -> None:
        """Every deadline is as late as it gets; what starts report after this can only shorten it."""
        for group_id, owner in list(self.leases.items()):
            if self.ledger.started(group_id, owner, self.ledger.version) is ReportAnswer.GONE:
                del self.leases[group_id]
            else:
                self.learn_start(group_id, self.ledger.version)

    def learn_start(self, group_id: str, version: int) -> None:
        self.starts[group_id] = min(version, self.starts.get(group_id, version))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group_id = self.some_group(data)
        self.report_ready(group_id, self.some_start(data, group_id), data.draw(st.booleans()))

    @rule(data=st.data())
    def finish_the_newest(self, data: st.DataObject) -> None:
        """The order that starves old groups."""
        newest = sorted(self.leases, key=lambda g: self.admitted_at[g])[-self.settings.batch_size :]
        for group_id in newest:
            self.report_ready(group_id, self.some_start(data, group_id))

    def report_ready(self, group_id: str, start: int, signal: bool = True) -> None:
        answer = self.ledger.ready(group_id, start, signal)
        assert answer is not ReportAnswer.FILTERED or (self.settings.filter_zero_signal and not signal)
        if answer is ReportAnswer.ACCEPTED:
            assert signal or not self.settings.filter_zero_signal or group_id.startswith("s")
            assert group_id in self.leases or group_id.startswith("s")
            if group_id.startswith("s"):
                self.starts.pop(group_id, None)
            self.learn_start(group_id, start)
            self.ready_groups.add(group_id)
        self.leases.pop(group_id, None)

    @rule(data=st.data())
    def reuse(self, data: st.DataObject) -> None:
        """Samples of earlier attempts, of any age, become some of a group."""
        group_id = self.some_group(data)
        versions = data.draw(st.lists(st.integers(0, self.ledger.version), max_size=4))
        oldest = self.ledger.reuse(group_id, versions)
        if oldest is None:
            return
        assert group_id in self.leases
        remaining = [e for e in self.events if isinstance(e, Requeued) and prompt_of(e.group_id) == prompt_of(group_id)]
        assert remaining[-1].reason in (LEASE_EXPIRED, RELEASED)
        start = min((version for version in versions if version >= oldest), default=None)
        if start is not None and start < self.admitted_at[group_id] and self.settings.on_straggler != "admission_only":
            self.learn_start(group_id, start)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def fail(self, data: st.DataObject, owner: str) -> None:
        group_id = self.some_group(data)
        if self.ledger.failed(group_id, owner, "cannot be scored") is ReportAnswer.ACCEPTED:
            assert self.leases.pop(group_id) == owner

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        group_id = self.some_group(data, self.ready_groups | set(self.leases))
        if any(group_id in batch for batch in self.batches.values()):
            return
        self.ledger.discard(group_id, "filtered")
        self.leases.pop(group_id, None)
        self.ready_groups.discard(group_id)

    @rule(owner=st.sampled_from(OWNERS), seconds=st.floats(0, 2 * LEASE))
    def time_passes(self, owner: str, seconds: float) -> None:
        """One owner renews in time, the other is as silent as the clock has it."""
        held = [group_id for group_id, holder in self.leases.items() if holder == owner]
        lost = self.ledger.leases.renew(owner, held, self.now, LEASE)
        self.now += min(seconds, LEASE - 1)
        expired = self.ledger.leases.expire(self.now)
        assert not set(held) & set(expired)
        for group_id in lost + expired:
            self.leases.pop(group_id, None)

    @precondition(lambda self: len(self.events) % 5 == 0)
    @rule(owner=st.sampled_from(OWNERS))
    def leave(self, owner: str) -> None:
        """Not at every turn, or no group would live long enough to be overtaken."""
        for group_id in self.ledger.leases.release(owner):
            self.leases.pop(group_id)

    @rule()
    def form_batch(self) -> None:
        version = self.ledger.version
        enough = self.ledger.state.groups.count(GroupState.READY) >= self.settings.batch_size
        alone = self.without_sessions() if enough and self.ledger.state.groups.count(GroupState.OPEN) else None
        answer = self.ledger.next_batch(version)
        for session in [group_id for group_id in self.leases if group_id.startswith("s")]:
            if self.ledger.state.groups.get(session) is None:
                self.leases.pop(session)
        if isinstance(answer, Batch):
            assert self.batches.setdefault(version, answer.group_ids) == answer.group_ids
            assert 0 < len(answer.group_ids) <= self.settings.batch_size
            self.ready_groups -= set(answer.group_ids)
        elif isinstance(answer, Waiting) and self.settings.on_straggler != "wait":
            assert not enough, "only `wait` waits with B groups ready"
        if isinstance(answer, Waiting) and alone:
            assert isinstance(alone.next_batch(version), Waiting), "a step waits for a session"
            assert not any(group_id.startswith("s") for group_id in answer.stragglers)

    def without_sessions(self) -> Ledger:
        """The ledger as it would be if no session was open."""
        ledger = self.from_a_dump()
        ledger.state.journal = None
        for row in snapshot_of(ledger.state)["groups"]:
            if row["state"] == GroupState.OPEN:
                ledger.discard(row["group_id"], "as if it had never been")
        return ledger

    @rule(data=st.data())
    def busy_step(self, data: st.DataObject) -> None:
        """All permits are taken, the newest groups finish, the rest is overtaken where the rules allow it."""
        self.admit(OWNERS[0], 1000)
        self.finish_the_newest(data)
        self.form_batch()
        if self.in_training():
            self.commit(1)

    def in_training(self) -> bool:
        """Whether there is a batch to commit. A resume with fewer steps takes it away."""
        return self.ledger.version in self.batches and self.ledger.version < self.settings.steps

    @precondition(lambda self: self.in_training())
    @rule(repeats=st.integers(1, 2))
    def commit(self, repeats: int) -> None:
        version = self.ledger.version
        records = [self.ledger.commit(version) for _ in range(repeats)]
        assert all(record.batch.group_ids == self.batches[version] for record in records)
        assert self.ledger.version == version + 1
        self.trained += self.batches[version]
        if self.settings.on_straggler in ("wait", "requeue"):
            ages = [version - self.starts[group_id] for group_id in self.batches[version]]
            bounds = [self.bounds[group_id] for group_id in self.batches[version]]
            assert all(map(operator.le, ages, bounds)), "a group was trained past the bound"
            assert records[0].staleness == tuple(ages)
        self.remember()

    @precondition(lambda self: self.ledger.version > 0)
    @rule(data=st.data())
    def redo_or_checkpoint(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, self.ledger.version))
        if version in self.ledger.state.steps.versions:
            answer = self.ledger.next_batch(version)
            assert isinstance(answer, Batch) and answer.group_ids == self.batches[version]
            self.ledger.commit(version)
        self.ledger.checkpointed(version)

    @rule()
    def master_restarts(self) -> None:
        """Whoever goes on from a dump is where the events, from the first one on, lead to."""
        again = replay(self.events, self.first_settings)
        assert all_but_the_story(again) == all_but_the_story(self.ledger)
        self.ledger = self.from_a_dump()

    def from_a_dump(self) -> Ledger:
        ledger = load(through_json(snapshot_of(self.ledger.state)))
        ledger.state.journal = self.ledger.state.journal
        return ledger

    # -- what always holds

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        admitted = sum(isinstance(event, Admitted | Opened) for event in self.events)
        remaining = sum(isinstance(event, Requeued | Discarded) for event in self.events)
        alive = admitted - remaining - len(self.trained)
        assert alive == len(self.ledger.state.groups) <= self.most_alive

    @invariant()
    def a_dump_holds_everything(self) -> None:
        assert all_but_the_story(self.from_a_dump()) == all_but_the_story(self.ledger)

    @invariant()
    def the_ledger_is_valid(self) -> None:
        check_invariants(self.ledger.state)

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        prompts = [prompt_of(group_id) for group_id in self.trained]
        prompts += [prompt_of(event.group_id) for event in self.events if isinstance(event, Discarded)]
        assert len(prompts) == len(set(prompts))

    def teardown(self) -> None:
        """From whatever state: complete what is alive and the run goes to its end, with every prompt accounted for."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(self.settings.steps + 1):
            self.complete_all()
            answer = self.ledger.next_batch(self.ledger.version)
            if isinstance(answer, Waiting) and not self.settings.sessions_alone:
                self.complete_all()  # sessions have made room for rows
                answer = self.ledger.next_batch(self.ledger.version)
            if isinstance(answer, RunEnded):
                break
            assert isinstance(answer, Batch), f"no progress: {answer}"
            self.form_batch()
            self.commit(1)
        else:
            raise AssertionError("the run does not end")
        discarded = {event.group_id for event in self.events if isinstance(event, Discarded) and event.reason}
        ends = [prompt_of(group_id) for group_id in discarded | set(self.trained)]
        for prompts in ([prompt for prompt in ends if prompt >= 0], [-1 - prompt for prompt in ends if prompt < 0]):
            assert sorted(prompts) == list(range(len(prompts))), "a prompt was lost"
        assert len(self.trained) > (self.settings.steps - 1) * self.settings.batch_size
        assert len(self.ledger.state.groups) == 0

    def complete_all(self) -> None:
        """As many groups as there is room for are complete. Beside rows, no session ever gets its reward."""
        self.admit(OWNERS[0], 1000)
        if isinstance(self, SessionMachine) and self.settings.sessions_alone:
            self.open_sessions(OWNERS[0], "a", 1000)
            self.adopt(OWNERS[0])
        for group_id in sorted(self.leases):
            if self.settings.sessions_alone or not group_id.startswith("s"):
                self.report_ready(group_id, self.ledger.version)


def prompt_of(group_id: str) -> int:
    number = int(group_id[1:].split(".")[0])
    return -1 - number if group_id.startswith("s") else number


class SessionMachine(LedgerMachine):
    """Users, too, open sessions."""

    @initialize(
        batch_size=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        on_straggler=st.sampled_from(["wait", "wait", "requeue", "mask", "admission_only"]),
        steps=st.integers(1, 8),
        max_attempts=st.integers(1, 3),
        on_failed_sample=st.sampled_from(["requeue", "discard"]),
        filter_zero_signal=st.booleans(),
        max_sessions=st.sampled_from([1, 3, 100]),
    )
    def begin(self, **chosen: object) -> None:
        super().begin(**chosen)

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from("abc"), n=st.integers(1, 4), age=st.integers(0, 3))
    def open_sessions(self, owner: str, name: str, n: int, age: int = 0) -> None:
        """age: of the version that users get."""
        served = max(0, self.ledger.version - age)
        for _ in range(n):
            if group := LedgerSessions(self.ledger.state).open(name, owner, self.now, LEASE, served):
                assert group.group_id not in self.admitted_at and self.ledger.state.groups.of_session(name)[-1] == group
                self.admitted_at[group.group_id] = served
                if served < self.ledger.version:
                    self.learn_start(group.group_id, served)
                self.bounds[group.group_id] = self.settings.max_staleness
                self.leases[group.group_id] = owner

    @precondition(lambda self: LedgerSessions(self.ledger.state).ownerless())
    @rule(owner=st.sampled_from(OWNERS))
    def adopt(self, owner: str) -> None:
        for group in LedgerSessions(self.ledger.state).adopt(
            [*LedgerSessions(self.ledger.state).ownerless(), *self.leases], owner, self.now, LEASE
        ):
            assert group.group_id not in self.leases
            self.leases[group.group_id] = owner


class ResumedMachine(LedgerMachine):
    """The run is also resumed, with other settings."""

    @rule(more_steps=st.integers(-3, 3), max_staleness=st.integers(0, 4))
    def resume(self, more_steps: int, max_staleness: int) -> None:
        self.master_restarts()
        steps = max(1, self.ledger.version, self.settings.steps + more_steps)
        self.settings = replace(self.settings, steps=steps, max_staleness=max_staleness)
        self.most_alive = max(len(self.ledger.state.groups), (max_staleness + 1) * self.settings.batch_size)
        self.ledger.change_settings(self.settings)

    def teardown(self) -> None:
        """With enough steps, all that earlier settings have left over is trained."""
        if hasattr(self, "ledger"):
            self.settings = replace(
                self.settings, steps=self.ledger.version + len(self.ledger.state.open_prompts()) + 1
            )
            self.ledger.change_settings(self.settings)
        super().teardown()


class RolledBackMachine(LedgerMachine):
    """The run also goes back to the state of an earlier version, without the payloads of some groups."""

    MOVES_BACK = ("events", "leases", "ready_groups", "admitted_at", "bounds", "starts", "batches", "trained")

    def remember(self) -> None:
        book = {name: getattr(self, name) for name in self.MOVES_BACK}
        self.pasts[self.ledger.version] = through_json(snapshot_of(self.ledger.state)), deepcopy(book)

    @precondition(lambda self: len(self.pasts) > 1)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.pasts)))
        dump, book = self.pasts[version]
        for name, past in deepcopy(book).items():
            setattr(self, name, past)
        self.pasts = {past: state for past, state in self.pasts.items() if past <= version}
        self.ledger = load(dump)
        self.ledger.state.journal = self.events.append
        lost = data.draw(st.sets(st.sampled_from(sorted(self.ready_groups)))) if self.ready_groups else set()
        for group_id in [*self.leases, *sorted(lost)]:
            if self.ledger.state.groups.get(group_id):  # owners learn only later that a group was re-queued
                gone = Discarded(group_id, "lost") if group_id.startswith("s") else Requeued(group_id, "lost", False)
                self.ledger.state.emit(gone)
        self.leases.clear()
        self.ready_groups -= lost


SEQUENCES = settings(
    max_examples=2 * settings.default.max_examples,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

TestAnySequence = LedgerMachine.TestCase
TestAnySequence.settings = SEQUENCES
TestAnySequenceWithSessions = SessionMachine.TestCase
TestAnySequenceWithSessions.settings = SEQUENCES
TestAnyResumedSequence = ResumedMachine.TestCase
TestAnyResumedSequence.settings = SEQUENCES
TestAnyRolledBackSequence = RolledBackMachine.TestCase
TestAnyRolledBackSequence.settings = SEQUENCES


# ----------------------------------------------------------------------------------------------------------- mutants


def no_gate() -> AbstractContextManager[None]:
    """Rule 3 is gone."""
    return patch.multiple(Schedule, stragglers=lambda schedule, chosen: [])


def gate_a_step_late() -> AbstractContextManager[None]:
    """Rule 3 counts the slots of the step in question."""
    stragglers = Schedule.stragglers

    def late(schedule: Schedule, chosen: list[LedgerGroup]) -> list[LedgerGroup]:
        schedule._state.version -= 1
        groups = stragglers(schedule, chosen)
        schedule._state.version += 1
        return groups

    return patch.multiple(Schedule, stragglers=late)


def gate_only_at_the_deadline() -> AbstractContextManager[None]:
    """Rule 3 is checked for d = i alone: the groups whose time is up now."""
    stragglers = Schedule.stragglers

    def at_the_deadline(schedule: Schedule, chosen: list[LedgerGroup]) -> list[LedgerGroup]:
        return [group for group in stragglers(schedule, chosen) if group.deadline == schedule._state.version]

    return patch.multiple(Schedule, stragglers=at_the_deadline)


def youngest_first() -> AbstractContextManager[None]:
    def choose(schedule: Schedule) -> list[LedgerGroup]:
        ready = [group for group in reversed(schedule._state.groups.unbatched()) if group.state is GroupState.READY]
        return ready[: schedule._state.settings.batch_size]

    return patch.multiple(Schedule, choose=choose)


def capacity_from_a_lifetime_counter() -> AbstractContextManager[None]:
    """Eq. 3 to the letter: what failed or expired is never given back."""
    for_rows = Room.for_rows.fget

    def counted(room: Room) -> int:
        state = room._state
        started = state.version + state.settings.max_staleness + 1
        return max(0, min(for_rows(room), state.settings.batch_size * started - state.counters.admitted))

    return patch.multiple(Room, for_rows=property(counted))


def capacity_from_work_in_progress() -> AbstractContextManager[None]:
    """Ready groups that wait for the trainer are forgotten."""
    for_rows = Room.for_rows.fget
    return patch.multiple(
        Room, for_rows=property(lambda room: for_rows(room) + room._state.groups.count(GroupState.READY))
    )


def latest_start_counts() -> AbstractContextManager[None]:
    """A start version that falls is ignored."""
    ready = Ledger.ready

    def with_the_latest(ledger: Ledger, group_id: str, start_version: int, signal: bool = True) -> ReportAnswer:
        row = ledger.state.groups.get(group_id)
        reported = row.start_version if row is not None else None
        return ready(ledger, group_id, start_version if reported is None else max(reported, start_version), signal)

    return patch.multiple(Ledger, ready=with_the_latest)


def start_may_fall_freely() -> AbstractContextManager[None]:
    """A start version that falls is believed, whether or not there is still a step in time."""
    return patch.multiple(Schedule, breaks=lambda schedule, group, version: False)


def expired_prompts_are_lost() -> AbstractContextManager[None]:
    expire = Leases.expire

    def expire_and_lose(leases: Leases, now: float) -> list[str]:
        expired = expire(leases, now)
        for _ in expired:
            leases._state.prompts.requeued.pop()
        return expired

    return patch.multiple(Leases, expire=expire_and_lose)


def batch_is_formed_anew() -> AbstractContextManager[None]:
    """The logged batch swaps a group for another that became ready later."""
    next_batch = Ledger.next_batch

    def swapped(ledger: Ledger, version: int) -> Batch | Waiting | RunEnded:
        answer = next_batch(ledger, version)
        chosen = ledger.schedule.choose()
        if version == ledger.version and isinstance(answer, Batch) and chosen:
            return replace(answer, group_ids=(chosen[0].group_id, *answer.group_ids[1:]))
        return answer

    return patch.multiple(Ledger, next_batch=swapped)


def sessions_are_waited_for() -> AbstractContextManager[None]:
    """A session is a straggler like another."""
    stragglers = Schedule.stragglers

    def and_sessions(schedule: Schedule, chosen: list[LedgerGroup]) -> list[LedgerGroup]:
        sessions = schedule._state.groups.head(GroupState.OPEN, schedule.in_excess(chosen)[1])
        return stragglers(schedule, chosen) or sessions

    return patch.multiple(Schedule, overdue=lambda schedule: [], stragglers=and_sessions)


def sessions_are_left_behind() -> AbstractContextManager[None]:
    """No session expires."""
    return patch.multiple(Schedule, overdue=lambda schedule: [])


def sessions_starve_rows() -> AbstractContextManager[None]:
    """No batch of rows has room beside the sessions."""
    most = property(lambda room: min(room._state.settings.max_sessions, room.most_alive))
    return patch.multiple(Room, most_sessions=most)


Mutant = Callable[[], AbstractContextManager[None]]
MUTANTS: list[Mutant] = [
    no_gate,
    gate_a_step_late,
    gate_only_at_the_deadline,
    youngest_first,
    capacity_from_a_lifetime_counter,
    capacity_from_work_in_progress,
    latest_start_counts,
    expired_prompts_are_lost,
    batch_is_formed_anew,
    sessions_are_waited_for,
    sessions_are_left_behind,
    sessions_starve_rows,
]


SELDOM = (gate_only_at_the_deadline, expired_prompts_are_lost)
"""What only hundreds of sequences find."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, marks=pytest.mark.slow if mutant in SELDOM else ()) for mutant in MUTANTS],
    ids=lambda mutant: mutant.__name__,
)
def test_a_mutant_of_the_rules_is_caught(mutant: Mutant):
    machine = SessionMachine if mutant.__name__.startswith("sessions") else LedgerMachine
    quickly = settings(SEQUENCES, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False)
    with mutant(), pytest.raises((AssertionError, LedgerError)):
        run_state_machine_as_test(machine, settings=quickly)


def test_without_the_check_a_start_version_that_falls_breaks_the_bound():
    """Too rare for random sequences to find every time: the schedule of the test that voids the attempt."""
    with start_may_fall_freely():
        ledger = make(batch_size=1, max_staleness=1)
        second, slow = admit(ledger, 2)
        finish(ledger, second)
        train(ledger)
        ledger.started(slow, "manager/0#1", 1)
        (newer,) = admit(ledger, 1)
        finish(ledger, newer)
        train(ledger)
        assert ledger.ready(slow, 0) is ReportAnswer.ACCEPTED
        assert isinstance(ledger.next_batch(2), Batch)
        assert ledger.commit(2).max_staleness == 2


# -------------------------------------------------------------------------------------------------------- simulation


def simulate(on_straggler: str, sigma: float, batch_size: int = 16, eta: int = 4, steps: int = 150) -> list[int]:
    """Staleness of every trained group: log-normal durations of median 1, a trainer that takes no time."""
    ledger = make(on_straggler=on_straggler, batch_size=batch_size, max_staleness=eta, steps=steps)
    rng, now = random.Random(0), 0.0
    running: list[tuple[float, str, int]] = []
    staleness: list[int] = []
    while not ledger.ended:
        for permit in ledger.admit("manager/0#1", batch_size * (eta + 1), now, LEASE):
            heapq.heappush(running, (now + rng.lognormvariate(0, sigma), permit.group_id, ledger.version))
        if isinstance(ledger.next_batch(ledger.version), Batch):
            staleness += ledger.commit(ledger.version).staleness
            continue
        now, group_id, start = heapq.heappop(running)
        ledger.ready(group_id, start)
    return staleness


@pytest.mark.parametrize("sigma", [0.5, 0.8])
def test_with_log_normal_durations_admission_alone_exceeds_the_bound_and_wait_holds_it(sigma: float):
    assert max(simulate("admission_only", sigma)) > 4
    held = simulate("wait", sigma)
    assert max(held) == 4 and len(held) == 150 * 16
