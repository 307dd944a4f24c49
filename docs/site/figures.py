"""Draws the figures of the docs from runs: `python docs/site/figures.py FILE.svg RUN_FOLDER...`, with the extra `docs`.

Of one run its learning curve, and its staleness under the bound. Several runs are drawn by the setting with the most
numeric values in which they differ; each combination of the other settings is a line, and runs that differ in their
seed alone are one point, with two standard errors to either side. Without such a setting the axis is the step.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from areal.base.command_line import output
from areal.base.errors import UserError
from areal.base.text import shown
from areal.config.settings import SPEED_ONLY
from areal.extensions.alerts.alerts import Curve
from areal.extensions.desk.comparison import (
    LEFT_OUT,
    by_settings,
    differing_settings,
    mean_text,
    means,
    staleness_of,
    value_of,
)
from areal.extensions.desk.panels import COLOURS, SEVERAL
from areal.storage.record import Record, number_or_nan

# Readable on white and on black: a file that stands alone takes no colours from a page.
INK, FAINT = "#7d8590", "#7d859055"
Point = tuple[float, float, float]
"""x, y, and the half width of y's interval, nan without one."""
Lines = dict[str, list[Point]]


def draw_run(folder: Path, file: Path) -> None:
    """Raises UserError if the folder holds no run, or a run without a step."""
    run = Record(folder)
    if not run.metrics.records:
        raise UserError(f"The run in {folder} has no step yet: draw its figure later.")
    figure, (learning, staleness) = _axes(2)
    rewards = run.metrics.series("reward_mean")
    learning.plot(run.metrics.steps, rewards, ".", color=COLOURS["work"], alpha=0.4, markersize=4, markeredgewidth=0)
    learning.plot(
        run.metrics.steps,
        Curve(run.metrics.steps, rewards).means,
        color=COLOURS["work"],
        label="reward, mean of 5 steps",
    )
    versions = [evaluation["version"] for evaluation in run.metrics.evaluations]
    accuracy = [number_or_nan(evaluation.get("accuracy")) for evaluation in run.metrics.evaluations]
    learning.plot(versions, accuracy, "o-", color=COLOURS["held_out"], markersize=3, label="held-out accuracy")
    learning.set_ylim(None, 1)
    for label, colour in (("mean", "work"), ("max", "second")):
        staleness.plot(run.metrics.steps, run.metrics.series(f"staleness_{label}"), color=COLOURS[colour], label=label)
    staleness.axhline(
        number_or_nan(run.configuration.settings.get("max_staleness")), color=INK, linestyle="--", label="bound"
    )
    staleness.set_ylim(0, None)
    _write(figure, file, ("Learning", "Staleness, versions"), "step")


