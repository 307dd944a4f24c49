"""Calls the program of a scheduler: sbatch, kubectl or sky."""

import re
import subprocess
from collections.abc import Mapping

from areal.base.errors import UserError


def call(
    *command: str, seconds: float, missing: str, slow: str, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Call a program. text: its input. missing, slow: the sentences for a missing program, and for more than `seconds`.
    Raises UserError."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        raise UserError(missing) from None
    except subprocess.TimeoutExpired:
        raise UserError(slow) from None


def advice_on(words: str, advices: Mapping[str, str], otherwise: str) -> str:
    """Return the advice on the words of a program: the first of `advices` whose pattern is in the words."""
    return next((advice for pattern, advice in advices.items() if re.search(pattern, words)), otherwise)
