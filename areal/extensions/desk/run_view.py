"""The plain data of a run's page, for a running run and for an ended run (its report)."""

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from areal.base import extensions
from areal.base.text import all_shown, duration
from areal.extensions.desk import timeline
from areal.extensions.desk.account import account, fork_lines, headlines, notation
from areal.extensions.desk.comparison import differing_settings, end_figures, value_of
from areal.extensions.desk.panels import title_of, unit_of
from areal.extensions.desk.plots import plots, run_colours
from areal.storage.events import GONE
from areal.storage.record import Record

# Seconds of the timeline, which ends at the newest event.
WINDOW_SECONDS = 120.0
# Actors send events every second. After this silence, a run without a summary counts as silent.
SILENT_SECONDS = 60.0
# A page waits this long for rollouts, and once more for the last file. Later requests read further files.
ROLLOUTS_SECONDS = 0.2
LEFT_OUT = ("prompts", "discarded")
PAIRS_SHOWN = 4
# The absolute folders in the paths of this machine.
FOLDERS = re.compile(r"(?m)(?<=[ '\"])/(?:[^/\n]+/)+(?=[^/\n])")
# Numbers of an actor with a column of their own, in order. The page shows further numbers on demand.
COLUMNS = ("running", "waiting", "groups_running", "samples_running", "scored", "failed", "memory")


def ending_of(summary: dict[str, Any] | None) -> str | None:
    """Return `finished: ...` or `ended early: ...`, with the reason; None for a run that is not over."""
    if not summary:
        return None
    state = "finished" if summary.get("ok", True) else "ended early"
    return f"{state}: {summary.get('reason') or 'no reason is recorded'}"


class PlotCache:
    """The plots of runs, made again after new steps or evaluations. `stamp` names the present plots."""

    def __init__(self, runs: Sequence[Record]) -> None:
        self.stamp = ""
        self._runs = runs
        self._plots: list[dict[str, Any]] = []

    def since(self, stamp: str) -> dict[str, Any]:
        """Return the stamp, and the plots unless `stamp` is the stamp of the present plots."""
        newest = ",".join(f"{len(run.metrics.records)}.{len(run.metrics.evaluations)}" for run in self._runs)
        if newest != self.stamp:
            self.stamp, self._plots = newest, plots(self._runs)
        last = max((p for run in self._runs for p in _places(run)), default=0)
        return {"stamp": newest, "last": last} | ({} if stamp == newest else {"plots": self._plots})


def _places(run: Record) -> Iterable[int]:
    return (*run.metrics.steps[-1:], *(evaluation["version"] for evaluation in run.metrics.evaluations[-1:]))


