"""An objective that is a function of this process: the source in a file, which the trainer's process loads."""

import builtins
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from areal.base.errors import UserError, explain
from areal.config import Config
from areal.storage.disk import replace

FILE = "objective.py"


def take_source(given: dict[str, Any]) -> str:
    """Replace an objective that is a function among the keys of a call by the name of a file. Returns the content of
    the file; empty if there is no such function. Raises UserError."""
    section = given.get("trainer")
    within = section.get("objective") if isinstance(section, Mapping) else None
    function = given.get("trainer.objective", within)
    if not callable(function):
        return ""
    source = source_of(function)
    given["trainer.objective"] = f"{FILE}:{function.__name__}"
    return source


def write(config: Config, source: str) -> Config:
    """Write the file into the folder of the run. Returns the configuration with the path of the file."""
    replace(config.folder / FILE, source)
    trainer = {"objective": f"{config.folder.absolute()}/{config.trainer.objective}"}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})


def source_of(function: Callable[..., Any]) -> str:
    """Return the source of a module that defines `function`, with the imports and constants that the function uses.
    Raises UserError if the function needs more of this process."""
    name = getattr(function, "__name__", "<lambda>")
    advice = "write it to a file, FILE.py:NAME"
    with explain((OSError, TypeError), f"The source of the objective {name} cannot be read ({{why}}): {advice}."):
        source = textwrap.dedent(inspect.getsource(function))
    if not source.startswith("def "):
        raise UserError(f"The objective {name} is no plain function: use def, without decorators, or {advice}.")
    values = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
    lines = ["from __future__ import annotations", ""]
    for word in sorted({*_used(symtable.symtable(source, FILE, "exec"))} - {name, *vars(builtins)}):
        value = values.get(word)
        kind, module = getattr(value, "__name__", word), sys.modules.get(getattr(value, "__module__", None) or "")
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {word}")
        elif module and module.__name__ != "__main__" and getattr(module, kind, None) is value:
            lines.append(f"from {module.__name__} import {kind} as {word}")
        elif isinstance(value, bool | int | float | str):
            lines.append(f"{word} = {value!r}")
        else:
            raise UserError(f"The objective {name} uses {word} of this process: define it in {name}, or {advice}.")
    return "\n".join([*lines, "", "", source])


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that code takes from outside."""
    for symbol in table.get_symbols():
        if symbol.is_global() or (symbol.is_referenced() and table.get_type() == "module"):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _used(child)
