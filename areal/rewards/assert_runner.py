"""Runs asserts against a program that must not be able to read or change them.

`areal.rewards.code_tests` runs this module in a sandbox. It uses two processes. The child runs the program; it is
forked before the asserts are read, so its memory does not contain them. The parent runs the asserts; the child cannot
read the parent's memory, and nothing that the child can write is on the parent's path of modules. The asserts use the
functions, classes and objects of the program through `areal.rewards.remote_objects`.

stdin: `{"nonce", "names", "modules", "prepare", "tests", "candidate", "collect"}`. `names` of the program are global
names of the tests, which may also import them from the module `solution`. `prepare` is run, then `tests`; with
`collect`, the tests are those of pytest's kind that `prepare` defines. `modules` are those that the tests import.
stdout: `NONCE tests COUNT`, and after each test `NONCE index 0|1`; or else `NONCE unusable REASON`, if no program could
pass the tests here.
"""

import builtins
import collections
import ctypes
import functools
import importlib
import importlib.util
import json
import math  # noqa: F401 - in NAMES_FROM
import os
import random
import signal
import socket
import sys
import time
import types
import typing

import pytest_standin
import remote_objects

PR_SET_DUMPABLE = 4
# What tests replace, to give a program its input or to see its output. A replacement holds in the program, too.
REPLACED = [
    *((sys, name) for name in ("stdin", "stdout", "stderr", "argv")),
    *((builtins, name) for name in ("input", "print", "open")),
    *((time, name) for name in ("sleep", "time", "perf_counter", "monotonic")),
    *((random, name) for name in ("random", "randint", "choice", "shuffle", "uniform", "sample", "randrange")),
]
# Modules, and modules whose names, tests use without importing them. A program must not define them in their place.
MODULES = {
    name: name
    for name in (
        *("asyncio", "collections", "copy", "datetime", "functools", "heapq", "itertools", "json", "math", "operator"),
        *("os", "random", "re", "statistics", "string", "sys", "time", "typing"),
    )
} | {"np": "numpy", "pd": "pandas"}
# Functions that look into objects: they run in the program's process if the object is the program's. What a program has
# pickled must never be loaded here.
THERE = {
    "pickle": ("dumps", "loads"),
    "dataclasses": ("asdict", "astuple", "fields", "replace"),
    "inspect": ("signature", "getdoc", "getsource"),
}
NAMES_FROM = {"collections": collections.__all__, "typing": typing.__all__, "math": ("isclose", "isnan", "sqrt")}


def set_dumpable(value):
    """With 0, no other process of the same user may read this one's memory or open files. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


# --- the child: runs the program


class Host:
    """Runs the program, then carries out the requests that the asserts send."""

    def __init__(self, connection):
        self.originals = {(module.__name__, name): getattr(module, name) for module, name in REPLACED}
        self.program = None
        self.failure = None
        remote_objects.Link(connection, self.serve, guarded=False).serve()

    def serve(self, what, thing, details):
        if what == "patch":
            for module, name, is_original, value in thing:
                original = self.originals[module, name]
                setattr(sys.modules[module], name, original if is_original else value)
            return None
        if self.program is None:
            self.load()
        if self.failure:
            raise self.failure
        if thing is None and what in ("attribute", "set", "delete"):
            thing = self.program
        return remote_objects.perform(what, thing, details)

    def load(self):
        sys.argv = ["program.py"]
        with open("program.py") as file:
            source = file.read()
        self.program = sys.modules["program"] = sys.modules["solution"] = types.ModuleType("solution")
        try:
            exec(compile(source, "program.py", "exec"), vars(self.program))
        except BaseException as error:  # the program may raise anything
            self.failure = error


# --- the parent: runs the asserts


def serve_program(what, thing, details):
    """Carries out a request of the program on an object that the asserts have given it. Raises TypeError or
    AttributeError if the program may not do that."""
    kind = type(thing)
    ours = "tests" in (kind.__module__, isinstance(thing, type) and thing.__module__)
    match what, *details:
        case ("call", _, _) | ("special", "__call__", _, _):
            pass
        case "special", name, _, _ if name in remote_objects.SPECIAL and not isinstance(thing, type):
            pass
        case "attribute", "__name__" | "__qualname__" | "__doc__":
            pass
        case "attribute", str(name) if not name.startswith("_") and (
            ours or kind.__module__ in ("_io", "unittest.mock")
        ):
            pass
        case "set", str(name), _ if not name.startswith("_") and ours:
            pass
        case "attribute" | "set" | "delete", name, *_:
            raise AttributeError(str(name))
        case _:
            raise TypeError(f"a {kind.__name__} of the tests cannot be used in this way")
    return remote_objects.perform(what, thing, details)


class Replacements:
    """What of REPLACED has another value than at first, and whether the program's process knows."""

    def __init__(self):
        self.first = [getattr(module, name) for module, name in REPLACED]
        self.told = list(self.first)

    def news(self):
        found = []
        for index, (module, name) in enumerate(REPLACED):
            value = getattr(module, name, None)
            if value is not self.told[index]:
                self.told[index] = value
                is_first = value is self.first[index]
                found.append((module.__name__, name, is_first, None if is_first else value))
        return tuple(found)


