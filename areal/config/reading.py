"""Configurations as text: YAML, files, and the bases of files."""

import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from areal.base.errors import UserError, explain

# In a clone a link to the folder `configs`; in a wheel a copy.
CONFIGS = Path(__file__).parents[1] / "configs"

# Benchmarks that `evaluator.benchmarks` names without a file.
BENCHMARKS = CONFIGS / "benchmarks"

# The most values of a configuration, with aliases written out: nine levels of nine would stop every reader.
MOST_VALUES = 100_000


class RepeatedKeyError(yaml.YAMLError):
    """A mapping has a key twice."""


# YAML 1.2's numbers, with `_` between digits. By YAML 1.1, as in `safe_load`, 1e-3 is text, 010 is 8, 1:30 is 90.
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")

_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)

_NUMBERS = {"tag:yaml.org,2002:int": _INTEGER, "tag:yaml.org,2002:float": _FLOAT}


class _Loader(yaml.SafeLoader):
    """Reads YAML as `safe_load` does, but takes numbers as in YAML 1.2, and refuses a repeated key of a mapping."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if tag not in _NUMBERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if _size(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise RepeatedKeyError(f"has the key {key.value!r} twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that are numbers by YAML 1.1 or 1.2."""


for _tag, _form in _NUMBERS.items():
    # A resolver is compared with a whole scalar, by the scalar's first character.
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(f"(?:{_form.pattern})$"), list("-+.0123456789"))

_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def read_yaml(text: str) -> Any:
    """Return the values in the text. Raises yaml.YAMLError, also for a repeated key of a mapping, too deep nesting, and
    aliases that stand for more than MOST_VALUES values; ValueError for an impossible date."""
    with explain(RecursionError, "it is nested too deeply", yaml.YAMLError):
        try:
            return yaml.load(text, _Loader)
        except yaml.MarkedYAMLError as error:
            raise yaml.YAMLError(_reason(error, text)) from None


def _reason(error: yaml.MarkedYAMLError, text: str) -> str:
    lines, reason = text.splitlines(), str(error.problem)
    number = min(error.problem_mark.line, len(lines) - 1) if error.problem_mark else 0
    if lines[number].lstrip(" ").startswith("\t"):
        reason = "it is indented with a tab, in place of spaces"
    elif reason.startswith("mapping values"):
        reason = "it is indented further than the line before, or its value has a colon and no quotes"
    elif reason.startswith("could not find expected"):
        reason = "it has no colon with a space behind it"
    return f"line {number + 1}, {lines[number].strip()!r:.80}: {reason}" if len(lines) > 1 else reason


def _size(node: yaml.Node | None, sizes: dict[int, float]) -> float:
    """Return the number of values in the node, with aliases written out; infinite for a node within itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = itertools.chain(*parts) if isinstance(node, yaml.MappingNode) else parts
        sizes[id(node)] = 1 + sum(_size(child, sizes) for child in children)
    return sizes[id(node)]


def write_yaml(values: Any) -> str:
    """Return YAML that `read_yaml` reads as `values`, with keys in order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_values(file: Path, bases: tuple[Path, ...] = (), *, beside: bool = True) -> dict[str, Any]:
    """Return the values in a YAML file and in its bases, unchecked. bases: the files that name `file` as a base,
    outermost first. beside: whether paths are relative to the file; else all paths are relative to the working
    directory. `configs/NAME` also exists outside a clone. Raises UserError if the file cannot be read."""
    if file.parts[:1] == ("configs",) and not file.is_file() and (CONFIGS.parent / file).is_file():
        file = CONFIGS.parent / file
    if not file.is_file():
        ours = next((path for path in CONFIGS.rglob(file.name) if not bases), None)
        how = f"correct the base in {bases[-1]}" if bases else "correct its path"
        how = f"this name has {Path('configs', ours.relative_to(CONFIGS))}" if ours else how
        raise UserError(f"There is no configuration file {file}: {how}.")
    if file.resolve() in [base.resolve() for base in bases]:
        raise UserError(f"{file} is a base of itself, by way of {bases[-1]}: remove one of these bases.")
    no_yaml = yaml.YAMLError, ValueError  # the latter: bytes that are no text, or an impossible date
    with (
        explain(no_yaml, f"{file} is not YAML: {{why}}."),
        explain(RepeatedKeyError, f"{file} {{why}}: remove one."),
        explain(OSError, f"{file} cannot be read ({{strerror}}): give another one."),
    ):
        values = read_yaml(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"{file} must contain keys and values, `key: value`, as configs/quickstart.yaml does.")
    return with_bases(with_paths(values, file.parent) if beside else values, file.parent, (*bases, file))


def with_paths(value: Any, folder: Path, key: str = "") -> Any:
    """Return `value` with `folder` before each text that is the relative path of a file below `folder`: a path,
    FILE.py:NAME, or a word of a `command`; under FOLDER_KEYS also the path of a folder, with a slash. All other texts
    stay: they are no paths, or paths from the working directory. key: the key of the value."""
    match value:
        case _ if folder == Path() or key == "base":
            return value
        case dict():
            return {_beside(name, folder): with_paths(inner, folder, name) for name, inner in value.items()}
        case list():
            return [with_paths(inner, folder, key) for inner in value]
        case str() if key == "command":
            return re.sub(r"\S+", lambda word: str(_beside(word[0], folder)), value)
        case str():
            return _beside(value, folder, key in FOLDER_KEYS)
    return value


def _beside(text: Any, folder: Path, folders: bool = False) -> Any:
    file, colon, name = text.rpartition(":") if isinstance(text, str) and ".py:" in text else (text, "", "")
    if not isinstance(file, str) or not re.search(r"[./]", file) or os.path.isabs(file):
        return text
    path = os.path.normpath(folder / file)
    return path + colon + name if os.path.isfile(path) or (folders and "/" in file and os.path.isdir(path)) else text


def with_bases(values: Any, folder: Path, files: tuple[Path, ...]) -> Any:
    """Return `values` with every `base` replaced by the contents of the base, relative to `folder`."""
    if isinstance(values, list):
        return [with_bases(value, folder, files) for value in values]
    if not isinstance(values, dict):
        return values
    names = values.get("base")
    names = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name.endswith((".yaml", ".yml")) for name in names):
        names = []  # `base` is an option of a reward, a task or the like
    resolved = {key: with_bases(value, folder, files) for key, value in values.items() if key != "base" or not names}
    for name in reversed(names):
        resolved = merged(read_values(folder / name, files), resolved)
    return resolved


def is_replaced(section: Mapping[str, Any], source: Any) -> bool:
    """Whether `source` is another data set than the section's source. Another split is no other data set."""
    names = [name.split(":")[:2] for name in (section.get("source"), source) if isinstance(name, str)]
    return len(names) == 2 and names[0] != names[1]


# Keys with a folder as a possible value.
FOLDER_KEYS = ("model", "source", "eval_source")

# Keys beside `source` that belong to a single source.
OF_SOURCE = ("options", "split", "eval_source")


def merged(below: Any, above: Any) -> Any:
    """Return `above` with missing keys from `below`; if `above` has a new `source`, without keys of the old source."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if is_replaced(below, above.get("source")):
        below = {key: value for key, value in below.items() if key not in OF_SOURCE}
    return below | {key: merged(below.get(key), value) for key, value in above.items()}
