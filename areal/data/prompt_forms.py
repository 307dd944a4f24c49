"""The forms of prompts in published data sets: text, messages, ShareGPT, items of the Responses API, JSON in a text."""

import ast
import json
import re
import warnings
from contextlib import suppress
from typing import Any

from areal.data.rows import PICTURE_PARTS, Prompt

_TEXT_PARTS = ("text", "input_text", "output_text")
# The roles of ShareGPT's senders.
_SENDERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
    "system": "system",
}
_OBJECT = re.compile(r"""[\[\s]*\{\s*['"]""")
_LIKE_MESSAGES = re.compile(r"""[\[\s]*\{\s*['"](?:role|from|content)['"]\s*:""")


def read_prompt(value: Any, *, of_table: bool = False) -> Prompt:
    """Read a prompt in a form of published data sets: text, messages, their JSON or Python literal, messages of
    ShareGPT (`from` and `value`), items of the Responses API, or a list of one list of messages, as in BFCL. Every text
    of `value` is in the result. Raises ValueError with the reason if `value` has no prompt.

    of_table: a table gives every object the keys of all objects, with nulls: nulls in a call's arguments are left out.

    >>> read_prompt([{"from": "human", "value": "2 + 3?"}])
    [{'role': 'user', 'content': '2 + 3?'}]
    """
    if isinstance(value, str) and value:
        written = literal(value)
        if written is None or not _is_like_messages(written):
            return value
        value = written
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not items:
        raise ValueError("it is neither text nor messages" if value else "it is empty")
    messages: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, dict):
            raise ValueError(f"a message is of type {type(item).__name__}, not an object")
        _add_message(messages, {key: field for key, field in item.items() if field is not None}, of_table)
    return messages


def prompt_or_none(value: Any) -> Prompt | None:
    """Return the prompt that `read_prompt` reads, or None if `value` has no prompt."""
    with suppress(ValueError):
        return read_prompt(value)
    return None


def literal(text: str) -> Any:
    """Return the object in a text, or the list that begins with an object. The text is JSON or, as pandas writes CSV,
    Python. None for any other text. Raises ValueError for messages in another form."""
    if not _OBJECT.match(text):
        return None
    for read in json.loads, ast.literal_eval:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # about text that looks like an escape in a prompt
            return read(text)
    if _LIKE_MESSAGES.match(text):
        raise ValueError("it looks like messages, but is neither JSON nor a list of Python: write JSON")
    return None


def _is_like_messages(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    keys = value.keys() if isinstance(value, dict) else set()
    return "role" in keys or {"from", "value"} <= keys


def _add_message(messages: list[dict[str, Any]], fields: dict[str, Any], of_table: bool) -> None:
    """Add the message of an object. Raises ValueError."""
    kind = fields.get("type")
    if "role" not in fields and kind == "function_call":
        call = {"id": fields.get("call_id"), "name": fields.get("name"), "arguments": fields.get("arguments")}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(_read_call(call, of_table))
        return
    if "role" not in fields and kind == "function_call_output":
        fields = {"role": "tool", "tool_call_id": fields.get("call_id"), "content": fields.get("output")}
    elif "role" not in fields and "from" in fields:
        fields = _of_sharegpt(fields)
    if not isinstance(fields.get("role"), str):
        raise ValueError(f"a message has no role{f', but the type {kind!r}' * bool(kind)}")
    calls = fields.get("tool_calls")
    content = _read_content(fields.get("content", "" if calls else None))
    messages.append(fields | {"content": content})
    if calls:
        calls = literal(calls) if isinstance(calls, str) else calls
        if not isinstance(calls, list):
            raise ValueError("the tool_calls of a message are not a list")
        messages[-1]["tool_calls"] = [_read_call(call, of_table) for call in calls]


def _of_sharegpt(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the message of an object with `from` and `value`. Raises ValueError."""
    further = {key: field for key, field in fields.items() if key not in ("from", "value")}
    sender, value = fields["from"], fields.get("value")
    if {"content", "tool_calls"} & {*further}:
        raise ValueError("a message has both from and content or tool_calls")
    if sender == "function_call":
        call = literal(value) if isinstance(value, str) else value
        return {"role": "assistant", "tool_calls": call if isinstance(call, list) else [call], **further}
    if not isinstance(sender, str) or sender not in _SENDERS:
        raise ValueError(f"a message is from {sender!r}: senders are {', '.join(_SENDERS)} and function_call")
    return {"role": _SENDERS[sender], "content": value, **further}


def _read_content(content: Any) -> str | list[dict[str, Any]]:
    """Return text, or parts if there is a picture. Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("the content of a message is neither text nor parts with text and pictures")
    parts = [read_part(part) for part in content]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def read_part(part: Any) -> dict[str, Any]:
    """Return a part of a message: a text, or a picture unchanged. Raises ValueError."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in (*_TEXT_PARTS, *PICTURE_PARTS):
        raise ValueError(f"a part of a message is of the type {kind!r}: types are text and image")
    texts = [part[key] for key in ("text", "value") if part.get(key) is not None]  # `value`: LLaMA-Factory
    if kind in PICTURE_PARTS and not texts:
        return dict(part)
    if kind in PICTURE_PARTS or len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError(f"a part of a message has the type {kind!r}, but not one text")
    return {"type": "text", "text": texts[0]}


def _read_call(call: Any, of_table: bool) -> dict[str, Any]:
    """Return a call with arguments as an object, which chat templates write as JSON; other arguments are unchanged.
    Raises ValueError."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
        raise ValueError("a call of a message has no name or no arguments")
    arguments = function["arguments"]
    if arguments in (None, ""):
        arguments = {}
    elif isinstance(arguments, str) and isinstance(read := _parsed(arguments), dict):
        arguments = read
    elif of_table:
        arguments = without_nulls(arguments)
    about = call if function is not call else {key: call[key] for key in ("id", "type") if key in call}
    about = {"type": "function"} | {key: field for key, field in about.items() if field is not None}
    named = function if function is not call else {key: function[key] for key in function if key not in about}
    return about | {"function": named | {"arguments": arguments}}


def without_nulls(value: Any) -> Any:
    """Return the value without nulls in objects, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def _parsed(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None
