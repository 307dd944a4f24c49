"""Rows: the problems that workflows and rewards receive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Prompt = str | list[dict[str, Any]]
"""Text, or chat messages with `role` and `content`, and perhaps `tool_calls`. Content is text, or parts: a text, or a
picture with its `digest`, `width` and `height`."""
# The mark for a picture in the texts of data sets.
PICTURE_MARK = "<image>"
# The kinds of parts of messages that are pictures.
PICTURE_PARTS = ("image", "image_url", "input_image")


@dataclass(frozen=True)
class Row:
    """One problem.

    index: training index, or number among the held-out rows. prompt: text or chat messages. answer: the reference
    answer as text, or None. reward: the row's own rewards with weights, or None. fields: the whole row, fit for JSON,
    which rewards receive; `answer` is the value of `data.answer_key`, and `prompt` the value of `data.prompt_key`,
    unless there is a `data.prompt_template`. pictures: the files of the prompt's pictures, in order; `fields` have the
    digests. tools: in the form of OpenAI's API; the chat template shows them with the prompt.
    """

    index: int
    prompt: Prompt
    answer: str | None
    reward: dict[str, float] | None
    fields: dict[str, Any]
    pictures: tuple[bytes, ...] = ()
    tools: list[dict[str, Any]] | None = None


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt as plain text: chat messages without roles, blank lines in between, a mark for each picture."""
    return prompt if isinstance(prompt, str) else "\n\n".join(text_of(message["content"]) for message in prompt)


def has_parts(prompt: Prompt) -> bool:
    """Whether a part of a message is a picture."""
    return not isinstance(prompt, str) and any(isinstance(message["content"], list) for message in prompt)


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Return the content of a message as text, with a mark for each picture."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else PICTURE_MARK for part in content)


def without(field: str, rows: Sequence[Row]) -> list[str]:
    """Return a sentence for every row without this field."""
    return [flawed(row, f"it has no {field!r}") for row in rows if row.fields.get(field) is None]


def flawed(row: Row, flaw: object) -> str:
    """Return a sentence about a flaw of a row."""
    return f"the row of the prompt {prompt_text(row.prompt)[:80]!r} ({flaw})"


def chat_of(prompt: str, completion: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompt and the completion as messages."""
    stored = row.get("prompt")
    messages = stored if isinstance(stored, list) else [{"role": "user", "content": prompt}]
    return [*messages, {"role": "assistant", "content": completion}]
