"""Runs tests that are Python code against a program that must not be able to read, change or fool them.

`code_tests` runs this module in a sandbox. The child runs the program; it is forked before the tests are
read, so its memory does not contain them. The parent runs the tests; the child cannot read the parent's memory, and
nothing that the child can write is on the parent's path of modules. Only plain data cross (`plain_data`):

* A function of the program is a `Function` in the tests. Its result is data, or an `Opaque`, which equals nothing.
* What the tests make by calling a class with a capitalised name is an `ObjectHandle`. Its methods and attributes are
  used by name; their results are data or handles. It has no operators, and equals itself alone.
* Functions of the tests that are given to the program are called back with data.

Tests that need more raise Unsupported, which makes the row an error and never a score. Whether they do depends on the
tests alone: where a program could pass them with data, other results fail.

stdin: `{"nonce", "names", "modules", "prepare", "tests", "candidate", "collect", "wall_seconds", "too_long"}`.
`names` of the program are global names of the tests, which may also import them from the module `solution`. `prepare`
is run, then `tests`; with `collect`, the tests are those of pytest's kind that `prepare` defines. `modules` are those
that the tests import.
stdout: `NONCE tests COUNT`, and after each test `NONCE index 0|1`; or else `NONCE unusable REASON`. The exit code is
`too_long` if the tests take longer by themselves than a program may.
"""

import builtins
import collections
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import io
import itertools
import json
import math
import operator
import os
import random
import re
import resource
import signal
import socket
import struct
import sys
import threading
import time
import types
import typing
from json import dumps
from typing import Any

import plain_data
import pytest_standin
from plain_data import ProgramError
from pytest_standin import Unsupported

