"""Rows with pictures, in the forms of published data sets.

Pictures are in the field `image` or `images`, in MathVista's `decoded_image` (its `image` names a file that the hub
lacks), or in parts of messages. A picture is bytes, as the hub's `Image` feature stores them, a data URL or a path.
Pictures from fields stand at the prompt's parts for pictures or texts `<image>`, else before the first text of the
user.
"""

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.base.errors import UserError, explain
from areal.data.prompt_forms import prompt_or_none
from areal.data.rows import PICTURE_MARK, PICTURE_PARTS, Prompt, has_parts
from areal.extensions.pictures.picture_files import MAX_BYTES, decode, part_of
from areal.samples.pictures import FIELDS

# Keys under which an object holds a picture, as the hub, verl and the protocols of agents write them.
_KEYS = ("bytes", "path", "image", "url")
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_DATA_URL = re.compile(r"data:image(/[\w.+-]+)?;base64,")
Part = dict[str, Any]


def _in_fields(raw: Mapping[str, Any]) -> list[Any]:
    """Return the pictures in the fields of a row, as written."""
    for name in FIELDS:
        value = raw.get(name)
        values = value if isinstance(value, list) else [value]
        if any(map(_is_picture, values)):
            return values
    return []


def _is_picture(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("data:image") or value.lower().partition("?")[0].endswith(_ENDINGS)
    if isinstance(value, Mapping):
        return bool(value.get("bytes") or value.get("path")) or any(_is_picture(value.get(k)) for k in ("image", "url"))
    return isinstance(value, bytes) or type(value).__module__.startswith("PIL.")


def place(prompt: Prompt, raw: Mapping[str, Any], folder: Path, where: str) -> tuple[Prompt, tuple[bytes, ...]]:
    """Return the prompt of the row `raw` as messages, with pictures as parts with `digest`, `width` and `height`, and
    the pictures' files. A prompt without pictures stays as written. folder: base of paths. Raises UserError."""
    values = _in_fields(raw)
    if not values and not has_parts(prompt):
        return prompt, ()
    unplaced, pictures = iter(values), list[bytes]()
    messages = _marked([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, len(values))

    def put(part: Part) -> Part:
        if part["type"] == "text":
            return {"type": "text", "text": part["text"]}
        if (value := next(_own(part), None)) is None and (value := next(unplaced, None)) is None:
            raise UserError(f"{where} has more places for pictures than pictures: correct it")
        with explain((OSError, ValueError), f"{where} has a picture that cannot be read ({{why}}): correct it"):
            content = _read(value, folder)
            shown = part_of(content)
        pictures.append(content)
        return shown

    placed = [
        message
        if isinstance(message["content"], str)
        else message | {"content": [put(part) for part in message["content"]]}
        for message in messages
    ]
    if next(unplaced, None) is not None:
        raise UserError(f"{where} has more pictures than places for them in its prompt: correct it")
    return placed, tuple(pictures)


def flaw_of(row: Mapping[str, Any], folder: Path) -> str | None:
    """Return an error of the row's pictures, after decoding them, or None. folder: base of paths."""
    prompt = prompt_or_none(row.get("prompt") or "?")
    try:
        for content in () if prompt is None else place(prompt, row, folder, "the row")[1]:
            decode(content)
    except (UserError, ValueError) as error:
        return str(error)
    return None


def _marked(messages: Sequence[Part], count: int) -> list[Part]:
    """Return the messages with a part at each mark; without a mark, `count` parts go before the user's first text."""
    if not count or has_parts(list(messages)):
        return list(messages)
    if not any(PICTURE_MARK in message["content"] for message in messages):
        first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        marked = messages[first] | {"content": PICTURE_MARK * count + messages[first]["content"]}
        messages = [*messages[:first], marked, *messages[first + 1 :]]
    return [message | {"content": _split(message["content"])} for message in messages]


def _split(text: str) -> str | list[Part]:
    if PICTURE_MARK not in text:
        return text
    parts: list[Part] = []
    for number, piece in enumerate(text.split(PICTURE_MARK)):
        parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": piece}] * bool(piece)
    return parts


def _own(part: Part) -> Iterator[Any]:
    """Yield the picture that a part itself holds."""
    for name in (*PICTURE_PARTS, "url", "path", "bytes"):
        if (value := part.get(name)) is not None:
            yield value.get("url", value) if isinstance(value, Mapping) else value


def from_url(value: str) -> bytes | None:
    """Return the file in a data URL, or None for any other text. Raises ValueError."""
    if not (url := _DATA_URL.match(value)):
        return None
    with explain(binascii.Error, "its data URL is not base64: {why}", ValueError):
        return base64.b64decode(value[url.end() :], validate=True)


def _read(value: Any, folder: Path) -> bytes:
    """Return the file of a picture. Raises OSError and ValueError."""
    while isinstance(value, Mapping):
        value = next((value[key] for key in _KEYS if value.get(key)), None)
    if isinstance(value, bytes):
        return value
    if type(value).__module__.startswith("PIL."):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    if not isinstance(value, str):
        raise ValueError(f"it is of type {type(value).__name__}")
    if (content := from_url(value)) is not None:
        return content
    if "://" in value.removeprefix("file://") or value.startswith("data:"):
        raise ValueError(f"{value[:80]} is not on this machine: save it as a file")
    file = folder / Path(value.removeprefix("file://")).expanduser()
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no regular file")
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{file} has more than {MAX_BYTES} bytes")
    return content
