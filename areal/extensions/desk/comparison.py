"""Runs side by side: the settings in which they differ, and their figures, as means over seeds.

`areal compare RUN RUN ...` prints them, and the page of several runs shows them. Of a run that goes on, they
are the figures so far.
"""

import json
import math
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from areal.base.command_line import output
from areal.config.settings import differences, is_under
from areal.extensions.alerts.alerts import Curve
from areal.extensions.desk.account import fork_lines
from areal.storage.record import Record, number_or_nan

# Keys that say only where a run is and what it is called, and the seed, over which figures are averaged.
LEFT_OUT = ("name", "run_dir", "seed", "master", "network", "observe")
LAST_STEPS = 10


class Figure(NamedTuple):
    """A figure of each run (nan where it is unknown), and the format of its values."""

    name: str
    form: str
    values: list[float]

    def shown(self, n: int) -> str:
        return mean_text(self.values[n], math.nan, self.form)


def compare(options: Namespace) -> None:
    """`areal compare`."""
    console, runs = output(200), [Record(folder) for folder in options.folders]
    console.print(table_of(runs))
    for line in fork_lines(runs):
        console.print(line, highlight=False)


def table_of(runs: Sequence[Record]) -> Table:
    """A table of these runs: the settings in which they differ, then their figures.

    Runs that differ in their seed alone are one column, with the mean of each figure and its interval (`means`). Those
    that repeat settings and seed have a column each, and a line below says so.
    """
    settings = [run.settings for run in runs]
    keys = differing_settings(settings)
    groups = by_settings(settings, keys)
    table = Table("", *(_title([runs[n].name for n in numbers]) for numbers in groups.values()))
    for column in table.columns[1:]:
        column.justify, column.overflow = "right", "fold"
    if repeated := [_title([runs[n].name for n in numbers]) for (*_, n), numbers in groups.items() if n != "0"]:
        table.caption = f"Same settings and seeds as in another column: {', '.join(repeated)}. Only timing differs."
    for place, key in enumerate(keys):
        table.add_row(key, *(texts[place] for texts in groups), style="dim")
    table.add_section()
    for figure in end_figures(runs):
        cells = means([figure.values[n] for n in numbers] for numbers in groups.values())
        table.add_row(figure.name, *(mean_text(mean, 2 * error, figure.form) for mean, error in cells))
    return table


def value_of(settings: Mapping[str, Any], key: str, missing: Any = None) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part, missing) if isinstance(value, dict) else missing
    return value


def differing_settings(settings: Sequence[dict[str, Any]], left_out: Sequence[str] = LEFT_OUT) -> list[str]:
    """The keys in which these configurations differ, without those in `left_out`."""
    keys = dict.fromkeys(key for config in settings for key, *_ in differences(settings[0], config))
    return [key for key in keys if not is_under(key, left_out)]