PR_SET_DUMPABLE = 4
# Items of an iterator that are sent; a further one is an error.
MOST_ITEMS = 10_000
# Frames of a program, as in a process of its own, besides those of this file; and of the tests.
RECURSION, DEEP = 1000 + 50, 10_000
# How often it is looked at how long the tests take, and which share of the time they may. They may replace `sleep`.
TICK_SECONDS, LATE, SLEEP = 0.1, 0.8, time.sleep
CLOCK_PROCESS_CPUTIME_ID, SIGEV_THREAD = 2, 2
# What takes tests long: large messages, large numbers, and lists within themselves.
LARGE, HEAVY = 1 << 16, re.compile(rb'(?<![.\d])\d{7}|[eE][+\d]|0x|"ref"')
# Functions that tests replace: the program then calls the replacement.
REPLACED = [
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
NAMES_FROM = {"collections": collections.__all__, "typing": typing.__all__, "math": ("isclose", "isnan", "sqrt")}
# What tests do to a handle by syntax and get data for.
SPECIAL: dict[str, Any] = {
    "__len__": len, "__str__": str, "__repr__": repr, "__iter__": lambda value: (item for item in value),
    "__call__": lambda value, *a, **k: value(*a, **k),
    "__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem,
}  # fmt: skip
# What else syntax and functions do to an object: the program would judge itself.
BINARY = "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor"
OTHER = """contains lt le gt ge enter exit aenter aexit aiter await next format reduce_ex
int float complex index neg pos abs invert round trunc floor ceil"""
REFUSED = [*OTHER.split(), *(prefix + name for name in BINARY.split() for prefix in ("", "r", "i"))]
NO_DATA_HAVE = ("call", "enter", "exit", "aenter", "aexit", "aiter", "await")
# Of what requests objects may be results.
OBJECTS = ("object", "made")
LOOKED_AT = ("__dict__", "__dataclass_fields__", "__signature__")


def set_dumpable(value):
    """With 0, no other process of the same user may read this one's memory or open files. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


class CpuBudget:
    """Ends this process with an exit code once its CPU time is used up, also while C code keeps Python's threads from
    running. Time in which the process is stopped, or waits for a processor, does not count."""

    def __init__(self, seconds, code):
        # On a thread of the C library, which calls _exit(code). A signal to this process could come from the program.
        self.libc, self.timer = ctypes.CDLL("librt.so.1"), ctypes.c_void_p()  # where glibc before 2.34 has timers
        function = ctypes.cast(self.libc._exit, ctypes.c_void_p).value
        event = struct.pack("PiiPP32x", code, 0, SIGEV_THREAD, function, 0)
        if self.libc.timer_create(CLOCK_PROCESS_CPUTIME_ID, event, ctypes.byref(self.timer)):
            raise OSError("timer_create failed")
        self.rest = ctypes.create_string_buffer(struct.pack("qqqq", 0, 0, int(seconds), int(seconds % 1 * 1e9)), 32)

    def run(self):
        self.libc.timer_settime(self.timer, 0, self.rest, None)

    def pause(self):
        self.libc.timer_settime(self.timer, 0, bytes(32), self.rest)


class JudgeLink:
    """One end of the connection between a program and its tests. While it waits for an answer, it carries out requests.

    end: it has `serve(*request)`, `encode_other`, `decode_other` and `errors`. budget: this end's CPU time, of which
    requests use nothing, with all that they lead to.
    """

    def __init__(self, connection, end, budget=None):
        self.stream, self.end, self.lock, self.budget = connection.makefile("rwb"), end, threading.RLock(), budget
        self.waiting = 0  # requests that wait for an answer

    def ask(self, *request, objects=""):
        """The answer to a request. Raises what the other end raises, or ProgramError. objects: for `decode_other`."""
        with self.lock:
            if self.budget and not self.waiting:
                self.budget.pause()
            self.waiting += 1
            try:
                failed, answer = self.exchange(request, objects)
            finally:
                self.waiting -= 1
                if self.budget and not self.waiting:
                    self.budget.run()
            if failed:
                raise answer
            return answer

    def exchange(self, request, objects):
        encoder = plain_data.Encoder(self.end.encode_other)
        self.send(["ask", encoder.items(list(request))])
        while (message := self.receive())[0] == "ask":
            self.answer(message[1])
        return self.read(self.read_answer, message, encoder.containers, objects)

    def read_answer(self, message, containers, objects):
        kind, value, changes = message
        decoder = plain_data.Decoder(self.end.decode_other, containers, objects)
        answer = self.end.errors.decode(value, decoder) if kind == "raise" else decoder.decode(value)
        for number, items in changes:
            plain_data.fill(containers[number], decoder.items(items))
        return kind == "raise", answer

    def answer(self, request):
        decoder = plain_data.Decoder(self.end.decode_other, objects="object")
        request = self.read(decoder.items, request)
        originals = [(container, plain_data.contents(container)) for container in decoder.containers]
        encoder = plain_data.Encoder(self.end.encode_other, decoder.containers)
        try:
            kind, value = "return", encoder.encode(self.end.serve(*request))
        except Unsupported:
            raise
        except BaseException as error:  # the other end may have asked for anything
            kind, value = "raise", self.end.errors.encode(error, encoder)
        changes = []
        for number, (container, items) in enumerate(originals):
            now = plain_data.contents(container)
            if len(now) != len(items) or not all(map(operator.is_, now, items)):
                changes.append([number, encoder.items(now)])
        self.send([kind, value, changes])

    def send(self, message):
        data = dumps(message).encode()
        try:
            self.stream.write(len(data).to_bytes(8, "big") + data)
            self.stream.flush()
        except (OSError, ValueError):
            raise ProgramError("the program has ended") from None

    def receive(self):
        size = int.from_bytes(self.stream.read(8), "big")
        if not 0 < size <= plain_data.MOST_BYTES:
            self.stream.close()
            raise ProgramError("the program has ended, or has sent too much")
        data = self.stream.read(size)
        if self.budget and (size > LARGE or HEAVY.search(data)):
            self.budget = None  # it is no fault of the tests if they take long for what the program has returned
        return self.read(plain_data.read_message, data)

    def read(self, function, *arguments):
        """What the function makes of data of the other end. Raises ProgramError if they are malformed."""
        try:
            return function(*arguments)
        except BaseException as error:  # Unsupported, too: whether tests are refused is not for the program to say
            raise ProgramError(f"{type(error).__name__}: {error}") from None


def is_iterator(value):
    return type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__")


def encode_iterator(steps, errors, encoder):
    """The items, and the error at which the iterator ended, or None."""
    items: list[Any] = []
    error = None
    try:
        items += itertools.islice(steps, MOST_ITEMS)
        if len(items) == MOST_ITEMS:
            raise ProgramError("an iterator has too many items")
    except BaseException as raised:  # the program may raise anything
        error = errors.encode(raised, encoder)
    return {"iterator": [encoder.items(items), error]}


def decode_iterator(items, error):
    yield from items
    if error:
        raise error


# --- the child: runs the program


class Objects(typing.NamedTuple):
    """A result in which objects are sent as handles."""

    value: object


class ProgramEnd:
    """Runs the program, then carries out the requests of the tests."""

    def __init__(self, connection):
        self.errors, self.failure = plain_data.Errors({}), None
        self.objects, self.numbers, self.made, self.callbacks = [], {}, set(), {}
        self.link = JudgeLink(connection, self)
        with open(os.devnull, "w") as self.nowhere, contextlib.suppress(ProgramError):
            while True:
                self.link.answer(self.link.receive()[1])

    def load(self):
        sys.argv = ["program.py"]
        with open("program.py") as file:
            source = file.read()
        program = sys.modules["program"] = sys.modules["solution"] = types.ModuleType("solution")
        self.number_of(program)
        try:
            exec(compile(source, "program.py", "exec"), vars(program))
        except BaseException as error:  # the program may raise anything
            self.failure = error

    def serve(self, context, what, number, *details):
        with self.replaced(**context):
            if not self.objects:
                self.load()
            if self.failure:
                raise self.failure
            return self.perform(what, self.objects[number], *details)

    @contextlib.contextmanager
    def replaced(self, functions=(), stdin=None, captured=False):
        """What the tests have replaced is replaced here, too, and what is printed is sent to them."""
        if stdin is not None:
            sys.stdin = io.StringIO(stdin)
        streams: list[Any] = [io.StringIO() if captured else self.nowhere for _ in range(2)]
        sys.stdout, sys.stderr = streams
        originals: list[Any] = [(*REPLACED[index], getattr(*REPLACED[index])) for index, _ in functions]
        for (module, name, _), (_, function) in zip(originals, functions, strict=True):
            setattr(module, name, function)
        try:
            yield
        finally:
            for module, name, function in originals:
                setattr(module, name, function)
            if captured and any(texts := [stream.getvalue() for stream in streams]):
                self.link.ask("print", *texts)

    def perform(self, what, thing, name="", arguments=(), keywords=types.MappingProxyType({})):
        match what:
            case "name":
                return self.named(name, getattr(thing, name))
            case "call":
                return thing(*arguments, **keywords)
            case "make":
                self.made.add(thing)
                instance = thing(*arguments, **keywords)
                self.number_of(instance)
                return Objects(instance)
            case "method":
                return Objects(getattr(thing, name)(*arguments, **keywords))
            case "special":
                return Objects(SPECIAL[name](thing, *arguments, **keywords))
            case "get":
                value = getattr(thing, name)
                is_method = callable(value) and type(value) not in self.made
                return ("method",) if is_method else Objects(("data", value))
            case "set":
                setattr(thing, name, *arguments)
            case "delete":
                delattr(thing, name)
            case "error":
                kind, arguments, keywords = arguments
                raise kind(*arguments, **keywords)

    def named(self, name, value):
        """A name of the program: what kind of thing it is, and what the tests need of it."""
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, type) and issubclass(value, BaseException):
            return "error", self.errors.describe(value)
        if isinstance(value, type):
            return "kind", *self.describe(value)
        if callable(value):
            text = getattr(value, "__doc__", None)
            return "function", self.number_of(value), str(getattr(value, "__name__", name)), text and str(text)
        return "data", value

    def describe(self, kind):
        """Number, name, text and bases of a class, and whether its objects have a truth value of their own."""
        bases = [self.describe(base) for base in kind.__bases__ if base.__module__ == "solution"]
        truth = hasattr(kind, "__bool__") or hasattr(kind, "__len__")
        return [self.number_of(kind), kind.__name__, str(kind.__doc__)[:1000], bases, truth]

    def number_of(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def encode_other(self, value, encoder):
        if type(value) is Objects:
            encoder.objects = "object"
            return encoder.encode(value.value)
        base = plain_data.base_of(type(value))
        if encoder.objects and type(value) in self.made and (not base or id(value) in self.numbers):
            return {"object": [self.number_of(value), self.describe(type(value))]}
        if base:
            return encoder.encode(plain_data.as_base(value, base))
        if is_iterator(value):
            return encode_iterator(value, self.errors, encoder)
        if isinstance(value, types.CoroutineType):
            try:
                return {"awaitable": [False, encoder.encode(event_loop().run_until_complete(value))]}
            except BaseException as error:  # the program may raise anything
                return {"awaitable": [True, self.errors.encode(error, encoder)]}
        return {"opaque": [self.number_of(value), type(value).__name__]}

    def decode_other(self, kind, content, decoder):
        match kind:
            case "object":
                return self.objects[content]
            case "builtin":
                return getattr(builtins, content)
            case "error":
                return self.errors.class_of(content)
            case "iterator":
                return decode_iterator(
                    decoder.items(content[0]), content[1] and self.errors.decode(content[1], decoder)
                )
        return self.callbacks.setdefault(content, lambda *a, **k: self.link.ask("callback", content, a, k))


@functools.cache
def event_loop():
    import asyncio  # it takes long

    return asyncio.new_event_loop()


# --- the parent: runs the tests


class Opaque:
    """What the program has returned that is no data: nothing is equal to it, and it may only be given back.

    _judge_refuses: no program could pass tests that use it otherwise; else they fail.
    """

    __slots__ = ("_judge_number", "_judge_kind", "_judge_refuses")

    def __init__(self, number, kind, refuses=True):
        self._judge_number, self._judge_kind, self._judge_refuses = number, kind, refuses

    def __getattr__(self, name):
        if not self._judge_refuses:
            raise AttributeError(name)
        refuse_attribute(name, f"a result that is no plain data, but a {self._judge_kind}")

    def refuse(self, name, *_, **__):
        if not self._judge_refuses:
            raise TypeError(f"a {self._judge_kind} has no {name}")
        raise Unsupported(f"{name} of a result, which is a {self._judge_kind}")


class Function(Opaque):
    """A function of the program."""

    __slots__ = ("_judge_tests", "_judge_name", "_judge_text")
    __doc__ = property(lambda self: self._judge_text)

    def __init__(self, tests, number, name, text, refuses):
        super().__init__(number, "function", refuses)
        self._judge_tests, self._judge_name, self._judge_text = tests, name, text

    def __call__(self, *arguments, **keywords):
        objects = "" if self._judge_refuses else "name"  # where the tests call a class, others can be judged
        return self._judge_tests.ask("call", self._judge_number, "", arguments, keywords, objects=objects)

    def __getattr__(self, name):
        return self._judge_name if name in ("__name__", "__qualname__") else super().__getattr__(name)


def is_class(name):
    return name.lstrip("_")[:1].isupper()


class HandleClass(type):
    """A class of the program. `_judge_class`: its number, and the tests' end of the link."""

    def __new__(cls, name, bases, namespace):
        raise Unsupported(f"a class derived from the program's {bases[0].__name__}")

    def __call__(cls, *arguments, **keywords):
        number, tests = cls._judge_class
        tests.made.add(cls)
        return tests.ask("make", number, "", arguments, keywords, objects="made")

    def __getattr__(cls, name):
        if name.startswith("__"):
            refuse_attribute(name, f"the class {cls.__name__}")
        number, tests = cls._judge_class
        value = tests.attribute(number, name)
        if name.isupper() and isinstance(value, Opaque):
            raise Unsupported(f"{cls.__name__}.{name}, which is no plain data")
        return value

    def __setattr__(cls, name, value):
        number, tests = cls._judge_class
        tests.ask("set", number, name, (value,))

    def __instancecheck__(cls, value):
        if isinstance(value, Opaque):
            raise Unsupported(f"whether a result is a {cls.__name__}")
        return super().__instancecheck__(value)


class ObjectHandle:
    """An object that the tests made by calling a class of the program, or that a method has returned.

    _judge_returned: the program has returned it. Else what is done to it is decided by the tests alone.
    """

    __slots__ = ("_judge_number", "_judge_returned")
    _judge_class: Any
    _judge_truth: bool

    def __class_getitem__(cls, _):
        return cls

    def __getattr__(self, name):
        if name.startswith("__"):
            refuse_attribute(name, f"an object of the class {type(self).__name__}")
        return type(self)._judge_class[1].attribute(self._judge_number, name)

    def __setattr__(self, name, value):
        type(self)._judge_class[1].ask("set", self._judge_number, name, (value,))

    def __delattr__(self, name):
        type(self)._judge_class[1].ask("delete", self._judge_number, name)

    def _judge_ask(self, name, *arguments, **keywords):
        tests = type(self)._judge_class[1]
        return tests.ask("special", self._judge_number, name, arguments, keywords, objects="object")

    def __bool__(self):
        return not type(self)._judge_truth or refuse_use(self, "bool")

    def __eq__(self, value):
        return value is self or (value is not None and refuse_use(self, "=="))

    def __hash__(self):
        return refuse_use(self, "hash") or id(self)


def refuse_attribute(name, owner):
    """Raises AttributeError if data may have such an attribute: another program could pass. Else raises Unsupported."""
    if name not in LOOKED_AT and (name.startswith("_") or any(name in dir(kind) for kind in plain_data.types())):
        raise AttributeError(name)
    raise Unsupported(f".{name} of {owner}")


def refuse_use(handle, what):
    """Raises Unsupported if the tests do to an object of theirs what cannot be judged. If the program has returned it,
    the test fails: returns False for what all objects have, else raises TypeError."""
    if not handle._judge_returned:
        raise Unsupported(f"{what} of an object of the class {type(handle).__name__}")
    if what not in ("==", "hash"):
        raise TypeError(f"an object of the program has no {what}")
    return False


def refuse(what):
    raise Unsupported(what)


def define(kind, names, method):
    for name in names:
        name = f"__{name.strip('_')}__"
        setattr(kind, name, functools.partialmethod(method, name))


define(ObjectHandle, REFUSED, lambda self, name, *_: refuse_use(self, name))
define(ObjectHandle, SPECIAL, ObjectHandle._judge_ask)
define(HandleClass, ("iter", "len", "contains"), lambda cls, name, *_: refuse(f"{name} of the class {cls.__name__}"))
define(Opaque, NO_DATA_HAVE, Opaque.refuse)


class TestsEnd:
    """The tests' end of the link."""

    def __init__(self, connection, budget):
        self.errors = plain_data.Errors({"__init__": lambda error, *a, **k: self.make_error(error, a, k)})
        self.streams = sys.stdin, sys.stdout, sys.stderr
        self.originals = [getattr(*place) for place in REPLACED]
        self.handles, self.kinds, self.made, self.callbacks, self.numbers = {}, {}, set(), [], {}
        self.link = JudgeLink(connection, self, budget)

    def ask(self, what, number, name, *details, objects=""):
        return self.link.ask(self.context(), what, number, name, *details, objects=objects)

    def context(self):
        """What the tests have replaced at this moment."""
        context: dict[str, Any] = {}
        stdin, stdout, stderr = self.streams
        functions = enumerate(getattr(*place) for place in REPLACED)
        if changed := [(index, now) for index, now in functions if now is not self.originals[index]]:
            context["functions"] = changed
        if sys.stdin is not stdin and (text := sys.stdin.read()):
            context["stdin"] = text
        if sys.stdout is not stdout or sys.stderr is not stderr:
            context["captured"] = True
        return context

    def name(self, name):
        """What the program has by this name. Raises what the program raises."""
        kind, *content = self.ask("name", 0, name, objects="name")
        if kind == "function" or (kind in ("kind", "error") and not is_class(name)):
            number, called, text = content if kind == "function" else (content[0], name, None)
            return Function(self, number, str(called), text, not is_class(name))
        match kind, *content:
            case "kind", *description:
                return self.kind(*description)
            case "error", description:
                return self.errors.class_of(description)
            case "module", called:  # the same one, if the tests may replace functions of it
                return next((module for module, _ in REPLACED if module.__name__ == called), Opaque(0, "module", False))
        return content[0]

    def attribute(self, number, name):
        kind, *content = self.ask("get", number, name, objects="object")
        if kind == "method":
            return lambda *a, **k: self.ask("method", number, name, a, k, objects="object")
        return content[0]

    def kind(self, number, name, text, bases, truth):
        if number not in self.kinds:
            parents = tuple(self.kind(*base) for base in bases) or (ObjectHandle,)
            namespace = {"__slots__": (), "__doc__": text, "__module__": "solution"}
            namespace |= {"_judge_class": (number, self), "_judge_truth": truth}
            try:
                self.kinds[number] = type.__new__(HandleClass, name, parents, namespace)
            except TypeError:  # the bases do not fit together
                self.kinds[number] = type.__new__(HandleClass, name, (ObjectHandle,), namespace)
        return self.kinds[number]

    def make_error(self, error, arguments, keywords):
        """Gives an exception that the tests make what one has that the program makes."""
        try:
            self.ask("error", 0, "", (type(error), arguments, keywords))
        except BaseException as made:
            if type(made) is not type(error):
                raise
            error.args = made.args
            vars(error).update(vars(made))

    def serve(self, what, *details):
        if what == "print":
            for stream, text in zip((sys.stdout, sys.stderr), details, strict=True):
                stream.write(text)
            return None
        number, arguments, keywords = details
        return self.callbacks[number](*arguments, **keywords)

    def encode_other(self, value, encoder):
        if isinstance(value, (Opaque, ObjectHandle)):
            return {"object": value._judge_number}
        if type(value) is HandleClass:
            return {"object": value._judge_class[0]}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": self.errors.describe(value)}
        if vars(builtins).get(name := getattr(value, "__name__", "")) is value:
            return {"builtin": name}
        if is_iterator(value):
            return encode_iterator(value, self.errors, encoder)
        if not callable(value) or getattr(value, "_mock_children", None):
            raise Unsupported(f"an object of the class {type(value).__name__} given to the program")
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.callbacks)
            self.callbacks.append(value)
        return {"callback": self.numbers[id(value)]}

    def decode_other(self, kind, content, decoder):
        match kind, *content:
            case "opaque", int(number), str(name):
                return Opaque(number, name, decoder.objects in ("", "object"))
            case "iterator", list(items), error:
                return decode_iterator(decoder.items(items), error and self.errors.decode(error, decoder))
            case "awaitable", failed, value:
                return awaited(failed, (self.errors.decode(value, decoder) if failed else decoder.decode(value)))
            case "object", int(number), [int(), str(), str(), list(), bool()] as description if (
                decoder.objects in OBJECTS
            ):
                return self.handle(number, self.kind(*description), decoder.objects != "made")
        raise ValueError(kind)

    def handle(self, number, kind, returned):
        if kind not in self.made:
            return Opaque(number, kind.__name__, returned)
        if number not in self.handles:
            handle = self.handles[number] = object.__new__(kind)
            object.__setattr__(handle, "_judge_number", number)
            object.__setattr__(handle, "_judge_returned", False)
        if returned:
            object.__setattr__(self.handles[number], "_judge_returned", True)
        return self.handles[number]


