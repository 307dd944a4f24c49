"""Conditions on the metrics of a step, such as `entropy<0.2`."""

import operator
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from areal.base.errors import UserError

_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Condition(NamedTuple):
    """A comparison of a metric, a key of metrics.jsonl such as `reward_parts.math`, with a limit.

    >>> Condition.parsed("entropy < 0.2").holds({"entropy": 0.1})
    True
    """

    metric: str
    comparison: str
    limit: float

    @classmethod
    def parsed(cls, text: str) -> "Condition":
        """Parse METRIC<NUMBER, or a condition with <=, > or >=. Raises UserError."""
        match = re.fullmatch(r"\s*([\w.]+)\s*([<>]=?)\s*([-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*", text)
        if not match:
            raise UserError(f"{text!r} is no condition: write METRIC<NUMBER (or <=, >, >=), as 'entropy<0.2'.")
        return cls(match[1], match[2], float(match[3]))

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.limit:g}"

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record of metrics.jsonl meets the condition. False if the metric was not measured."""
        value: Any = record
        for part in self.metric.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value is not None and _COMPARISONS[self.comparison](float(value), self.limit)

    def check(self, names: Collection[str], where: str) -> None:
        """Raise UserError if the metric is not in `names`. where: the subject of the message."""
        if self.metric not in names:
            raise UserError(f"{where} has no metric {self.metric!r}: use one of {', '.join(sorted(names))}.")
