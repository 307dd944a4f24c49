"""Sentences about mistakes in a configuration."""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from areal.base.secrets import without_secrets
from areal.config.reading import CONFIGS, read_yaml
from areal.config.section import Section, section_in

# The most keys named in place of an unknown key, and the most keys that an unknown key may stand for.
FEW_KEYS, FEW_MEANT = 12, 3
# The least likeness of a key to the written key.
LIKE, VERY_LIKE = 0.7, 0.8


def other_names() -> dict[str, str]:
    """Return this project's names for names of other libraries (areal docs examples)."""
    names: dict[str, str] = read_yaml((Path(__file__).with_name("other_names.yaml")).read_text())
    return names


def is_about(error: ValidationError, key: str) -> bool:
    """Whether the mistake is about a key: it is at the key's place or, for several keys, its sentence names the key."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if f"{place}.".startswith(f"{key}.") or key.startswith(f"{place}."):
        return True
    return first["type"] == "value_error" and bool(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]\w)", first["msg"]))


def sentence_of(error: ValidationError, file: Path | str | None, kind: type[Section]) -> str:
    place = str(file or "the command line").removeprefix(f"{CONFIGS.parent}/")
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            names = [*map(str, first["loc"]), *_names_inside(first["input"])]
            hint = _hint(names, place, _section_of(kind, first["loc"]), kind)
            return f"Unknown key {'.'.join(names)!r} in {place}: {hint}"
        case "missing" if isinstance(first["loc"][-1], str):
            return f"The key {key!r} is missing in {place}: set it there or as an override, {key}=VALUE."
        case "value_error":
            return f"{first['msg'].removeprefix('Value error, ')} ({place})."
        case "model_type" | "model_attributes_type":
            return f"{key} is a section, but has a value in {place}: `areal config {key}` lists its keys."
        case "string_pattern_mismatch" if "tcp" in first["ctx"]["pattern"]:
            return f"{key} is {first['input']!r:.80} in {place}, which is no address: write tcp://HOST:PORT."
        case _:
            value = without_secrets(first["input"], key.rpartition(".")[2])
            rule = first["msg"].removeprefix("Input ").partition(", unable to parse")[0]
            if callable(value):  # a loss, in a notebook
                return f"{key} is a function of this process, but another calls it: write it to a file, FILE.py:NAME."
            return f"{key} is {value!r:.80} in {place}, but {rule[0].lower() + rule[1:]}."


def _section_of(kind: type[Section], places: tuple[int | str, ...]) -> type[Section]:
    section: Any = kind
    for part in places[:-1]:
        if part in section.model_fields:  # else the place in a list, or the name in a mapping
            section = section_in(section.model_fields[part].annotation)
    return section


def _names_inside(value: Any) -> Iterator[str]:
    while isinstance(value, dict) and len(value) == 1:
        ((name, value),) = value.items()
        yield str(name)


def _hint(names: Sequence[str], place: str, section: type[Section], kind: type[Section]) -> str:
    """Return advice about an unknown key of `section`: the key to write instead. kind: the class with all keys."""
    key, last = ".".join(names), names[-1]
    translations = other_names()
    if names[0] == "grid":
        return f"a configuration with a grid is a sweep, areal sweep {place}."
    if name := next((name for name in (key, ".".join(names[-2:]), last) if name in translations), None):
        return f"here it is {translations[name]}."
    if "." in names[0]:
        return "keys with dots are for the command line; in a file write one section inside the other."
    keys = [*keys_in(kind)]
    unknown_section = names[1:] and names[0] not in kind.model_fields
    close = difflib.get_close_matches(names[0], kind.model_fields, 1, LIKE) if unknown_section else []
    meant = [name for name in (".".join([section, *names[1:]]) for section in close) if name in keys]
    meant = meant or [name for name in keys if name.endswith(f".{last}") or name.replace(".", "_") == last]
    if not meant:
        parent = key.rpartition(".")[0]
        close = difflib.get_close_matches(last, section.model_fields, 1, LIKE)
        meant = [f"{parent}.{name}".lstrip(".") for name in close]
    if not meant:
        close = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in keys], 1, VERY_LIKE)
        meant = [name for name in keys if name.rpartition(".")[2] in close]
    if 0 < len(meant) <= FEW_MEANT:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    if len(section.model_fields) > FEW_KEYS:
        return (
            f"`areal config {last if meant else names[0] if names[1:] else ''}".rstrip()
            + "` lists those that are known."
        )
    return f"known are {', '.join(section.model_fields)}."


def keys_in(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Return the keys of a section with their dots, except keys in mappings and lists."""
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if get_origin(field.annotation) in (dict, tuple, list):
            inner = None
        yield from keys_in(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
