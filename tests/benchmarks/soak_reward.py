"""The reward of the soak: the quickstart's, which fails now and then."""

from __future__ import annotations

import random
import time

from areal.data import addition

OUTAGE_EVERY_SECONDS, OUTAGE_SECONDS = 600.0, 15.0
FAILING_SHARE = 0.02


def reward(prompt: str, completion: str, row: dict[str, str]) -> float:
    """Raises ConnectionError for one call in fifty, and for all calls within OUTAGE_SECONDS of every ten minutes."""
    if time.time() % OUTAGE_EVERY_SECONDS < OUTAGE_SECONDS:
        raise ConnectionError("the judge is away")
    if random.random() < FAILING_SHARE:
        raise ConnectionError("the judge did not answer")
    return addition.reward(prompt, completion, row)
