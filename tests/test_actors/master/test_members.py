"""The directory of a run, without sockets."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.small_runs import ten_steps

from actors.master.members import Members
from actors.master.run_state import RunState
from areal.storage.journal import Journal
from protocols.bus_errors import MalformedError
from protocols.codec import decode_body, encode_body
from protocols.membership_messages import Engagement, Heartbeat, Join, Member, Policy, Snapshot


@pytest.fixture
def state() -> Iterator[RunState]:
    journal = Journal(sqlite3.connect(":memory:", check_same_thread=False))
    yield RunState(ten_steps(), journal)
    journal.close()


@pytest.fixture
def members(state) -> Members:
    return Members(state, lambda event: None, lambda: 1.0)


def join(members: Members, index: int) -> Member:
    member = members.new_entry(Join(role="generator", index=index, address=f"tcp://a:{1000 + index}"), f"m{index:04}")
    members.add(member)
    return member


def read(members: Members) -> tuple[Member, ...]:
    """The members that who asks for a snapshot reads."""
    snapshot = decode_body("snapshot", [b"", *encode_body(members.snapshot(7, "tcp://a:1"))])
    assert isinstance(snapshot, Snapshot)
    return snapshot.members


def calls_in(work: Callable[[], Any]) -> int:
    """The number of calls of functions, of Python and of C."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def test_a_snapshot_has_each_member_as_it_last_changed(members, state):
    first, second, third = (join(members, index) for index in range(3))
    members.update(first, Heartbeat(state="healthy", serves=("\u2028",), activity="", stats={}))
    members.hold(second, Policy(lineage=0, version=0, folder="m"), serving=True)
    members.remove(third.identity, "left")
    assert read(members) == tuple(state.members.values())
    assert [(m.state, m.serving) for m in read(members)] == [("healthy", False), ("starting", True)]
    again = Members(state, lambda event: None, lambda: 1.0)  # as after a restart of the master
    assert read(again) == read(members)


def test_an_asker_gets_the_newest_load_of_each_generator_that_is_there(members):
    asker = "rollout_manager/0#a"
    generators = [join(members, index).identity for index in range(4)]

    def tells(generator: int, sequences: dict[str, int], limit: int, version: int) -> None:
        load = Engagement(sequences=sequences, limit=limit, version=version)
        beat = Heartbeat(state="healthy", serves=(), activity="", stats={}, engagement=load)
        members.heartbeats.record(generators[generator], beat)

    def loads() -> dict[str, tuple[int, ...]]:
        """The columns' rows: sequences, of which the asker's, limit, version."""
        told = members.heartbeats.loads_for(asker)
        columns = told.sequences, told.asker_sequences, told.limits, told.versions
        return dict(zip(told.names, zip(*(column.tolist() for column in columns), strict=True), strict=True))

    tells(3, {}, 8, 1)
    tells(1, {asker: 2, "rollout_manager/1#b": 3}, 8, 1)
    tells(0, {asker: 1}, 16, 2)
    before = members.heartbeats.loads_for(asker)
    assert loads() == {generators[3]: (0, 0, 8, 1), generators[1]: (5, 2, 8, 1), generators[0]: (1, 1, 16, 2)}
    tells(3, {asker: 7}, 4, 3)
    members.remove(generators[1], "left")
    members.remove(generators[2], "left")  # it has told nothing yet
    tells(0, {}, 16, 3)
    assert loads() == {generators[3]: (7, 7, 4, 3), generators[0]: (0, 0, 16, 3)}
    generators.append(join(members, 4).identity)
    tells(4, {asker: 1}, 2, 2)
    assert loads() == {generators[3]: (7, 7, 4, 3), generators[0]: (0, 0, 16, 3), generators[4]: (1, 1, 2, 2)}
    assert before.sequences.tolist() == [0, 5, 1]  # what is being sent does not change


def test_a_join_and_its_snapshot_take_as_many_calls_among_hundreds_of_members_as_among_a_few(members):
    def joins(index: int) -> None:
        join(members, index)
        encode_body(members.snapshot(7, "tcp://a:1"))

    few = min(calls_in(lambda index=index: joins(index)) for index in range(10))
    for index in range(10, 200):
        join(members, index)
    assert min(calls_in(lambda index=index: joins(index)) for index in range(200, 205)) <= few + 10


def test_a_snapshot_with_a_member_that_is_no_json_is_refused(members):
    broken = Snapshot.model_construct(
        policy=Policy(lineage=0, version=0, folder="m"), members=(b'{"identity":',), sequence=0, events="tcp://a:1"
    )
    with pytest.raises(MalformedError, match="snapshot: members"):
        decode_body("snapshot", [b"", *encode_body(broken)])
