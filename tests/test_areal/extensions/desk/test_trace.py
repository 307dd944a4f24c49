"""A run as a trace for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from areal.__main__ import main
from areal.extensions.desk.trace import trace_events
from areal.storage.record import Record
from areal.storage.records import line_of
from areal.storage.run_files import EVALUATIONS, EVENTS, METRICS


def step(number: int, time: float, **metrics) -> dict:
    return {
        "step": number,
        "time": time,
        "step_seconds": 2.0,
        "trainer_wait_seconds": 0.5,
        "train_seconds": 1.5,
    } | metrics


def span(actor: str, name: str, begin: float, seconds: float) -> dict:
    return {"time": begin, "actor": actor, "span": name, "seconds": seconds}


def trace(records=(), events=(), evaluations=()) -> list[dict]:
    with TemporaryDirectory() as folder:
        for file, lines in ((METRICS, records), (EVALUATIONS, evaluations), (EVENTS, events)):
            (Path(folder) / file).write_text("".join(map(line_of, lines)))
        return trace_events(Record(Path(folder)))


def spans_of(events: list[dict]) -> dict[str, list[tuple[str, float, float]]]:
    """By actor: name, begin and seconds of each."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    results = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            results[names[event["pid"]]].append((event["name"], event["ts"] / 1e6, event["dur"] / 1e6))
    return results


def test_a_step_lies_between_the_commit_before_it_and_its_own():
    spans = spans_of(trace([step(1, 102.0), step(2, 104.0)]))
    assert spans["run"] == [("step 1", 0.0, 2.0), ("step 2", 2.0, 2.0)]


def test_without_events_the_trainers_phases_come_from_the_steps():
    spans = spans_of(trace([step(1, 102.0)]))
    assert spans["trainer/0"] == [("trainer_wait", 0.0, 0.5), ("train", 0.5, 1.5)]


def test_what_the_trainer_measured_itself_is_shown_in_place_of_that():
    spans = spans_of(trace([step(1, 102.0)], [span("trainer/0", "train", 100.25, 1.0)]))
    assert spans["trainer/0"] == [("train", 0.25, 1.0)]


def test_a_run_of_old_whose_steps_have_no_time_is_laid_out_from_its_seconds():
    records = [{"step": n, "step_seconds": 2.0} for n in (1, 2)]
    assert spans_of(trace(records))["run"] == [("step 1", 0.0, 2.0), ("step 2", 2.0, 2.0)]


def test_what_overlaps_lies_in_different_rows_and_the_rest_in_one():
    events = [
        span("trainer/0", "train", 0.0, 2.0),
        span("trainer/0", "write", 1.0, 2.0),
        span("trainer/0", "save", 2.0, 1),
    ]
    rows = {e["name"]: e["tid"] for e in trace(events=events) if e["ph"] == "X"}
    assert rows["train"] == rows["save"] != rows["write"]


def test_a_kind_of_span_keeps_its_row_which_has_its_name():
    events = [span("trainer/0", "train", begin, 2.0) for begin in (0.0, 2.0)]
    events += [span("trainer/0", "write", begin, 1.0) for begin in (1.5, 3.5)]
    events += [span("trainer/0", "save", 4.5, 1.0)]
    spans = trace(events=events)
    names = {e["tid"]: e["args"]["name"] for e in spans if e["name"] == "thread_name"}
    assert [(e["name"], names[e["tid"]]) for e in spans if e["ph"] == "X"] == [
        ("train", "train, save"),
        ("train", "train, save"),
        ("save", "train, save"),
        ("write", "write"),
        ("write", "write"),
    ]


def test_what_clocks_or_rounding_make_overlap_a_little_follows():
    events = [
        span("generator/0", "load", 0.0951, 0.5),
        span("generator/0", "pause", 0.0, 0.1000004),
        span("generator/0", "resume", 0.595, 0.0002),
    ]
    drawn = [(e["name"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in trace(events=events) if e["ph"] == "X"]
    assert drawn == [("pause", 1, 0, 100_000), ("load", 1, 100_000, 595_100), ("resume", 1, 595_100, 595_200)]


def test_what_is_over_just_after_the_next_one_seems_to_begin_comes_before_it():
    events = [span("trainer/0", "train", 1.0, 2.0), span("trainer/0", "fetch", 1.0001, 0.001)]
    assert spans_of(trace(events=events))["trainer/0"] == [("fetch", 0.0001, 0.001), ("train", 0.0011, 1.9989)]
    assert len({e["tid"] for e in trace(events=events) if e["ph"] == "X"}) == 1


def test_numbers_that_only_grow_are_shown_as_rates():
    heard = [
        {"time": at, "actor": "generator/0", "state": "healthy", "activity": "", "stats": stats}
        for at, stats in (
            (0.0, {"tokens_generated": 100, "running": 3}),
            (2.0, {"tokens_generated": 300, "running": 4}),
        )
    ]
    counters = [(e["name"], e["args"]) for e in trace(events=heard) if e["ph"] == "C"]
    assert ("tokens_generated / s", {"tokens_generated": 100.0}) in counters
    assert ("running", {"running": 4}) in counters


def test_every_actor_has_a_name_and_a_place():
    events = [span("generator/1", "load", 0.0, 1.0), span("trainer/0", "train", 0.0, 1.0)]
    names = [e["args"]["name"] for e in trace(events=events) if e["name"] == "process_name"]
    assert names == ["trainer/0", "generator/1"]


def test_the_command_writes_one_json_file(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(line_of(step(1, 102.0)))
    assert main(["trace", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "trace.json").read_text())
    assert {"ph", "pid", "name"} <= written["traceEvents"][0].keys()
    assert str(tmp_path / "trace.json") in capsys.readouterr().out


def test_a_folder_without_a_run_is_the_users_mistake(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert "not the folder of a run" in capsys.readouterr().err
