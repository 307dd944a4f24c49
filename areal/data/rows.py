"""Rows: the problems that workflows and rewards receive."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Prompt = str | list[dict[str, Any]]
"""Text, or chat messages with `role` and `content`, and perhaps `tool_calls`. Content is text, or parts: a text, or a
picture as `areal.data.pictured.place` writes it."""
# What data sets write into texts where a picture is.
PICTURE_MARK = "<image>"
# The kinds of parts of messages that are pictures.
PICTURE_PARTS = ("image", "image_url", "input_image")
# Roles as ShareGPT calls them.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


@dataclass(frozen=True)
class Row:
    """One problem.

    index: training index, or number among the held-out rows. prompt: text or chat messages. answer: the reference
    answer as text, None if the row has none. reward: the row's own rewards with their weights, None if it names none.
    fields: the whole row, fit for JSON, which rewards receive; its `answer` is the value of `data.answer_key`, and its
    `prompt` that of `data.prompt_key`, unless there is a `data.prompt_template`. pictures: the files of those that the
    prompt has, in order; `fields` have their digests.
    """

    index: int
    prompt: Prompt
    answer: str | None
    reward: dict[str, float] | None
    fields: dict[str, Any]
    pictures: tuple[bytes, ...] = ()


def read_prompt(value: Any) -> Prompt | None:
    """The prompt that is written in one of the forms of published data sets: text, messages, their JSON, messages of
    ShareGPT (`from` and `value`), or a list of one list of messages, as in BFCL. None if it is none of these, or empty.
    """
    if isinstance(value, str):
        messages = _read_messages(_parsed(value)) if value.lstrip().startswith("[") else None
        return messages or value or None
    return _read_messages(value)


def _read_messages(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    messages = [_read_message(item) for item in value] if isinstance(value, list) else []
    return None if None in messages else [message for message in messages if message] or None


def _read_message(raw: Any) -> dict[str, Any] | None:
    if not isinstance(raw, dict):
        return None
    fields = {key: item for key, item in raw.items() if item is not None}  # tables have nulls for what others have
    if "role" not in fields and isinstance(sender := fields.pop("from", None), str):
        fields |= {"role": _ROLES.get(sender, sender), "content": fields.pop("value", None)}
    content, calls = fields.get("content"), fields.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(fields.get("role"), str) or not (isinstance(content, str) or _is_pictured(content)):
        return None
    if not calls:
        return fields | {"content": content}
    with suppress(KeyError, TypeError):
        return fields | {"content": content, "tool_calls": [_read_call(call) for call in calls]}
    return None


def _is_pictured(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(map(_is_part, content))


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind in PICTURE_PARTS or (kind == "text" and isinstance(part.get("text"), str))


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    """Its arguments as an object, as chat templates write them as JSON. Raises KeyError or TypeError."""
    function = call["function"]
    if isinstance(function["arguments"], str) and isinstance(arguments := _parsed(function["arguments"]), dict):
        function = function | {"arguments": arguments}
    return {"type": "function", **call, "function": function}


def _parsed(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text: chat messages without roles, a blank line between them, a mark for each picture."""
    return prompt if isinstance(prompt, str) else "\n\n".join(text_of(message["content"]) for message in prompt)


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The content of a message as text, with a mark for each picture."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else PICTURE_MARK for part in content)


def seed_of(row: Row) -> int:
    """Return the row's field `seed` or, if it has none, its index."""
    seed = row.fields.get("seed")
    return row.index if seed is None else seed


def extended(prompt: Prompt, text: str) -> Prompt:
    """Return the prompt with the text at its end, on a line of its own."""
    if isinstance(prompt, str):
        return f"{prompt}\n{text}" if prompt else text
    last = prompt[-1]["content"]
    content = f"{last}\n{text}" if isinstance(last, str) else [*last, {"type": "text", "text": f"\n{text}"}]
    return [*prompt[:-1], prompt[-1] | {"content": content}]
