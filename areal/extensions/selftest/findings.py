"""What a check found."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from areal.base.errors import UserError

REPORT = "Report it with selftest.json attached (areal docs gpu)."
Verdict = Literal["ok", "FAILED", "skipped"]

SHARE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
"""Largest norm of an error, as a share of the norm of the float64 reference. A wrong mask gives 0.3 and more."""
LAYERS = 2
"""How many times larger this and areal.training.guard.GAP may be where several layers add their errors."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check `name`. measured: the numbers, as shown. advice: what to do if it failed, in a sentence.
    values: all numbers, for selftest.json."""

    name: str
    result: Verdict
    measured: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def judged(name: str, passed: bool, measured: str, advice: str, **values: Any) -> Finding:
    """A finding that is ok if `passed`. `advice` is kept only if it is not."""
    return Finding(name, "ok" if passed else "FAILED", measured, "" if passed else advice, values)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What `check` finds. Whatever it raises is its failure, and not that of the checks after it."""
    try:
        return check()
    except UserError as error:
        return Finding(name, "FAILED", "", str(error))
    except Exception as error:  # of libraries that may not work here
        first = (str(error).strip().splitlines() or [""])[0]
        return Finding(name, "FAILED", f"{type(error).__name__}: {first}", "Report this, with selftest.json attached.")
