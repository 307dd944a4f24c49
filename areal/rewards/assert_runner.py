"""Runs tests that are Python code against a program that must not be able to read, change or fool them.

`areal.rewards.code_tests` runs this module in a sandbox. It uses two processes. The child runs the program; it is
forked before the tests are read, so its memory does not contain them. The parent runs the tests; the child cannot read
the parent's memory, and nothing that the child can write is on the parent's path of modules.

Only plain data cross (`areal.rewards.plain_data`). In the tests, a function of the program is a `Function`: it is called
by name, and its result is data, or an `Opaque` that has nothing. A class that has a capitalised name is a `HandleClass`;
what the tests make by calling it is a `Handle`, whose methods and attributes are used by name, and whose results are
data or handles. Functions of the tests that are given to the program are called back in the same way. A test that needs
more raises Unsupported, which makes its row an error and never a score.

stdin: `{"nonce", "names", "modules", "prepare", "tests", "candidate", "collect", "cpu_seconds", "wall_seconds"}`.
`names` of the program are global names of the tests, which may also import them from the module `solution`. `prepare` is
run, then `tests`; with `collect`, the tests are those of pytest's kind that `prepare` defines. `modules` are those that
the tests import. stdout: `NONCE tests COUNT`, and after each test `NONCE index 0|1`; or else `NONCE unusable REASON`, if
no program could pass the tests here.
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
import math  # noqa: F401 - in NAMES_FROM
import operator
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import types
import typing

import plain_data
import pytest_standin
from plain_data import ProgramError
from pytest_standin import Unsupported

PR_SET_DUMPABLE = 4
# Items of a generator or another iterator that are sent; the next one is an error.
MOST_ITEMS = 10_000
# Frames that the program has to itself, as in a process of its own, and those of this file; and frames of the tests.
RECURSION, DEEP = 1000 + 50, 10_000
# How often it is checked how long the tests take, and from which share of the time on they are to blame.
TICK_SECONDS, LATE, SLEEP = 0.1, 0.9, time.sleep
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
# What may come back besides data: from functions, from methods and attributes, from making an object, from names.
RESULTS = frozenset({"opaque", "iterator", "awaitable", "callback"})
OBJECTS, MADE = RESULTS | {"object", "method"}, RESULTS | {"object"}
NAMES = RESULTS | {"function", "class", "error", "module"}
# Special attributes that functions of libraries look at for the tests; any others they only try.
LOOKED_AT = ("__dict__", "__annotations__", "__dataclass_fields__", "__signature__")
# What tests ask of a handle by syntax, and the program answers by data.
SPECIAL = {
    "__len__": len, "__str__": str, "__repr__": repr, "__iter__": lambda value: (item for item in value),
    "__call__": lambda value, *a, **k: value(*a, **k),
    "__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem,
}  # fmt: skip
# What a handle has not: the program would judge itself.
REFUSED = [
    *"bool contains lt le gt ge enter exit aenter aexit aiter await next reversed format reduce_ex".split(),
    *"int float complex index neg pos abs invert round trunc floor ceil".split(),
    *(
        prefix + name
        for name in "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor".split()
        for prefix in ("", "r", "i")
    ),
]


def set_dumpable(value):
    """With 0, no other process of the same user may read this one's memory or open files. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


