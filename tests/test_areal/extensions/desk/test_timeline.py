"""What happened when, as it is recorded and read."""

from __future__ import annotations

import pytest

from areal.extensions.desk.timeline import WAITING, WEIGHTS, WORK, TimelineSpan, activities, spans
from areal.storage.events import GONE, EventLog
from areal.storage.record import Record
from areal.storage.records import line_of
from areal.storage.run_files import METRICS


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(tmp_path) -> Clock:
    (tmp_path / METRICS).touch()  # now it is the folder of a run
    return Clock()


@pytest.fixture
def events(tmp_path, clock) -> EventLog:
    return EventLog(tmp_path, 1 << 20, clock)


def test_a_change_is_recorded_at_once_and_what_stays_the_same_once_a_second(events, clock, tmp_path):
    for tenth in range(20):
        clock.now = 1000.0 + tenth / 10
        events.record_heartbeat("trainer/0", "healthy", "waiting" if tenth < 5 else "training", {})
    events.flush()
    assert [e["time"] for e in Record(tmp_path).events] == [1000.0, 1000.5, 1001.5]


def test_a_clock_that_is_set_back_keeps_nothing_from_the_file(events, clock, tmp_path):
    events.record_heartbeat("trainer/0", "healthy", "training", {})
    clock.now -= 3600.0
    events.record_heartbeat("trainer/0", "healthy", "training", {})
    assert [e["time"] for e in Record(tmp_path).events] == [-2600.0, 1000.0]


def test_many_actors_together_write_no_more_than_fifty_would(events, clock, tmp_path):
    for second in range(20):
        clock.now = 1000.0 + second
        for index in range(500):
            events.record_heartbeat(f"generator/{index}", "healthy", "generating", {})
    events.flush()
    # Each at first, and then every ten seconds.
    assert len(Record(tmp_path).events) <= 500 * 3


def test_spans_are_recorded_at_the_time_they_began_however_late_one_hears_of_them(events, clock, tmp_path):
    events.record_heartbeat("generator/0", "healthy", "generating", {}, 70.0, [("load", 68.0, 0.5)])
    clock.now += 3.0
    events.record_heartbeat("generator/0", "healthy", "generating", {}, 71.0, [("load", 70.5, 0.25)])
    events.flush()
    assert list(spans(Record(tmp_path).events)) == [
        TimelineSpan("generator/0", "load", 998.0, 0.5),
        TimelineSpan("generator/0", "load", 1000.5, 0.25),
    ]


def test_an_actor_that_comes_back_may_have_another_clock(events, tmp_path):
    events.record_heartbeat("generator/0", "healthy", "generating", {}, 70.0)
    events.record_heartbeat("generator/0", GONE, "killed", {})
    events.record_heartbeat("generator/0", "healthy", "generating", {}, 5000.0, [("load", 4999.0, 0.5)])
    events.flush()
    assert list(spans(Record(tmp_path).events)) == [TimelineSpan("generator/0", "load", 999.0, 0.5)]


def test_the_newest_events_are_kept_and_the_files_are_bounded(clock, tmp_path):
    events = EventLog(tmp_path, 2000, clock)
    for second in range(200):
        clock.now = 1000.0 + second
        events.record_heartbeat("trainer/0", "healthy", f"step {second}", {})
    events.flush()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * 2000
    assert Record(tmp_path).events[-1]["activity"] == "step 199"


def test_a_folder_that_cannot_be_written_to_hurts_nobody(clock, tmp_path):
    events = EventLog(tmp_path / "missing", 1 << 20, clock)
    for second in range(3):
        clock.now = 1000.0 + second
        events.record_heartbeat("trainer/0", "healthy", f"step {second}", {})
    events.flush()


def test_half_a_line_of_a_master_that_was_killed_is_left_out(events, tmp_path):
    events.record_heartbeat("trainer/0", "healthy", "waiting", {})
    events.flush()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line_of({"time": 1001.0, "actor": "trainer/0"})[:-5])
    assert [event["activity"] for event in Record(tmp_path).events] == ["waiting"]


def said(at: float, activity: str, actor: str = "trainer/0", state: str = "healthy") -> dict:
    return {"time": at, "actor": actor, "state": state, "activity": activity}


def test_an_activity_lasts_until_the_next_one_the_departure_or_the_end():
    heard = [
        said(1.0, "waiting"),
        said(2.0, "waiting"),
        said(4.0, "training"),
        said(5.0, "killed", state="gone"),
        said(7.0, "waiting"),
        said(8.0, "scoring", "reward/0"),
        said(9.0, "waiting"),
    ]
    assert list(activities(heard)) == [
        TimelineSpan("trainer/0", "waiting", 1.0, 3.0),
        TimelineSpan("trainer/0", "training", 4.0, 1.0),
        TimelineSpan("trainer/0", "waiting", 7.0, 2.0),
        TimelineSpan("reward/0", "scoring", 8.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("purpose", "names"),
    [
        (WORK, "train, fetch, training step 3, generating at version 2, scoring with addition, nobody waits"),
        (
            WEIGHTS,
            "load, pause, resume, write, snapshot, save, saving a checkpoint of version 9, loading version 3, "
            "receiving version 4, fetching version 4, checkpoint",
        ),
        (
            WAITING,
            "trainer_wait, publish_wait, save_wait, waiting for permits from the master, finished, "
            "the generators are full, waiting for completions to score them with loader",
        ),
    ],
)
def test_each_span_is_work_weights_or_waiting(purpose, names):
    assert {TimelineSpan("a", name, 0.0, 1.0).purpose for name in names.split(", ")} <= {purpose}
