"""The `math` reward: 1.0 if the final answer of a completion equals an answer of the row, else 0.0.

`final_answer.py` finds the answer in the completion, and math-verify compares the two answers. Each question to
math-verify about a completion is asked in a child process with limits (`limits.py`): no completion can hang or end this
process. Plain numbers are compared without math-verify.
"""

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache, lru_cache, partial
from typing import Any

from areal.data.rows import Row, flawed
from areal.extensions.math import answer_forms, final_answer
from areal.extensions.math.answer_forms import rounded, tidy
from areal.extensions.math.final_answer import MARK
from areal.extensions.math.limits import all_limited, limited
from areal.rewards.functions import RewardError

# Decimal places of a difference in math-verify beyond the row's smallest number's. By default 15: 1e-16 is 0.
DIGITS = 300
# Decimal places to which decimals are rounded; if the row's number is smaller than 0.001, significant digits.
PLACES = 6

# math-verify's parser learns the grammar while reading: a child without the grammar takes ten times as long.
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
# Few enough digits for a float.
_NUMBER = r"-?(?:0|[1-9][0-9]{0,8}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,2})(?:\.[0-9]{1,6})?"
_PLAIN = re.compile(_NUMBER)
# A mixed number, as in 1 1/2.
_MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,9})\s(\d{1,9})/(\d{1,9})(?![\w.,])")
_DECIMAL_COMMA = re.compile(r"-?\d+,(?:\d{1,2}|\d{4,9})")


@cache
def warm() -> None:
    """Import math-verify and build its grammars, which saves the time in each comparison."""
    importlib.import_module("math_verify")
    # math-verify warns that its own time limit, which needs signals, is off; the child process has a limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for latex in EXAMPLES:
        for text in _boxed(latex), f"${latex}$":
            _equal(_read(_boxed(latex)), _read(text))


def answers_of(row: Mapping[str, Any]) -> list[str]:
    """Return a row's answers, any of which suffices: `answer` or `solutions`, perhaps lists. Raises RewardError."""
    value = row.get("answer") if row.get("answer") is not None else row.get("solutions")
    answers = value if isinstance(value, list) else [value]
    if not answers or None in answers:
        raise RewardError("the row has no answer to compare with")
    # Plain digits, not 1e-07.
    return [f"{Decimal(str(answer)):f}" if isinstance(answer, float) else str(answer) for answer in answers]


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1.0 if the completion's final answer equals an answer of the row, else 0.0.

    A completion scores 0.0 if its answer cannot be read, or cannot be compared within the limits. Raises RewardError if
    an answer of the row is missing or unreadable, and TimeoutError if the machine is too busy for a comparison.
    """
    latex = final_answer.extract(completion, prompt)
    verdicts, questions = [], []
    for answer in answers_of(row):
        text, compared, verdict = _at_sight(_latex(answer), latex)
        verdicts.append(verdict)
        if verdict is None:
            questions.append(partial(_same, text, _gold(text), compared, prompt))
    if True in verdicts or not questions or latex is None:
        return float(True in verdicts)
    return float(limited(lambda: any(question() for question in questions)) or False)


def unreadable(answers: Sequence[str]) -> list[str]:
    """Return the answers of rows that math-verify cannot read."""
    hard = [answer for answer in answers if _at_sight(_latex(answer), None)[2] is None]
    if hard:
        warm()
    readable = all_limited([partial(_readable, answer) for answer in hard])
    return [answer for answer, read in zip(hard, readable, strict=True) if not read]


def _after_mark(text: str) -> str:
    text = text.rpartition(MARK)[2].rpartition("<answer>")[2]  # as in data sets for models with vision
    return tidy(text.partition("</answer>")[0].strip())


@lru_cache(maxsize=4096)
def _latex(answer: str) -> str:
    text = _after_mark(answer)
    return tidy(final_answer.extract(text) or text) if _MARKED.search(text) else text


def _at_sight(gold: str, latex: str | None) -> tuple[str, str, bool | None]:
    """Return the comparable parts of the row's answer and of a completion's, without letters of choices, and whether
    they are equal; None if math-verify has to tell."""
    if (number := _number(gold)) is not None and (latex is None or _number(latex) is not None):
        return gold, latex or "", latex is not None and number == _number(latex)
    letter, gold_value = answer_forms.choice(gold)
    latex_letter, latex_value = answer_forms.choice(latex or "")
    if letter and (latex is None or not gold_value or (latex_letter and (latex_letter != letter or not latex_value))):
        return gold, "", letter == latex_letter
    if (letter or latex_value) and (gold, latex) != (gold_value or gold, latex_value or latex):
        return _at_sight(gold_value or gold, latex_value or latex)
    return gold, latex or "", answer_forms.same_words(gold, latex or "")


def _number(text: str) -> Decimal | None:
    return Decimal(text.replace(",", "")) if _PLAIN.fullmatch(text) else None


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    """Return the row's answer as expressions of math-verify. Unless it is a number, a child process reads it first."""
    if _number(_after_mark(answer)) is None and not limited(partial(_readable, answer)):
        raise RewardError(f"math-verify cannot read the row's answer {answer[-100:]!r}: write LaTeX that it reads")
    return _meaning(answer)


