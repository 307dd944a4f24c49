"""Reward functions: their interface, their results, and the built-in `exact_match`. A reward is a function

    def reward(prompt: str, completion: str, row: dict) -> float: ...

or a class. Each worker makes an object of the class, with the keyword arguments in `reward.options`:

    class Judge:
        def __init__(self, model: str) -> None: ...
        async def score(self, prompt: str, completion: str, row: dict) -> float: ...

The function or method may be plain or async. It may have a further parameter `tokens`, the ids of the completion's
tokens. `row` is the whole row of the data (`Row.fields`). The result is a finite number, or a pair of the number and
the scores of parts, `(0.7, {"format": 1.0, "answer": 0.4})`. A reward that cannot score a completion raises an
exception; a failure is never counted as a score. A reward with varying scores for the same completion sets the
attribute `deterministic = False`. Calls of an async reward run at once in one process; with `concurrent = False` they
run in turn in each of the worker processes, like calls of a plain reward. A function for another library may have
another form (`lookup.RewardForm`).

A reward of groups scores all completions of a prompt at once, and returns a result for each completion:

    def group_score(prompt: str, completions: list[str], rows: list[dict]) -> list[float]: ...

It is a function with these parameters, or a class with a method `group_score`.

A reward is named by an entry in the table of extensions (areal.base.extensions), by `package.module:object` or by
`path/to/file.py:object`. `judge/strict` is `judge` with other options.

A reward may have hooks, functions that are attributes (static methods of a class). `warm()` does slow preparations once
in each worker, before the first call. Rewards in the table have more hooks, called before a run: `rehearse(config)`
raises UserError if the reward cannot work on this machine; `flaws(rows)` returns a sentence for each row that the
reward cannot score; `examine(config, rows)` looks at the rows of `rows()`, and raises UserError or prints a note.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from areal.base.errors import explain
from areal.data.rows import without
from areal.samples.trajectory import LARGEST_REWARD

T = TypeVar("T")


class RewardError(Exception):
    """A reward returned a value that is no score, or a row lacks a field that the reward needs."""


class Result(NamedTuple):
    """A finite score, and the scores of parts by name."""

    score: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Traits:
    """A reward's traits. `concurrent`: calls may run at once. `groups`: a call scores all completions of a group."""

    takes_tokens: bool
    deterministic: bool
    concurrent: bool
    groups: bool


@dataclass(frozen=True, slots=True)
class RewardFunction(Traits):
    """A resolved reward, ready to be called."""

    function: Callable[..., Any | Awaitable[Any]]

    def call(
        self, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: Sequence[int] | None = None
    ) -> Any:
        """Return the reward's value for the only completion, or for all completions of a group; or an awaitable value.
        Raises RewardError if the reward takes tokens and `tokens` is None."""
        if self.groups:
            return self.function(prompt, [*completions], [row] * len(completions))
        (completion,) = completions
        if not self.takes_tokens:
            return self.function(prompt, completion, row)
        if tokens is None:
            raise RewardError("it takes tokens: the workflow must call session.score(completion, tokens)")
        return self.function(prompt, completion, row, tokens=tokens)

    def results(self, value: Any, completions: Sequence[str]) -> list[Result]:
        """Return a result for each completion, from the value of `call`. Raises RewardError."""
        return as_results(value, len(completions)) if self.groups else [as_result(value)]


def as_result(value: Any) -> Result:
    """Check the value of a reward: a score, perhaps with the scores of parts. Raises RewardError if not finite."""
    score, parts = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(parts, Mapping):
        raise RewardError(f"the reward returned parts of type {type(parts).__name__} beside the score, not a dict")
    return Result(as_score(score), {str(name): as_score(part) for name, part in parts.items()})


def as_results(value: Any, count: int) -> list[Result]:
    """Check the value of a reward of groups, for `count` completions. Raises RewardError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RewardError(f"the reward returned a value of type {type(value).__name__}, not a list of scores")
    if len(value) != count:
        raise RewardError(f"the reward returned {len(value)} scores for {count} completions")
    return [as_result(result) for result in value]


def as_score(value: Any) -> float:
    """Return `value` as a float. Raises RewardError unless it is finite, of magnitude LARGEST_REWARD at most."""
    if not hasattr(value, "__float__"):  # text has none; numbers and scalars of numpy, torch and the like do
        raise RewardError(f"the reward returned a value of type {type(value).__name__}, not a number")
    # Arrays with several numbers raise one of these errors too.
    with explain(
        (OverflowError, RuntimeError, TypeError, ValueError),
        "the reward returned what is not one float ({why})",
        RewardError,
    ):
        score = float(value)
    if not abs(score) <= LARGEST_REWARD:
        raise RewardError(f"the reward returned {score}, not a finite number up to {LARGEST_REWARD:g}")
    return score


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """The penalty for the length of a completion of `length` tokens: 0 to 1 (DAPO, arXiv 2503.14476, eq. 13).

    The penalty rises linearly over the last `buffer` tokens before `longest`, and is 1 from `longest` on. 0: none.

        >>> overlong_penalty(90, longest=100, buffer=20), overlong_penalty(100, longest=100, buffer=0)
        (0.5, 0.0)
    """
    return min(1.0, max(0, length - (longest - buffer)) / buffer) if buffer else 0.0


def combined(weights: Mapping[str, float], results: Mapping[str, Result]) -> Result:
    """Return the weighted sum of several rewards' scores. The parts are the parts of each reward, named `reward/part`,
    and, for several rewards, the score of each reward under its name."""
    parts = {f"{name}/{part}": score for name, result in results.items() for part, score in result.parts.items()}
    if len(results) > 1:
        parts |= {name: result.score for name, result in results.items()}
    return Result(sum(weight * results[name].score for name, weight in weights.items()), parts)


async def all_scored(names: Iterable[str], score: Callable[[str], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Return `score(name)` of several rewards, called at once. A call's error is raised, and cancels other calls."""
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
    """Return the name of the first completion with the full score, among completions that compute nothing; None if
    there is none. Raises RewardError if no completion can be scored."""
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
    """Return the mean score of each part over the results with the part."""
    scores: dict[str, list[float]] = defaultdict(list)
    for parts in scored:
        for name, score in parts.items():
            scores[name].append(score)
    return {name: fmean(values) for name, values in scores.items()}


def exact_match(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1.0 if the completion or its last line equals an answer of the row, else 0.0. Space at the ends is ignored.

    >>> exact_match("6 * 7?", "42 ", {"answer": ["42", "forty-two"]})
    1.0"""
    if row.get("answer") in (None, []):
        raise RewardError("the row has no answer to compare with")
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    texts = completion.strip(), completion.strip().rpartition("\n")[2].strip()
    return float(any(str(answer).strip() in texts for answer in answers))


vars(exact_match)["flaws"] = partial(without, "answer")
