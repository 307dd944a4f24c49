"""The panels of a run, listed in panels.yaml. The report and the live page draw panels, the comparison lays runs over
each other in a panel, the trace counts by panels, and Grafana's dashboard is written from the panels.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from areal.config.reading import read_values
from areal.extensions.desk.timeline import WAITING, WEIGHTS, WORK

FILE = Path(__file__).with_name("panels.yaml")
COLOURS = {
    WORK: "#3b82d6",  # training, generating, scoring, evaluating; also the first curve of a plot
    WEIGHTS: "#e07b28",  # taking, writing, publishing and loading weights
    WAITING: "#9a9a9a",
    "held_out": "#2e9e6b",  # measurements on held-out rows
    "second": "#9b59d0",  # the second curve of a plot
    "rest": "#c9c9c9",
    "pause": "#f2b98a",
    "resume": "#9c4f10",
}
# Colours of compared runs, and of curves beyond the named colours of a panel.
SEVERAL = ("#3b82d6", "#e07b28", "#2e9e6b", "#9b59d0", "#d0507b", "#c4a000", "#17a2b0", "#8c6d4f")
# Numbers in the record of a step that are no metrics, or repeat a metric.
NO_METRICS = ("step", "time", "crc", "step_seconds_median", "effective_throughput")
UNITS = {
    r"_(seconds|delay)$": "s",
    r"_(share|use|fraction)$": "share",
    r"(^|_)(memory|bytes)(_|$)": "bytes",
    r"(^|_)tokens(_|$)": "tokens",
}


@dataclass(frozen=True)
class Panel:
    """A plot of a run.

    curves: a metric, or a formula of metrics, by label. A formula is a sum, `a + b`, or a sum over a metric,
    `a + b / c`. `*` in a label and its metric stands for each part of a metric with parts, such as `reward_parts.*`.
    says: the sentence below the plot. unit: the values' unit; `s`, `bytes` and `share` get prefixes on the page, and a
    share has the limits 0 and 1. from_0: the axis begins at 0. log: a logarithmic axis if values differ much.
    bound: the configuration key with the value of a line. of: the place of a value, a `step` or an evaluated `version`.
    error: the metric with the standard error of the first curve.
    stack: the curves are parts, drawn on top of each other. total: the metric divided into the parts.
    needs: the panel is left out if this metric is 0 in all steps. main: drawn first, and larger.
    colours: names in COLOURS.
    """

    title: str
    curves: Mapping[str, str]
    says: str = ""
    unit: str = ""
    from_0: bool = False
    log: bool = False
    bound: str = ""
    of: str = "step"
    error: str = ""
    stack: bool = False
    total: str = ""
    needs: str = ""
    main: bool = False
    colours: Sequence[str] = ("work", "second")

    @property
    def metrics(self) -> list[str]:
        """The metrics of the curves, without their parts."""
        return re.findall(r"(?<![.\w])[a-z]\w*", " ".join((*self.curves.values(), self.total)))

    @property
    def has_parts(self) -> bool:
        return any("*" in metric for metric in self.curves.values())

    @property
    def whole(self) -> "Panel":
        """The panel with a stack's sum as its only curve. A stack of a metric's parts, which are shares, has none."""
        curves = {} if self.has_parts else {"": self.total or " + ".join(self.curves.values())}
        return replace(self, curves=curves, stack=False, total="") if self.stack else self


@cache
def panels() -> tuple[Panel, ...]:
    """Return the panels of panels.yaml."""
    return tuple(
        Panel(title, **{**keys, "curves": curves if isinstance(curves := keys["curves"], dict) else {"": curves}})
        for title, keys in read_values(FILE).items()
    )


def panels_of(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the listed panels, and a panel for each further number in the records of steps."""
    named = {*NO_METRICS, *(metric for panel in panels() for metric in panel.metrics)}
    unnamed = [name for name in dict.fromkeys(chain.from_iterable(records)) if name not in named]
    numbers = [name for name in unnamed if any(isinstance(record.get(name), int | float) for record in records)]
    return [*panels(), *(Panel(title_of(name), {"": name}, unit=unit_of(name)) for name in numbers)]


def title_of(metric: str) -> str:
    return metric.replace("_", " ").capitalize()


def unit_of(metric: str) -> str:
    """Return the unit of a metric, or of a number in a heartbeat, by its name."""
    return next((unit for pattern, unit in UNITS.items() if re.search(pattern, metric)), "")
