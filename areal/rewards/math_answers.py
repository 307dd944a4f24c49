"""The `math` reward: 1.0 if the final answer of a completion equals an answer of its row, else 0.0.

math-verify finds the answers in the texts and compares them. Whatever it is asked about a completion, it is asked in a
child process with limits (`areal.rewards.limits`), so no completion can hang or end this process. If the completion and
the row both clearly end in a plain number, the numbers are compared without math-verify.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache, lru_cache, partial
from typing import Any

from areal.rewards.limits import all_limited, limited
from areal.rewards.result import RewardError

# What stands before the answer in GSM8K.
MARK = "####"
# Digits to which math-verify evaluates a difference. With its default, 15, all numbers below 1e-15 are equal.
DIGITS = 50

# math-verify's parser learns its grammar as it reads: a child that has to learn takes ten times as long.
EXAMPLES = (
    "-\\frac{a+b}{2}x^{2}y-3(x-1)(x+2)/4",
    "2\\sqrt{3}+\\sqrt[3]{x}\\cdot\\pi",
    "e^{-2x}+\\ln 2-\\log_2 (x)",
    "\\sin^2(x)+\\cos x-\\tan(2x)",
    "|x-1|+n!+\\binom{n}{2}",
    "\\sum_{k=1}^{n} k^2",
    "y = 2x+1",
    "2x+3y-7 = 0",
    "0 < x \\le \\frac{1}{2}",
    "(-\\infty, 5] \\cup [6, 7)",
    "(1, 2), \\{3, 4\\}",
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
)

_MARKED = re.compile(r"\\boxed|(?<!\\)\\[(\[]|(?<!\\)\$.*(?<!\\)\$", re.DOTALL)
_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z .,;'!?-]*")
# Few enough digits for a float.
_NUMBER = r"-?(?:0|[1-9][0-9]{0,8}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,2})(?:\.[0-9]{1,6})?"
_PLAIN = re.compile(_NUMBER)
# What follows the box is no part of a formula, no percent sign, and not what math-verify looks for behind an answer.
# Possessive, so that a long text behind the box is read once and not again for each of its blanks.
_LAST_BOX = re.compile(
    rf"\\boxed\{{({_NUMBER})\}}\s*+(\$\$|\$|\\\)|\\\])?+(?!\s*+(?:percent|pct))(?!.*hope)[^$\\\]}}%]*+",
    re.DOTALL | re.IGNORECASE,
)
_OPENING = {"$": "$", "$$": "$$", "\\)": "\\(", "\\]": "\\["}


@cache
def warm() -> None:
    """Imports math-verify and builds its grammars, so that no comparison has to."""
    importlib.import_module("math_verify")
    # It warns that its own time limit, which needs signals, is off; the child process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for latex in EXAMPLES:
        for completion in _boxed(latex), f"${latex}$":
            _same(_read(_boxed(latex), gold=True), completion)


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """The answers of a row, of which one suffices: its `answer`, or else its `solutions`; either may be a list. Raises
    RewardError if there is none."""
    found = row.get("answer") if row.get("answer") is not None else row.get("solutions")
    answers = found if isinstance(found, list) else [found]
    if not answers or None in answers:
        raise RewardError("the row has no answer to compare with")
    # Plain digits, not 1e-07.
    return [f"{Decimal(str(each)):f}" if isinstance(each, float) else str(each) for each in answers]


def score(answers: Sequence[str], completion: str) -> float:
    """1.0 if the completion's final answer equals one of the row's answers, else 0.0.

    A completion whose answer cannot be read, or cannot be compared within the limits, scores 0.0. Raises RewardError if
    one of the row's answers cannot be read, and TimeoutError if the machine is too busy for a comparison.
    """
    number = final_number(completion)
    numbers = [_number(_after_mark(answer)) for answer in answers]
    if number is not None and None not in numbers:
        return float(number in numbers)
    golds = [gold for answer in answers for gold in _gold(answer)]
    return float(limited(lambda: _same(golds, completion)) or False)


def final_number(completion: str) -> Decimal | None:
    """The number that math-verify finds as the final answer, if that is certain without asking it.

    It is the content of the completion's only box, alone in its formula if it is in one, with only words behind it; or,
    without a box, it is all that follows the last `####`.
    """
    start = completion.rfind("\\boxed")
    if start < 0:
        return _number(_after_mark(completion))
    before = completion[:start]
    found = _LAST_BOX.fullmatch(completion, start)
    if not found or "\\boxed" in before or "\\fbox" in before:
        return None
    if closing := found[2]:
        opening, before = _OPENING[closing], before.rstrip()
        head = before.removesuffix(opening)
        # An earlier formula that was never closed would include this one.
        if head == before or head.endswith(("\\", "$")) or head.rfind(opening) > head.rfind(closing):
            return None
    return _number(found[1])


def unreadable(answers: Sequence[str]) -> list[str]:
    """Those of some answers of rows that math-verify cannot read."""
    hard = [answer for answer in answers if _number(_after_mark(answer)) is None]
    if hard:
        warm()
    readable = all_limited([partial(_readable, answer) for answer in hard])
    return [answer for answer, read in zip(hard, readable, strict=True) if not read]


def _after_mark(text: str) -> str:
    return text.rpartition(MARK)[2].strip()


def _number(text: str) -> Decimal | None:
    return Decimal(text.replace(",", "")) if _PLAIN.fullmatch(text) else None


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    """What the row's answer means to math-verify. Unless it is a number, a child process reads it first."""
    if _number(_after_mark(answer)) is None and not limited(partial(_readable, answer)):
        raise RewardError(
            f"math-verify cannot read the row's answer {answer[-100:]!r}: write it as LaTeX that it understands"
        )
    return _read(_gold_text(answer), gold=True)


def _readable(answer: str) -> bool:
    """Whether the answer is an expression that equals itself; an undefined value does not."""
    gold = _read(_gold_text(answer), gold=True)
    return _equal(gold, gold)


def _gold_text(answer: str) -> str:
    """The row's answer as math-verify finds it: in a box, unless it has a box or formulas of its own."""
    text = _after_mark(answer)
    if _MARKED.search(text):
        return text
    # Letters that are not marked as text would be a product of variables, in any order.
    return _boxed(f"\\text{{{text}}}" if _WORDS.fullmatch(text) else text)


def _same(golds: Sequence[Any], completion: str) -> bool:
    """Only for texts of this file, or within `limited`."""
    return _equal(golds, _read(completion if "\\boxed" in completion else _after_mark(completion)))


def _equal(golds: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether one of the expressions equals one of those given."""
    from math_verify import verify

    return verify(golds, given, numeric_precision=DIGITS, timeout_seconds=None)


def _read(text: str, gold: bool = False) -> list[Any]:
    """The final answer in the text, as SymPy expressions; empty if there is none."""
    from math_verify import parse

    found: list[Any] = parse(text, _targets(gold, "\\boxed" in text), fallback_mode="no_fallback", parsing_timeout=None)
    return found


@cache
def _targets(gold: bool, boxed: bool) -> list[Any]:
    """What math-verify looks for: LaTeX, boxes first, and in a completion numbers too. Beside a box, only formulas and
    numbers that the text calls the answer count."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not boxed)
    return [latex] if gold else [latex, ExprExtractionConfig(try_extract_without_anchor=not boxed)]
