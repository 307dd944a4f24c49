"""Reward functions: their interface, and the built-in `exact_match`. A reward is a function

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

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal.data.rows import without
from areal.rewards.result import Result, RewardError, as_result, as_results


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
