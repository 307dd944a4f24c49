"""Runs tests that are Python code against a program, in a sandbox.

`code_tests` runs this module. Outside: the child runs the program. The child is forked before the tests are read, so
its memory has no tests. The parent runs the tests. The child can neither read the parent's memory, nor write
to the parent's path of modules. The tests call functions of the program by name. Arguments and results are
plain data (`plain_data`), so results are compared away from the program. Inside: one process runs the program and the
tests, as usual, and the program may do anything to the tests.

stdin: `{"nonce", "names", "prepare", "tests", "candidate", "pytest", "to_the_end"}`. `names` of the program are global
names of the tests, which may also import them from the module `solution`. `prepare` is run, then `tests`; with
`pytest`, pytest collects the tests from the definitions of `prepare`; without `to_the_end`, the first failing test is
the last.
stdout: `NONCE tests COUNT`, and after each test `NONCE index 0|1`; `NONCE unusable REASON` if the tests cannot be run.
"""

import builtins
import collections
import contextlib
import ctypes
import importlib
import inspect
import io
import json
import math
import os
import resource
import signal
import socket
import sys
import types
import typing
from functools import cache
from json import dumps
from typing import Any

import plain_data
from plain_data import NotPlain, ProgramError

PR_SET_DUMPABLE = 4
# The most frames of a program, as in a process of its own, plus this file's frames; and the most of the tests.
RECURSION, DEEP = 1000 + 50, 10_000
# Modules, and modules of names, that tests use without an import. A program's definitions must not replace them.
MODULES = {
    name: name
    for name in (
        *("asyncio", "collections", "copy", "datetime", "functools", "heapq", "itertools", "json", "math", "operator"),
        *("os", "random", "re", "statistics", "string", "sys", "time", "typing"),
    )
} | {"np": "numpy", "pd": "pandas"}
NAMES_FROM = {collections: collections.__all__, typing: typing.__all__, math: ("isclose", "isnan", "sqrt")}
# Plugins that tests do not need. Some take long.
NO_PLUGINS = (
    *("assertion", "cacheprovider", "doctest", "faulthandler", "junitxml", "pastebin", "reports", "setuponly"),
    *("setupplan", "stepwise", "terminal", "threadexception", "unraisableexception", "warnings"),
)
# Pytest reads no file: neither tests nor configuration.
PYTEST = ("--capture=no", "--noconftest", "--import-mode=importlib", "-c", os.devnull, "--rootdir", "/", os.devnull)


def set_dumpable(value):
    """Set whether the user's other processes may read the memory and open files of this process. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def send(stream, message):
    data = dumps(message).encode()
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


def receive(stream):
    """Return a message. Raises ProgramError or ValueError if the other end is gone, or has sent no message."""
    size = int.from_bytes(stream.read(8), "big")
    if not 0 < size <= plain_data.MOST_BYTES:
        stream.close()
        raise ProgramError("the program has ended, or has sent too much")
    return plain_data.read_message(stream.read(size))


# --- the program


def load(names=builtins):
    """Run and return the program as the module `solution`. names: known without an import. May raise anything."""
    sys.argv = ["program.py"]
    with open("program.py") as file:
        source = file.read()
    program = sys.modules["program"] = sys.modules["solution"] = types.ModuleType("solution")
    vars(program).update(__builtins__=names)
    exec(compile(source, "program.py", "exec"), vars(program))
    return program


def serve(stream):
    """Run the program, then answer the requests of the tests."""
    program = failure = None
    try:
        program = load()
    except BaseException as error:  # the program may raise anything
        failure = error
    with contextlib.suppress(ProgramError, OSError):
        while True:
            send(stream, answer(receive(stream), program, failure))


def answer(request, program, failure):
    """Return `[kind, value, changes, printed]`. changes: the new items of changed containers of the request."""
    decoder = plain_data.Decoder()
    what, name, arguments, keywords = decoder.items(request)
    originals = [(container, plain_data.contents(container)) for container in decoder.containers]
    encoder = plain_data.Encoder(decoder.containers, wide=True)
    streams = sys.stdout, sys.stderr = [io.TextIOWrapper(io.BytesIO(), "utf-8", "replace") for _ in range(2)]
    try:
        if failure:
            raise failure
        value = getattr(program, name)
        value = named(name, value) if what == "name" else value(*arguments, **keywords)
        kind, value = "return", encoder.encode(value)
    except BaseException as error:  # the program may raise anything
        encoder = plain_data.Encoder(decoder.containers, wide=True)  # a failed encoding may have left half of a value
        kind, value = "raise", plain_data.encode_error(error, encoder)
    changes = []
    for number, (container, items) in enumerate(originals):
        now = plain_data.contents(container)
        if len(now) != len(items) or not all(a is b for a, b in zip(now, items, strict=True)):
            changes.append([number, plain_data.plain_items(now, encoder)])
    return [kind, value, changes, [printed(stream) for stream in streams]]


def named(name, value):
    """Return the program's object of a name: a function, an exception that the program defines, or data."""
    if isinstance(value, type) and issubclass(value, BaseException):
        if value.__module__ != "solution":
            raise AttributeError(f"{name} is another name of {value.__name__}")
        return ["error", json.dumps(plain_data.describe(value))]
    if callable(value):
        return ["function", str(value.__doc__ or "")]
    return ["data", value]


