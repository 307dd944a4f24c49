"""Reward functions: `reward(prompt: str, completion: str, row: dict) -> float`, plain or async.

`row` is the whole row of the data (`Row.fields`). The score is a finite number. A function that cannot score says so by
raising: a failure is never a score. The built-in ones are named in `BUILT_IN`; any other is named by
`package.module:function`.
"""

from __future__ import annotations

import importlib
import logging
import math
import numbers
import re
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from typing import Any

from areal import addition, plugins, reasoning_tasks
from areal.config import UserError

Reward = Callable[[str, str, dict[str, Any]], float | Awaitable[float]]

# A final answer is short. The symbolic parser takes time that grows fast with the length of what it is given.
MAX_ANSWER_CHARACTERS = 300

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_NUMBER_AND_UNIT = re.compile(r"\$?(-?\d[\d,]*(?:\.\d+)?)\s+[a-zA-Z]{2}")
_LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?!.*\d)", re.DOTALL)


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
    """1.0 if the completion's final answer is mathematically the row's answer, else 0.0.

    The row's answer may be a whole solution. In both, the final answer stands after the last `####`, or else in the
    last \\boxed{}, or else the end of the text is searched for it (`the answer is ...`, the last formula or number).

    There is no time limit in here: an answer that takes too long to understand meets the deadline of the call, and is
    a failure, not a 0.0.
    """
    gold = _answer(row)
    gold = _marked(gold) or gold.strip()
    marked = _marked(completion)
    if marked is not None:
        return float(marked != "" and _equal(gold, marked))
    tail = completion[-MAX_ANSWER_CHARACTERS:]
    if _number(gold) is not None and (last := _LAST_NUMBER.search(tail)) and _number(last[0]) == _number(gold):
        return 1.0
    return float(_same_expression(gold, tail))


def _answer(row: Mapping[str, Any]) -> str:
    if row.get("answer") is None:
        raise RewardError("the row has no answer to compare with")
    return str(row["answer"]).strip()


def _marked(text: str) -> str | None:
    """What the text marks as its final answer; None where it marks nothing."""
    if "####" in text:
        line = text.rpartition("####")[2].strip().partition("\n")[0]
        counted = _NUMBER_AND_UNIT.match(line)
        return counted[1] if counted else line.strip()
    _, boxed, tail = text.rpartition("\\boxed{")
    if not boxed:
        return None
    depth = 1
    for position, character in enumerate(tail):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return tail[:position].strip()
    return ""


def _equal(gold: str, answer: str) -> bool:
    if answer == gold:
        return True
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    wanted, given = _number(gold), _number(answer)
    if wanted is not None and given is not None:
        return wanted == given
    return _same_expression(f"\\boxed{{{gold}}}", f"\\boxed{{{answer}}}")


def _number(text: str) -> Decimal | None:
    """The value of a decimal numeral, dollar signs, digit commas and a final full stop apart."""
    bare = text.strip().replace("\\$", "").strip("$ ").removesuffix(".")
    if not bare.strip("-") or not _NUMBER.fullmatch(bare):
        return None
    return Decimal(bare.replace(",", ""))


def _same_expression(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(gold, parsing_timeout=None), parse(answer, parsing_timeout=None), timeout_seconds=None)


def _warm_math() -> None:
    importlib.import_module("math_verify")
    for part in "parser", "grader":
        # It warns that its own timeouts are off; the deadline of the call is the one that counts.
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    _same_expression("$\\frac{1}{2}$", "$0.5$")  # builds its grammars


def _no_warming() -> None:
    pass


# Name: (function, what to do before its first call).
BUILT_IN: dict[str, tuple[Reward, Callable[[], Any]]] = {
    "math": (math_answer, _warm_math),
    "exact_match": (exact_match, _no_warming),
    "addition": (addition.reward, _no_warming),
    "reasoning_gym": (reasoning_gym, reasoning_tasks.load),
}
