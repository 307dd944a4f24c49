"""The judges whose model is in a run: the policy, or a scorer."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from areal.config.engine_sections import SamplingConfig
from areal.rewards.functions import RewardFunction
from areal.rewards.lookup import find, make, of_object


def judge_by(
    answer: Callable[[SamplingConfig, str], Awaitable[tuple[str, int, bool]]], name: str, options: Mapping[str, Any]
) -> RewardFunction:
    """Return the judge called `name`, with a model in a run. answer: returns the model's answer to a text, the number
    of tokens of both, and whether the answer was cut. Raises UserError."""
    kind: Any = find(name)
    judge: Any = make(name, kind, options)
    judge.answer = partial(answer, judge.sampling)
    return of_object(name, judge)
