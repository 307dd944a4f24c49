"""Reads tests that are Python code without running them: what they need, whether they can fail at all, and what in them
cannot be judged."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PosixPath
from uuid import UUID

import numpy as np

from areal.programs import plain_data

# The module that tests import the program from, as in KodCode.
PROGRAM = "solution"
# With these, tests run what a program has returned, or look into what is only in the program's process.
RUNNERS = {"eval", "exec", "compile", "__import__"}
UNJUDGED = {
    "cloudpickle",
    "ctypes",
    "dill",
    "gc",
    "importlib",
    "inspect",
    "marshal",
    "pandas",
    "pickle",
    "runpy",
    "shelve",
}
INSIDES = {"__annotations__", "__closure__", "__code__", "__defaults__", "__globals__", "__wrapped__"}
# The attributes that data may have.
ATTRIBUTES = {name for kind in (*plain_data.BASES, np.ndarray, np.generic, UUID, PosixPath) for name in dir(kind)}
OF_FUNCTIONS = {"__name__", "__qualname__"}
# What tests use without importing it.
LIBRARIES = sys.stdlib_module_names | {"np", "pd", "numpy", "pytest", PROGRAM}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Needs:
    """names: what the tests use and expect the program to define. modules: what they import. can_fail: False if no code
    that runs can fail, or none that runs uses the program. unjudged: what in them cannot be judged, or None."""

    names: tuple[str, ...]
    modules: tuple[str, ...]
    can_fail: bool
    unjudged: str | None


@lru_cache(maxsize=64)  # the completions of a row are scored one after another
def needs_of(sources: tuple[str, ...], pytest_style: bool, functions: frozenset[str] = frozenset()) -> Needs:
    """What the tests in `sources` need; the sources run one after another in the same namespace.

    pytest_style: the functions and methods that pytest calls are called. functions: those that a right program defines,
    as far as is known: they may have names of built-in ones. Raises SyntaxError.
    """
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    reached = list(_reached(trees, pytest_style))
    read = {node.id for node in reached if isinstance(node, ast.Name)}
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == PROGRAM
        for alias in node.names
        if alias.name != "*"
    }
    undefined = read & _undefined(sources)
    names = undefined - set(dir(builtins)) | imported
    if not names and PROGRAM not in read:  # the function of the program has the name of a built-in one
        names = undefined & functions or (undefined if len(undefined) == 1 else set())
    uses_program = bool(names) or PROGRAM in read
    defined = {node.name for node in nodes if isinstance(node, Function)}
    modules = _modules(nodes)
    can_fail = uses_program and any(_may_fail(node, defined) for node in reached)
    unjudged = next(filter(None, (_unjudged(node, names) for node in reached)), None)
    if unjudged is None and (foreign := UNJUDGED & {*modules}):
        unjudged = f"the module {min(foreign)}"
    return Needs(tuple(sorted(names)), modules, can_fail, unjudged)


@lru_cache(maxsize=64)
def is_pytest_style(sources: tuple[str, ...]) -> bool:
    """True if a source defines tests that pytest would collect. Raises SyntaxError."""
    return any(
        isinstance(node, Function)
        and node.name.startswith("test")
        or isinstance(node, ast.ClassDef)
        and any(isinstance(part, Function) and part.name.startswith("test") for part in node.body)
        for source in sources
        for node in ast.parse(source).body
    )


def _reached(trees: Sequence[ast.AST], pytest_style: bool) -> Iterator[ast.AST]:
    """The nodes that run. The body of a function runs if a node that runs contains its name."""
    named: set[str] = set()
    waiting: dict[str, list[ast.AST]] = defaultdict(list)
    queue = list(trees)
    while queue:
        node = queue.pop()
        if isinstance(node, Function) and not (
            node.name in named
            or node.name.startswith("__")
            or (pytest_style and node.name.startswith(("test", "setup", "setUp")))
        ):
            waiting[node.name].append(node)
            continue
        yield node
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):  # pytest calls fixtures by arguments
                named.add(name)
                queue += waiting.pop(name, ())
        queue += ast.iter_child_nodes(node)


def _may_fail(node: ast.AST, defined: set[str]) -> bool:
    match node:
        case ast.Raise():
            return True
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):  # assert (x == 1, "a message"): always true
            return False
        case ast.Assert():
            return True
        case ast.Call(func=ast.Attribute(attr=name)):  # self.assertEqual, np.testing.assert_allclose, pytest.raises
            return name.startswith(("assert", "fail", "raises"))
        case ast.Call(func=ast.Name(id=name)):  # a function of that kind that is imported by name
            return name.startswith(("assert", "fail", "raises")) and name not in defined
    return False


def _unjudged(node: ast.AST, names: set[str]) -> str | None:
    """What cannot be judged in a node: text that is run, or what no plain data have, of a function's result."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()) if name in RUNNERS:
            return name
        case ast.Attribute(attr=attribute) if attribute in INSIDES:
            return f".{attribute}"
        case ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr=attribute) if (
            attribute not in ATTRIBUTES and _is_function(name, names)
        ):
            return f".{attribute} of what {name} returns"
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if (
            attribute not in ATTRIBUTES | OF_FUNCTIONS and _is_function(name, names)
        ):
            return f".{attribute} of {name}"
        case ast.Call(func=ast.Call(func=ast.Name(id=name))) if _is_function(name, names):
            return f"a call of what {name} returns"
    return None


def _is_function(name: str, names: set[str]) -> bool:
    return name in names and name not in LIBRARIES and not name.lstrip("_")[:1].isupper()


def _undefined(sources: Iterable[str]) -> set[str]:
    """Names, built-in ones included, that are looked up in the namespace of the sources, which do not define them."""
    tables = [symtable.symtable(source, "tests", "exec") for source in sources]
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    defined = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    queue = [child for table in tables for child in table.get_children()]
    while queue:
        table = queue.pop()
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        queue += table.get_children()
    return used - defined


def _modules(nodes: Iterable[ast.AST]) -> tuple[str, ...]:
    modules: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                modules.update(alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                modules.add(module.partition(".")[0])
    return tuple(sorted(modules - {PROGRAM}))
