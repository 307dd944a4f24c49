"""Panels with the values of runs: what the pages draw. Here curves are smoothed, and axes cut.

A plot is plain data, with null where nothing was measured: `lines`, each with its places `x`, the values `points`, and
`curve`: these smoothed or, in a stack, the top of the part.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from areal.extensions.desk.panels import COLOURS, SEVERAL, Panel, with_others
from areal.storage.record import Record, number_or_nan

# A curve is smoothed over one in this many of its points, to either side: with less points it is not.
SMOOTHED_FROM = 20
# Of longer runs a page gets this many points of a curve: each is one of the steps that it stands for.
MOST_POINTS = 1000
# Values above this multiple of the 90th percentile are cut off: the first step includes the start of generation.
OUTLIER = 2.5
# Values that are cut off are named, this many of them.
NAMED_CUTS = 3
# A logarithmic axis is for values that differ by more than this factor.
LOG_FROM = 10.0
# The part of a logarithmic axis that belongs to zero ends here, if no value is positive.
SMALLEST = 1e-7
# The axis of a share above this one ends at 1.
LARGE_SHARE = 0.25
# The colour scale from the freshest to the oldest groups. Without a light middle, neighbours could not be told apart.
SCALE = ((0x3B, 0x82, 0xD6), (0xF2, 0xC5, 0x4B), (0xC4, 0x2E, 0x5B))
DIGITS = 5  # of values on a page

Records = Sequence[Mapping[str, Any]]
Plot = dict[str, Any]


def plots(runs: Sequence[Record]) -> list[Plot]:
    """The plots of a run. Of several runs, a colour is a run, and each curve of a panel has a plot of its own."""
    panels = with_others(record for run in runs for record in run.records)
    if len(runs) > 1:
        return [plot for panel in panels for plot in _compared(panel.whole, runs)]
    return [plot for panel in panels if (plot := plot_of(panel, runs[0]))["lines"]]


def plot_of(panel: Panel, run: Record) -> Plot:
    """The plot of one run; without lines if it has no value for the panel."""
    records = _records(panel, run)
    values = _values(panel, records)
    bound = _bound(panel, run)
    colours = [COLOURS[name] for name in panel.colours] + [*SEVERAL[2:], *SEVERAL] * len(values)
    if panel.stack and panel.has_parts:  # of ages, which keep their colours while the run goes on
        colours, bound = ramp(max(len(values), int(np.nan_to_num(bound)) + 1)), math.nan
    places = [record[panel.of] for record in records]
    lines = [_line(label, colour, places, y) for (label, y), colour in zip(values.items(), colours, strict=False)]
    if panel.stack:
        for line, top in zip(lines, np.cumsum([np.nan_to_num(y) for y in values.values()], axis=0), strict=True):
            line["curve"] = _numbers(top[_chosen(top, top)])
    elif panel.error and lines:
        lines[0] |= _band(lines[0], _column(records, panel.error))
    return _plot(panel, lines, bound)


def _compared(panel: Panel, runs: Sequence[Record]) -> Iterator[Plot]:
    of_runs = [_records(panel, run) for run in runs]
    values = [_values(panel, records) for records in of_runs]
    for label in dict.fromkeys(label for curves in values for label in curves):
        lines = []
        for n, (records, curves, colour) in enumerate(zip(of_runs, values, run_colours(len(runs)), strict=True)):
            if label in curves:
                line = _line(runs[n].name, colour, [record[panel.of] for record in records], curves[label])
                band = _band(line, _column(records, panel.error)) if panel.error and label == next(iter(curves)) else {}
                lines.append(line | band | {"run": n})
        yield _plot(replace(panel, title=f"{panel.title}, {label}" if label else panel.title), lines, math.nan)


def run_colours(count: int) -> list[str]:
    return [SEVERAL[n % len(SEVERAL)] for n in range(count)]


def _records(panel: Panel, run: Record) -> Records:
    """The steps, or evaluations, in which the panel has its values; none if it needs a metric that is 0 in all."""
    if panel.needs and not any(record.get(panel.needs) for record in run.records):
        return []
    records = run.records if panel.of == "step" else run.evaluations
    by_place = {record[panel.of]: record for record in records}
    return [by_place[place] for place in sorted(by_place)]


def _bound(panel: Panel, run: Record) -> float:
    return number_or_nan(run.settings.get(panel.bound, (run.ending or {}).get(panel.bound)))


def _values(panel: Panel, records: Records) -> dict[str, np.ndarray]:
    """By label: float64 [n], nan where nothing was measured. Curves without a value, or that repeat another, are left
    out; the rest of a total is the last curve."""
    values: dict[str, np.ndarray] = {}
    for pattern, metric in panel.curves.items():
        for label, formula in _expanded(pattern, metric, records):
            y = _column(records, formula)
            if np.isfinite(y).any() and not any(np.array_equal(y, curve, equal_nan=True) for curve in values.values()):
                values[label] = y
    if panel.total and values:
        unnamed = _column(records, panel.total) - np.nansum([*values.values()], axis=0)
        values["other"] = np.maximum(unnamed, 0.0)
    return values


def _expanded(label: str, metric: str, records: Records) -> Iterator[tuple[str, str]]:
    """The curves that a label and a metric stand for."""
    head, star, tail = metric.partition(".*")
    if not star:
        yield label, metric
        return
    parts = [value for record in records if isinstance(value := record.get(head), dict | list)]
    keys = dict.fromkeys(str(n) for part in parts for n in (part if isinstance(part, dict) else range(len(part))))
    yield from ((label.replace("*", key), f"{head}\0{key}{tail.replace('.', chr(0))}") for key in keys)


def _column(records: Records, formula: str) -> np.ndarray:
    """float64 [n]. A missing metric counts as 0 in a sum with one that is there."""
    if "\0" in formula:
        return np.array([_at(record, formula.split("\0")) for record in records])
    sums, _, total = formula.partition(" / ")
    terms = np.array([[_at(record, [name]) for record in records] for name in sums.split(" + ")])
    numerator = np.where(np.isnan(terms).all(0), math.nan, np.nansum(terms, axis=0))
    if not total:
        return numerator
    by = _column(records, total)
    return np.divide(numerator, by, out=np.full(len(records), math.nan), where=by > 0)


def _at(record: Any, path: Sequence[str]) -> float:
    """The number at a path of keys, and of places in a list, which may end before: 0."""
    for key in path:
        if isinstance(record, list):
            record = record[int(key)] if int(key) < len(record) else 0
        else:
            record = record.get(key) if isinstance(record, Mapping) else None
    return number_or_nan(record)


def _line(label: str, colour: str, places: Sequence[int], y: np.ndarray) -> dict[str, Any]:
    curve = smoothed(y)
    chosen = _chosen(y, curve)
    return {
        "label": label,
        "colour": colour,
        "x": [places[n] for n in chosen],
        "points": _numbers(y[chosen]),
        "curve": _numbers(curve[chosen]),
    }


def _chosen(y: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """The places that are drawn: all or, of each of MOST_POINTS parts, the place that is farthest from the curve."""
    far = np.nan_to_num(np.abs(y - curve), nan=-1.0)
    parts = np.array_split(np.arange(len(y)), min(len(y), MOST_POINTS))
    return np.array([part[np.argmax(far[part])] for part in parts], int)


def _band(line: Mapping[str, Any], error: np.ndarray) -> dict[str, list[float | None]]:
    """Two standard errors to either side of the points; nothing of a line of which only a part is drawn."""
    if len(error) > MOST_POINTS or not np.isfinite(error).any():
        return {}
    y = np.array(line["points"], float)
    return {"low": _numbers(y - 2 * error), "high": _numbers(y + 2 * error)}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def smoothed(y: np.ndarray) -> np.ndarray:
    """At each place the mean of the values around it, as many places before as after except at the ends; nan where
    there is none. Fewer than SMOOTHED_FROM values stay as they are."""
    finite = np.isfinite(y)
    half = len(y) // SMOOTHED_FROM
    if not half or finite.sum() < SMOOTHED_FROM:
        return y
    window = np.ones(2 * half + 1)
    sums, counts = (np.convolve(values, window) for values in (np.where(finite, y, 0.0), finite))
    sums, counts = sums[half : half + len(y)], counts[half : half + len(y)]
    return np.divide(sums, counts, out=np.full(len(y), math.nan), where=counts > 0.5)


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
    """The end of an axis from 0 that cuts off outliers, a tenth of `values` at most; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    usual = OUTLIER * ordered[int(0.9 * (len(ordered) - 1))]
    return None if ordered[-1] <= usual or usual <= 0 else 1.2 * max(value for value in ordered if value <= usual)


def _log_axis(values: Sequence[float]) -> float | None:
    """None: a linear axis shows the values. 0: a logarithmic one does. Else some are 0: the axis is linear below this
    power of ten."""
    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values):
        return 0.0 if max(positive) > LOG_FROM * min(positive) else None
    return 10.0 ** math.floor(math.log10(min(positive, default=SMALLEST)))


def ramp(n: int) -> list[str]:
    """`n` colours from the first of SCALE to its last."""
    places, at = np.linspace(0, len(SCALE) - 1, n), range(len(SCALE))
    colours = np.stack([np.interp(places, at, part) for part in zip(*SCALE, strict=True)], axis=1).round().astype(int)
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in colours.tolist()]
