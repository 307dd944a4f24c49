"""Reward functions: `reward(prompt: str, completion: str, row: dict) -> float`, plain or async.

`row` is the whole row of the data (`Row.fields`). The score is a finite number. A function that cannot score says so by
raising: a failure is never a score. The built-in ones are named in `BUILT_IN`; any other is named by
`package.module:function`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from areal import addition, computer_algebra, math_answers, plugins, reasoning_tasks
from areal.config import UserError

Reward = Callable[[str, str, dict[str, Any]], float | Awaitable[float]]


class RewardError(Exception):
    """A reward function gave something that is no score, or a row does not have what the function needs."""


def resolve(name: str) -> Reward:
    """The reward function called `name`: a built-in one, or `package.module:function`.

    What the function needs is imported here, so that its first call is not slower than the others.
    Raises UserError.
    """
    if name in BUILT_IN:
        function, warm = BUILT_IN[name]
        warm()
        return function
    if ":" not in name:
        raise UserError(
            f"there is no reward {name!r}: name one of {', '.join(BUILT_IN)}, or your own as package.module:function"
        )
    function = plugins.load(name, "reward")
    if not callable(function):
        raise UserError(f"reward {name!r} is a {type(function).__name__}, not a function: name a function")
    return function


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """What a completion of `length` tokens loses of its reward for its length: 0 to 1 (DAPO, arXiv 2503.14476, eq. 13).

    It rises linearly over the last `buffer` tokens before `longest`, and is 1 beyond. Without a buffer it is 0.
    """
    return min(1.0, max(0, length - (longest - buffer)) / buffer) if buffer else 0.0


def as_score(value: Any) -> float:
    """What a reward function returned, as a score. Raises RewardError where it is no finite number."""
    if not isinstance(value, numbers.Real):
        raise RewardError(f"the reward returned a {type(value).__name__}, not a number")
    try:
        score = float(value)
    except OverflowError as error:
        raise RewardError("the reward returned a number too large for a float") from error
    if not math.isfinite(score):
        raise RewardError(f"the reward returned {score}, not a finite number")
    return score


def exact_match(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1.0 if the completion, or its last line, is the row's answer, white space around them apart."""
    wanted = _answer(row)
    completion = completion.strip()
    return float(wanted in (completion, completion.rpartition("\n")[2].strip()))


def reasoning_gym(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The task's own score of what stands in the last <answer> tags; of all of the completion if there are none."""
    if "entry" not in row:
        raise RewardError("the row has no entry of reasoning_gym: use this reward with data.source reasoning_gym:NAME")
    _, opened, tail = completion.rpartition("<answer>")
    answer, closed, _ = tail.partition("</answer>")
    return reasoning_tasks.score((answer if opened and closed else completion).strip(), row)


def math_answer(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1.0 if the completion's final answer is mathematically the row's answer, else 0.0: `areal.math_answers`."""
    try:
        return math_answers.score(_answer(row), completion)
    except math_answers.UnreadableAnswer as error:
        raise RewardError(str(error)) from error


def _answer(row: Mapping[str, Any]) -> str:
    if row.get("answer") is None:
        raise RewardError("the row has no answer to compare with")
    return str(row["answer"]).strip()


def _no_warming() -> None:
    pass


# Name: (function, what to do before its first call).
BUILT_IN: dict[str, tuple[Reward, Callable[[], Any]]] = {
    "math": (math_answer, computer_algebra.warm),
    "exact_match": (exact_match, _no_warming),
    "addition": (addition.reward, _no_warming),
    "reasoning_gym": (reasoning_gym, reasoning_tasks.load),
}
