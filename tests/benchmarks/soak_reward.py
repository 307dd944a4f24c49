"""The reward of the soak: the quickstart's, which fails now and then, and always while a file says that it is down."""

from __future__ import annotations

import os
import random
from pathlib import Path

from areal.data import addition

DOWN = "SOAK_REWARD_DOWN"
"""The environment variable with the path of that file."""
FAILING_SHARE = 0.02


def reward(prompt: str, completion: str, row: dict[str, str]) -> float:
    """Raises ConnectionError for one call in fifty, and for all calls while the file is there."""
    if Path(os.environ[DOWN]).exists():
        raise ConnectionError("the judge is away")
    if random.random() < FAILING_SHARE:
        raise ConnectionError("the judge did not answer")
    return addition.reward(prompt, completion, row)