class Solution(types.ModuleType):
    """The module from which tests import the names of the program."""

    def __init__(self, link, names):
        super().__init__("solution")
        vars(self).update(_link=link, _names=names)

    def __getattr__(self, name):
        if name == "__all__":
            return [name for name in self._names if hasattr(self, name)]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            found = self._link.ask("attribute", None, name)
        except Exception:  # the program may raise anything
            raise AttributeError(name) from None
        if type(found) is remote_objects.Mirror and name[:1].isupper():
            found._remote.named = True
        return found

    def __setattr__(self, name, value):
        self._link.ask("set", None, name, value)

    def __delattr__(self, name):
        self._link.ask("delete", None, name)


def judge(job, connection, verdict):
    """Runs the tests one by one, and writes a line for each to `verdict`."""

    def tell(*words):
        print(job["nonce"], *words, file=verdict, flush=True)

    link = remote_objects.Link(connection, serve_program, guarded=True)
    link.before = Replacements().news
    solution = sys.modules["solution"] = Solution(link, job["names"])
    for module in THERE.keys() & {*job["modules"]}:
        for name in THERE[module]:
            setattr(importlib.import_module(module), name, in_program(link, module, name))
    sys.modules["pytest"] = pytest_standin
    missing = [name for name in job["modules"] if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        tell("unusable they import what cannot be imported here:", ", ".join(missing))
        return
    try:
        tests = tests_of(job, solution)
        tell("tests", len(tests))
        for index, test in enumerate(tests):
            tell(index, int(passes(test)))
    except pytest_standin.Unsupported as reason:
        tell("unusable they need of pytest what is not supported here:", reason)


def in_program(link, module, name):
    original = getattr(importlib.import_module(module), name)

    def function(thing, *arguments, **keywords):
        if module == "pickle" or link.is_theirs(thing):
            return link.ask("library", thing, module, name, arguments, tuple(keywords.items()))
        return original(thing, *arguments, **keywords)

    return function


def tests_of(job, solution):
    """The tests, as functions. Raises what `prepare` raises."""
    # A function of the program may have the name of a built-in one, which must not stand in for it.
    names: dict[str, object] = {name: None for name in job["names"] if hasattr(builtins, name)}
    there = functools.partial(functools.partial, vars(solution)["_link"].ask)
    names |= {"__name__": "tests", "eval": there("eval"), "exec": there("exec")}
    library = of_library([name for name in job["names"] if name != job["candidate"]])
    if len(library) == len(job["names"]):
        library = {}  # else nothing would be the program's
    names.update((name, getattr(solution, name)) for name in solution.__all__ if name not in library)
    names |= library
    for source in job["prepare"]:
        exec(source, names)
    if job["candidate"]:
        names |= dict.fromkeys(("candidate", job["candidate"]), getattr(solution, job["candidate"], None))
    if job["collect"]:
        return list(pytest_standin.tests_in(names))
    return [functools.partial(exec, test, names) for test in job["tests"]]


def of_library(names):
    """Those of the names that are not the program's, although the tests do not import them."""
    found = {name: importlib.import_module(MODULES[name]) for name in names if name in MODULES}
    for module, public in NAMES_FROM.items():
        found |= {name: getattr(sys.modules[module], name) for name in names if name in public}
    return found


def passes(test):
    try:
        test()
    except pytest_standin.Unsupported:
        raise
    except BaseException:  # the test has not passed, whatever it raised
        return False
    return True


def is_safe(path):
    path = os.path.realpath(path)
    return os.path.isdir(path) and all(os.path.commonpath([path, it]) != it for it in (os.getcwd(), "/tmp"))


def main():
    sys.set_int_max_str_digits(0)
    set_dumpable(0)
    ours, theirs = socket.socketpair()
    with open(os.dup(1), "w") as verdict, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 1)
        if os.fork() == 0:
            verdict.close()
            ours.close()
            os.dup2(nothing.fileno(), 0)
            set_dumpable(1)
            Host(theirs)
            os._exit(0)
        theirs.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Nothing is imported from where the program can write.
        sys.path[:] = [path for path in sys.path if is_safe(path)]
        job = json.load(sys.stdin)
        os.dup2(nothing.fileno(), 0)
        judge(job, ours, verdict)
    os._exit(0)
