"""What tests use of pytest, for the process of the asserts, where pytest itself must not run: it reads files that the
program can write.

`areal.rewards.assert_runner` uses this file as the module `pytest`. Anything that is not here raises
Unsupported, which makes the row an error and never a score.
"""

import collections
import contextlib
import functools
import inspect
import io
import itertools
import math
import re
import sys
import types


class Unsupported(BaseException):
    """The tests use something of pytest that this stand-in lacks."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise Unsupported(f"pytest.{name}")


# --- what tests call


class Raises:
    """The context manager of `raises`, and what it yields."""

    def __init__(self, expected, match):
        self.expected = expected if isinstance(expected, tuple) else (expected,)
        self.match_wanted = match
        self.value = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert error is not None, "no exception was raised"
        if not isinstance(error, self.expected):
            return False
        self.value, self.type, self.tb = error, kind, trace
        if self.match_wanted is not None:
            self.match(self.match_wanted)
        return True

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

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected = expected
        self.options = {"rel": rel, "abs": abs, "nan_ok": nan_ok}

    def __eq__(self, given):
        expected = self.expected
        if isinstance(expected, dict):
            return (
                isinstance(given, dict)
                and given.keys() == expected.keys()
                and all(given[key] == approx(item, **self.options) for key, item in expected.items())
            )
        if isinstance(expected, (list, tuple)):
            return len(given) == len(expected) and all(
                one == approx(other, **self.options) for one, other in zip(given, expected, strict=True)
            )
        if given == expected:
            return True
        try:
            if math.isnan(expected):
                return self.options["nan_ok"] and math.isnan(given)
            return not math.isinf(expected) and abs(given - expected) <= self.tolerance()
        except TypeError:
            return False

    def tolerance(self):
        rel, absolute = self.options["rel"], self.options["abs"]
        if rel is None and absolute is not None:
            return absolute
        return max((1e-6 if rel is None else rel) * abs(self.expected), 1e-12 if absolute is None else absolute)

    __hash__ = None  # type: ignore[assignment]  # makes it unhashable


def fail(reason=""):
    raise AssertionError(reason)


def param(*values, id=None):
    return Param(values)


class Param(tuple):  # type: ignore[type-arg]
    pass


def fixture(function=None, *, autouse=False, params=None, **_):
    if params is not None:
        raise Unsupported("a fixture with params")
    if function is None:
        return functools.partial(fixture, autouse=autouse)
    function.fixture_of_all = autouse
    return function


class Mark:
    def parametrize(self, names, values, ids=None):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        sets = []
        for value in values:
            many = value if isinstance(value, Param) or len(names) > 1 else (value,)
            sets.append(dict(zip(names, many, strict=True)))

        def parametrized(test):
            test.parameter_sets = [sets, *getattr(test, "parameter_sets", [])]
            return test

        return parametrized

    def __getattr__(self, name):
        if name in ("skip", "skipif", "xfail", "usefixtures"):
            raise Unsupported(f"pytest.mark.{name}")

        def unknown(*details, **_):
            return details[0] if details and callable(details[0]) else lambda test: test

        return unknown


mark = Mark()


# --- fixtures that pytest has


class Captured(collections.namedtuple("Captured", "out err")):
    __slots__ = ()


class Capture:
    def __init__(self):
        self.streams = io.StringIO(), io.StringIO()

    def readouterr(self):
        found = Captured(*(stream.getvalue() for stream in self.streams))
        for stream in self.streams:
            stream.seek(0)
            stream.truncate()
        return found


@contextlib.contextmanager
def capsys():
    capture = Capture()
    out, err = capture.streams
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield capture


class MonkeyPatch:
    def __init__(self, stack):
        self.stack = stack

    def setattr(self, target, name, *value, raising=True):
        from unittest import mock

        if isinstance(target, str):
            self.stack.enter_context(mock.patch(target, name, create=not raising))
        else:
            self.stack.enter_context(mock.patch.object(target, name, value[0], create=not raising))

    def setitem(self, target, key, value):
        from unittest import mock

        self.stack.enter_context(mock.patch.dict(target, {key: value}))

    def __getattr__(self, name):
        raise Unsupported(f"monkeypatch.{name}")


@contextlib.contextmanager
def monkeypatch():
    with contextlib.ExitStack() as stack:
        yield MonkeyPatch(stack)


@contextlib.contextmanager
def tmp_path():
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


PROVIDED = {"capsys": capsys, "monkeypatch": monkeypatch, "tmp_path": tmp_path}


# --- how they are run


def tests_in(names):
    """The tests in a namespace, as functions without arguments."""
    fixtures = {name: value for name, value in names.items() if is_fixture(value)}
    for name in ("setup_module", "teardown_module", "setup_function", "teardown_function"):
        if name in names:
            raise Unsupported(name)
    unittest = sys.modules.get("unittest")
    for name, value in [*names.items()]:
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            yield from cases_of(value, fixtures, no_object)
        elif unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(value):
                yield value(method).debug
        elif isinstance(value, type) and name.startswith("Test"):
            yield from tests_of_class(value, fixtures)


def tests_of_class(owner, fixtures):
    if hasattr(owner, "parameter_sets") or hasattr(owner, "setup_class"):
        raise Unsupported("setup_class or parametrize for a class")
    methods = {name: getattr(owner, name) for name in dir(owner) if is_fixture(getattr(owner, name))}
    for name in dir(owner):
        if name.startswith("test"):
            # Each test has an object of its own.
            yield from cases_of(getattr(owner, name), fixtures, functools.partial(new_object, owner, methods))


def is_fixture(value):
    """True for a fixture of the tests; an object of the program is none, whatever it says."""
    return isinstance(value, types.FunctionType) and hasattr(value, "fixture_of_all")


@contextlib.contextmanager
def no_object():
    yield None, {}


@contextlib.contextmanager
def new_object(owner, fixtures):
    made = owner()
    if hasattr(made, "setup_method"):
        made.setup_method(*[None][: len(inspect.signature(made.setup_method).parameters)])
    yield made, {name: function.__get__(made) for name, function in fixtures.items()}
    if hasattr(made, "teardown_method"):
        made.teardown_method(*[None][: len(inspect.signature(made.teardown_method).parameters)])


def cases_of(test, fixtures, owner):
    if not isinstance(test, types.FunctionType):
        raise Unsupported("tests that are no functions")
    for choice in itertools.product(*getattr(test, "parameter_sets", [])):
        values = {name: value for part in choice for name, value in part.items()}
        yield functools.partial(run, test, values, fixtures, owner)


def run(test, values, fixtures, owner):
    with contextlib.ExitStack() as stack:
        made, methods = stack.enter_context(owner())
        fixtures, values = fixtures | methods, dict(values)
        if made is not None:
            test = test.__get__(made)
        for name, function in fixtures.items():
            if function.fixture_of_all:
                provide(name, values, fixtures, stack)
        found = test(**arguments_of(test, values, fixtures, stack))
        if inspect.iscoroutine(found):
            import asyncio  # it takes long

            asyncio.run(found)


def arguments_of(function, values, fixtures, stack):
    return {name: provide(name, values, fixtures, stack) for name in inspect.signature(function).parameters}


def provide(name, values, fixtures, stack):
    """The value of a parameter or a fixture; a fixture is made once for each test."""
    if name not in values:
        if name in PROVIDED and name not in fixtures:
            return values.setdefault(name, stack.enter_context(PROVIDED[name]()))
        if name not in fixtures:
            raise Unsupported(f"the fixture {name}")
        function = fixtures[name]
        arguments = arguments_of(function, values, fixtures, stack)
        if inspect.isgeneratorfunction(function):
            values[name] = stack.enter_context(contextlib.contextmanager(function)(**arguments))
        else:
            values[name] = function(**arguments)
    return values[name]
