"""A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: trace.json, in the Trace Event Format.

Every actor is a process of the trace. Its first row has what it said it was doing, the rows below what it measured
itself; its numbers are counters. The process `run` has the steps and the evaluations.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from areal import timeline
from areal.report import Run, read_run
from areal.timeline import Span

RUN = "run"
ORDER = (RUN, "master", "trainer", "generator", "rollout_manager", "reward", "evaluator")
COUNTERS = {
    "reward": ("reward_mean", "reward_mean_all"),
    "staleness": ("staleness_mean", "staleness_max"),
    "groups": ("groups_ready", "groups_alive", "groups_left_over"),
    "completion tokens": ("completion_tokens_mean", "completion_tokens_max"),
}
# What an actor says it does, above what it measured.
SAID, MEASURED = 0, 1


def write_trace(folder: Path) -> Path:
    """Write `trace.json` into a run folder and return its path. Raises UserError where the folder holds no run."""
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace_events(read_run(folder)), "displayTimeUnit": "ms"}))
    return path


def trace_events(run: Run) -> list[dict[str, Any]]:
    """Spans ("X"), counters ("C") and names ("M"); times in microseconds since the first of them."""
    measured = [*steps(run), *timeline.measured(run.events, run.records, run.times)]
    said = list(timeline.activities(run.events))
    counters = [*step_counters(run), *actor_counters(run.events)]
    begin = min([span.begin for span in measured + said] + [at for _, _, at, _ in counters], default=0.0)

    actors = sorted({span.actor for span in measured + said} | {actor for actor, *_ in counters}, key=_order)
    numbers = {actor: number for number, actor in enumerate(actors, 1)}
    events = [_named("process_name", numbers[actor], SAID, name=actor) for actor in actors]
    events += [_named("process_sort_index", numbers[actor], SAID, sort_index=numbers[actor]) for actor in actors]
    events += [_named("thread_name", numbers[actor], SAID, name="doing") for actor in actors]
    rows = [(span, SAID) for span in said] + list(_in_rows(measured))
    for span, row in rows:
        events.append({
            "ph": "X", "name": span.name, "pid": numbers[span.actor], "tid": row,
            "ts": _microseconds(span.begin - begin), "dur": _microseconds(span.seconds), "args": span.details,
        })  # fmt: skip
    for actor, name, at, values in counters:
        events.append({"ph": "C", "name": name, "pid": numbers[actor], "ts": _microseconds(at - begin), "args": values})
    return events


def steps(run: Run) -> Iterator[Span]:
    """Each step from the commit before it to its own, and each evaluation up to its result."""
    for record, end in zip(run.records, run.times, strict=True):
        seconds = record.get("step_seconds", 0.0)
        plain = {key: value for key, value in record.items() if isinstance(value, int | float | str)}
        yield Span(RUN, f"step {record['step']}", end - seconds, seconds, plain)
    for evaluation in run.evaluations:
        if "time" in evaluation:
            name = f"version {evaluation['version']} evaluated: {evaluation.get('accuracy', math.nan):.3f}"
            yield Span(RUN, name, evaluation["time"], 0.0)


Counter = tuple[str, str, float, dict[str, float]]
"""Actor, name, time, values."""


def step_counters(run: Run) -> Iterator[Counter]:
    for record, end in zip(run.records, run.times, strict=True):
        for name, keys in COUNTERS.items():
            if values := {key: record[key] for key in keys if isinstance(record.get(key), int | float)}:
                yield RUN, name, end, values


def actor_counters(events: Iterable[dict[str, Any]]) -> Iterator[Counter]:
    """Every number of the heartbeats; of what only ever grows, how fast it does, a second."""
    before: dict[tuple[str, str], tuple[float, float]] = {}
    for event in events:
        for name, value in (event.get("stats") or {}).items():
            actor, at = event["actor"], event["time"]
            if name not in timeline.TOTALS:
                yield actor, name, at, {name: value}
                continue
            then, total = before.get((actor, name), (at, value))
            before[actor, name] = (at, value)
            if at > then:
                yield actor, f"{name} / s", at, {name: max(0.0, value - total) / (at - then)}


def _in_rows(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Each span with its row within its actor: the first in which nothing else goes on. In one row, the viewers take a
    span that begins during another for a part of it."""
    ends: dict[str, list[float]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin):
        rows = ends[span.actor]
        # Clocks of two machines: what overlaps by less than this follows.
        row = next((row for row, end in enumerate(rows) if end <= span.begin + 1e-5), len(rows))
        rows[row : row + 1] = [span.begin + span.seconds]
        yield span, MEASURED + row


def _order(actor: str) -> tuple[int, str, int]:
    role, _, index = actor.partition("/")
    return ORDER.index(role) if role in ORDER else len(ORDER), role, int(index or 0)


def _named(what: str, pid: int, tid: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
