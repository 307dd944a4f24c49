"""The result of a check, and the tolerances of all checks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from areal.base.errors import UserError

REPORT = "Report it with selftest.json attached (areal docs gpu)."
Verdict = Literal["ok", "FAILED", "skipped"]

SHARE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
"""Largest norm of an error, as a share of the norm of the float64 reference. A wrong mask gives 0.3 and more."""
LAYERS = 2
"""The factor on SHARE, and on areal.training.guard.GAP, for checks in which several layers add their errors."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check `name`. measured: the numbers as text. advice: a sentence about the next step after a
    failure. values: all numbers, for selftest.json."""

    name: str
    result: Verdict
    measured: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def judged(name: str, passed: bool, measured: str, advice: str, **values: Any) -> Finding:
    """Return a finding, "ok" if `passed`, else "FAILED". Only a failure keeps the `advice`.

    >>> judged("ranks", True, "2 ranks", "Update NCCL.").result
    'ok'
    """
    return Finding(name, "ok" if passed else "FAILED", measured, "" if passed else advice, values)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """Return the finding of `check`. An error of `check` is its failure, and later checks still run."""
    try:
        return check()
    except UserError as error:
        return Finding(name, "FAILED", "", str(error))
    except Exception as error:  # a library may raise anything on new hardware
        first = (str(error).strip().splitlines() or [""])[0]
        return Finding(name, "FAILED", f"{type(error).__name__}: {first}", "Report this, with selftest.json attached.")
