"""Conditions on the metrics of a step, such as `entropy<0.2`."""

import operator
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from areal.base.errors import UserError

_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Condition(NamedTuple):
    """metric: a key of metrics.jsonl, with dots for what is within it, as in `reward_parts.math`."""

    metric: str
    comparison: str
    limit: float

    @classmethod
    def parsed(cls, text: str) -> "Condition":
        """The condition in a text, METRIC<NUMBER; also with <=, > or >=. Raises UserError."""
        match = re.fullmatch(r"\s*([\w.]+)\s*([<>]=?)\s*([-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*", text)
        if not match:
            raise UserError(f"{text!r} is no condition: write METRIC<NUMBER (or <=, >, >=), as 'entropy<0.2'.")
        return cls(match[1], match[2], float(match[3]))

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.limit:g}"

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of metrics.jsonl meets the condition; False if the metric was not measured."""
        value: Any = record
        for part in self.metric.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value is not None and _COMPARISONS[self.comparison](float(value), self.limit)

    def check(self, names: Collection[str], where: str) -> None:
        """Raises UserError if the metric is none of `names`, which `where` has."""
        if self.metric not in names:
            raise UserError(f"{where} has no metric {self.metric!r}: use one of {', '.join(sorted(names))}.")
