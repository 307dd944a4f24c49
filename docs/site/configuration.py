"""Writes docs/configuration.md from the configuration models; run it after every change to them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from areal.config import Config, Section
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
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

INTRODUCTION = """\
# Configuration

This page is for everyone who configures a run or supervised fine-tuning: it lists every key with its values, its
default and its meaning.

<!-- Written by docs/site/configuration.py from areal/config.py: change it there. -->

A run is configured by a YAML file, by `key=value` arguments on the command line, or by both. Examples of arguments are
`trainer.lr=1e-5` and `reward.functions=[math]`. Unknown keys and values of a wrong type are reported before anything is
started. `--dry-run` prints the resolved configuration; a run also writes it to `config.yaml` in the run folder. Keys
without a default are required.
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
    for name, field in section.model_fields.items():
        if inner := _section_of(field):
            yield from _section(f"{prefix}{name}.", inner)


def _table(prefix: str, section: type[Section]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in section.model_fields.items():
        if not _section_of(field):
            text = _linked(field.description or "").replace("|", "\\|")
            yield f"| `{prefix}{name}` | {_kind(field)} | {_default(field)} | {text} |"


def _section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a key holds, also if the section is optional."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)), None)


def _kind(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(bound, name)
    ]
    return ", ".join([_name(field.annotation), *limits])


def _name(kind: Any) -> str:
    arguments = get_args(kind)
    match get_origin(kind) or kind:
        case origin if origin is Literal:
            return ", ".join(f"`{value}`" for value in arguments)
        case origin if origin in (UnionType, Union):
            return " or ".join(_name(part) for part in arguments if part is not NoneType)
        case origin if origin is tuple:
            return f"{len(arguments)} of: {_name(arguments[0])}"
        case origin if origin is list:
            return f"list of: {_name(arguments[0])}"
        case origin if origin is dict:
            return f"mapping of {_name(arguments[0])} to {_name(arguments[1])}"
        case _:
            return NAMES[kind]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else f"`{json.dumps(to_jsonable_python(value))}`"


def _linked(text: str) -> str:
    """Turns the name of a page, as the code writes it (`docs/x.md`), into a link to the page."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
