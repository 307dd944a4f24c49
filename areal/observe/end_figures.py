"""The figures that runs end with, side by side: `python -m areal compare RUN RUN ...`, and the page of several runs.

Of a run that goes on, they are the figures so far.
"""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.table import Table

from areal.command_line import output
from areal.observe.alerts import Curve
from areal.observe.comparison import half_width, pooled_deviation, staleness_of, value_of
from areal.observe.report import Run, read_run
from areal.storage.run_folder import STEADY, differences, within

# Keys that say only where a run is and what it is called, and the seed, over which figures are averaged.
LEFT_OUT = ("name", "run_dir", "seed", "master", "network", "observe")
LAST_STEPS = 10


class Figure(NamedTuple):
    """A figure of each run (nan where it is unknown), and the format of its values."""

    name: str
    form: str
    values: list[float]

    def shown(self, n: int) -> str:
        return "–" if math.isnan(self.values[n]) else format(self.values[n], self.form)


def end_figures(runs: Sequence[Run]) -> list[Figure]:
    """The figures of these runs. Those that no run has are left out."""
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.get("benchmarks") or ())
    kinds: list[tuple[str, str, Callable[[Run], float]]] = [
        ("held-out accuracy, before", ".3f", lambda run: _accuracy(run, "accuracy_before", 0)),
        ("held-out accuracy", ".3f", lambda run: _accuracy(run, "accuracy_after", -1)),
        *((name, ".3f", lambda run, name=name: _benchmark(run, name)) for name in names),
        (f"reward, last {LAST_STEPS} steps", ".3f", lambda run: _mean(run.series("reward_mean")[-LAST_STEPS:])),
        ("staleness, mean", ".2f", staleness_of),
        ("staleness, max", ".1f", lambda run: max(run.series("staleness_max"), default=math.nan)),
        ("samples a second", ",.1f", lambda run: _number(run.summary.get("samples_per_second"))),
        ("effective tokens a second", ",.0f", lambda run: _number(run.summary.get("effective_throughput"))),
        ("trainer idle", ".1%", _idle),
        ("log-prob gap, max", ".1e", lambda run: max(Curve.of(run.records, "logprob_gap").values, default=math.nan)),
        ("steps", ",.0f", lambda run: max(run.steps, default=0)),
        ("seconds", ",.0f", lambda run: sum(run.series("step_seconds"))),
    ]
    figures = [Figure(name, form, [float(value(run)) for run in runs]) for name, form, value in kinds]
    figures += _to_reward(runs)
    return [figure for figure in figures if not all(map(math.isnan, figure.values))]


def compare(options: Namespace) -> None:
    """`areal compare`."""
    output(200).print(table_of(options.folders))


def table_of(folders: Sequence[Path]) -> Table:
    """A table of these runs: the settings in which they differ, then their figures.

    Runs that differ in their seed alone are one column, with the mean of each figure and the half width of its interval
    (areal.observe.comparison): about 95 %, by the standard deviation over the seeds, pooled over all columns. Raises
    UserError if a folder holds no run.
    """
    runs = [read_run(folder) for folder in folders]
    settings: list[dict[str, Any]] = [yaml.safe_load(run.config) or {} for run in runs]
    differing = differing_settings(settings)
    columns: dict[tuple[str, ...], list[int]] = {}
    for n, config in enumerate(settings):
        columns.setdefault(tuple(json.dumps(value_of(config, key)) for key in differing), []).append(n)
    table = Table("", *(_title([runs[n].name for n in numbers]) for numbers in columns.values()))
    for column in table.columns[1:]:
        column.justify, column.overflow = "right", "fold"
    for key, values in zip(differing, zip(*columns, strict=True), strict=bool(differing)):
        table.add_row(key, *values, style="dim")
    table.add_section()
    for figure in end_figures(runs):
        table.add_row(figure.name, *_cells(figure, list(columns.values())))
    return table


def differing_settings(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which these configurations differ, without those in LEFT_OUT."""
    keys = dict.fromkeys(key for config in settings for key, *_ in differences(settings[0], config))
    return [key for key in keys if not within(key, LEFT_OUT)]


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}\n{len(names)} seeds"


def _cells(figure: Figure, columns: Sequence[Sequence[int]]) -> list[str]:
    cells = [[value for n in numbers if not math.isnan(value := figure.values[n])] for numbers in columns]
    deviation = pooled_deviation([cell for cell in cells if cell])
    shown = []
    for cell in cells:
        error = half_width(deviation, len(cell)) if cell else math.nan
        width = "" if math.isnan(error) else f" ± {error:{figure.form}}"
        shown.append(f"{statistics.fmean(cell):{figure.form}}{width}" if cell else "–")
    return shown


def _to_reward(runs: Sequence[Run]) -> list[Figure]:
    """How long each run took to the highest reward that all of them have reached, as a mean of RECENT steps."""
    means = [Curve(run.steps, run.series("reward_mean")).means for run in runs]
    if any(np.isnan(curve).all() for curve in means):
        return []
    level = min(float(np.nanmax(curve)) for curve in means)
    ends = [int(np.argmax(curve >= level)) + 1 for curve in means]
    seconds = [sum(run.series("step_seconds")[:end]) for run, end in zip(runs, ends, strict=True)]
    return [
        Figure(f"steps to reward {level:.3f}", ".1f", list(map(float, ends))),
        Figure(f"seconds to reward {level:.3f}", ",.0f", seconds),
    ]


def _accuracy(run: Run, key: str, place: int) -> float:
    """Of the summary or, while there is none, of the first or the newest evaluation."""
    accuracies = [e["accuracy"] for e in run.evaluations if e.get("accuracy") is not None]
    return _number(run.summary.get(key, accuracies[place] if accuracies else None))


def _benchmark(run: Run, name: str) -> float:
    accuracies = [e["benchmarks"][name]["accuracy"] for e in run.evaluations if name in (e.get("benchmarks") or ())]
    return _number(accuracies[-1] if accuracies else None)


def _idle(run: Run) -> float:
    """The share of time that the trainer waited, as in summary.json."""
    steady = [record for record in run.records if record["step"] >= STEADY]
    seconds = sum(record.get("step_seconds") or 0.0 for record in steady)
    waits = ("trainer_wait_seconds", "publish_wait_seconds")
    return sum(record.get(wait) or 0.0 for record in steady for wait in waits) / seconds if seconds else math.nan


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