def printed(stream):
    try:
        stream.flush()
        return stream.buffer.getvalue().decode("utf-8", "replace")
    except (AttributeError, ValueError):  # the program has closed the stream, or taken it apart
        return ""


# --- the tests


class Program(types.ModuleType):
    """The module from which tests import the names of the program, which runs in another process."""

    def __init__(self, stream, names):
        super().__init__("solution")
        vars(self).update(_stream=stream, _names=names)

    def __getattr__(self, name):
        if name == "__all__":
            return [name for name in self._names if hasattr(self, name)]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            kind, value = self._ask("name", name)
            if kind == "error":
                return plain_data.class_of(json.loads(value))
        except Exception:  # the program may raise anything
            raise AttributeError(name) from None
        if kind == "data":
            return value

        def function(*arguments, **keywords):
            return self._ask("call", name, arguments, keywords)

        function.__name__ = function.__qualname__ = name
        function.__doc__ = value
        return function

    def _ask(self, what, name, arguments=(), keywords=types.MappingProxyType({})):
        """Ask the program, and return the answer. Raises the program's error, or ProgramError."""
        encoder = plain_data.Encoder()
        request = encoder.items([what, name, list(arguments), dict(keywords)])
        try:
            send(self._stream, request)
            failed, value = self._read(encoder)
        except BaseException as error:  # the program may have sent anything
            raise ProgramError(f"{type(error).__name__}: {error}") from None
        if failed:
            raise value
        return value

    def _read(self, encoder):
        kind, value, changes, texts = receive(self._stream)
        decoder = plain_data.Decoder(encoder.containers, wide=True)
        failed = kind == "raise"
        value = plain_data.decode_error(value, decoder) if failed else decoder.decode(value)
        for number, items in changes:
            plain_data.fill(encoder.containers[number], decoder.items(items))
        for stream, text in zip((sys.stdout, sys.stderr), texts, strict=True):
            stream.write(text)
        return failed, value


def judge(job, program, verdict):
    """Run the tests in turn, and write a line for every test to `verdict`. program: the program's module, or None."""

    def report(*words):
        print(" ".join(map(str, (job["nonce"], *words))) + "\n", end="", file=verdict, flush=True)

    try:
        tests = namespace_of(job, program)
    except BaseException as error:  # no test passes then
        return explain(error, report)
    if job["pytest"]:
        return run_pytest(tests, report, most_failures=int(not job["to_the_end"]))
    report("tests", len(job["tests"]))
    for index, test in enumerate(job["tests"]):
        try:
            exec(test, vars(tests))
        except BaseException as error:  # whatever a test raised, it has not passed
            report(index, 0)
            explain(error, report)
            if not job["to_the_end"]:
                break
        else:
            report(index, 1)


def explain(error, report):
    """Report that the tests cannot be run, if the error says so."""
    if isinstance(error, NotPlain):
        report("unusable they give the program what is no plain data:", error)
    if isinstance(error, ModuleNotFoundError) and error.name != "solution":
        report("unusable they import what cannot be imported here:", error.name)


