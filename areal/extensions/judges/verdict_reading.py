"""Reads the verdict of a judge in its answer: a number, a choice, or a field of JSON.

A verdict is alone in a line, or follows `Score:` or the like at the beginning of a line. The last such line counts.
Without such a line, the answer has to end with a number or a choice, or have only one. An ambiguous answer has none.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_NAME = r"(?:(?:my|the|final|overall|total)\s+)*(?:score|verdict|rating|grade|mark|judge?ment|answer|final)"
_MARKS = r"(?:[^\w\n]|_)*"  # no line break: each line is matched by itself
_BEGIN = rf"^{_MARKS}(?:{_NAME}\b[\W_]*(?:is\b[\W_]*)?)"
_DIGITS = r"(?<![\w.,-])(-?\d+(?:[.,]\d+)?(?:[eE][+-]?\d+)?)(?![\w%]|\s*%|[.,]\d|-\d)"
# In 8/10 or "8 out of 10" the first number is the verdict.
_NUMBER = rf"{_DIGITS}(?:\s*\**\s*(?:/|(?:\(\s*)?out of)\s*\d+(?:[.,]\d+)?)?"
_END = r"(?=[^\w\n]*(?:\(.*)?$)"
_NUMBER_LINE = re.compile(rf"(?:{_BEGIN}|^{_MARKS}?){_NUMBER}{_END}", re.MULTILINE | re.IGNORECASE)
_ANY_NUMBER = re.compile(_NUMBER, re.IGNORECASE)
_LAST_NUMBER = re.compile(rf"{_NUMBER}\W*\Z", re.IGNORECASE)
_NEGATED = re.compile(r"(?:\b(?:not|no|never|neither|nor|cannot)|n['’]t)\s+(?:\w+\s+)?[\W_]*\Z", re.IGNORECASE)


def number_in(text: str) -> float | None:
    """Return the number that an answer gives as its verdict, or None.

    >>> number_in("Two of 3 steps are right, so 8/10.")
    8.0
    """
    text = _THINKING.sub("", text)
    numbers = _NUMBER_LINE.findall(text)[-1:] or _LAST_NUMBER.findall(text)
    numbers = numbers or list(dict.fromkeys(_ANY_NUMBER.findall(text)))
    return float(numbers[0].replace(",", ".")) if len(numbers) == 1 else None


def choice_in(text: str, choices: Iterable[str]) -> str | None:
    """Return the choice that an answer gives as its verdict, or None. A choice in its own line may be in any case."""
    text = _THINKING.sub("", text)
    by_name = {choice.casefold(): choice for choice in choices}
    words = "|".join(sorted(map(re.escape, choices), key=len, reverse=True))
    alone = re.compile(rf"^{_MARKS}?(?<!\w)({words})(?!\w){_END}", re.MULTILINE | re.IGNORECASE)
    named = re.compile(rf"{_BEGIN}(?<!\w)({words})(?!\w)", re.MULTILINE | re.IGNORECASE)
    if lines := sorted([*alone.finditer(text), *named.finditer(text)], key=lambda match: match.start(1)):
        return by_name.get(lines[-1][1].casefold())
    matches = [*re.finditer(rf"(?<!\w)(?:{words})(?!\w)", text)]
    if matches and not re.search(r"\w", text[matches[-1].end() :]):
        matches = matches[-1:]
    is_one = len({match[0] for match in matches}) == 1
    return matches[0][0] if is_one and not any(_NEGATED.search(text[: match.start()]) for match in matches) else None


def field_in(text: str, field: str) -> Any:
    """Return the value of a field in the last object of an answer that is not part of another object, or None."""
    text, start, value = _THINKING.sub("", text).rstrip(), 0, None
    while (start := text.find("{", start)) >= 0:
        try:
            read, start = json.JSONDecoder().raw_decode(text, start)
        except json.JSONDecodeError as error:
            if error.pos >= len(text):  # a cut object has no verdict
                return None
            start += 1
            continue
        except RecursionError:
            return None
        value = _of_any_case(read, field, value)
    return number_of(value) if isinstance(value, str) else value


def number_of(text: str) -> float | None:
    """Return 8.0 for the text "8" or "8/10", and None for a text that is not just a number or a share."""
    match = _ANY_NUMBER.fullmatch(text.strip())
    return float(match[1].replace(",", ".")) if match else None


def _of_any_case(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in fields.items() if key.casefold() == name.casefold()), default)