class Link:
    """One end of the connection. Requests may be nested: who waits for an answer carries out requests meanwhile.

    ends: an object with `serve`, `encode_other`, `decode_other` and `errors`.
    """

    def __init__(self, connection, ends):
        self.stream, self.ends, self.lock = connection.makefile("rwb"), ends, threading.RLock()
        # What the other end's messages have cost, and how long this end has waited for them.
        self.cpu_seconds = self.waited_seconds = 0.0

    def ask(self, allowed, what, *parts):
        """The other end's answer. Raises what it raises, or ProgramError. allowed: what it may be besides data."""
        with self.lock:
            encoder = plain_data.Encoder(self.ends.encode_other)
            self.send(["ask", encoder.items([what, *parts])])
            while (message := self.receive())[0] == "ask":
                self.answer(message[1])
            failed, answer = self.read(self.read_answer, message, encoder.containers, allowed)
            if failed:
                raise answer
            return answer

    def read_answer(self, message, containers, allowed):
        kind, value, changes = message
        decoder = plain_data.Decoder(self.ends.decode_other, containers)
        decoder.allowed = allowed
        answer = self.ends.errors.decode(value, decoder) if kind == "raise" else decoder.decode(value)
        for number, items in changes:
            container = containers[number]
            plain_data.CONTAINERS[type(container)][1](container, decoder.items(items))
        return kind == "raise", answer

    def answer(self, request):
        decoder = plain_data.Decoder(self.ends.decode_other)
        decoder.allowed = OBJECTS
        parts = self.read(decoder.items, request)
        given = [(container, plain_data.contents(container)) for container in decoder.containers]
        encoder = plain_data.Encoder(self.ends.encode_other, decoder.containers)
        try:
            kind, value = "return", encoder.encode(self.ends.serve(*parts))
        except BaseException as error:  # the program, or the function of the tests, may raise anything
            if isinstance(error, Unsupported):
                raise
            kind, value = "raise", self.ends.errors.encode(error, encoder)
        changes = []
        for number, (container, items) in enumerate(given):
            now = plain_data.contents(container)
            if len(now) != len(items) or not all(map(operator.is_, now, items)):
                changes.append([number, encoder.items(now)])
        self.send([kind, value, changes])

    def send(self, message):
        data = json.dumps(message).encode()
        try:
            self.stream.write(len(data).to_bytes(8, "big") + data)
            self.stream.flush()
        except OSError:
            raise ProgramError("the program has ended") from None

    def receive(self):
        began = time.monotonic()
        size = int.from_bytes(self.stream.read(8), "big")
        if not 0 < size <= plain_data.MOST_BYTES:
            raise ProgramError("the program has ended, or has sent too much")
        data = self.stream.read(size)
        self.waited_seconds += time.monotonic() - began
        return self.read(plain_data.read_message, data)

    def read(self, function, *arguments):
        """What the function makes of data of the other end. Raises ProgramError if it is malformed."""
        began = time.process_time()
        try:
            return function(*arguments)
        except Exception as error:
            raise ProgramError(f"{type(error).__name__}: {error}") from None
        finally:
            self.cpu_seconds += time.process_time() - began


def iterated(steps, errors, encoder):
    """An iterator as its items, and the error at which it ended, or None."""
    items = []
    try:
        items += itertools.islice(steps, MOST_ITEMS)
        error = ProgramError("an iterator has too many items") if len(items) == MOST_ITEMS else None
    except BaseException as raised:  # the program may raise anything
        error = raised
    return {"iterator": [encoder.items(items), error and errors.encode(error, encoder)]}


def iterator(items, error):
    yield from items
    if error:
        raise error


def is_iterator(value):
    return type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__")


# --- the child: runs the program


class Answer(typing.NamedTuple):
    """A result, and how it is sent if it is no data: with objects (`object`), or as `kind` with `content`."""

    value: object
    kind: str
    content: object = None