def by_settings(settings: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """By the values of `keys`, as JSON, or – for one that is missing: the numbers of the configurations that have them.

    The seeds of a group differ. A run that repeats the seed of another one is no further sample, so it is in a group of
    its own, with the number of the repetition behind the values.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    earlier: Counter[tuple[str, ...]] = Counter()
    for n, config in enumerate(settings):
        # A section with names, such as scorers, has other keys in each run.
        texts = tuple("–" if (value := value_of(config, key, "–")) == "–" else json.dumps(value) for key in keys)
        seeded = (*texts, json.dumps(config.get("seed")))
        groups.setdefault((*texts, f"{earlier[seeded]}"), []).append(n)
        earlier[seeded] += 1
    return groups


def means(cells: Iterable[Sequence[float]]) -> list[tuple[float, float]]:
    """Of the values of each cell, such as runs that differ in their seed alone: the mean and its standard error. The
    interval of two standard errors to either side is about 95 %.

    The standard deviation is pooled over all cells, since a few seeds tell little about that of one. nan: of no values,
    and the error if no cell has two values. Values that are nan do not count.
    """
    finite = [[value for value in cell if not math.isnan(value)] for cell in cells]
    freedom = sum(len(cell) - 1 for cell in finite if cell)
    squares = sum((value - statistics.fmean(cell)) ** 2 for cell in finite for value in cell)
    deviation = math.sqrt(squares / freedom) if freedom else math.nan
    return [(_mean(cell), deviation / math.sqrt(len(cell)) if cell else math.nan) for cell in finite]


def mean_text(mean: float, error: float, form: str) -> str:
    return "–" if math.isnan(mean) else f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:{form}}")


def end_figures(runs: Sequence[Record]) -> list[Figure]:
    """The figures of these runs. Those that no run has are left out."""
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.get("benchmarks") or ())
    rewards = {"reward": "reward_mean"}
    if any(run.filters for run in runs):  # the trained groups are not all groups
        rewards = {"reward of trained groups": "reward_mean", "reward of all groups": "reward_mean_all"}
    kinds: list[tuple[str, str, Callable[[Record], float]]] = [
        ("held-out accuracy, before", ".3f", lambda run: _accuracy(run, "accuracy_before", 0)),
        ("held-out accuracy", ".3f", lambda run: _accuracy(run, "accuracy_after", -1)),
        *((name, ".3f", lambda run, name=name: _benchmark(run, name)) for name in names),
        *(
            (f"{name}, last {LAST_STEPS} steps", ".3f", lambda run, key=key: _mean(run.series(key)[-LAST_STEPS:]))
            for name, key in rewards.items()
        ),
        ("trained groups with signal", ".1%", lambda run: _mean([*filter(math.isfinite, run.series("mixed_groups"))])),
        ("tokens generated for each of them", ",.0f", _tokens_per_signal),
        (
            "rows of which a prompt was admitted",
            ".1%",
            lambda run: run.series("coverage")[-1] if run.records else math.nan,
        ),
        ("staleness, mean", ".2f", staleness_of),
        ("staleness, max", ".1f", lambda run: max(run.series("staleness_max"), default=math.nan)),
        ("samples a second", ",.1f", lambda run: number_or_nan(run.summary.get("samples_per_second"))),
        ("effective tokens a second", ",.0f", lambda run: number_or_nan(run.summary.get("effective_throughput"))),
        ("trainer idle", ".1%", _idle),
        ("log-prob gap, max", ".1e", lambda run: max(Curve.of(run.records, "logprob_gap").values, default=math.nan)),
        ("steps", ",.0f", lambda run: max(run.steps, default=0)),
        ("seconds", ",.0f", lambda run: sum(run.series("step_seconds"))),
    ]
    figures = [Figure(name, form, [float(value(run)) for run in runs]) for name, form, value in kinds]
    figures += _to_reward(runs) + _at_tokens(runs)
    return [figure for figure in figures if not all(map(math.isnan, figure.values))]


def staleness_of(run: Record) -> float:
    """The mean over the steps, without the first, in which generation has just begun."""
    return _mean([number_or_nan(record.get("staleness_mean")) for record in run.steady])


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}\n{len(names)} seeds"


def _to_reward(runs: Sequence[Record]) -> list[Figure]:
    """How long each run took to the highest reward that all of them have reached, as a mean of RECENT steps. Of runs
    that filter, the reward of all groups: that of the trained ones hardly changes."""
    keys = ["reward_mean_all" if run.filters else "reward_mean" for run in runs]
    curves = [Curve(run.steps, run.series(key)).means for run, key in zip(runs, keys, strict=True)]
    if any(np.isnan(curve).all() for curve in curves):
        return []
    level = min(float(np.nanmax(curve)) for curve in curves)
    ends = [int(np.argmax(curve >= level)) + 1 for curve in curves]
    seconds = [sum(run.series("step_seconds")[:end]) for run, end in zip(runs, ends, strict=True)]
    return [
        Figure(f"steps to reward {level:.3f}", ".1f", list(map(float, ends))),
        Figure(f"seconds to reward {level:.3f}", ",.0f", seconds),
    ]


def _at_tokens(runs: Sequence[Record]) -> list[Figure]:
    """The held-out accuracy of each run when it had generated as many tokens as the run that has generated fewest.
    Between two evaluations it is taken to rise evenly."""
    curves = []
    for run in runs:
        tokens = dict(zip(run.steps, np.nancumsum(run.series("tokens_generated")), strict=True)) | {0: 0.0}
        scored = [e for e in run.evaluations if e.get("accuracy") is not None and e["version"] in tokens]
        scored.sort(key=lambda e: e["version"])
        curves.append(([float(tokens[e["version"]]) for e in scored], [e["accuracy"] for e in scored]))
    least = min((tokens[-1] for tokens, _ in curves if tokens), default=0.0)
    if not least or not all(tokens for tokens, _ in curves):
        return []
    name = f"held-out accuracy at {least:,.0f} tokens generated"
    return [Figure(name, ".3f", [float(np.interp(least, *curve)) for curve in curves])]


def _tokens_per_signal(run: Record) -> float:
    mixed = np.nansum(np.multiply(run.series("mixed_groups"), run.series("groups_trained")))
    return float(np.nansum(run.series("tokens_generated")) / mixed) if mixed else math.nan


def _accuracy(run: Record, key: str, place: int) -> float:
    """Of the summary or, while there is none, of the first or the newest evaluation."""
    accuracies = [e["accuracy"] for e in run.evaluations if e.get("accuracy") is not None]
    return number_or_nan(run.summary.get(key, accuracies[place] if accuracies else None))


def _benchmark(run: Record, name: str) -> float:
    accuracies = [e["benchmarks"][name]["accuracy"] for e in run.evaluations if name in (e.get("benchmarks") or ())]
    return number_or_nan(accuracies[-1] if accuracies else None)


def _idle(run: Record) -> float:
    """The share of time that the trainer waited, as in summary.json."""
    seconds = sum(record.get("step_seconds") or 0.0 for record in run.steady)
    waits = ("trainer_wait_seconds", "publish_wait_seconds")
    return sum(record.get(wait) or 0.0 for record in run.steady for wait in waits) / seconds if seconds else math.nan


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
