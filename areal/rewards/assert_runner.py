"""Runs asserts against a program that must not be able to read or change them.

`areal.rewards.code_tests` runs this file as the main program of a sandbox. It uses two processes. The child runs the
program; it is forked before the asserts are read, so its memory does not contain them. The parent runs the asserts; the
child cannot read the parent's memory. In the asserts, functions, classes and objects of the program are `Remote`
objects. A call sends its arguments to the child and receives data, never code and never an object with its own `==`.

stdin: `{"nonce", "names", "modules", "prepare", "tests", "candidate", "collect", "pytest"}`. `names` of the program are
global names of the tests, which may also import them from the module `solution`. `prepare` is run, then `tests`; with
`collect`, the tests are those of pytest's kind that `prepare` defines. `modules` are those that the tests import;
`pytest` is the text of the module pytest, if they need it. stdout: `NONCE tests COUNT`, and after each test `NONCE
index 0|1`; or else `NONCE unusable REASON`, if no program could pass the tests here.
"""

import builtins
import ctypes
import functools
import importlib.util
import json
import os
import socket
import sys
import types

PR_SET_DUMPABLE = 4
# Longest line that the parent reads as an answer of the child.
MOST_CHARACTERS = 1 << 26
COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def set_dumpable(value):
    """With 0, no other process of the same user may read this one's memory or open files. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def built_in_type(name):
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) else None


def encode(value, keep):
    """`value` as JSON. An object that is not plain data becomes `{"object": keep(value)}`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        for plain in (bool, int, float, str):
            if isinstance(value, plain):
                return plain(value)
        return None
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, type) and built_in_type(value.__name__) is value:
        return {"type": value.__name__}
    return {"object": keep(value)}


