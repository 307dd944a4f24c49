"""Writes a run as trace.json, in the Trace Event Format of Perfetto (ui.perfetto.dev) and chrome://tracing.

Every actor is a process of the trace. The first row has the actor's reported activities, the rows below have its
measured spans, and its numbers are counters. The process `run` has the steps and the evaluations.
"""

import json
import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from areal.config.roles import ROLES
from areal.extensions.desk import timeline
from areal.extensions.desk.panels import panels_of
from areal.extensions.desk.timeline import TimelineSpan
from areal.storage.disk import replace
from areal.storage.events import TOTALS
from areal.storage.record import Record

RUN = "run"
ORDER = (RUN, "master", *ROLES)
# The row of an actor's reported activities. The rows below have its measured spans.
ACTIVITIES = 0
# Consecutive spans may seem to overlap by this much.
CLOCK_SECONDS = 0.02


def write_trace(options: Namespace) -> None:
    """`areal trace`: write `trace.json` into a run folder, and print its path."""
    path = options.folder / "trace.json"
    replace(path, json.dumps({"traceEvents": trace_events(Record(options.folder)), "displayTimeUnit": "ms"}))
    print(path)


def trace_events(run: Record) -> list[dict[str, Any]]:
    """Return spans ("X"), counters ("C") and names ("M"), with times in microseconds since the earliest time."""
    measured = [*steps(run), *timeline.measured(run.events, run.metrics.records, run.metrics.times)]
    activities = list(timeline.activities(run.events))
    counters = [*step_counters(run), *actor_counters(run.events)]
    begin = min([span.begin for span in measured + activities] + [at for _, _, at, _ in counters], default=0.0)

    actors = sorted({span.actor for span in measured + activities} | {actor for actor, *_ in counters}, key=_order)
    numbers = {actor: number for number, actor in enumerate(actors, 1)}
    events = []
    for actor, number in numbers.items():
        events += [_named("process_name", number, name=actor), _named("process_sort_index", number, sort_index=number)]
        rows = list(_rows(span for span in measured if span.actor == actor))
        if spoken := [span for span in activities if span.actor == actor]:
            rows.insert(0, (ACTIVITIES, sorted(spoken, key=lambda span: span.begin)))
        for row, spans in rows:
            kinds = "doing" if row == ACTIVITIES else ", ".join(dict.fromkeys(span.kind for span in spans))
            events += [_named("thread_name", number, row, name=kinds), *_drawn(spans, number, row, begin)]
    for actor, name, at, values in counters:
        events.append({"ph": "C", "name": name, "pid": numbers[actor], "ts": _microseconds(at - begin), "args": values})
    return events


def _drawn(spans: Iterable[TimelineSpan], pid: int, row: int, zero: float) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a row, in the order of time. A span that overlaps the span before begins at its end."""
    end = 0
    for span in spans:
        begin = max(end, _microseconds(span.begin - zero))
        end = max(begin, _microseconds(span.end - zero))
        yield {
            "ph": "X",
            "name": span.name,
            "pid": pid,
            "tid": row,
            "ts": begin,
            "dur": end - begin,
            "args": span.details,
        }


def steps(run: Record) -> Iterator[TimelineSpan]:
    """Yield a span for each step, at most from commit to commit, and an empty span for each evaluation's result."""
    previous = -math.inf
    for record, end in zip(run.metrics.records, run.metrics.times, strict=True):
        seconds = min(record.get("step_seconds", 0.0), end - previous)
        previous = end
        plain = {key: value for key, value in record.items() if isinstance(value, int | float | str)}
        yield TimelineSpan(RUN, f"step {record['step']}", end - seconds, seconds, plain)
    for evaluation in run.metrics.evaluations:
        if "time" in evaluation:
            accuracy = evaluation.get("accuracy")
            name = f"version {evaluation['version']} evaluated" + ("" if accuracy is None else f": {accuracy:.3f}")
            yield TimelineSpan(RUN, name, evaluation["time"], 0.0)


Counter = tuple[str, str, float, dict[str, float]]
"""Actor, name, time, values."""


def step_counters(run: Record) -> Iterator[Counter]:
    panels = panels_of(run.metrics.records)
    for record, end in zip(run.metrics.records, run.metrics.times, strict=True):
        for panel in panels:
            if values := {key: record[key] for key in panel.metrics if isinstance(record.get(key), int | float)}:
                yield RUN, panel.title, end, values


def actor_counters(events: Iterable[dict[str, Any]]) -> Iterator[Counter]:
    """Yield every number of the heartbeats. A growing total (TOTALS) becomes its increase per second."""
    totals: dict[tuple[str, str], tuple[float, float]] = {}
    for event in events:
        for name, value in (event.get("stats") or {}).items():
            actor, at = event["actor"], event["time"]
            if name not in TOTALS:
                yield actor, name, at, {name: value}
                continue
            then, total = totals.get((actor, name), (at, value))
            totals[actor, name] = (at, value)
            if at > then:
                yield actor, f"{name} / s", at, {name: max(0.0, value - total) / (at - then)}


def _rows(spans: Iterable[TimelineSpan]) -> Iterator[tuple[int, list[TimelineSpan]]]:
    """Yield each row of an actor, with its number and its spans in the order of time. Viewers nest a span that begins
    during another span of its row, so kinds of spans share a row only if none of them overlap."""
    kinds: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin):
        kinds[span.kind].append(span)
    rows: list[list[TimelineSpan]] = []
    for remaining in kinds.values():
        while remaining:
            chain, remaining = _chain(remaining)
            row = next((row for row in rows if not _chain([*row, *chain])[1]), None)
            if row is None:
                rows.append(chain)
            else:
                row.extend(chain)
    for number, row in enumerate(rows, 1):
        yield number, sorted(row, key=lambda span: span.end)


def _chain(spans: Iterable[TimelineSpan]) -> tuple[list[TimelineSpan], list[TimelineSpan]]:
    """Return as many spans as possible without overlaps, and the remaining spans."""
    chain: list[TimelineSpan] = []
    overlapping: list[TimelineSpan] = []
    for span in sorted(spans, key=lambda span: span.end):
        follows = not chain or span.begin >= chain[-1].end - CLOCK_SECONDS
        (chain if follows else overlapping).append(span)
    return chain, overlapping


def _order(actor: str) -> tuple[int, str, int]:
    role, _, index = actor.partition("/")
    return ORDER.index(role) if role in ORDER else len(ORDER), role, int(index or 0)


def _named(what: str, pid: int, tid: int = ACTIVITIES, /, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