class RunView:
    """The data of the page for the run in `folder`. Raises UserError if the folder holds no run."""

    def __init__(self, folder: Path) -> None:
        self.record = Record(folder, without=LEFT_OUT)
        self._plots = PlotCache([self.record])
        self._events: deque[dict[str, Any]] = deque()
        self._actors: dict[str, dict[str, Any]] = {}
        self._began = math.inf
        digests = extensions.part_of("alerts", "digests")
        self._digests = digests and digests(folder)
        self._written: float | None = None  # time of the last writing, by the clock of the writing host
        self._changed: float | None = None  # when `_written` last changed, by this process's clock

    def since(self, stamp: str = "", rollouts_seconds: float = ROLLOUTS_SECONDS) -> dict[str, Any]:
        """Return the state of the run, with its plots and texts if they are newer than `stamp`."""
        self._read()
        record, config = self.record, self.record.configuration.settings
        data = {
            "run": config.get("name", record.name),
            "step": record.metrics.trained,
            "total": config.get("steps"),
            "cards": headlines(record),
            "alerts": self._alerts(config, rollouts_seconds),
            "lanes": self._lanes(),
        }
        plots = self._plots.since(stamp)
        texts = _texts(record) if "plots" in plots else {}
        shown: dict[str, Any] = finite(all_shown(data | texts | plots | self._ending() | self._times()))
        return shown

    def _ending(self) -> dict[str, Any]:
        """Return sentences on the run's end and on its silence, or None, and the actors. After the end, each actor has
        the state of the run's end."""
        ended = ending_of(self.record.ending)
        actors = [self._actors[actor] for actor in sorted(self._actors)]
        if ended:
            actors = [actor | {"state": ended.partition(":")[0], "activity": ""} for actor in actors]
        silent = 0.0 if ended else self._silent_seconds()
        sentence = (
            f"silent for {silent:.0f} s: the master was killed, or cannot write" if silent > SILENT_SECONDS else None
        )
        return {"ended": ended, "silent": sentence, "actors": [_actor(actor) for actor in actors]}

    def _times(self) -> dict[str, str]:
        """Return in words the time of the run up to its newest event, and the expected time of the remaining steps."""
        last, total = (self.record.metrics.records or [{}])[-1], self.record.configuration.settings.get("steps")
        seconds = {
            "elapsed": self._events[-1]["time"] - self._began if self._events else 0.0,
            "left": last.get("step_seconds_median", 0.0) * (total - last["step"]) if last and total else 0.0,
        }
        return {name: duration(value) if value > 0 else "" for name, value in seconds.items()}

    def _silent_seconds(self) -> float:
        """Return the seconds since the last writing, by this host's clock for writings seen since the first look."""
        written, now = self.record.last_written, time.monotonic()
        if written != self._written:
            self._written, self._changed = written, now if self._written else None
        if self._changed is not None:
            return now - self._changed
        return time.time() - written if written else 0.0

    def _read(self) -> None:
        self.record.metrics.update()
        for event in self.record.new_events():
            self._events.append(event)
            self._began = min(self._began, event["time"])
            if event.get("state") == GONE:
                self._actors.pop(event["actor"], None)
            elif "state" in event:
                self._actors[event["actor"]] = event
        # An actor's activity is recorded repeatedly, so an activity older than the window also has an event within it.
        while self._events and self._events[0]["time"] < self._events[-1]["time"] - WINDOW_SECONDS:
            self._events.popleft()

    def _alerts(self, config: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Return for each alert its name, its sentence, the query for the page of its rollouts (None without rollouts),
        and the command that prints the rollouts."""
        digests = self._digests
        alerts = (
            digests.alerts(self.record.metrics.records, self.record.metrics.evaluations, config, seconds)
            if digests
            else ()
        )
        return [
            {
                "name": alert.name,
                "text": alert.sentence,
                "query": urlencode(alert.filters) if digests.has_rollouts else None,
                "command": digests.command(alert),
            }
            for alert in alerts
        ]

    def _lanes(self) -> list[dict[str, Any]]:
        """Return the activities of each actor in the last WINDOW_SECONDS, as tuples: name, purpose (TimelineSpan),
        beginning (in seconds before the end of the timeline), duration in seconds, and True if the actor measured the
        times."""
        if not self._events:
            return []
        end = max(event["time"] + event.get("seconds", 0.0) for event in self._events)
        ordered = sorted(self._events, key=lambda event: event["time"])
        spans = [(span, False) for span in timeline.activities(ordered)]
        spans += [(span, True) for span in timeline.spans(ordered)]
        lanes: dict[str, list[tuple[str, str, float, float, bool]]] = {}
        for span, measured in spans:
            if span.end >= end - WINDOW_SECONDS:
                bar = (span.name, span.purpose, end - span.begin, span.seconds, measured)
                lanes.setdefault(span.actor, []).append(bar)
        return [{"actor": actor, "spans": lanes[actor]} for actor in sorted(lanes)]


class RunsView:
    """The data of the page that compares the runs in several folders. Raises UserError if a folder holds no run."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._runs = [Record(folder, without=LEFT_OUT) for folder in folders]
        self._plots = PlotCache(self._runs)

    def since(self, stamp: str = "") -> dict[str, Any]:
        """Return the runs' different settings and figures, with the plots if they are newer than `stamp`."""
        runs = self._runs
        for run in runs:
            run.metrics.update()
        configs = [run.configuration.settings for run in runs]
        settings = differing_settings(configs)
        figures = end_figures(runs)
        rows = [
            {
                "run": run.name,
                "colour": colour,
                "ended": ending_of(run.ending),
                "cells": [json.dumps(value_of(config, key)) for key in settings] + [f.shown(n) for f in figures],
            }
            for n, (run, config, colour) in enumerate(zip(runs, configs, run_colours(len(runs)), strict=True))
        ]
        columns = [*settings, *(figure.name for figure in figures)]
        shown: dict[str, Any] = finite(all_shown({"columns": columns, "runs": rows} | self._plots.since(stamp)))
        return shown


def _actor(event: dict[str, Any]) -> dict[str, Any]:
    """Return an actor's last heartbeat, with numbers as (name, value, unit, place of the table's column or -1)."""
    stats = (event.get("stats") or {}).items()
    numbers = [
        (title_of(name), value, unit_of(name), COLUMNS.index(name) if name in COLUMNS else -1) for name, value in stats
    ]
    return {key: event[key] for key in ("actor", "state", "activity")} | {"numbers": numbers}


def _texts(run: Record) -> dict[str, Any]:
    return {
        "account": account(run),
        "forks": fork_lines([run]),
        "samples": run.sample_pairs()[:PAIRS_SHOWN] if run.ending else [],
        "notation": notation(run),
        "configuration": FOLDERS.sub("…/", run.configuration.text),
    }


def finite(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinities, which JSON in a browser cannot represent.

    >>> finite({"loss": float("nan"), "steps": [1, 2]})
    {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
