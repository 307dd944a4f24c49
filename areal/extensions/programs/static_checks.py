"""Reads tests in Python without running them: the names that tests need of a program, and whether tests can fail."""

import ast
import builtins
import collections
import symtable
import sys
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from areal.extensions.programs import plain_data

# The module from which tests import the program, as in KodCode.
PROGRAM = "solution"
# Modules for tests outside the program: none reaches files, processes or the clock, nor runs text. asyncio is missing:
# results of asynchronous functions are no plain data.
PURE = {
    *("__future__", "abc", "array", "bisect", "cmath", "collections", "colorsys", "contextlib", "copy", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math"),
    *("numbers", "numpy", "operator", "pytest", "random", "re", "statistics", "string", "struct", "sys", "textwrap"),
    *("time", "typing", "types", "unittest", "zlib", "base64", "csv", "calendar", "warnings", "timeit", "xml", "scipy"),
    PROGRAM,
}
IMPURE = ("unittest.mock", "numpy.ctypeslib")
RUNNERS = {"eval", "exec", "compile", "open", "input", "__import__"}
# Beginnings of names of functions that can fail a test.
CHECKS = ("assert", "fail", "raises", "warns", "deprecated_call")
FIXTURES = {"tmp_path", "tmp_path_factory", "tmpdir", "tmpdir_factory", "monkeypatch", "caplog", "capfd", "recwarn"}
# The attributes that data may have.
DATA = (*plain_data.BASES, bool, type(None), BaseException, OSError, SystemExit, UnicodeError, np.ndarray)
ATTRIBUTES = {name for kind in DATA for name in dir(kind)} | {"__name__"}
OF_FUNCTIONS = {"__name__", "__doc__"}
# Names that tests use without an import, and names from pytest.
LIBRARIES = {
    *("self", "cls", "request", "capsys", "np", "pytest", PROGRAM, *PURE, *collections.__all__, *typing.__all__),
}
# Names that tests outside the program cannot use: they do not affect the program, do not cross, or change class.
BEYOND = {
    "stdin",
    "seed",
    "setrecursionlimit",
    "__cause__",
    "__context__",
    "warns",
    "catch_warnings",
    "deprecated_call",
}
LOOKS = {"hasattr", "getattr", "setattr", "delattr", "vars", "callable"}
CAUGHT_ALONE = {"AssertionError", "AttributeError", "NameError", "KeyboardInterrupt", "GeneratorExit", "StopIteration"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of tests. names: used by the tests, to be defined by the program. constants: names in capitals that are
    neither called nor caught. can_fail: False if no code that runs can fail, or no code that runs uses the program.
    unsafe: why a program could reach tests outside it, or None. beyond: why right programs would fail outside, or
    None."""

    names: tuple[str, ...]
    constants: tuple[str, ...]
    can_fail: bool
    unsafe: str | None
    beyond: str | None


@lru_cache(maxsize=64)  # the completions of a row are scored one after another
def needs_of(sources: tuple[str, ...], pytest_style: bool, functions: frozenset[str] = frozenset()) -> Needs:
    """Return the needs of the tests in `sources`, which run in turn in a shared namespace.

    pytest_style: pytest calls its functions and methods. functions: the known functions of a right program, perhaps
    with names of built-in functions. Raises SyntaxError.

    >>> needs_of(("assert add(1, 2) == 3",), pytest_style=False).names
    ('add',)
    """
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    reached = list(_reached(trees, pytest_style))
    read = {node.id for node in reached if isinstance(node, ast.Name)}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == PROGRAM]
    imported = {alias.name for node in imports for alias in node.names} - {"*"}
    undefined = read & _undefined(sources)
    names = undefined - set(dir(builtins)) | imported
    if not names and PROGRAM not in read:  # the program's function has the name of a built-in function
        names = undefined & functions or (undefined if len(undefined) == 1 else set())
    uses_program = bool(names) or PROGRAM in read
    defined = {node.name for node in nodes if isinstance(node, Function)}
    can_fail = uses_program and any(_may_fail(node, defined) for node in reached)
    unsafe = next(filter(None, (_unsafe(node, defined) for node in nodes)), None)
    constants = sorted(
        name for name in names - functions - _used_otherwise(reached) if name.isupper() and not _is_class(name)
    )
    return Needs(tuple(sorted(names)), tuple(constants), can_fail, unsafe, _beyond(trees, nodes, reached, names))


@lru_cache(maxsize=64)
def is_pytest_style(sources: tuple[str, ...]) -> bool:
    """Return whether a source defines tests that pytest would collect. Raises SyntaxError."""
    return any(
        isinstance(node, Function)
        and node.name.startswith("test")
        or isinstance(node, ast.ClassDef)
        and any(isinstance(part, Function) and part.name.startswith("test") for part in node.body)
        for source in sources
        for node in ast.parse(source).body
    )


def _used_otherwise(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names that are called, or caught as exceptions."""
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return called | {part.id for node in nodes for part in _caught(node) if isinstance(part, ast.Name)}


def _reached(trees: Sequence[ast.AST], pytest_style: bool) -> Iterator[ast.AST]:
    """Yield the nodes that run. The body of a function runs if a node that runs contains the function's name."""
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
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):  # assert (x == 1, "a message"): always true
            return False
        case ast.Raise() | ast.Assert():
            return True
        case ast.Call(func=ast.Attribute(attr=name)):  # self.assertEqual, np.testing.assert_allclose, pytest.raises
            return name.startswith(CHECKS)
        case ast.Call(func=ast.Name(id=name)):  # a check, imported by name
            return name.startswith(CHECKS) and name not in defined
    return False


def _unsafe(node: ast.AST, defined: set[str]) -> str | None:
    """Name the part of a node that would let a program reach tests outside: a module, fixture or runner of text."""
    modules: list[str] = []
    match node:
        case ast.Import(names=aliases):
            modules = [alias.name for alias in aliases]
        case ast.ImportFrom(module=str(module), names=aliases):
            modules = [module, *(f"{module}.{alias.name}" for alias in aliases)]
        case ast.Name(id=name, ctx=ast.Load()) if name in RUNNERS:
            return name
        case ast.arg(arg=name) if name in FIXTURES - defined:
            return f"the fixture {name}"
    return next(
        (f"the module {name}" for name in modules if name in IMPURE or name.partition(".")[0] not in PURE), None
    )


def _beyond(
    trees: Sequence[ast.AST], nodes: Sequence[ast.AST], reached: Sequence[ast.AST], names: set[str]
) -> str | None:
    """Return a use of the program beyond calls of functions by name with plain data and plain results, or None."""
    modules = _of_libraries(nodes)
    names = names - modules
    functions = {node.name for node in nodes if isinstance(node, Function | ast.ClassDef)}
    own_names = functions | {
        getattr(node, "attr", getattr(node, "id", None))
        for node in nodes
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store)
    }
    functions -= {node.arg for node in nodes if isinstance(node, ast.arg)}  # pytest passes results of fixtures
    expected = [part for node in nodes for part in _caught(node)]
    caught = {id(part) for part in expected}
    errors = {part.id for part in expected if isinstance(part, ast.Name)}
    for node in reached:
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncWith() | ast.AsyncFor():
                return "asynchronous functions"
            case ast.ClassDef(name=name, bases=bases) if not (bases or name.startswith("Test")):
                return f"the class {name} of theirs"
            case ast.Name(id=name) if name in CAUGHT_ALONE and id(node) in caught:
                return f"{name}, which tests raise themselves"
            case ast.Name(id=name) if name in names and _is_class(name) and name not in errors:
                return f"the class {name}"
            case ast.Attribute(attr=attribute) if attribute in BEYOND:
                return f".{attribute}"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if (
                name in names and attribute not in OF_FUNCTIONS
            ):
                return f".{attribute} of {name}"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == PROGRAM and _is_class(attribute):
                if id(node) not in caught:
                    return f"the class {attribute}"
            case ast.Attribute(value=base, attr=attribute) if attribute not in ATTRIBUTES | own_names:
                if not _is_of_module(base, modules):
                    return f".{attribute}, which no plain data have"
            case ast.Call(ast.Name(name), [value, *_]) if name in LOOKS and not _is_of_module(value, modules):
                return f"{name}, which looks into an object"
            case ast.Call(func=ast.Call(func=ast.Name(id=name))) if name in names:
                return f"a call of what {name} returns"
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in names:
                for value in (*arguments, *(keyword.value for keyword in keywords)):
                    if _is_callback(value, functions):
                        return f"a function that is given to {name}"
            case ast.withitem(context_expr=ast.Call(func=ast.Name(id=name))) if name in names:
                return f"with {name}"
    return None


