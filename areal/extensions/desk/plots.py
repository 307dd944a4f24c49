"""Panels with the values of runs, as the pages draw them. This module smooths curves, and cuts axes.

A plot is plain data, with null for missing values. Each of its `lines` has the places `x`, the values `points`, and the
`curve`: the smoothed points or, in a stack, the top of the part.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from areal.extensions.desk.panels import COLOURS, SEVERAL, Panel, panels_of
from areal.storage.record import Record, number_or_nan

# A curve is smoothed over a 20th of its points, to either side. A curve with fewer points is not smoothed.
SMOOTHED_FROM = 20
# The most points of a curve on a page.
MOST_POINTS = 1000
# Values above this multiple of the 90th percentile are cut off: the first step includes the start of generation.
OUTLIER = 2.5
# The most cut values named below a plot.
NAMED_CUTS = 3
# A logarithmic axis is for values that differ by more than this factor.
LOG_FROM = 10.0
# If no value is positive, the linear part of a logarithmic axis, around zero, ends here.
SMALLEST = 1e-7
# The axis of larger shares ends at 1.
LARGE_SHARE = 0.25
# The colour scale from the freshest to the oldest groups. Without a light middle, neighbours could not be told apart.
SCALE = ((0x3B, 0x82, 0xD6), (0xF2, 0xC5, 0x4B), (0xC4, 0x2E, 0x5B))
DIGITS = 5  # significant digits of a value

Records = Sequence[Mapping[str, Any]]
Plot = dict[str, Any]


class Measured(NamedTuple):
    """The steps of a run, or its evaluated versions, in ascending order, and their records."""

    places: list[int]
    records: Records

    @classmethod
    def of(cls, records: Records, key: str) -> Self:
        places = [record[key] for record in records]
        if not all(map(operator.lt, places, places[1:])):  # a repeated step counts once
            by_place = dict(zip(places, records, strict=True))
            places = sorted(by_place)
            records = [by_place[place] for place in places]
        return cls(places, records)


def plots(runs: Sequence[Record]) -> list[Plot]:
    """Return the plots of runs. If there are several, a colour is a run, and each curve of a panel has its own plot."""
    sources = [
        {"step": Measured.of(run.metrics.records, "step"), "version": Measured.of(run.metrics.evaluations, "version")}
        for run in runs
    ]
    drawn: list[Plot] = []
    for panel in panels_of([record for run in runs for record in run.metrics.records]):
        if panel.needs and not any(record.get(panel.needs) for run in runs for record in run.metrics.records):
            continue
        measured = [source[panel.of] for source in sources]
        if len(runs) > 1:
            drawn += _compared(panel.whole, [run.name for run in runs], measured)
        else:
            drawn.append(_alone(panel, _bound(panel, runs[0]), *measured))
    return [plot for plot in drawn if plot["lines"]]


def _alone(panel: Panel, bound: float, measured: Measured) -> Plot:
    """Return the plot of a single run. The plot has no lines if the run has no value for the panel."""
    values = _values(panel, measured.records)
    colours = [COLOURS[name] for name in panel.colours] + [*SEVERAL[2:], *SEVERAL] * len(values)
    if panel.stack and panel.has_parts:  # ages keep their colours while the run goes on
        colours, bound = ramp(max(len(values), int(np.nan_to_num(bound)) + 1)), math.nan
    tops = [smoothed(y) for y in values.values()]
    chosen = [_chosen(y, top) for y, top in zip(values.values(), tops, strict=True)]
    if panel.stack and values:
        tops = list(np.cumsum([np.nan_to_num(y) for y in values.values()], axis=0))
        chosen = [_chosen(tops[-1], smoothed(tops[-1]))] * len(tops)
    lines = [
        _line(label, colour, measured.places, y, top, places)
        for (label, y), colour, top, places in zip(values.items(), colours, tops, chosen, strict=False)
    ]
    if panel.error and lines:
        lines[0] |= _band(lines[0], _column(measured.records, panel.error))
    return _plot(panel, lines, bound)


def _compared(panel: Panel, names: Sequence[str], measured: Sequence[Measured]) -> Iterator[Plot]:
    values = [_values(panel, records) for _, records in measured]
    for label in dict.fromkeys(label for curves in values for label in curves):
        lines = []
        for n, (curves, (places, records)) in enumerate(zip(values, measured, strict=True)):
            if (y := curves.get(label)) is not None:
                curve = smoothed(y)
                line = _line(names[n], run_colours(len(names))[n], places, y, curve, _chosen(y, curve)) | {"run": n}
                is_first = panel.error and label == next(iter(curves))
                lines.append(line | _band(line, _column(records, panel.error)) if is_first else line)
        yield _plot(replace(panel, title=f"{panel.title}, {label}" if label else panel.title), lines, math.nan)


def run_colours(count: int) -> list[str]:
    return [SEVERAL[n % len(SEVERAL)] for n in range(count)]


def _bound(panel: Panel, run: Record) -> float:
    return number_or_nan(run.configuration.settings.get(panel.bound, (run.ending or {}).get(panel.bound)))


def _values(panel: Panel, records: Records) -> dict[str, np.ndarray]:
    """Return the curves by label: float64 [n], nan for missing values. Curves without a value are left out, and so are
    parts equal to another curve, such as pass@1. The rest of a total is the last curve."""
    values: dict[str, np.ndarray] = {}
    for pattern, metric in panel.curves.items():
        for label, formula in _expanded(pattern, metric, records):
            y = _column(records, formula)
            repeats = "*" in metric and any(np.array_equal(y, curve, equal_nan=True) for curve in values.values())
            if np.isfinite(y).any() and not repeats:
                values[label] = y
    if panel.total and values:
        unnamed = _column(records, panel.total) - np.nansum([*values.values()], axis=0)
        values["other"] = np.maximum(unnamed, 0.0)
    return values


def _expanded(label: str, metric: str, records: Records) -> Iterator[tuple[str, str]]:
    """Yield each curve of a label and a metric: `*` stands for the parts of the metric."""
    head, star, tail = metric.partition(".*")
    if not star:
        yield label, metric
        return
    parts = [value for record in records if isinstance(value := record.get(head), dict | list)]
    keys = dict.fromkeys(str(n) for part in parts for n in (part if isinstance(part, dict) else range(len(part))))
    yield from ((label.replace("*", key), f"{head}\0{key}{tail.replace('.', chr(0))}") for key in keys)


def _column(records: Records, formula: str) -> np.ndarray:
    """Return a formula's values, float64 [n]. In a sum a missing metric counts as 0 if another metric is there."""
    if "\0" in formula:
        return np.array([_at(record, formula.split("\0")) for record in records])
    sums, _, total = formula.partition(" / ")
    terms = np.array([_numbers_of(records, name) for name in sums.split(" + ")])
    numerator = np.where(np.isnan(terms).all(0), math.nan, np.nansum(terms, axis=0))
    if not total:
        return numerator
    by = _column(records, total)
    return np.divide(numerator, by, out=np.full(len(records), math.nan), where=by > 0)


