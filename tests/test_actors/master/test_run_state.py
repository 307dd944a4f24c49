"""The master's state: what it makes of its journal."""

import asyncio
import json
import sqlite3
from dataclasses import fields
from zlib import crc32

import pytest
from conftest import ROOT
from support.small_runs import ten_steps

from actors.master import changes
from actors.master.accounts import coverage
from actors.master.run_state import PLAIN, GroupTally, RunState
from actors.master.session_records import SessionRecords
from areal.base.errors import UserError
from areal.config import Config
from areal.data.sources import open_source
from areal.staleness.ledger_records import snapshot_of
from areal.storage.journal import Journal

OF_GROUPS = [part.name for kind in (GroupTally, SessionRecords) for part in fields(kind)]


def config_of(**data) -> Config:
    return ten_steps(data={"source": "addition", "size": 20, "eval_size": 0, **data})


def state_of(config: Config, connection: sqlite3.Connection) -> RunState:
    return RunState(config, Journal(connection), open_source(config.data, config.seed))


def rewarded(state: RunState, group: str, signal: bool = True) -> None:
    row = state.ledger.state.groups.get(group).row
    state.ledger.ready(group, 0, signal)
    state.emit(
        changes.Rewarded(
            group=group,
            row=row,
            version=0,
            mean=0.5 if signal else 0.0,
            spread=0.5 * signal,
            signal=signal,
            parts={},
            tokens=7,
            discarded=0,
        )
    )


def test_a_master_after_a_master_goes_on_with_the_same_history_from_events_and_from_a_snapshot():
    sampler = f"{ROOT}/configs/examples/difficulty/difficulty.py:Difficulty"
    config, connection = config_of(sampler=sampler), sqlite3.connect(":memory:", check_same_thread=False)
    state = state_of(config, connection)
    permits = state.ledger.admit("manager/0#1", 4, 0.0, 30.0)
    for number, permit in enumerate(permits[:3]):
        rewarded(state, permit.group_id, signal=number == 1)
    assert coverage(state) == 4 / 20
    for _ in range(2):
        asyncio.run(state.journal.durable())
        later = state_of(config, connection)
        assert later.history == state.history
        assert later.history.rows[later.history.data.key(permits[1].row)].tokens == 7
        assert later.ledger.row_of_prompt(4) == state.ledger.row_of_prompt(4)
        state.journal.compact(state.dump())


def stored(connection: sqlite3.Connection, *snapshot: dict, **events: dict) -> RunState:
    """The state that a journal with this snapshot and these events gives."""
    journal = Journal(connection)
    for body in snapshot:
        text = json.dumps(body)
        with connection:
            values = (text, crc32(text.encode(), crc32(b"snapshot")))
            connection.execute("INSERT INTO snapshot VALUES (1, ?, ?)", values)
    for kind, body in events.items():
        journal.append(kind, body)
    asyncio.run(journal.durable())
    return state_of(config_of(), connection)


def in_memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", check_same_thread=False)


def whole() -> dict:
    """A snapshot of a run that has begun."""
    state = state_of(config_of(), in_memory())
    state.ledger.admit("manager/0#1", 4, 0.0, 30.0)
    return json.loads(json.dumps(state.dump()))


@pytest.mark.parametrize("name", [*PLAIN, *OF_GROUPS, "history", "members", "partial", "run_ahead"])
def test_a_snapshot_without_a_part_that_an_earlier_version_did_not_know_is_that_of_a_new_run(name):
    snapshot = whole()
    snapshot.pop(name)
    state = stored(in_memory(), snapshot)
    assert state.dump()[name] == state_of(config_of(), in_memory()).dump()[name]
    assert len(snapshot_of(state.ledger.state)["groups"]) == 4


@pytest.mark.parametrize("place", [(), ("ledger", "counters"), ("ledger", "groups", 0), ("ledger", "settings")])
def test_fields_inside_a_snapshot_that_an_earlier_version_did_not_know_have_their_defaults(place):
    snapshot = whole()
    part = snapshot
    for step in place:
        part = part[step]
    optional = {(): "receipts", ("ledger", "counters"): "sessions_trained", ("ledger", "groups", 0): "resumed"}
    del part[optional.get(place, "max_sessions")]
    assert stored(in_memory(), snapshot).dump() == {**whole(), "not_evaluated": []}


@pytest.mark.parametrize("place", [(), ("ledger",), ("ledger", "groups", 0), ("history",), ("run_ahead",), ("policy",)])
def test_what_a_snapshot_of_another_version_has_besides_is_refused_in_one_sentence(place):
    snapshot = whole()
    part = snapshot
    for step in place:
        part = part[step]
    part["novelty"] = 1
    with pytest.raises(
        UserError, match=r"written by another version of this program \(the snapshot: .*novelty"
    ) as refused:
        stored(in_memory(), snapshot)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "event",
    [
        {"tokens_discarded": {"count": 1, "novelty": 2}},
        {"committed": {"version": 1, "novelty": 2}},
        {"novelty": {}},
        {"tokens_discarded": {}},
    ],
    ids=str,
)
def test_an_event_that_this_version_does_not_know_is_refused_in_one_sentence(event):
    (kind,) = event
    with pytest.raises(UserError, match=rf"written by another version of this program \({kind}: ") as refused:
        stored(in_memory(), **event)
    assert "\n" not in str(refused.value)