def namespace_of(job, program):
    """Return the module of the tests, after `prepare`. Raises errors of `prepare`."""
    tests = sys.modules["tests"] = types.ModuleType("tests")
    # A function of the program may have the name of a built-in function, and the latter must not stand in.
    vars(tests).update({name: None for name in job["names"] if hasattr(builtins, name)})
    library = {name: value for name in job["names"] if name != job["candidate"] and (value := of_library(name))}
    if len(library) == len(job["names"]):
        library = {}  # else no name would be the program's
    names = [name for name in job["names"] if name not in library and hasattr(program, name)]
    vars(tests).update(library | {name: getattr(program, name) for name in names})
    for source in job["prepare"]:
        exec(compile(source, "<tests>", "exec"), vars(tests))
    if job["candidate"]:
        candidate = getattr(program, job["candidate"], None)
        vars(tests).update({"candidate": candidate, job["candidate"]: candidate})
    return tests


def of_library(name):
    """Return the library object of a name that tests use without an import; None for a name of the program."""
    if name in MODULES:
        return importlib.import_module(MODULES[name])
    owner = next((module for module, names in NAMES_FROM.items() if name in names), None)
    return owner and getattr(owner, name)


@cache
def pytest_config():
    """Return pytest's configuration. The launcher of sandboxes needs it before forking. Raises ImportError."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    from _pytest.config import _prepareconfig

    return _prepareconfig([*PYTEST, *(f"-pno:{name}" for name in NO_PLUGINS)])


def run_pytest(tests, report, most_failures):
    import pytest

    class Module(pytest.Module):
        def _getobj(self):
            return tests

    class Plugin:
        """Gives pytest the tests, and reports the outcomes."""

        indices: dict[str, int] = {}
        failed: set[str] = set()

        def pytest_collection(self, session):
            items = [*session.genitems(Module.from_parent(session, path=session.config.rootpath / "tests"))]
            session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
            session.items, session.testscollected = items, len(items)
            self.indices.update({item.nodeid: index for index, item in enumerate(items)})
            report("tests", len(items))
            return True

        def pytest_pyfunc_call(self, pyfuncitem):
            function = pyfuncitem.obj
            if not inspect.iscoroutinefunction(function):
                return None
            import asyncio  # the import takes long

            asyncio.run(function(**{key: pyfuncitem.funcargs[key] for key in inspect.signature(function).parameters}))
            return True

        def pytest_runtest_makereport(self, item, call):
            if call.excinfo:
                explain(call.excinfo.value, report)
                self.failed.add(item.nodeid)

        def pytest_runtest_logfinish(self, nodeid, location):
            report(self.indices[nodeid], int(nodeid not in self.failed))

    config = pytest_config()
    config.option.maxfail = most_failures
    config.pluginmanager.register(Plugin())
    config.hook.pytest_cmdline_main(config=config)


def is_safe(path):
    path = os.path.realpath(path)
    return os.path.isdir(path) and all(os.path.commonpath([path, it]) != it for it in (os.getcwd(), "/tmp"))


def start_program(cpu_seconds, verdict, nothing):
    """Start the program in a process of its own, without the verdict and the tests. Returns the stream to it."""
    tests_socket, program_socket = socket.socketpair()
    if os.fork() == 0:
        verdict.close()
        os.dup2(nothing.fileno(), 0)
        tests_socket.close()
        set_dumpable(1)
        sys.setrecursionlimit(RECURSION)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
        seconds = math.ceil(cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard_limit < 0 else min(seconds, hard_limit),) * 2)
        serve(program_socket.makefile("rwb"))
        os._exit(0)
    program_socket.close()
    return tests_socket.makefile("rwb")


def main(outside, cpu_seconds):
    """outside: program and tests run in different processes. cpu_seconds: the limit of either."""
    sys.set_int_max_str_digits(plain_data.MOST_DIGITS)
    set_dumpable(int(not outside))
    with open(os.dup(1), "w") as verdict, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 1)
        if outside:
            stream = start_program(cpu_seconds, verdict, nothing)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.setrecursionlimit(DEEP)
            # No module is imported from a folder where the program can write.
            sys.path[:] = [path for path in sys.path if is_safe(path)]
        job: Any = json.load(sys.stdin)
        os.dup2(nothing.fileno(), 0)
        if outside:
            program = sys.modules["solution"] = Program(stream, job["names"])
        else:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            program = None
            with contextlib.suppress(BaseException):  # without a program, the tests fail
                program = load()
        judge(job, program, verdict)
        verdict.flush()
    os._exit(0)