class Host:
    """Runs the program, then carries out the requests of the tests."""

    def __init__(self, connection):
        self.errors = plain_data.Errors({})
        self.objects, self.numbers = [], {}
        self.classes, self.described = set(), set()  # those that the tests called, and those that they know
        self.callbacks, self.given_functions, self.failure = {}, {}, None
        self.link = Link(connection, self)
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

    def serve(self, context, what, *parts):
        with self.replaced(**context):
            if not self.objects:
                self.load()
            if self.failure:
                raise self.failure
            return getattr(self, f"serve_{what}")(*parts)

    @contextlib.contextmanager
    def replaced(self, functions=(), stdin=None, captured=False):
        """What the tests have replaced is replaced here, too, and what is printed is sent to them."""
        if stdin is not None:
            sys.stdin = io.StringIO(stdin)
        sys.stdout, sys.stderr = streams = [io.StringIO() if captured else self.nowhere for _ in range(2)]
        originals = [(*REPLACED[index], getattr(*REPLACED[index])) for index, _ in functions]
        for index, function in functions:
            setattr(*REPLACED[index], function)
        try:
            yield
        finally:
            for original in originals:
                setattr(*original)
            if captured and any(texts := [stream.getvalue() for stream in streams]):
                self.link.ask((), "print", *texts)

    def serve_name(self, name):
        value = getattr(self.objects[0], name)
        if isinstance(value, types.ModuleType):
            return Answer(value, "module", [value.__name__])
        if isinstance(value, type) and issubclass(value, BaseException):
            return Answer(value, "error", [self.errors.describe(value)])
        if isinstance(value, type):
            return Answer(value, "class", self.describe(value))
        if callable(value):
            names = getattr(value, "__name__", name), getattr(value, "__doc__", None)
            return Answer(value, "function", [self.number_of(value), *map(str, names)])
        return value

    def serve_call(self, number, arguments, keywords):
        return self.objects[number](*arguments, **keywords)

    def serve_make(self, number, arguments, keywords):
        self.classes.add(self.objects[number])
        made = self.serve_call(number, arguments, keywords)
        self.number_of(made)
        return Answer(made, "object")

    def serve_method(self, number, name, arguments, keywords):
        return Answer(getattr(self.objects[number], name)(*arguments, **keywords), "object")

    def serve_special(self, number, name, arguments, keywords):
        return Answer(SPECIAL[name](self.objects[number], *arguments, **keywords), "object")

    def serve_get(self, number, name):
        value = getattr(self.objects[number], name)
        as_method = callable(value) and type(value) not in self.classes
        return Answer(value, "method", [number, name]) if as_method else Answer(value, "object")

    def serve_set(self, number, name, value):
        setattr(self.objects[number], name, value)

    def serve_delete(self, number, name):
        delattr(self.objects[number], name)

    def number_of(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def describe(self, kind):
        """Number, name, text and bases of a class; its number, if the tests know it already."""
        number = self.number_of(kind)
        if number in self.described:
            return [number]
        self.described.add(number)
        bases = [self.describe(base) for base in kind.__bases__ if base.__module__ == "solution"]
        return [number, kind.__name__, str(kind.__doc__), bases]

    def encode_other(self, value, encoder):
        if type(value) is Answer:
            if value.kind != "object":
                return {value.kind: value.content}
            encoder.with_objects = True
            return encoder.encode(value.value)
        base = plain_data.base_of(type(value))
        if id(value) in self.given_functions:
            return {"callback": [self.given_functions[id(value)]]}
        if getattr(encoder, "with_objects", False) and type(value) in self.classes:
            if not base or id(value) in self.numbers:
                return {"object": [self.number_of(value), self.describe(type(value))]}
        if base:
            return encoder.encode(plain_data.as_base(value, base))
        if is_iterator(value):
            return iterated(value, self.errors, encoder)
        if isinstance(value, types.CoroutineType):
            try:
                return {"awaitable": [False, encoder.encode(event_loop().run_until_complete(value))]}
            except BaseException as error:  # the program may raise anything
                return {"awaitable": [True, self.errors.encode(error, encoder)]}
        return {"opaque": [self.number_of(value), type(value).__name__]}

    def decode_other(self, name, content, decoder):
        match name:
            case "object":
                return self.objects[content]
            case "builtin":
                return getattr(builtins, content)
            case "error":
                return self.errors.class_of(content)
            case "iterator":
                items, error = content
                return iterator(decoder.items(items), error and self.errors.decode(error, decoder))
        if content not in self.callbacks:
            function = self.callbacks[content] = lambda *a, **k: self.link.ask(RESULTS, "callback", content, a, k)
            self.given_functions[id(function)] = content
        return self.callbacks[content]


@functools.cache
def event_loop():
    import asyncio  # it takes long

    return asyncio.new_event_loop()


# --- the parent: runs the tests


class Opaque:
    """What the program has returned that is no data: nothing is equal to it, and it may only be given back."""

    __slots__ = ("_number", "_kind")

    def __init__(self, number, kind):
        self._number, self._kind = number, kind

    def __getattr__(self, name):
        refuse_attribute(name, f"a result that is no plain data, but a {self._kind}")


class Items:
    """What a generator or another iterator of the program has given."""

    __slots__ = ("_items",)

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._items)

    def __getattr__(self, name):
        refuse_attribute(name, "an iterator")


