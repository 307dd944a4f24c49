"""Rows: the problems that workflows and rewards receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Prompt = str | list[dict[str, str]]
"""Text, or chat messages with `role` and `content`."""


@dataclass(frozen=True)
class Row:
    """One problem.

    index: training index, or number among the held-out rows. prompt: text or chat messages. answer: the reference
    answer as text, None if the row has none. reward: the row's own rewards with their weights, None if it names none.
    fields: the whole row, fit for JSON, which rewards receive; its `answer` is the value of `data.answer_key`, and its
    `prompt` that of `data.prompt_key`, unless there is a `data.prompt_template`.
    """

    index: int
    prompt: Prompt
    answer: str | None
    reward: dict[str, float] | None
    fields: dict[str, Any]


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt as plain text: chat messages without their roles, with a blank line between them."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def seed_of(row: Row) -> int:
    """Return the row's field `seed` or, if it has none, its index."""
    seed = row.fields.get("seed")
    return row.index if seed is None else seed


def extended(prompt: Prompt, text: str) -> Prompt:
    """Return the prompt with the text at its end, on a line of its own."""
    if isinstance(prompt, str):
        return f"{prompt}\n{text}" if prompt else text
    return [*prompt[:-1], prompt[-1] | {"content": f"{prompt[-1]['content']}\n{text}"}]
