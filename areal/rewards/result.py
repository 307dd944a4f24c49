"""Checks what a reward returns, and combines the results of several rewards."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from areal.base.errors import explain
from areal.samples.trajectory import LARGEST_REWARD

T = TypeVar("T")


class RewardError(Exception):
    """A reward returned something that is not a score, or a row lacks what the reward needs."""


class Result(NamedTuple):
    """A finite score, and the scores of its parts by name."""

    score: float
    parts: dict[str, float]


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """The penalty for the length of a completion of `length` tokens: 0 to 1 (DAPO, arXiv 2503.14476, eq. 13).

    It rises linearly over the last `buffer` tokens before `longest`, and is 1 from there on. With `buffer` 0 it is 0.
    """
    return min(1.0, max(0, length - (longest - buffer)) / buffer) if buffer else 0.0


def as_result(value: Any) -> Result:
    """Checks what a reward returned: a score, perhaps with its parts. Raises RewardError if one is not finite."""
    score, parts = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(parts, Mapping):
        raise RewardError(f"the reward returned parts of type {type(parts).__name__} beside the score, not a dict")
    return Result(as_score(score), {str(name): as_score(part) for name, part in parts.items()})


def as_results(value: Any, count: int) -> list[Result]:
    """Checks what a reward of groups returned for `count` completions. Raises RewardError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RewardError(f"the reward returned a value of type {type(value).__name__}, not a list of scores")
    if len(value) != count:
        raise RewardError(f"the reward returned {len(value)} scores for {count} completions")
    return [as_result(result) for result in value]


def as_score(value: Any) -> float:
    """`value` as a float. Raises RewardError unless it is a finite number of magnitude LARGEST_REWARD at most."""
    if not hasattr(value, "__float__"):  # text has none; numbers and scalars of numpy, torch and the like do
        raise RewardError(f"the reward returned a value of type {type(value).__name__}, not a number")
    # Arrays with several numbers raise such errors too.
    with explain(
        (OverflowError, RuntimeError, TypeError, ValueError),
        "the reward returned what is not one float ({why})",
        RewardError,
    ):
        score = float(value)
    if not abs(score) <= LARGEST_REWARD:
        raise RewardError(f"the reward returned {score}, not a finite number up to {LARGEST_REWARD:g}")
    return score


def combined(weights: Mapping[str, float], results: Mapping[str, Result]) -> Result:
    """The weighted sum of several rewards' scores. Its parts are the parts of each reward, named `reward/part`, and, if
    there are several rewards, the score of each under its name."""
    parts = {f"{name}/{part}": score for name, result in results.items() for part, score in result.parts.items()}
    if len(results) > 1:
        parts |= {name: result.score for name, result in results.items()}
    return Result(sum(weight * results[name].score for name, weight in weights.items()), parts)


async def all_scored(names: Iterable[str], score: Callable[[str], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """What `score` says of several rewards, asked at the same time. If one raises, so does this, without the others."""
    names = list(names)
    if len(names) == 1:  # without the cost of a task
        return {names[0]: await score(names[0])}
    calls = {name: asyncio.create_task(score(name)) for name in names}
    try:
        await asyncio.gather(*calls.values())
    finally:
        for call in calls.values():
            call.cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)
    return {name: call.result() for name, call in calls.items()}


async def passing(completions: Mapping[str, str], score: Callable[[str], Awaitable[float]]) -> str | None:
    """Which of these completions, which compute nothing, is the first to get the full score; None if none does. Raises
    RewardError if no score can be given to any of them."""
    errors: list[RewardError] = []
    for name, completion in completions.items():
        try:
            if await score(completion) >= 1:
                return name
        except RewardError as error:
            errors.append(error)
    if len(errors) == len(completions):
        raise errors[0]
    return None


def mean_parts(scored: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean score of each part over the results that have it."""
    scores: dict[str, list[float]] = defaultdict(list)
    for parts in scored:
        for name, score in parts.items():
            scores[name].append(score)
    return {name: fmean(values) for name, values in scores.items()}