class Function(Opaque):
    """A function of the program."""

    __slots__ = ("_name", "_tests", "_text")
    __doc__ = property(lambda self: self._text)

    def __init__(self, tests, number, name, text):
        super().__init__(number, "function")
        self._tests, self._name, self._text = tests, name, text

    def __getattr__(self, name):
        return self._name if name in ("__name__", "__qualname__") else super().__getattr__(name)

    def __call__(self, *arguments, **keywords):
        return self._tests.ask(RESULTS, "call", self._number, arguments, keywords)


class HandleClass(type):
    """A class of the program with a capitalised name: the tests make handles by calling it."""

    def __new__(cls, name, bases, namespace):
        raise Unsupported(f"a class derived from the program's {bases[0].__name__}")

    def __call__(cls, *arguments, **keywords):
        cls._tests.made.add(cls)
        return cls._tests.ask(MADE, "make", cls._class_number, arguments, keywords)

    def __getattr__(cls, name):
        if name.startswith("__"):
            refuse_attribute(name, f"the class {cls.__name__}")
        value = cls._tests.ask(OBJECTS, "get", cls._class_number, name)
        if name.isupper() and isinstance(value, Opaque):
            raise Unsupported(f"{cls.__name__}.{name}, which is no plain data")
        return value

    def __setattr__(cls, name, value):
        cls._tests.ask((), "set", cls._class_number, name, value)

    def __delattr__(cls, name):
        cls._tests.ask((), "delete", cls._class_number, name)

    def __instancecheck__(cls, value):
        if isinstance(value, Opaque):
            raise Unsupported(f"whether a result is a {cls.__name__}")
        return super().__instancecheck__(value)


class Handle:
    """An object that the tests made by calling a class of the program, or that a method has returned.

    _returned: the program has returned it. Else what is done to it is decided by the tests alone.
    """

    __slots__ = ("_number", "_returned")

    def __class_getitem__(cls, _):
        return cls

    def __getattr__(self, name):
        if name.startswith("__"):
            refuse_attribute(name, f"an object of the class {type(self).__name__}")
        return type(self)._tests.ask(OBJECTS, "get", self._number, name)

    def __setattr__(self, name, value):
        type(self)._tests.ask((), "set", self._number, name, value)

    def __delattr__(self, name):
        type(self)._tests.ask((), "delete", self._number, name)

    def __eq__(self, other):
        return other is self or (other is not None and refuse_use(self, "==") is True)

    def __hash__(self):
        return refuse_use(self, "hash") or id(self)


def refuse_attribute(name, owner):
    """Raises AttributeError if data may have such an attribute, so that another program could pass, else Unsupported."""
    if name not in LOOKED_AT and (name.startswith("__") or any(name in dir(kind) for kind in plain_data.types())):
        raise AttributeError(name)
    raise Unsupported(f".{name} of {owner}")


def refuse_use(handle, what):
    """Raises Unsupported if the tests do to an object of theirs what cannot be judged. Where the program has returned the
    object, another program could pass: raises TypeError, or returns False for what all objects have."""
    if not handle._returned:
        raise Unsupported(f"{what} of an object of the class {type(handle).__name__}")
    if what not in ("==", "hash"):
        raise TypeError(f"an object of the program has no {what}")
    return False


