"""Draws the results of several runs by a setting in which they differ: `python -m areal report RUNS --figure FILE`.

The horizontal axis is the setting with the most numeric values, each combination of the other settings is a line, and
runs that differ in their seed alone are one point.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from areal.config import UserError
from areal.observe.report import BLUE, GREEN, ORANGE, Run, figure_of_points, read_run, write_svg
from areal.storage.run_folder import SPEED_ONLY, STEADY, differences, within

# Keys that do not change what a run learns, and the seed, over which results are averaged.
LEFT_OUT = ("name", "run_dir", "seed", "master", "network", "observe", *SPEED_ONLY)
COLOURS = (ORANGE, BLUE, GREEN, "#a05bd6", "#c4a000", "#d64f7b")


@dataclass(frozen=True)
class Point:
    """The runs with one value x of the axis: how many, their mean held-out accuracy at the end with the half width of
    its interval (nan where there are no seeds to tell it by), and their mean staleness."""

    x: float
    runs: int
    accuracy: float
    error: float
    staleness: float


def write_comparison(folders: Sequence[Path], path: Path) -> Table:
    """Draw the runs in `folders` into the SVG file `path`. Returns the numbers as a table.

    The interval of a point is two standard errors to either side, which is about 95 %. The standard deviation is
    pooled over all points, since a few seeds tell little about that of one. Raises UserError if a folder holds no
    finished run, or if the runs differ in no setting with numeric values.
    """
    runs = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if not run.config or run.summary.get("accuracy_after") is None:
            raise UserError(f"The run in {folder} has no final held-out accuracy: leave it out, or let it finish.")
    values = _differing([yaml.safe_load(run.config) for run in runs])
    numeric = [key for key in values[0] if all(_is_number(config[key]) for config in values)]
    if not numeric:
        raise UserError("These runs differ in no setting that is a number: a figure of them has no axis.")
    axis = max(numeric, key=lambda key: len({config[key] for config in values}))
    lines: dict[str, dict[float, list[Run]]] = {}
    for run, config in zip(runs, values, strict=True):
        label = ", ".join(_text(key, value) for key, value in config.items() if key != axis)
        lines.setdefault(label, {}).setdefault(config[axis], []).append(run)
    points = _points(lines)
    accuracies = {label: [(p.x, p.accuracy, p.error) for p in line] for label, line in points.items()}
    ages = {label: [(p.x, p.staleness, math.nan) for p in line] for label, line in points.items()}
    panels = (("Held-out accuracy at the end", accuracies), ("Staleness, mean", ages))
    write_svg(path, "comparison", lambda: figure_of_points(panels, axis, COLOURS))
    return _table(axis, points)


def _differing(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings in which the runs differ, by key, without those in LEFT_OUT. Of several that divide the runs alike,
    such as an objective and the settings that it brings along, only the first."""
    keys: dict[tuple[int, ...], str] = {}
    for key in dict.fromkeys(key for config in settings for key, *_ in differences(settings[0], config)):
        if within(key, LEFT_OUT):
            continue
        texts = [json.dumps(value_of(config, key)) for config in settings]
        keys.setdefault(tuple(map(texts.index, texts)), key)
    return [{key: value_of(config, key) for key in keys.values()} for config in settings]


def value_of(settings: dict[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(key: str, value: Any) -> str:
    return value if isinstance(value, str) else f"{key.rpartition('.')[2]} {json.dumps(value)}"


def _points(lines: dict[str, dict[float, list[Run]]]) -> dict[str, list[Point]]:
    cells = [[run.summary["accuracy_after"] for run in runs] for line in lines.values() for runs in line.values()]
    deviation = pooled_deviation(cells)
    points: dict[str, list[Point]] = {}
    for label, line in lines.items():
        for x, runs in sorted(line.items()):
            accuracy = statistics.fmean(run.summary["accuracy_after"] for run in runs)
            error = half_width(deviation, len(runs))
            staleness = statistics.fmean(map(staleness_of, runs))
            points.setdefault(label, []).append(Point(x, len(runs), accuracy, error, staleness))
    return points


def pooled_deviation(cells: Sequence[Sequence[float]]) -> float:
    """The standard deviation within cells of values that differ in the seed alone; nan if no cell has two values."""
    freedom = sum(len(cell) - 1 for cell in cells)
    squares = sum((value - statistics.fmean(cell)) ** 2 for cell in cells for value in cell)
    return math.sqrt(squares / freedom) if freedom else math.nan


def half_width(deviation: float, runs: int) -> float:
    """Of the interval of a mean over so many runs: two standard errors, about 95 %."""
    return 2 * deviation / math.sqrt(runs)


def staleness_of(run: Run) -> float:
    """The mean over the steps, without the first, in which generation has just begun."""
    steady = [age for step, age in zip(run.steps, run.series("staleness_mean"), strict=True) if step >= STEADY]
    return statistics.fmean(steady) if steady else math.nan


def _table(axis: str, points: dict[str, list[Point]]) -> Table:
    table = Table("", axis, "runs", "held-out accuracy", "staleness")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, line in points.items():
        for p in line:
            error = "" if math.isnan(p.error) else f" ± {p.error:.3f}"
            table.add_row(label, f"{p.x:g}", str(p.runs), f"{p.accuracy:.3f}{error}", f"{p.staleness:.2f}")
    return table
