"""Writes docs/configuration.md from the configuration models; run it after every change to them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from datetime import date
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from areal.config import Config, DataConfig, EvaluatorConfig, Section, SourceConfig
from areal.training.sft import SftConfig, SftData

PAGE = Path(__file__).parents[1] / "configuration.md"
NAMES = {
    date: "date",
    str: "text",
    int: "integer",
    float: "number",
    bool: "true, false",
    Path: "path",
    Any: "any value",
}
# Counts, durations and shares are not negative: nobody has to read that of each.
OBVIOUS = (("ge", 0), ("ge", 1), ("gt", 0))
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

INTRODUCTION = """\
# Configuration

This page lists every key of a run and of supervised fine-tuning.

<!-- Written by docs/site/configuration.py from areal/config.py: change it there. -->

A run is configured by a YAML file, by arguments such as `trainer.lr=1e-5` and `reward.functions=[math]`, or by both.
Unknown keys and wrong values are reported before anything is started. `--dry-run` checks and prints the resolved
configuration; a run also writes it to `config.yaml` in the run folder.

The column *value* begins with the default, or with *required*. Other values, the type where the default does not show
it, and limits follow, but not the obvious ones: no count, size or time is negative.
"""

FINE_TUNING = """\
## Supervised fine-tuning

These are the keys of `python -m areal sft --model FOLDER --data FILE.jsonl --output FOLDER key=value ...`, which trains
a model that a run can start from. The keys of its section `trainer` are those of a run.
"""


def page() -> str:
    """The text of docs/configuration.md."""
    return "\n".join(
        [
            INTRODUCTION,
            *_section("", Config),
            FINE_TUNING,
            *_table("", SftConfig),
            "",
            *_section("data.", SftData, "### data (fine-tuning)"),
        ]
    )


def _section(prefix: str, section: type[Section], heading: str | None = None) -> Iterator[str]:
    yield heading or (f"## {prefix[:-1]}" if prefix else "## The run")
    yield ""
    if section.__doc__:
        yield _linked(inspect.cleandoc(section.__doc__))
        yield ""
    yield from _table(prefix, section)
    yield ""
    same = _shared(section)
    for described, keys in same.items():
        yield f"Meaning and default as in [{described}](#{described}): {', '.join(f'`{key}`' for key in keys)}."
        yield ""
    for name, field in section.model_fields.items():
        if name not in chain(*same.values()) and (inner := _section_of(field)):
            yield from _section(f"{prefix}{name}.", inner)


def _table(prefix: str, section: type[Section]) -> Iterator[str]:
    same = list(chain(*_shared(section).values()))
    yield "| key | value | meaning |"
    yield "|---|---|---|"
    for name, field in section.model_fields.items():
        if name not in same and not _section_of(field):
            text = _linked(field.description or "").replace("|", "\\|")
            yield f"| `{prefix}{name}` | {_value(field)} | {text} |"


def _shared(section: type[Section]) -> dict[str, list[str]]:
    """The keys that a section of rows shares with `data` and `evaluator`, by the one that describes them."""
    if section is DataConfig or not issubclass(section, SourceConfig):
        return {}
    keys = {
        name: [key for key, field in section.model_fields.items() if _same(field, described.model_fields.get(key))]
        for name, described in (("data", DataConfig), ("evaluator", EvaluatorConfig))
    }
    return {name: shared for name, shared in keys.items() if shared}


def _same(field: FieldInfo, described: FieldInfo | None) -> bool:
    if described is None:
        return False
    return (field.description, _value(field)) == (described.description, _value(described))


def _section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a key holds, also if the section is optional."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)), None)


def _value(field: FieldInfo) -> str:
    """The default, then the other values, or the type where the default does not show it, and the limits."""
    default = field.get_default(call_default_factory=True)
    limits = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(bound, name) and (name, getattr(bound, name)) not in OBVIOUS
    ]
    if default is PydanticUndefined:
        return ", ".join(["required", _name(field.annotation), *limits])
    plain = to_jsonable_python(default)
    text = f"`{plain if isinstance(plain, str) else json.dumps(plain)}`"
    if default is None or _choices(field.annotation):
        values = _name(field.annotation).split(", ")
        return ", ".join([text, *(value for value in values if value != text), *limits])
    return ", ".join([text, *limits])


def _choices(kind: Any) -> bool:
    return get_origin(kind) is Literal or any(get_origin(part) is Literal for part in get_args(kind))


def _name(kind: Any) -> str:
    arguments = get_args(kind)
    match get_origin(kind) or kind:
        case origin if origin is Literal:
            return ", ".join(f"`{value}`" for value in arguments)
        case origin if origin in (UnionType, Union):
            return ", ".join(_name(part) for part in arguments if part is not NoneType)
        case origin if origin is Annotated:
            return _name(arguments[0])
        case origin if origin is tuple:
            return f"{len(arguments)} of: {_name(arguments[0])}"
        case origin if origin is list:
            return f"list of: {_name(arguments[0])}"
        case origin if origin is dict:
            return f"mapping of {_name(arguments[0])} to {_name(arguments[1])}"
        case _:
            return NAMES[kind]


def _linked(text: str) -> str:
    """Turns the name of a page, as the code writes it (`docs/x.md`), into a link to the page."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