def refuse_result(result, what):
    raise Unsupported(f"{what} of a result that is no plain data, but a {result._kind}")


def refuse_construction(error, *_, **__):
    raise Unsupported(f"the tests make a {type(error).__name__} of the program")


def forward(handle, name, arguments, keywords):
    return type(handle)._tests.ask(OBJECTS, "special", handle._number, name, arguments, keywords)


def refuse_class(cls, what):
    raise Unsupported(f"{what} of the class {cls.__name__}")


for _name in ("__iter__", "__len__", "__contains__", "__getitem__"):
    setattr(HandleClass, _name, lambda cls, *_, _name=_name: refuse_class(cls, _name))
for _name in SPECIAL:
    setattr(Handle, _name, lambda self, *a, _name=_name, **k: forward(self, _name, a, k))
for _name in REFUSED:
    setattr(Handle, f"__{_name}__", lambda self, *_, _name=_name: refuse_use(self, f"__{_name}__"))
for _name in ("__call__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__aiter__", "__await__"):
    setattr(Opaque, _name, lambda self, *_, _name=_name, **__: refuse_result(self, _name))


class Tests:
    """The end of the tests: what they have of the program, and what the program has of theirs."""

    def __init__(self, connection):
        self.errors = plain_data.Errors({"__init__": refuse_construction})
        self.streams = sys.stdin, sys.stdout, sys.stderr
        self.originals = [getattr(*place) for place in REPLACED]
        self.handles, self.classes, self.functions, self.made = {}, {}, {}, set()
        self.callbacks, self.numbers = [], {}
        self.link = Link(connection, self)

    def ask(self, allowed, what, *parts):
        return self.link.ask(allowed, self.context(), what, *parts)

    def context(self):
        """What the tests have replaced at this moment."""
        context, (stdin, stdout, stderr) = {}, self.streams
        functions = enumerate(getattr(*place) for place in REPLACED)
        if changed := [(index, now) for index, now in functions if now is not self.originals[index]]:
            context["functions"] = changed
        if sys.stdin is not stdin and (text := sys.stdin.read()):
            context["stdin"] = text
        if sys.stdout is not stdout or sys.stderr is not stderr:
            context["captured"] = True
        return context

    def serve(self, what, *parts):
        if what == "print":
            for stream, text in zip((sys.stdout, sys.stderr), parts, strict=True):
                stream.write(text)
            return None
        number, arguments, keywords = parts
        return self.callbacks[number](*arguments, **keywords)

    def encode_other(self, value, encoder):
        if isinstance(value, (Opaque, Handle)):
            return {"object": value._number}
        if type(value) is HandleClass:
            return {"object": value._class_number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": self.errors.describe(value)}
        if vars(builtins).get(getattr(value, "__name__", None)) is value:
            return {"builtin": value.__name__}
        if is_iterator(value):
            return iterated(value, self.errors, encoder)
        if not callable(value) or getattr(value, "_mock_children", None):
            raise Unsupported(f"the program is given an object of the class {type(value).__name__}")
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.callbacks)
            self.callbacks.append(value)
        return {"callback": self.numbers[id(value)]}

    def decode_other(self, name, content, decoder):
        if name not in decoder.allowed:
            raise ProgramError(f"a {name} where there can be none")
        return getattr(self, f"decode_{name}")(decoder, *content)

    def decode_opaque(self, _, number, kind):
        return Opaque(number, str(kind))

    def decode_iterator(self, decoder, items, error):
        return Items(iterator(decoder.items(items), error and self.errors.decode(error, decoder)))

    def decode_callback(self, _, number):
        return self.callbacks[number]

    def decode_awaitable(self, decoder, failed, content):
        return awaitable(failed, self.errors.decode(content, decoder) if failed else decoder.decode(content))

    def decode_object(self, decoder, number, description):
        kind = self.decode_class(decoder, *description)
        if kind not in self.made:
            return Opaque(number, kind.__name__)
        if number not in self.handles:
            handle = self.handles[number] = object.__new__(kind)
            object.__setattr__(handle, "_number", int(number))
            object.__setattr__(handle, "_returned", False)
        if decoder.allowed is not MADE:
            object.__setattr__(self.handles[number], "_returned", True)
        return self.handles[number]

    def decode_method(self, _, number, name):
        return lambda *a, **k: self.ask(OBJECTS, "method", number, name, a, k)

    def decode_function(self, _, number, name, text):
        return self.functions.setdefault(number, Function(self, number, str(name), str(text)))

    def decode_class(self, decoder, number, *description):
        if number not in self.classes:
            name, text, bases = description
            kinds = tuple(self.decode_class(decoder, *base) for base in bases) or (Handle,)
            fields = {"__slots__": (), "__doc__": str(text), "__module__": "solution"}
            fields |= {"_tests": self, "_class_number": int(number)}
            try:
                self.classes[number] = type.__new__(HandleClass, str(name), kinds, fields)
            except TypeError:  # the bases do not fit together
                self.classes[number] = type.__new__(HandleClass, str(name), (Handle,), fields)
        return self.classes[number]

    def decode_error(self, _, description):
        return self.errors.class_of(description)

    def decode_module(self, _, name):
        """The same module, if the tests may replace functions of it in the program."""
        return next((module for module, _ in REPLACED if module.__name__ == name), None)