def draw_runs(folders: Sequence[Path], file: Path) -> Table:
    """Returns the numbers as a table. Raises UserError if a folder holds no finished run."""
    runs = [Record(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if not run.configuration.settings or run.summary.get("accuracy_after") is None:
            raise UserError(f"The run in {folder} has no final held-out accuracy: leave it out, or let it finish.")
    axis, groups = _by_axis(runs)
    if axis:
        at = [(label, value_of(group[0].configuration.settings, axis), _at_the_end(group)) for label, group in groups]
        titles, second, form = ("Held-out accuracy at the end", "Staleness, mean"), "staleness", ".2f"
    else:
        at = [(label, *point) for label, group in groups for point in _by_step(group).items()]
        axis, titles, second, form = "step", ("Held-out accuracy", "Reward of the steps"), "reward", ".3f"
    at.sort(key=lambda point: point[:2])
    accuracy = means([accuracy for accuracy, _ in values] for *_, values in at)
    table = Table("", axis, "runs", "held-out accuracy", second)
    lines: tuple[Lines, Lines] = ({}, {})
    for (label, x, values), (mean, error) in zip(at, accuracy, strict=True):
        other = statistics.fmean(value for _, value in values)
        for line, point in zip(lines, ((x, mean, 2 * error), (x, other, math.nan)), strict=True):
            line.setdefault(label, []).append(point)
        table.add_row(
            label, f"{x:g}", f"{len(values)}", mean_text(mean, 2 * error, ".3f"), mean_text(other, math.nan, form)
        )
    figure, axes = _axes(2)
    for place, of_place in zip(axes, lines, strict=True):
        _draw_points(place, of_place)
    _write(figure, file, titles, axis)
    return table


def _by_axis(runs: Sequence[Record]) -> tuple[str, list[tuple[str, list[Record]]]]:
    """The setting that is the axis, empty if there is none, and the runs by the label of their other settings."""
    settings = [run.configuration.settings for run in runs]
    by_division: dict[tuple[int, ...], str] = {}  # of keys that divide the runs alike, only the first
    for key in differing_settings(settings, (*LEFT_OUT, *SPEED_ONLY)):
        texts = [repr(value_of(config, key)) for config in settings]
        by_division.setdefault(tuple(map(texts.index, texts)), key)
    keys = [*by_division.values()]
    numeric = [key for key in keys if all(type(value_of(config, key)) in (int, float) for config in settings)]
    axis = max(numeric, key=lambda key: len({value_of(config, key) for config in settings}), default="")
    groups = []
    for numbers in by_settings(settings, keys).values():
        values = {key: value_of(settings[numbers[0]], key) for key in keys if key != axis}
        words = (v if isinstance(v, str) else f"{key.rpartition('.')[2]} {v}" for key, v in values.items())
        groups.append((", ".join(words), [runs[n] for n in numbers]))
    return axis, groups


def _at_the_end(group: Sequence[Record]) -> list[tuple[float, float]]:
    return [(run.summary["accuracy_after"], staleness_of(run)) for run in group]


def _by_step(group: Sequence[Record]) -> dict[int, list[tuple[float, float]]]:
    """By evaluated version, of each run: the accuracy, and the mean reward of the steps since the evaluation before."""
    values: dict[int, list[tuple[float, float]]] = {}
    for run in group:
        rewards, earlier = dict(zip(run.metrics.steps, run.metrics.series("reward_mean"), strict=True)), 0
        for evaluation in sorted(run.metrics.evaluations, key=lambda evaluation: evaluation["version"]):
            version = evaluation["version"]
            since = [reward for step, reward in rewards.items() if earlier < step <= version]
            point = number_or_nan(evaluation.get("accuracy")), statistics.fmean(since) if since else math.nan
            values.setdefault(version, []).append(point)
            earlier = version
    return values


def _axes(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * count, 2.9), layout="constrained")
    return figure, figure.subplots(1, count)


def _draw_points(axes: Any, lines: Mapping[str, Sequence[Point]]) -> None:
    for (label, points), colour in zip(lines.items(), itertools.cycle(SEVERAL), strict=False):
        x, y, errors = zip(*points, strict=True)
        axes.errorbar(x, y, errors, color=colour, label=_label(label) or None, marker="o", markersize=3, capsize=2)
    ticks = sorted({x for points in lines.values() for x, *_ in points})
    if ticks[0] >= 0 and ticks[-1] > 8 * (ticks[1] if len(ticks) > 1 and not ticks[0] else ticks[0]):
        axes.set_xscale("symlog", linthresh=next(x for x in ticks if x > 0))
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()


def _write(figure: Any, file: Path, titles: Iterable[str], axis: str) -> None:
    import matplotlib

    for axes, title in zip(figure.axes, titles, strict=True):
        axes.set_title(title, loc="left", color=INK, fontsize=10)
        axes.set_xlabel(_label(axis), color=INK)
        axes.tick_params(colors=INK, which="both")
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(INK)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "figure", "font.size": 9}):
        figure.savefig(file, transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


def _label(text: str) -> str:
    """The text as matplotlib shows it as it is, and not as a formula."""
    return shown(text).replace("$", r"\$")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.svg")
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    options = parser.parse_args(arguments)
    try:
        if len(options.folders) == 1:
            draw_run(options.folders[0], options.file)
        else:
            output(120).print(draw_runs(options.folders, options.file))
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
