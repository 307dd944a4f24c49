"""What tests use of pytest, for the process of the tests, where pytest itself must not run: it reads files that the
program can write.

`assert_runner` uses this file as the module `pytest`. Anything that is not here raises Unsupported, which
makes the row an error and never a score. It is imported for all tests, so what takes long is imported where it is used.
"""

import collections
import contextlib
import functools
import inspect
import io
import itertools
import math
import operator
import re
import sys
import types
from typing import Any


class Unsupported(BaseException):
    """The tests need what cannot be judged here."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise Unsupported(f"pytest.{name}")


# --- what tests call


class Raises:
    """The context manager of `raises`, and what it yields."""

    def __init__(self, expected, match):
        self.expected, self.pattern = expected, match
        self.value = self.type = self.tb = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert error is not None, "no exception was raised"
        if not isinstance(error, self.expected):
            return False
        self.value, self.type, self.tb = error, kind, trace
        return self.pattern is None or self.match(self.pattern)

    def match(self, pattern):
        assert re.search(pattern, str(self.value)), "the exception has another message"
        return True


def raises(expected, *call, match=None, **keywords):
    context = Raises(expected, match)
    if not call:
        return context
    with context:
        call[0](*call[1:], **keywords)
    return context


class approx:
    """Equals numbers, and lists and dicts of numbers, that are within a tolerance of those expected."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, value):
        expected, near = self.expected, functools.partial(approx, rel=self.rel, abs=self.abs, nan_ok=self.nan_ok)
        if isinstance(expected, dict):
            return (
                isinstance(value, dict)
                and value.keys() == expected.keys()
                and all(value[key] == near(item) for key, item in expected.items())
            )
        if isinstance(expected, (list, tuple)):
            return len(value) == len(expected) and all(map(operator.eq, value, map(near, expected)))
        if value == expected:
            return True
        if not isinstance(value, (int, float, complex)) and not hasattr(value, "__float__"):
            return False
        if math.isnan(expected):
            return self.nan_ok and math.isnan(value)
        return not math.isinf(expected) and abs(value - expected) <= self.tolerance()

    def tolerance(self):
        if self.rel is None and self.abs is not None:
            return self.abs
        relative = (1e-6 if self.rel is None else self.rel) * abs(self.expected)
        return max(relative, 1e-12 if self.abs is None else self.abs)


def fail(reason=""):
    raise AssertionError(reason)


class Param(tuple):  # type: ignore[type-arg]
    """The values of one case of parametrize."""


def param(*values, id=None):
    return Param(values)


def fixture(function=None, *, autouse=False, params=None, **_):
    if params is not None:
        raise Unsupported("a fixture with params")
    if function is None:
        return functools.partial(fixture, autouse=autouse)
    function.fixture_of_all = autouse
    return function


class Marks:
    def parametrize(self, names, values, ids=None):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [value if isinstance(value, Param) or len(names) > 1 else (value,) for value in values]
        cases = [dict(zip(names, row, strict=True)) for row in rows]

        def parametrized(test):
            test.cases = [cases, *getattr(test, "cases", [])]
            return test

        return parametrized

    def __getattr__(self, name):
        if name in ("skip", "skipif", "xfail", "usefixtures"):
            raise Unsupported(f"pytest.mark.{name}")
        return lambda *details, **_: details[0] if details and callable(details[0]) else lambda test: test


mark = Marks()


# --- fixtures that pytest has

Captured = collections.namedtuple("Captured", "out err")


@fixture
def capsys():
    def readouterr():
        texts = Captured(*(stream.getvalue() for stream in streams))
        for stream in streams:
            stream.seek(0)
            stream.truncate()
        return texts

    streams = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield types.SimpleNamespace(readouterr=readouterr)


class MonkeyPatch:
    def __init__(self, stack):
        self.stack = stack

    def setattr(self, target, name, *value, raising=True):
        from unittest import mock

        patch: Any = mock.patch if isinstance(target, str) else mock.patch.object
        self.stack.enter_context(patch(target, name, *value, create=not raising))

    def setitem(self, target, key, value):
        from unittest import mock

        self.stack.enter_context(mock.patch.dict(target, {key: value}))

    def __getattr__(self, name):
        raise Unsupported(f"monkeypatch.{name}")


@fixture
def monkeypatch():
    with contextlib.ExitStack() as stack:
        yield MonkeyPatch(stack)


@fixture
def tmp_path():
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


PROVIDED = {"capsys": capsys, "monkeypatch": monkeypatch, "tmp_path": tmp_path}


# --- how they are run


def tests_in(names):
    """The tests in a namespace, as functions without arguments."""
    fixtures = PROVIDED | {name: value for name, value in names.items() if is_fixture(value)}
    for name in ("setup_module", "teardown_module", "setup_function", "teardown_function"):
        if name in names:
            raise Unsupported(name)
    unittest = sys.modules.get("unittest")
    for name, value in [*names.items()]:
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            yield from cases_of(value, fixtures, contextlib.nullcontext)
        elif unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            yield from (value(method).debug for method in unittest.defaultTestLoader.getTestCaseNames(value))
        elif isinstance(value, type) and name.startswith("Test"):
            if hasattr(value, "cases") or hasattr(value, "setup_class"):
                raise Unsupported("setup_class or parametrize for a class")
            for test in dir(value):
                if test.startswith("test"):  # each has an object of its own
                    yield from cases_of(getattr(value, test), fixtures, functools.partial(new_object, value))


def is_fixture(value):
    """True for a fixture of the tests; an object of the program is none, whatever it says."""
    return isinstance(value, types.FunctionType) and hasattr(value, "fixture_of_all")


@contextlib.contextmanager
def new_object(owner):
    value = owner()
    call_with_method(value, "setup_method")
    yield value
    call_with_method(value, "teardown_method")


def call_with_method(value, name):
    if function := getattr(value, name, None):
        function(*[None] * len(inspect.signature(function).parameters))


def cases_of(test, fixtures, owner):
    if not isinstance(test, types.FunctionType):
        raise Unsupported("tests that are no functions")
    for case in itertools.product(*getattr(test, "cases", [])):
        values = {name: value for part in case for name, value in part.items()}
        yield functools.partial(run, test, values, fixtures, owner)


def run(test, values, fixtures, owner):
    with contextlib.ExitStack() as stack:
        if (value := stack.enter_context(owner())) is not None:
            test = test.__get__(value)
            methods = {name: getattr(type(value), name) for name in dir(type(value))}
            fixtures = fixtures | {name: f.__get__(value) for name, f in methods.items() if is_fixture(f)}
        values = dict(values)
        for name, function in fixtures.items():
            if function.fixture_of_all:
                provide(name, values, fixtures, stack)
        result = test(**arguments_of(test, values, fixtures, stack))
        if inspect.iscoroutine(result):
            import asyncio  # it takes long

            asyncio.run(result)


def arguments_of(function, values, fixtures, stack):
    return {name: provide(name, values, fixtures, stack) for name in inspect.signature(function).parameters}


def provide(name, values, fixtures, stack):
    """The value of a parameter or a fixture; a fixture is made once for each test."""
    if name in values:
        return values[name]
    if name not in fixtures:
        raise Unsupported(f"the fixture {name}")
    function = fixtures[name]
    arguments = arguments_of(function, values, fixtures, stack)
    if inspect.isgeneratorfunction(function):
        values[name] = stack.enter_context(contextlib.contextmanager(function)(**arguments))
    else:
        values[name] = function(**arguments)
    return values[name]