async def awaitable(failed, content):
    if failed:
        raise content
    return content


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
            return self._tests.ask(NAMES, "name", name)
        except Exception:  # the program may raise anything
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self._tests.ask((), "set", 0, name, value)

    def __delattr__(self, name):
        self._tests.ask((), "delete", 0, name)
def judge(job, connection, verdict):
    """Runs the tests one by one, and writes a line for each to `verdict`."""

    def tell(*words):
        print(job["nonce"], *words, file=verdict, flush=True)

    tests = Tests(connection)
    solution = sys.modules["solution"] = Solution(tests, job["names"])
    sys.modules["pytest"] = pytest_standin
    missing = [name for name in job["modules"] if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        tell("unusable they import what cannot be imported here:", ", ".join(missing))
        return
    threading.Thread(target=watch, args=(job, tests.link, tell), daemon=True).start()
    try:
        cases = cases_of(job, solution)
        tell("tests", len(cases))
        for index, case in enumerate(cases):
            tell(index, int(passes(case)))
    except Unsupported as reason:
        tell("unusable they need what is not supported here:", reason)


def watch(job, link, tell):
    """Ends the tests once they themselves have used up the time, apart from what the program and its messages took."""
    began, used = time.monotonic(), time.process_time()
    while True:
        SLEEP(TICK_SECONDS)
        busy = time.process_time() - used - link.cpu_seconds
        passed = time.monotonic() - began
        if busy > job["cpu_seconds"] or (passed > LATE * job["wall_seconds"] and link.waited_seconds < passed / 2):
            tell(f"unusable they take longer than a program may ({busy:.1f} s of CPU time, {passed:.1f} s)")
            os._exit(0)


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


def main():
    sys.set_int_max_str_digits(plain_data.MOST_DIGITS)
    set_dumpable(0)
    ours, theirs = socket.socketpair()
    with open(os.dup(1), "w") as verdict, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 1)
        if os.fork() == 0:
            verdict.close()
            ours.close()
            os.dup2(nothing.fileno(), 0)
            set_dumpable(1)
            sys.setrecursionlimit(RECURSION)
            Host(theirs)
            os._exit(0)
        theirs.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.setrecursionlimit(DEEP)
        # Nothing is imported from where the program can write.
        sys.path[:] = [path for path in sys.path if is_safe(path)]
        job = json.load(sys.stdin)
        os.dup2(nothing.fileno(), 0)
        judge(job, ours, verdict)
    os._exit(0)
