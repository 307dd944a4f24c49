"""Runs side by side: their different settings, and their figures, as means over seeds.

`areal compare RUN RUN ...` and the page of several runs show both. An unfinished run has its figures so far.
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

# Keys for the place and the name of a run, and the seed: figures are averaged over seeds.
LEFT_OUT = ("name", "run_dir", "seed", "master", "network", "observe")
LAST_STEPS = 10


class Figure(NamedTuple):
    """A figure of each run (nan: unknown), and the format of its values."""

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
    """Return a table of the runs: first the settings in which they differ, then the figures.

    Runs that differ only in their seed share a column, with the mean of each figure and its interval (`means`). Runs
    with equal settings and seed have a column each, named by the caption.
    """
    settings = [run.configuration.settings for run in runs]
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
    """Return the keys in which the configurations differ, without the keys in `left_out`."""
    keys = dict.fromkeys(key for config in settings for key, *_ in differences(settings[0], config))
    return [key for key in keys if not is_under(key, left_out)]


def by_settings(settings: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """Group the places of configurations by the values of `keys`: JSON texts, or – for a missing key.

    The seeds within a group differ. A run with the seed of an earlier run is no further sample, so it is in a further
    group, and the number of the repetition follows the values.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    earlier: Counter[tuple[str, ...]] = Counter()
    for n, config in enumerate(settings):
        # A section with names, such as scorers, has different keys in each run.
        texts = tuple("–" if (value := value_of(config, key, "–")) == "–" else json.dumps(value) for key in keys)
        seeded = (*texts, json.dumps(config.get("seed")))
        groups.setdefault((*texts, f"{earlier[seeded]}"), []).append(n)
        earlier[seeded] += 1
    return groups