def _numbers_of(records: Records, name: str) -> list[float]:
    values = [record.get(name) for record in records]
    return [value if isinstance(value, int | float) else math.nan for value in values]


def _at(record: Any, path: Sequence[str]) -> float:
    """Return the number at a path of keys and of places in a list. A place beyond the end of a list gives 0."""
    for key in path:
        if isinstance(record, list):
            record = record[int(key)] if int(key) < len(record) else 0
        else:
            record = record.get(key) if isinstance(record, Mapping) else None
    return number_or_nan(record)


def _line(
    label: str, colour: str, places: Sequence[int], y: np.ndarray, curve: np.ndarray, chosen: np.ndarray
) -> dict[str, Any]:
    numbers = {"points": _numbers(y[chosen]), "curve": _numbers(curve[chosen])}
    return {"label": label, "colour": colour, "x": [places[n] for n in chosen], **numbers}


def _chosen(y: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Return the places to draw: all places, or, of each of MOST_POINTS parts, the place of an outlier or a measured
    place in the middle."""
    if len(y) <= MOST_POINTS:
        return np.arange(len(y))
    far = np.nan_to_num(np.abs(y - curve), nan=-1.0)
    usual = OUTLIER * np.quantile(far[far >= 0] if (far >= 0).any() else far, 0.99)
    chosen = []
    for part in np.array_split(np.arange(len(y)), MOST_POINTS):
        measured = part[far[part] >= 0]
        farthest = part[np.argmax(far[part])]
        middle = measured[len(measured) // 2] if len(measured) else part[0]
        chosen.append(farthest if far[farthest] > usual else middle)
    return np.array(chosen)


def _band(line: Mapping[str, Any], error: np.ndarray) -> dict[str, list[float | None]]:
    """Return two standard errors to either side of the points; nothing if the line leaves out points."""
    if len(error) > MOST_POINTS or not np.isfinite(error).any():
        return {}
    y = np.array(line["points"], float)
    return {"low": _numbers(y - 2 * error), "high": _numbers(y + 2 * error)}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def smoothed(y: np.ndarray) -> np.ndarray:
    """Return the mean of the values around each place, as many before as after except at the ends; nan for a place
    without values around it. Fewer than SMOOTHED_FROM values are returned unchanged."""
    finite = np.isfinite(y)
    half = len(y) // SMOOTHED_FROM
    if not half or finite.sum() < SMOOTHED_FROM:
        return y
    last = np.minimum(np.arange(len(y)) + half + 1, len(y))
    first = np.maximum(np.arange(len(y)) - half, 0)
    sums, counts = (np.concatenate(([0.0], np.cumsum(x))) for x in (np.where(finite, y, 0.0), finite))
    number = counts[last] - counts[first]
    return np.divide(sums[last] - sums[first], number, out=np.full(len(y), math.nan), where=number > 0)


def _plot(panel: Panel, lines: Sequence[dict[str, Any]], bound: float) -> Plot:
    tops, of = (lines[-1:], "curve") if panel.stack else (lines, "points")
    points = [(x, y) for line in tops for x, y in zip(line["x"], line[of], strict=True) if y is not None]
    values = [y for _, y in points]
    limit = None
    if (panel.from_0 or panel.stack) and not math.isfinite(bound):
        limit = upper_limit(values)
    low = 0.0 if panel.from_0 or panel.stack or panel.unit == "share" else None
    return {
        "title": panel.title,
        "says": panel.says,
        "unit": panel.unit,
        "of": panel.of,
        "main": panel.main,
        "stack": panel.stack,
        "lines": list(lines),
        "bound": bound if math.isfinite(bound) else None,
        "low": low,
        "high": 1.0 if panel.unit == "share" and max(values, default=0.0) > LARGE_SHARE else limit,
        "cut": sorted(((y, x) for x, y in points if limit and y > limit), reverse=True)[:NAMED_CUTS],
        "log": _log_axis(values) if panel.log else None,
    }


def upper_limit(values: Sequence[float]) -> float | None:
    """Return the end of an axis from 0 that cuts off outliers, at most a tenth of `values`; None without outliers."""
    ordered = sorted(values)
    if not ordered:
        return None
    usual = OUTLIER * ordered[int(0.9 * (len(ordered) - 1))]
    return None if ordered[-1] <= usual or usual <= 0 else 1.2 * max(value for value in ordered if value <= usual)


def _log_axis(values: Sequence[float]) -> float | None:
    """Return None for a linear axis, and 0 for a logarithmic axis. If some values are 0: the power of ten below which a
    logarithmic axis is linear."""
    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values):
        return 0.0 if max(positive) > LOG_FROM * min(positive) else None
    return 10.0 ** math.floor(math.log10(min(positive, default=SMALLEST)))


def ramp(n: int) -> list[str]:
    """Return `n` colours from the first of SCALE to the last."""
    places, at = np.linspace(0, len(SCALE) - 1, n), range(len(SCALE))
    colours = np.stack([np.interp(places, at, part) for part in zip(*SCALE, strict=True)], axis=1).round().astype(int)
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in colours.tolist()]
