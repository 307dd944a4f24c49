"""The panels of a run, which panels.yaml lists. The report and the live page draw them, the comparison lays runs over
each other in them, the trace counts by them, and Grafana's dashboard is written from them.
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
    WEIGHTS: "#e07b28",  # taking, writing, publishing and loading them
    WAITING: "#9a9a9a",
    "held_out": "#2e9e6b",  # what is measured on held-out rows
    "second": "#9b59d0",  # the second curve of a plot
    "rest": "#c9c9c9",
    "pause": "#f2b98a",
    "resume": "#9c4f10",
}
# Of runs that are compared, and of curves beyond those that a panel names.
SEVERAL = ("#3b82d6", "#e07b28", "#2e9e6b", "#9b59d0", "#d0507b", "#c4a000", "#17a2b0", "#8c6d4f")
# Numbers in the record of a step that are no metrics of it, or repeat a metric.
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

    curves: by label a metric, or a formula of metrics: a sum, `a + b`, over another metric, `a + b / c`. `*` in a label
    and its metric stands for each part of a metric with parts, such as `reward_parts.*`.
    says: the sentence below the plot. unit: of the values; `s`, `bytes` and `share` have prefixes on the page, and a
    share has the limits 0 and 1. from_0: the axis begins at 0. log: a logarithmic axis, where values differ much.
    bound: the key of the configuration whose value is drawn as a line. of: what the values are measured at, a `step` or
    an evaluated `version`. error: the metric that is the standard error of the first curve.
    stack: the curves are parts, drawn on top of each other. total: the metric that they are parts of.
    needs: the panel is left out where this metric is 0 in all steps. main: drawn first, and larger.
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
        """The metrics in its curves, without their parts."""
        return re.findall(r"(?<![.\w])[a-z]\w*", " ".join((*self.curves.values(), self.total)))

    @property
    def has_parts(self) -> bool:
        return any("*" in metric for metric in self.curves.values())

    @property
    def whole(self) -> "Panel":
        """Of a stack, the sum of its parts as a curve, and no curve if it has parts of one metric: they are shares."""
        curves = {} if self.has_parts else {"": self.total or " + ".join(self.curves.values())}
        return replace(self, curves=curves, stack=False, total="") if self.stack else self


@cache
def panels() -> tuple[Panel, ...]:
    """The list."""
    return tuple(
        Panel(title, **{**keys, "curves": curves if isinstance(curves := keys["curves"], dict) else {"": curves}})
        for title, keys in read_values(FILE).items()
    )


def with_others(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The list, and a panel for each further number in the records of steps."""
    named = {*NO_METRICS, *(metric for panel in panels() for metric in panel.metrics)}
    unnamed = [name for name in dict.fromkeys(chain.from_iterable(records)) if name not in named]
    numbers = [name for name in unnamed if any(isinstance(record.get(name), int | float) for record in records)]
    return [*panels(), *(Panel(title_of(name), {"": name}, unit=unit_of(name)) for name in numbers)]


def title_of(metric: str) -> str:
    return metric.replace("_", " ").capitalize()


def unit_of(metric: str) -> str:
    """The unit of a metric, or of a number in a heartbeat, by its name."""
    return next((unit for pattern, unit in UNITS.items() if re.search(pattern, metric)), "")