async def awaited(failed, value):
    if failed:
        raise value
    return value


class Solution(types.ModuleType):
    """The module from which tests import the names of the program."""

    def __init__(self, tests, names):
        super().__init__("solution")
        vars(self).update(_tests=tests, _names=names)

    def __getattr__(self, name):
        if name == "__all__":
            return [name for name in self._names if hasattr(self, name)]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._tests.name(name)
        except Exception:  # the program may raise anything
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self._tests.ask("set", 0, name, (value,))

    def __delattr__(self, name):
        self._tests.ask("delete", 0, name)


def judge(job, cpu_seconds, connection, verdict):
    """Runs the tests one by one, and writes a line for each to `verdict`."""

    def report(*words):
        print(" ".join(map(str, (job["nonce"], *words))) + "\n", end="", file=verdict, flush=True)

    budget = CpuBudget(cpu_seconds, job["too_long"])
    tests = TestsEnd(connection, budget)
    solution = sys.modules["solution"] = Solution(tests, job["names"])
    sys.modules["pytest"] = pytest_standin
    missing = [name for name in job["modules"] if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        report("unusable they import what cannot be imported here:", ", ".join(missing))
        return
    threading.Thread(target=watch, args=(tests.link, LATE * job["wall_seconds"], job["too_long"]), daemon=True).start()
    budget.run()
    try:
        cases = cases_of(job, solution)
        report("tests", len(cases))
        for index, case in enumerate(cases):
            report(index, int(passes(case)))
    except Unsupported as reason:
        report("unusable they need what is not supported here:", reason)


def watch(link, seconds, code):
    """Ends this process with an exit code once the tests have waited or computed for so long by themselves."""
    busy = 0.0
    while busy <= seconds:
        SLEEP(TICK_SECONDS)
        busy += TICK_SECONDS * (not link.waiting)  # counted: the program may stop this process for a while
    os._exit(code if link.budget else 0)


def cases_of(job, solution):
    """The tests, as functions. Raises what `prepare` raises."""
    # A function of the program may have the name of a built-in one, which must not stand in for it.
    names: dict[str, object] = {name: None for name in job["names"] if hasattr(builtins, name)}
    names["__name__"] = "tests"
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
    library = {name: importlib.import_module(MODULES[name]) for name in names if name in MODULES}
    for module, public in NAMES_FROM.items():
        library |= {name: getattr(sys.modules[module], name) for name in names if name in public}
    return library


def passes(case):
    try:
        case()
    except Unsupported:
        raise
    except BaseException:  # the test has not passed, whatever it raised
        return False
    return True


def is_safe(path):
    path = os.path.realpath(path)
    return os.path.isdir(path) and all(os.path.commonpath([path, it]) != it for it in (os.getcwd(), "/tmp"))


def main(cpu_seconds):
    """cpu_seconds: what the program may use, and what the tests may use besides."""
    sys.set_int_max_str_digits(plain_data.MOST_DIGITS)
    set_dumpable(0)
    tests_socket, program_socket = socket.socketpair()
    with open(os.dup(1), "w") as verdict, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 1)
        if os.fork() == 0:
            verdict.close()
            tests_socket.close()
            os.dup2(nothing.fileno(), 0)
            set_dumpable(1)
            sys.setrecursionlimit(RECURSION)
            _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
            seconds = math.ceil(cpu_seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard_limit < 0 else min(seconds, hard_limit),) * 2)
            ProgramEnd(program_socket)
            os._exit(0)
        program_socket.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.setrecursionlimit(DEEP)
        # Nothing is imported from where the program can write.
        sys.path[:] = [path for path in sys.path if is_safe(path)]
        job = json.load(sys.stdin)
        os.dup2(nothing.fileno(), 0)
        judge(job, cpu_seconds, tests_socket, verdict)
    os._exit(0)
