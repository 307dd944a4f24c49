"""Overrides of a command line, such as `generator.count=2`."""

import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml

from areal.base.errors import UserError, explain
from areal.config.reading import CONFIGS, OF_SOURCE, RepeatedKeyError, is_replaced, read_yaml
from areal.config.section import Section, section_in


def parsed(override: str, kind: type[Section]) -> tuple[str, Any]:
    """Return the key and the value of an override such as `generator.count=2`; `kind` has the keys. The value of a text
    key is the text as written, without a pair of quotes; other values are YAML. Raises UserError."""
    key, text = split_override(override)
    annotation = _annotation(kind, key)
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts}
    if kinds <= {str, Path, type(None)}:
        return key, None if text in ("null", "~") and type(None) in kinds else _unquoted(text)
    return key, _yaml(text, override)


def parsed_values(override: str) -> tuple[str, list[Any]]:
    """Return the key and the values of a text such as `generator.count=1,2`. Raises UserError."""
    key, text = split_override(override)
    return key, _yaml(f"[{text}]", override)


def split_override(override: str) -> tuple[str, str]:
    """Return the key of `key=value`, and the value as text. Raises UserError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"The override {override!r} is not of the form key=value: {_in_place_of(override)}.")
    return key, text


def _in_place_of(word: str) -> str:
    """Return advice about a word of a command line that is neither an option, a file of YAML nor an override."""
    packaged = next(
        (name for name in (f"{word}.yaml", f"configs/{word}.yaml") if (CONFIGS.parent / name).is_file()), None
    )
    if Path(f"{word}.yaml").is_file() or packaged:
        return f"the configuration is {packaged or word + '.yaml'}"
    if Path(word).is_dir() and (Path(word) / "config.yaml").is_file():
        return f"a run goes on with --resume {word}"
    if word.endswith((".json", ".toml")):
        return f"a configuration is a file of YAML, {Path(word).with_suffix('.yaml')}; rows are data.source={word}"
    if Path(word).is_file():
        return f"rows are data.source={word}"
    name = word.rstrip(":")
    return f"write {name}=VALUE" if re.fullmatch(r"[a-z_]+(\.\w+)*", name) else "write, say, generator.count=2"


def _yaml(text: str, override: str) -> Any:
    with (
        explain(
            (yaml.YAMLError, ValueError),
            f"What the override {override!r} sets is not YAML ({{why}}): {_mend(text)}.",
        ),
        explain(RepeatedKeyError, f"The override {override!r} {{why}}: remove one."),
    ):
        return read_yaml(text)


def _mend(text: str) -> str:
    for first, last in ("[]", "{}"):
        if text.count(first) > text.count(last):
            return f"close it with {last}, and write it between single quotes, which the shell takes away"
    return "write it between two pairs of quotes, '\"...\"', of which the shell takes one away"


def _unquoted(text: str) -> str:
    quote, inner = text[:1], text[1:-1]
    if len(text) < 2 or quote not in ("'", '"') or text[-1] != quote or quote in inner.replace("''", ""):
        return text
    return inner.replace("''", "'") if quote == "'" else inner


def _parts(key: str) -> list[str]:
    """Return the parts of a key. A reward's name is a single part: reward.options.judges.py:Judge.model."""
    named = re.fullmatch(r"(reward|data)\.(options|functions|reward)\.([^:]+:[^.]+)(.*)", key)
    return [*named.groups()[:3], *named[4].split(".")[1:]] if named else key.split(".")


def _annotation(kind: type[Section], key: str) -> Any:
    annotation: Any = kind
    for part in _parts(key):
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif (section := section_in(annotation)) and part in section.model_fields:
            annotation = section.model_fields[part].annotation
        else:
            return None
    return annotation


def forget_source(values: dict[str, Any], key: str, value: Any) -> None:
    """If an override replaces a `source`, remove the keys of the old source."""
    section: Any = values
    *names, last = key.split(".")
    for name in names:
        section = section.get(name) if isinstance(section, dict) else None
    if last == "source" and isinstance(section, dict) and is_replaced(section, value):
        for name in OF_SOURCE:
            section.pop(name, None)


def set_value(values: dict[str, Any], key: str, value: Any, override: str) -> None:
    *sections, last = _parts(key)
    for section in sections:
        if values.get(section) is None:  # left out, or written as null
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UserError(f"The override {override!r} sets a key inside {section!r}, which is no section.")
    values[last] = value
