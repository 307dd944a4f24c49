"""Reward functions: their interface, and the built-in `exact_match`. A reward is a function

    def reward(prompt: str, completion: str, row: dict) -> float: ...

or a class. Each worker makes one object of it, with the keyword arguments in `reward.options`:

    class Judge:
        def __init__(self, model: str) -> None: ...
        async def score(self, prompt: str, completion: str, row: dict) -> float: ...

The function or method may be plain or async. It may have a further parameter `tokens`, the ids of the completion's
tokens. `row` is the whole row of the data (`Row.fields`). The result is a finite number, or a pair of the number and
the scores of its parts, `(0.7, {"format": 1.0, "answer": 0.4})`. A reward that cannot score a completion raises an
exception; a failure is never counted as a score. A reward that may score the same completion differently on another
call sets the attribute `deterministic = False`. Calls of an async reward run at once in one process, unless it sets
`concurrent = False`: then they run one at a time in each of the worker processes, as those of a plain reward. A
function that was written for another library may have a form of its own (`lookup.RewardForm`).

A reward of groups scores all completions of a prompt at once, and returns a result for each:

    def group_score(prompt: str, completions: list[str], rows: list[dict]) -> list[float]: ...

It is a function with these parameters, or a class with a method `group_score`.

The name of a reward is that of an entry of the table of extensions (areal.base.extensions), `package.module:object` or
`path/to/file.py:object`. `judge/strict` is `judge` with options of its own.

A reward may have hooks, functions that are its attributes (static methods of a class). `warm()` does once in each
worker what would otherwise add seconds to the first call. A reward of the table has more, which are called before a
run: `rehearse(config)` raises UserError if the reward cannot work on this machine; `flaws(rows)` returns a sentence for
each of these rows that the reward cannot score; `examine(config, rows)` looks at what `rows()` yields, and raises
UserError or prints a note.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal.data.rows import without
from areal.rewards.result import Result, RewardError, as_result, as_results


@dataclass(frozen=True, slots=True)
class Traits:
    """Of a reward: whether it takes tokens; whether it is deterministic; whether its calls may run at once; whether it
    scores all completions of a group at once."""

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
        """The return value of the reward for the only completion, or of one of groups for those of a group; or an
        awaitable of it. Raises RewardError if it takes tokens and there are none."""
        if self.groups:
            return self.function(prompt, [*completions], [row] * len(completions))
        (completion,) = completions
        if not self.takes_tokens:
            return self.function(prompt, completion, row)
        if tokens is None:
            raise RewardError("it takes tokens: the workflow must call session.score(completion, tokens)")
        return self.function(prompt, completion, row, tokens=tokens)

    def results(self, value: Any, completions: Sequence[str]) -> list[Result]:
        """A result for each completion, from what `call` has returned. Raises RewardError."""
        return as_results(value, len(completions)) if self.groups else [as_result(value)]


def exact_match(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1.0 if the completion or its last line equals the row's answer, or one of a list, else 0.0. Stripped."""
    if row.get("answer") in (None, []):
        raise RewardError("the row has no answer to compare with")
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    texts = completion.strip(), completion.strip().rpartition("\n")[2].strip()
    return float(any(str(answer).strip() in texts for answer in answers))


vars(exact_match)["flaws"] = partial(without, "answer")