def decode(data, find):
    """The inverse of `encode`. `find` returns the object for a result of `keep`. Raises ValueError, TypeError or
    KeyError."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "type" and built_in_type(content):
        return built_in_type(content)
    if kind == "object":
        return find(content)
    return COLLECTIONS[kind](decode(item, find) for item in content)


# --- the child: runs the program


def host(channel):
    """Runs the program, then carries out the requests that the asserts send over `channel`."""
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    sys.argv = ["program.py"]
    with open("program.py") as file:
        source = file.read()
    program = sys.modules["program"] = types.ModuleType("program")
    failure = None
    try:
        exec(compile(source, "program.py", "exec"), vars(program))
    except BaseException as error:  # the program may raise anything
        failure = error
    objects = [vars(program)]

    def keep(value):
        objects.append(value)
        return len(objects) - 1

    with channel.makefile("rw") as lines:
        for line in lines:
            try:
                if failure:
                    raise failure
                answer = {"value": encode(perform(decode(json.loads(line), objects.__getitem__)), keep)}
            except BaseException as error:  # every call may raise anything, too
                answer = {"raised": [kind.__name__ for kind in type(error).__mro__], "message": str(error)[:1000]}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def perform(request):
    match request:
        case "name" | "item", thing, key:
            return thing[key]
        case "attribute", thing, name:
            return getattr(thing, name)
        case "set", thing, name, value:
            return setattr(thing, name, value)
        case "list", thing:
            return list(thing)
        case "length", thing:
            return len(thing)
        case "call", thing, arguments, keywords:
            return thing(*arguments, **keywords)
    raise ValueError(request)


# --- the parent: runs the asserts


class ProgramError(Exception):
    """The program raised an exception that is of no built-in kind, its process ended, or its answer was too long."""


def built_in_error(name):
    kind = built_in_type(name)
    return kind if kind and issubclass(kind, Exception) else None


class Channel:
    def __init__(self, connection):
        self.lines = connection.makefile("rw")

    def ask(self, what, thing, *details):
        self.lines.write(json.dumps(encode([what, thing, *details], number_of)) + "\n")
        self.lines.flush()
        line = self.lines.readline(MOST_CHARACTERS)
        if not line.endswith("\n"):
            raise ProgramError("the program ended, or its answer is too long")
        answer = json.loads(line)
        if "raised" in answer:
            kinds = [str(name) for name in answer["raised"]]
            error = next(filter(None, map(built_in_error, kinds)), ProgramError)(str(answer.get("message")))
            vars(error)["kinds"] = kinds
            raise error
        return decode(answer["value"], lambda number: Remote(self, number))


class Remote:
    """An object in the program that is not plain data."""

    def __init__(self, channel, number):
        vars(self).update(_channel=channel, _number=number)

    def __call__(self, *arguments, **keywords):
        return self._channel.ask("call", self, arguments, keywords)

    def __getattr__(self, name):
        return self._channel.ask("attribute", self, name)

    def __setattr__(self, name, value):
        self._channel.ask("set", self, name, value)

    def __iter__(self):
        return iter(self._channel.ask("list", self))

    def __len__(self):
        return self._channel.ask("length", self)

    def __getitem__(self, key):
        return self._channel.ask("item", self, key)

    def __bool__(self):
        raise TypeError("the program returned an object, which has no truth value")

    def _no_comparison(self, other):
        raise TypeError("the program returned an object, which cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _no_comparison
    __hash__ = None  # type: ignore[assignment]  # makes it unhashable


def number_of(value):
    if isinstance(value, Remote):
        return value._number
    raise TypeError(f"a {type(value).__name__} cannot be passed to the program")


class Solution(types.ModuleType):
    """The module from which tests import the names of the program."""

    def __init__(self, fetch, names):
        super().__init__("solution")
        self._fetch = fetch
        self._names = names

    def __getattr__(self, name):
        if name == "__all__":
            return [name for name in self._names if self._has(name)]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._fetch(name)
        except Exception:  # the program may raise anything
            raise AttributeError(name) from None

    def _has(self, name):
        try:
            self._fetch(name)
        except Exception:
            return False
        return True


def judge(job, channel):
    """Runs the tests one by one, and prints a line for each."""

    def tell(*words):
        print(f"\n{job['nonce']}", *words, flush=True)  # a test may have printed part of a line

    fetch = functools.partial(channel.ask, "name", Remote(channel, 0))
    solution = sys.modules["solution"] = Solution(fetch, job["names"])
    unsupported: tuple[type[BaseException], ...] = ()
    if job["pytest"] is not None:
        pytest = sys.modules["pytest"] = types.ModuleType("pytest")
        exec(job["pytest"], vars(pytest))
        unsupported = (pytest.Unsupported,)
    # The program can write to the working folder, so nothing is imported from there.
    sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
    missing = [name for name in job["modules"] if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        tell("unusable they import what cannot be imported here:", ", ".join(missing))
        return
    try:
        tests = tests_of(job, solution)
        tell("tests", len(tests))
        for index, test in enumerate(tests):
            tell(index, int(passes(test, unsupported)))
    except unsupported as reason:
        tell("unusable they need of pytest what is not supported here:", reason)


def tests_of(job, solution):
    """The tests, as functions. Raises what `prepare` raises."""
    # A function of the program may have the name of a built-in one, which must not stand in for it.
    names: dict[str, object] = {name: None for name in job["names"] if hasattr(builtins, name)}
    names["__name__"] = "tests"
    names.update((name, getattr(solution, name)) for name in solution.__all__)
    for source in job["prepare"]:
        exec(source, names)
    if job["candidate"]:
        names |= dict.fromkeys(("candidate", job["candidate"]), getattr(solution, job["candidate"], None))
    if job["collect"]:
        return list(sys.modules["pytest"].tests_in(names))
    return [functools.partial(exec, test, names) for test in job["tests"]]


def passes(test, unsupported):
    try:
        test()
    except unsupported:
        raise
    except BaseException:  # the test has not passed, whatever it raised
        return False
    return True


def main():
    sys.set_int_max_str_digits(0)
    set_dumpable(0)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        set_dumpable(1)
        host(theirs)
        os._exit(0)
    theirs.close()
    judge(json.load(sys.stdin), Channel(ours))
    os._exit(0)


if __name__ == "__main__":
    main()