def _of_libraries(nodes: Sequence[ast.AST]) -> set[str]:
    """Return names of modules, of values from modules, and of caught exceptions."""
    names = set(LIBRARIES)
    for node in nodes:
        match node:
            case ast.ImportFrom(module=module) if module == PROGRAM:
                names -= {alias.asname or alias.name for alias in node.names}
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
            case ast.ExceptHandler(name=str(name)):
                names.add(name)
    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.withitem(optional_vars=ast.Name(id=name), context_expr=value)
            ) if _is_of_module(value, names):
                names.add(name)
    return names


def _is_of_module(node: ast.AST, modules: set[str]) -> bool:
    """Return whether the value comes from a module, as in `np.random.default_rng(0)`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in modules


def _is_callback(value: ast.AST, functions: set[str]) -> bool:
    """Return whether the value is a function of the tests, or a library's function that is no built-in name."""
    match value:
        case ast.Lambda():
            return True
        case ast.Name(id=name):
            return name in functions
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            owners = (vars(builtins).get(name), sys.modules.get(name), *DATA)
            return any(callable(getattr(owner, attribute, None)) for owner in owners)
    return False


def _caught(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that name expected exceptions."""
    match node:
        case (
            ast.ExceptHandler(type=ast.AST() as kind)
            | ast.Call(ast.Attribute(attr="raises" | "assertRaises" | "assertRaisesRegex"), [kind, *_])
            | ast.Call(ast.Name("raises"), [kind, *_])
        ):
            yield from kind.elts if isinstance(kind, ast.Tuple) else [kind]


def _is_class(name: str) -> bool:
    bare = name.lstrip("_")
    return bare[:1].isupper() and (len(bare) == 1 or not bare.isupper())


def _undefined(sources: Iterable[str]) -> set[str]:
    """Return names, built-in names included, that the sources look up in their namespace and do not define."""
    tables = [symtable.symtable(_with_generators(source), "tests", "exec") for source in sources]
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    defined = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    inner = [child for table in tables for child in table.get_children()]
    for table in inner:  # the list grows meanwhile
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        inner += table.get_children()
    return used - defined


def _with_generators(source: str) -> str:
    """Return the source with generators in place of comprehensions: from Python 3.12 on, tables of symbols have the
    variables of a comprehension as variables of the code around it."""
    tree = ast.parse(source)
    if not any(isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp) for node in ast.walk(tree)):
        return source
    return ast.unparse(_Generators().visit(tree))


class _Generators(ast.NodeTransformer):
    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)
