"""A recipe: a configuration and, beside it, expect.yaml, with the way to run it and the results of its runs.

    run: {needs: a GPU of 24 GB, overrides: [...], before: [python make.py], command: python users.py}   by hand
    runs: {...}, bands: {accuracy: {low: 0.66, high: 0.81}, minutes: {high: 6}, ...}                     by --write

`configs/NAME.yaml` has `configs/NAME.expect.yaml` beside it. A run with a new seed ends within a band with a
probability of 95 %. Bands are computed from runs of at least SEEDS seeds.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.base.extensions import part_of
from areal.config.reading import read_values, write_yaml
from areal.extensions.desk.comparison import staleness_of
from areal.storage.disk import replace
from areal.storage.record import Record

SEEDS, LAST_STEPS, CURVE_POINTS = 3, 10, 24
STOPPED_SECONDS = 60.0
# Student's t at 97.5 %, by degrees of freedom.
_T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
TIMES = {"engine_gap": 10.0, "minutes": 2.0}
"""A figure may be so many times the largest figure seen: rounding depends on the data, time on the machine."""
_KEYS = {"needs": "", "overrides": [], "quick": [], "before": [], "command": "", "alerts": []}


@dataclass(frozen=True)
class RunRecipe:
    """A recipe. name: the name of its runs and files. run: `needs`, in words, a part that a machine may lack;
    `overrides`, changes to the configuration, and `quick`, the changes in their place with --quick; `before`, commands
    that make the inputs; `command` starts a run with changes as its arguments, in place of `areal run`; `alerts` are
    expected at the end. A user types the commands in the clone. runs, bands: written by --write."""

    name: str
    config: Path
    file: Path
    run: Mapping[str, Any]
    runs: Mapping[str, Any]
    bands: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, path: Path) -> "RunRecipe":
        """Read a recipe. path: a folder with run.yaml, or a configuration. Raises UserError for a missing recipe."""
        folder = path.is_dir()
        config, file = (path / "run.yaml", path / "expect.yaml") if folder else (path, path.with_suffix(".expect.yaml"))
        if not config.is_file():
            raise UserError(f"{path} is no recipe: name a configuration, or a folder with run.yaml.")
        values = read_values(file, beside=False) if file.is_file() else {}
        run = values.get("run") or {}
        if not isinstance(run, dict) or run.keys() - _KEYS.keys():
            raise UserError(f"{file}: `run` has {', '.join(_KEYS)}, and nothing else.")
        name = path.name if folder else path.stem
        return cls(name, config, file, _KEYS | run, values.get("runs") or {}, values.get("bands") or {})

    def written(self, runs: Sequence[Mapping[str, Any]]) -> "RunRecipe":
        """Write the bands of these runs, and keep `run`. Raises UserError if the runs are too few."""
        if len(runs) < SEEDS:
            raise UserError(f"{self.file} is not written: {len(runs)} of {SEEDS} seeds have run, --seeds {SEEDS}.")
        made_on = runs[0]["made_on"]
        facts = {"seeds": [run["seed"] for run in runs], "commit": made_on["commit"], "processor": made_on["processor"]}
        values = {"run": {key: value for key, value in self.run.items() if value}, "runs": facts, "bands": bands(runs)}
        first = "# `runs` and `bands` are written by `areal check-recipe --write` (areal docs results).\n"
        replace(self.file, first + write_yaml({key: value for key, value in values.items() if value}))
        return RunRecipe.of(self.file.parent if self.file.name == "expect.yaml" else self.config)

    def faults(self, run: Mapping[str, Any], quick: bool = False) -> list[str]:
        """Return a sentence for each expectation that a run did not meet. quick: bands do not count."""
        lines = [] if run["ok"] else ["the run did not reach its end"]
        if run["staleness"] is not None and run["staleness"] > run["bound"]:
            lines.append(f"staleness {run['staleness']} is over its bound {run['bound']}")
        lines += [f"alert: {alert}" for alert in run["alerts"] if alert not in self.run["alerts"]]
        for name, band in self.bands.items() if not quick else ():
            value = _figure(run, name)
            low, high = band.get("low", -math.inf), band.get("high", math.inf)
            elsewhere = name == "minutes" and run["made_on"]["processor"] != self.runs.get("processor")
            if not elsewhere and (value is None or not low <= value <= high):
                lines.append(f"{name} is {'missing' if value is None else f'{value:.3g}'}, not {band_text(band)}")
        return lines


def figures(record: Record) -> dict[str, Any]:
    """Return the figures of a finished run, as JSON. A figure that the run lacks is None."""
    scores, rewards = [*map(_scores, record.metrics.evaluations)], record.metrics.series("reward_mean")
    alerts_of, age = part_of("alerts", "of_record"), staleness_of(record)
    return {
        "ok": bool(record.summary["ok"]),
        "accuracy_before": scores[0]["accuracy"] if scores else None,
        "accuracy": scores[-1]["accuracy"] if scores else None,
        "standard_error": scores[-1]["standard_error"] if scores else None,
        "reward": statistics.fmean(rewards[-LAST_STEPS:]),
        "staleness": record.summary.get("staleness_max"),
        "bound": record.summary.get("max_staleness"),
        "staleness_mean": None if math.isnan(age) else age,
        "engine_gap": max((gap for gap in record.metrics.series("engine_gap") if not math.isnan(gap)), default=None),
        "minutes": _seconds_up(record) / 60,
        "alerts": [alert.name for alert, _ in alerts_of(record)] if alerts_of else [],
        "curve": _thinned(rewards),
    }


def _seconds_up(record: Record) -> float:
    """Return the seconds from the start of a run to its last step, without the time between a stop and a resumption.
    Events come every second."""
    end = record.metrics.times[-1]
    times = sorted([*record.metrics.times, *(event["time"] for event in record.events if event["time"] < end)])
    gaps = (after - before for before, after in itertools.pairwise(times))
    return end - times[0] - sum(gap for gap in gaps if gap > STOPPED_SECONDS)


def bands(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the bands of finished runs with different seeds, by figure. A figure that a run lacks has no band."""
    result: dict[str, dict[str, float]] = {}
    for name in ("accuracy", "gain", "reward", *TIMES):
        values = [_figure(run, name) for run in runs]
        if None in values:
            continue
        if name == "gain":  # few seeds give a wide band, which a run that learned nothing may end in
            result |= {name: {"low": 0.0}} if min(values) > 0 else {}
            continue
        if name in TIMES:
            result[name] = {"high": float(f"{TIMES[name] * max(values):.2g}")}
            continue
        # Few runs may lie closer together than the number of held-out rows can resolve.
        least = max(run["standard_error"] or 0.0 for run in runs) if name == "accuracy" else 0.0
        reach = _T.get(len(values) - 1, 2.0) * max(statistics.stdev(values), least) * math.sqrt(1 + 1 / len(values))
        mean = statistics.fmean(values)
        low, high = mean - reach, mean + reach
        low, high = (max(low, 0.0), min(high, 1.0)) if name == "accuracy" else (low, high)
        result[name] = {"mean": round(mean, 3), "low": round(low, 3), "high": round(high, 3)}
    return result


def _figure(run: Mapping[str, Any], name: str) -> Any:
    """Return a figure of a run. `gain` is the rise of the accuracy over the run."""
    if name != "gain" or run.get("accuracy") is None:
        return run.get(name)
    return run["accuracy"] - run["accuracy_before"]


def band_text(band: Mapping[str, float]) -> str:
    if "high" not in band:
        return f"at least {band['low']:.2g}"
    return f"{band['low']:.3g} to {band['high']:.3g}" if "low" in band else f"at most {band['high']:.2g}"


def _scores(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scores on the held-out rows or, without held-out rows, on the first benchmark."""
    of_benchmarks: Mapping[str, Any] = evaluation.get("benchmarks") or {}
    return evaluation if evaluation.get("accuracy") is not None else next(iter(of_benchmarks.values()), evaluation)


def _thinned(values: Sequence[float]) -> list[float]:
    """Return the means of CURVE_POINTS parts of a curve, or all points of a shorter curve."""
    count = min(CURVE_POINTS, len(values))
    ends = [n * len(values) // count for n in range(count + 1)]
    return [round(statistics.fmean(values[a:b]), 3) for a, b in zip(ends, ends[1:], strict=False)]