def means(cells: Iterable[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the mean of each cell's values, and its standard error. The values of a cell come from runs that differ
    only in their seed. Two standard errors to either side make an interval of about 95 %.

    The standard deviation is pooled over all cells, since a cell has few seeds. nan values do not count. The mean of no
    values is nan; the error is nan if no cell has two values.

    >>> means([[1.0, 3.0], [5.0]])
    [(2.0, 1.0), (5.0, 1.4142135623730951)]
    """
    finite = [[value for value in cell if not math.isnan(value)] for cell in cells]
    freedom = sum(len(cell) - 1 for cell in finite if cell)
    squares = sum((value - statistics.fmean(cell)) ** 2 for cell in finite for value in cell)
    deviation = math.sqrt(squares / freedom) if freedom else math.nan
    return [(_mean(cell), deviation / math.sqrt(len(cell)) if cell else math.nan) for cell in finite]


def mean_text(mean: float, error: float, form: str) -> str:
    return "–" if math.isnan(mean) else f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:{form}}")


def end_figures(runs: Sequence[Record]) -> list[Figure]:
    """Return the figures of the runs. A figure that is unknown in all runs is left out."""
    names = dict.fromkeys(name for run in runs for e in run.metrics.evaluations for name in e.get("benchmarks") or ())
    rewards = {"reward": "reward_mean"}
    if any(run.metrics.filters for run in runs):  # trained groups are only some of all groups
        rewards = {"reward of trained groups": "reward_mean", "reward of all groups": "reward_mean_all"}
    kinds: list[tuple[str, str, Callable[[Record], float]]] = [
        ("held-out accuracy, before", ".3f", lambda run: _accuracy(run, "accuracy_before", 0)),
        ("held-out accuracy", ".3f", lambda run: _accuracy(run, "accuracy_after", -1)),
        *((name, ".3f", lambda run, name=name: _benchmark(run, name)) for name in names),
        *(
            (
                f"{name}, last {LAST_STEPS} steps",
                ".3f",
                lambda run, key=key: _mean(run.metrics.series(key)[-LAST_STEPS:]),
            )
            for name, key in rewards.items()
        ),
        (
            "trained groups with signal",
            ".1%",
            lambda run: _mean([*filter(math.isfinite, run.metrics.series("mixed_groups"))]),
        ),
        ("tokens generated for each of them", ",.0f", _tokens_per_signal),
        (
            "rows of which a prompt was admitted",
            ".1%",
            lambda run: run.metrics.series("coverage")[-1] if run.metrics.records else math.nan,
        ),
        ("staleness, mean", ".2f", staleness_of),
        ("staleness, max", ".1f", lambda run: max(run.metrics.series("staleness_max"), default=math.nan)),
        ("samples a second", ",.1f", lambda run: number_or_nan(run.summary.get("samples_per_second"))),
        ("effective tokens a second", ",.0f", lambda run: number_or_nan(run.summary.get("effective_throughput"))),
        ("trainer idle", ".1%", _idle),
        (
            "log-prob gap, max",
            ".1e",
            lambda run: max(Curve.of(run.metrics.records, "logprob_gap").values, default=math.nan),
        ),
        ("steps", ",.0f", lambda run: max(run.metrics.steps, default=0)),
        ("seconds", ",.0f", lambda run: sum(run.metrics.series("step_seconds"))),
    ]
    figures = [Figure(name, form, [float(value(run)) for run in runs]) for name, form, value in kinds]
    figures += _to_reward(runs) + _at_tokens(runs)
    return [figure for figure in figures if not all(map(math.isnan, figure.values))]


def staleness_of(run: Record) -> float:
    """Return the mean over the steps but the first, in which generation has only begun."""
    return _mean([number_or_nan(record.get("staleness_mean")) for record in run.metrics.steady])


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}\n{len(names)} seeds"


def _to_reward(runs: Sequence[Record]) -> list[Figure]:
    """Return the steps and the seconds of each run to the highest reward reached by all runs, as a mean of RECENT
    steps. Runs with filters compare the reward of all groups: the reward of trained groups hardly changes."""
    keys = ["reward_mean_all" if run.metrics.filters else "reward_mean" for run in runs]
    curves = [Curve(run.metrics.steps, run.metrics.series(key)).means for run, key in zip(runs, keys, strict=True)]
    if any(np.isnan(curve).all() for curve in curves):
        return []
    level = min(float(np.nanmax(curve)) for curve in curves)
    ends = [int(np.argmax(curve >= level)) + 1 for curve in curves]
    seconds = [sum(run.metrics.series("step_seconds")[:end]) for run, end in zip(runs, ends, strict=True)]
    return [
        Figure(f"steps to reward {level:.3f}", ".1f", list(map(float, ends))),
        Figure(f"seconds to reward {level:.3f}", ",.0f", seconds),
    ]


def _at_tokens(runs: Sequence[Record]) -> list[Figure]:
    """Return each run's held-out accuracy after as many generated tokens as the run with the fewest tokens generated.
    Between two evaluations the accuracy is interpolated."""
    curves = []
    for run in runs:
        tokens = dict(zip(run.metrics.steps, np.nancumsum(run.metrics.series("tokens_generated")), strict=True)) | {
            0: 0.0
        }
        scored = [e for e in run.metrics.evaluations if e.get("accuracy") is not None and e["version"] in tokens]
        scored.sort(key=lambda e: e["version"])
        curves.append(([float(tokens[e["version"]]) for e in scored], [e["accuracy"] for e in scored]))
    least = min((tokens[-1] for tokens, _ in curves if tokens), default=0.0)
    if not least or not all(tokens for tokens, _ in curves):
        return []
    name = f"held-out accuracy at {least:,.0f} tokens generated"
    return [Figure(name, ".3f", [float(np.interp(least, *curve)) for curve in curves])]


def _tokens_per_signal(run: Record) -> float:
    mixed = np.nansum(np.multiply(run.metrics.series("mixed_groups"), run.metrics.series("groups_trained")))
    return float(np.nansum(run.metrics.series("tokens_generated")) / mixed) if mixed else math.nan


def _accuracy(run: Record, key: str, place: int) -> float:
    """Return the accuracy in the summary, or, before the end, of the first or the newest evaluation."""
    accuracies = [e["accuracy"] for e in run.metrics.evaluations if e.get("accuracy") is not None]
    return number_or_nan(run.summary.get(key, accuracies[place] if accuracies else None))


def _benchmark(run: Record, name: str) -> float:
    accuracies = [
        e["benchmarks"][name]["accuracy"] for e in run.metrics.evaluations if name in (e.get("benchmarks") or ())
    ]
    return number_or_nan(accuracies[-1] if accuracies else None)


def _idle(run: Record) -> float:
    """Return the share of time for which the trainer waited, as in summary.json."""
    seconds = sum(record.get("step_seconds") or 0.0 for record in run.metrics.steady)
    waits = ("trainer_wait_seconds", "publish_wait_seconds")
    return (
        sum(record.get(wait) or 0.0 for record in run.metrics.steady for wait in waits) / seconds
        if seconds
        else math.nan
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