def _readable(answer: str) -> bool:
    """Whether the answer is an expression that equals itself, unlike an undefined value."""
    gold = _meaning(answer)
    return _equal(gold, gold)


def _meaning(answer: str) -> list[Any]:
    text = _latex(answer)
    # 1,22 may be 1.22, or 1 and 22.
    return _read(_boxed(text)) + (_read(_boxed(text.replace(",", "."))) if _DECIMAL_COMMA.fullmatch(text) else [])


def _same(gold: str, expressions: Sequence[Any], latex: str, prompt: str = "") -> bool:
    """Whether an answer equals the row's, by expressions. For texts of this file, or within `limited`."""
    *names, value = [latex] if "=" in gold else answer_forms.sides(latex)
    if any(map(answer_forms.is_unsolved, names)):
        return False
    if any(answer_forms.is_arithmetic(side) and not _equal(expressions, _read(_boxed(side))) for side in names):
        return False
    ranges = [answer_forms.intervals(text) for text in (gold, value)]
    if len({span[0] for span in ranges if span}) == 1 and all(
        span or not answer_forms.is_relation(text) for span, text in zip(ranges, (gold, value), strict=True)
    ):
        gold, value = (span[1] if span else text for span, text in zip(ranges, (gold, value), strict=True))
        expressions = _read(_boxed(gold)) if ranges[0] else expressions
    return answer_forms.is_answered(value, gold, prompt) and _equal(expressions, _read(_boxed(rounded(value, gold))))


def _equal(golds: Sequence[Any], expressions: Sequence[Any]) -> bool:
    from math_verify import verify

    # Expressions that differ only in the order of terms are then equal without further work.
    golds, expressions = ([_ordered(expression) for expression in group] for group in (golds, expressions))
    size = min(map(_exponent, golds), default=0)
    places, digits = (PLACES - size if size < -3 else PLACES), DIGITS - 2 * size
    return verify(golds, expressions, float_rounding=places, numeric_precision=digits, timeout_seconds=None)


def _ordered(expression: Any) -> Any:
    """Return the sides of an equation with terms in SymPy's order; the parser leaves terms in the order of the text."""
    from sympy import Eq, Expr

    if isinstance(expression, Eq):
        return expression.func(*map(_ordered, expression.args), evaluate=False)
    is_term = isinstance(expression, Expr) and expression.args
    return expression.func(*map(_ordered, expression.args)) if is_term else expression


def _exponent(expression: Any) -> int:
    """Return the power of ten of an expression's smallest number, if the number is below 1; else 0."""
    from sympy import Expr, floor, log, preorder_traversal

    least, parts = 0, preorder_traversal(expression)
    for part in parts:
        if isinstance(part, Expr) and part.is_number and part.is_finite:
            parts.skip()
            if size := abs(part.evalf(3)):
                least = min(least, int(floor(log(size, 10))))
    return least


def _read(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    text = re.sub(r"\\mathrm\{(\w)\}", r"\1", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    target = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor="\\boxed" not in text)
    expressions: list[Any] = parse(text, [target], fallback_mode="no_fallback", parsing_timeout=None)
    if expressions or "\\pm" not in text:
        return expressions
    # A \pm within a fraction is not read: write both values, with a comma between.
    alternatives = re.sub(
        r"[^,;{}]*\{[^,;]*\\pm[^,;]*",
        lambda part: part[0].replace("\\pm", "+") + "," + part[0].replace("\\pm", "-"),
        text,
    )
    return _read(alternatives)


def _flaws(rows: Sequence[Row]) -> list[str]:
    """Return a flaw for each row whose answer cannot be read: the answer, or the reason."""
    flaws, answers = [], []
    for row in rows:
        try:
            answers.append(answers_of(row.fields))
        except RewardError as error:
            flaws.append(flawed(row, error))
    bad = unreadable([answer for row_answers in answers for answer in row_answers])
    for row_answers in answers:
        flaws += [repr(answer[-80:]) for answer in row_answers if answer in bad][:1]
    return flaws


vars(score).update(warm=warm, flaws=_flaws)
