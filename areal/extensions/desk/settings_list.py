"""The keys of a run's configuration, listed: `areal config`."""

import ast
import inspect
import json
import re
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from datetime import date
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from rich.table import Table

from areal.base.command_line import output
from areal.base.errors import UserError
from areal.config import Config
from areal.config.section import Section, section_in

NAMES = {date: "date", str: "text", int: "integer", float: "number", bool: "true, false", Path: "path", Any: "anything"}
# Counts, durations and shares are obviously not negative: the list leaves these bounds out.
OBVIOUS = (("ge", 0), ("ge", 1), ("gt", 0))
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def print_keys(options: Namespace) -> None:
    """`areal config`: print the keys with all words in name or description, their values and meaning."""
    if options.schema:
        return print(json.dumps(schema(), indent=2))
    words = [word.lower() for word in options.words]
    table = Table("key", "value", "meaning", box=None, pad_edge=False)
    for key, field, meaning in keys_of(Config):
        if all(word in f"{key} {meaning}".lower() for word in words):
            table.add_row(key, value_of(field).replace("`", ""), meaning)
    if not table.row_count:
        parts = {part for key, *_ in keys_of(Config) for part in re.split(r"[._]", key)}
        close = [name for word in words if word not in parts for name in get_close_matches(word, parts, 1)]
        advice = f"did you mean {' '.join(close)}?" if close else "leave out a word."
        raise UserError(f"No key of the configuration has to do with {' '.join(words)}: {advice}")
    for column in table.columns[1:]:
        column.overflow = "fold"
    output(160).print(table)


def keys_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Yield all keys of a section, with dots, and their meanings. Keys of inner sections come last."""
    fields, texts = section.model_fields, meanings(section)
    inner = {name: nested for name, field in fields.items() if (nested := section_in(field.annotation))}
    yield from ((f"{prefix}{name}", fields[name], texts.get(name, "")) for name in fields if name not in inner)
    for name, nested in inner.items():
        is_mapping = get_origin(fields[name].annotation) is dict
        yield from keys_of(nested, f"{prefix}{name}.{'NAME.' * is_mapping}")


@cache
def meanings(section: type[Section]) -> dict[str, str]:
    """Return the meaning of each key of a section and its base classes: the key's description, or the text below it."""
    texts: dict[str, str] = {}
    for kind in (kind for kind in reversed(section.__mro__) if issubclass(kind, Section)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for key, below in pairwise(cast(ast.ClassDef, tree).body):
            match key, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts | {name: field.description for name, field in section.model_fields.items() if field.description}


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration, with the meaning of each key."""
    whole, kinds = Config.model_json_schema(), [Section]
    parts = whole["$defs"] | {Config.__name__: whole}
    for kind in kinds:  # the list grows
        kinds += kind.__subclasses__()
        properties = parts.get(kind.__name__, {}).get("properties", {})
        for name in meanings(kind).keys() & properties.keys():
            properties[name]["description"] = meanings(kind)[name]
    return whole


def value_of(field: FieldInfo) -> str:
    """Return the default, then further values, or the type if the default does not show it, and the limits."""
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
