"""The `math` reward: 1.0 if the final answer of a completion equals an answer of its row, else 0.0.

`areal.rewards.final_answer` finds the answer in the completion, and math-verify compares the two. Whatever it is asked
about a completion, it is asked in a child process with limits (`areal.programs.limits`), so no completion can hang or
end this process. Plain numbers are compared without math-verify.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache, lru_cache, partial
from typing import Any

from areal.programs.limits import all_limited, limited
from areal.result import RewardError
from areal.rewards import final_answer
from areal.rewards.final_answer import MARK, rounded, tidy

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
# A mixed number, as in 1 1/2.
_MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,9})\s(\d{1,9})/(\d{1,9})(?![\w.,])")
_DECIMAL_COMMA = re.compile(r"-?\d+,(?:\d{1,2}|\d{4,9})")


@cache
def warm() -> None:
    """Imports math-verify and builds its grammars, so that no comparison has to."""
    importlib.import_module("math_verify")
    # It warns that its own time limit, which needs signals, is off; the child process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for latex in EXAMPLES:
        for text in _boxed(latex), f"${latex}$":
            _equal(_read(_boxed(latex)), _read(text))


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """The answers of a row, of which one suffices: its `answer`, or else its `solutions`; either may be a list. Raises
    RewardError if there is none."""
    value = row.get("answer") if row.get("answer") is not None else row.get("solutions")
    answers = value if isinstance(value, list) else [value]
    if not answers or None in answers:
        raise RewardError("the row has no answer to compare with")
    # Plain digits, not 1e-07.
    return [f"{Decimal(str(answer)):f}" if isinstance(answer, float) else str(answer) for answer in answers]


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1.0 if the completion's final answer equals one of the row's answers, else 0.0.

    A completion whose answer cannot be read, or cannot be compared within the limits, scores 0.0. Raises RewardError if
    the row has no answer or one that cannot be read, and TimeoutError if the machine is too busy for a comparison.
    """
    answers = answers_of(row)
    latex = final_answer.extract(completion, prompt)
    number = None if latex is None else _number(latex)
    numbers = [_number(_after_mark(answer)) for answer in answers]
    if number is not None and None not in numbers:
        return float(number in numbers)
    golds = [(answer, _gold(answer)) for answer in answers]
    return float(latex is not None and (limited(lambda: _same(golds, latex, prompt)) or False))


def unreadable(answers: Sequence[str]) -> list[str]:
    """Those of some answers of rows that math-verify cannot read."""
    hard = [answer for answer in answers if _number(_after_mark(answer)) is None]
    if hard:
        warm()
    readable = all_limited([partial(_readable, answer) for answer in hard])
    return [answer for answer, read in zip(hard, readable, strict=True) if not read]


def _after_mark(text: str) -> str:
    return tidy(text.rpartition(MARK)[2].strip())


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
    text = _after_mark(answer)
    # 1,22 may be 1.22, or 1 and 22.
    decimal = _read(_boxed(text.replace(",", "."))) if _DECIMAL_COMMA.fullmatch(text) else []
    return _meaning(answer) + decimal


def _readable(answer: str) -> bool:
    """Whether the answer is an expression that equals itself; an undefined value does not."""
    gold = _meaning(answer)
    return _equal(gold, gold)


def _meaning(answer: str) -> list[Any]:
    expressions = _read(_gold_text(answer))
    if not expressions and "\\boxed" in answer:  # not closed, or escaped once too often
        expressions = _read(_boxed(final_answer.extract(answer) or ""))
    return expressions


def _gold_text(answer: str) -> str:
    """The row's answer as math-verify finds it: in a box, unless it has a box or formulas of its own."""
    text = _after_mark(answer)
    if _MARKED.search(text):
        return text
    # Letters that are not marked as text would be a product of variables, in any order.
    return _boxed(f"\\text{{{text}}}" if _WORDS.fullmatch(text) else text)


def _same(golds: Sequence[tuple[str, list[Any]]], latex: str, prompt: str = "") -> bool:
    """Only for texts of this file, or within `limited`."""
    for answer, gold in golds:
        text = final_answer.extract(_gold_text(answer)) or answer
        expressions = _read(_boxed(rounded(latex, text)))
        if final_answer.is_answered(latex, text, prompt) and _equal(gold, expressions, final_answer.is_solved(latex)):
            return True
    return False


def _equal(golds: Sequence[Any], expressions: Sequence[Any], solved: bool = False) -> bool:
    """Whether one of the expressions equals one of those given. solved: also if it is an inequality for a set."""
    from math_verify import verify

    return verify(golds, expressions, numeric_precision=DIGITS, allow_set_relation_comp=solved, timeout_seconds=None)


def _read(text: str) -> list[Any]:
    """The final answer in the text, as SymPy expressions; empty if there is none."""
    from math_verify import LatexExtractionConfig, parse

    text = re.sub(r"\\mathrm\{(\w)\}", r"\1", text).replace("\\varnothing", "\\emptyset")
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    target = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor="\\boxed" not in text)
    expressions: list[Any] = parse(text, [target], fallback_mode="no_fallback", parsing_timeout=None)
    if expressions or "\\pm" not in text:
        return expressions
    # A \pm within a fraction is not read: both values, one after the other.
    alternatives = re.sub(
        r"[^,;{}]*\{[^,;]*\\pm[^,;]*",
        lambda part: part[0].replace("\\pm", "+") + "," + part[0].replace("\\pm", "-"),
        text,
    )
    return _read(alternatives)
