"""Objects of one process that another process uses: `Link` is one of the two ends.

The process of the asserts and the process of the program each import this file in the sandbox. It needs only Python.

* Plain data (numbers, text, tuples, dates, arrays of numpy, ...) cross by value.
* Lists, dicts, sets and the like are shared: each process has a copy, and every message carries what has changed.
* Any other object stays where it is. The other process has a `Mirror` of its class, and a mirror's instance for the
  object: attributes, calls, operators and the like are requests to the object's process.

What makes it safe to use a hostile process's objects: a message is JSON and names only types in tables of this file. An
exception that would end an iteration silently arrives as ProgramError. With `guarded`, an object is never asked
whether it equals plain data, and gets no plain data as an operand, unless this process has made it by calling a class
that `named` was set on.
"""

import base64
import builtins
import collections
import copy
import datetime
import decimal
import fractions
import functools
import importlib
import inspect
import json
import operator
import sys
import types
from _thread import RLock  # the module threading takes longer
from typing import Any

# Longest line that is read as a message.
MOST_CHARACTERS = 1 << 27
# How long coroutines of this process run before those of the other one have their turn.
STEP_SECONDS = 0.005
# Exceptions that end an iteration: they are raised only where an iteration was asked for.
ENDS = {"StopIteration", "StopAsyncIteration", "GeneratorExit"}
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "lshift", "rshift", "and", "or"),
    "xor",
)
ARITHMETIC = tuple(f"__{prefix}{name}__" for name in BINARY for prefix in ("", "r", "i"))
UNARY = tuple(f"__{name}__" for name in ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"))
# What is made of an object that the asserts have made is as good as that.
OPERATIONS = {*ARITHMETIC, *UNARY, "__enter__"}
# What gets no plain data as an operand.
GUARDED = {*COMPARISONS, *ARITHMETIC, "__contains__"}
STEPS = ("__next__", "__anext__", "send", "throw", "close")
SPECIAL = {
    *GUARDED, *OPERATIONS, *STEPS,
    *("__int__", "__float__", "__complex__", "__index__", "__bool__", "__str__", "__repr__", "__format__", "__bytes__"),
    *("__len__", "__iter__", "__reversed__", "__getitem__", "__setitem__", "__delitem__", "__length_hint__"),
    *("__call__", "__exit__", "__await__", "__aiter__", "__aenter__", "__aexit__", "__hash__"),
    *("__copy__", "__deepcopy__", "__fspath__", "__dir__", "__missing__"),
}  # fmt: skip


class ProgramError(Exception):
    """The other process raised what cannot be raised here, has ended, or has sent too much."""


# --- plain data


def zone(value):
    return value.tzinfo and datetime.timezone(value.utcoffset())


# By type: its name in messages, what it is made from, and how.
VALUES: dict[type, tuple[str, Any, Any]] = {
    tuple: ("tuple", list, lambda *items: items),
    frozenset: ("frozenset", list, lambda *items: frozenset(items)),
    bytes: ("bytes", lambda v: [v.hex()], bytes.fromhex),
    complex: ("complex", lambda v: [v.real, v.imag], complex),
    range: ("range", lambda v: [v.start, v.stop, v.step], range),
    slice: ("slice", lambda v: [v.start, v.stop, v.step], slice),
    decimal.Decimal: ("Decimal", lambda v: [str(v)], decimal.Decimal),
    fractions.Fraction: ("Fraction", lambda v: [v.numerator, v.denominator], fractions.Fraction),
    datetime.date: ("date", lambda v: [v.year, v.month, v.day], datetime.date),
    datetime.time: ("time", lambda v: [v.hour, v.minute, v.second, v.microsecond, zone(v)], datetime.time),
    datetime.datetime: (
        "datetime",
        lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, zone(v)],
        datetime.datetime,
    ),
    datetime.timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
    datetime.timezone: ("timezone", lambda v: [v.utcoffset(None)], datetime.timezone),
    type({}.keys()): ("dict_keys", list, lambda *items: dict.fromkeys(items).keys()),
    type({}.values()): ("dict_values", list, lambda *items: dict(enumerate(items)).values()),
    type({}.items()): ("dict_items", list, lambda *items: dict(items).items()),
}
MAKERS: dict[str, Any] = {name: make for name, _, make in VALUES.values()}
# Types whose modules are imported only where they are needed, made of text.
TEXTS = {("uuid", "UUID"), ("pathlib", "PosixPath")}
CONSTANTS = {"NotImplemented": NotImplemented, "Ellipsis": Ellipsis}


def mapping(kind):
    def set_pairs(target, items):
        kind.clear(target)
        for key, value in zip(items[::2], items[1::2], strict=True):
            kind.__setitem__(target, key, value)

    return lambda target: [part for pair in kind.items(target) for part in pair], set_pairs


def set_set(target, items):
    set.clear(target)
    set.update(target, items)


def set_deque(target, items):
    collections.deque.clear(target)
    collections.deque.extend(target, items)


# By type of a shared container: its items, and how to set them.
SHARED: dict[type, tuple[Any, Any]] = {
    list: (list.copy, lambda target, items: list.__setitem__(target, slice(None), items)),
    set: (lambda target: [*set.__iter__(target)], set_set),
    bytearray: (
        lambda target: [*bytearray.__iter__(target)],
        lambda target, items: bytearray.__setitem__(target, slice(None), items),
    ),
    collections.deque: (lambda target: [*collections.deque.__iter__(target)], set_deque),
    dict: mapping(dict),
    collections.OrderedDict: mapping(collections.OrderedDict),
    collections.defaultdict: mapping(dict),
    collections.Counter: mapping(dict),
}
ATOMS = (int, float, str)
# The types that mean the same in both processes.
TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(kind for kind in vars(builtins).values() if isinstance(kind, type)),
        *(kind for kind in (*VALUES, *SHARED) if "dict_" not in kind.__name__),
        type(None),
    )
}
NAMES = {kind: name for name, kind in TYPES.items()}
# Types that a mirrored class can be derived from.
BASES = {
    kind
    for kind in TYPES.values()
    if kind in (*ATOMS, tuple, frozenset, bytes, complex, *SHARED) or issubclass(kind, BaseException)
}


def content_of(value, base):
    """What an instance of `base` is made of, as a list; None for an object."""
    if base in SHARED:
        return SHARED[base][0](value)
    if base in ATOMS:
        return [base(getattr(base, "__str__" if base is str else f"__{base.__name__}__")(value))]
    if base is not object and issubclass(base, BaseException):
        return list(value.args)
    return VALUES[base][1](value) if base in VALUES else None


# --- mirrors


class Remote:
    """What a mirror knows of its class: the link to the other process and the class's number there; `base`, the type of
    BASES that both are derived from; the special methods to forward; the attributes that `base` provides. `named`: the
    asserts know the class by a name that looks like that of a class."""

    def __init__(self, link, number, base, special, local):
        self.link, self.number, self.base, self.special, self.local = link, number, base, special, local
        self.named = False


class Mirror(type):
    """A class of the other process. Its instances stand for that class's instances."""

    def __new__(cls, name, bases, namespace):
        """A class that the asserts derive from one of the program's is made in the program's process."""
        link = next(one._remote.link for one in bases if type(one) is Mirror)
        parts = {key: value for key, value in namespace.items() if key not in ("__module__", "__classcell__")}
        made = link.ask("derive", name, bases, tuple(parts.items()))
        if cell := namespace.get("__classcell__"):
            cell.cell_contents = made
        return made

    def __call__(cls, *arguments, **keywords):
        made = cls._remote.link.ask("call", cls, arguments, tuple(keywords.items()))
        return with_trust(made, cls._remote.named)

    def __getattr__(cls, name):
        return cls._remote.link.ask("attribute", cls, name)

    def __setattr__(cls, name, value):
        cls._remote.link.ask("set", cls, name, value)

    def __delattr__(cls, name):
        cls._remote.link.ask("delete", cls, name)

    def __iter__(cls):
        return cls._remote.link.ask("iter", cls)

    def __len__(cls):
        return cls._remote.link.ask("len", cls)

    def __getitem__(cls, key):
        return cls._remote.link.ask("getitem", cls, key)

    def __contains__(cls, item):
        return cls._remote.link.ask("contains", cls, item)

    def __repr__(cls):
        return cls._remote.link.ask("repr", cls)


class Unknown:
    """Nothing of the program can be equal to an object of this class."""


def is_mirrored(value):
    return type(type(value)) is Mirror


def number_of(value):
    return value._remote.number if type(value) is Mirror else object.__getattribute__(value, "_number")


def with_trust(value, trusted):
    if is_mirrored(value):
        object.__setattr__(value, "_trusted", trusted)
    return value


def is_local(self, name):
    remote = type(self)._remote
    return name in remote.local or (name in STEPS and name in remote.special)


def get_attribute(self, name):
    if name == "__class__":
        return type(self)
    if is_local(self, name):
        return object.__getattribute__(self, name)
    return type(self)._remote.link.ask("attribute", self, name)


def set_attribute(self, name, value):
    if is_local(self, name):
        object.__setattr__(self, name, value)
    else:
        type(self)._remote.link.ask("set", self, name, value)


def delete_attribute(self, name):
    type(self)._remote.link.ask("delete", self, name)


def special_method(name):
    def method(self, *arguments, **keywords):
        remote = type(self)._remote
        link, trusted = remote.link, object.__getattribute__(self, "_trusted")
        if name in GUARDED and link.guarded and not trusted and not all(map(is_mirrored, arguments)):
            if hasattr(remote.base, name):
                return getattr(remote.base, name)(self, *arguments)
            if name == "__contains__":
                return any(item is arguments[0] or item == arguments[0] for item in self)
            return NotImplemented
        found = link.ask("special", self, name, arguments, tuple(keywords.items()))
        if name == "__eq__" and found is True and link.guarded and link.equals_unknown(self):
            raise ProgramError("an object of the program equals everything")
        return with_trust(found, trusted) if name in OPERATIONS else found

    method.__name__ = name
    return method


def await_method(self):
    """Runs the other process's coroutine there, until it is done, and meanwhile lets other coroutines here run."""
    link = type(self)._remote.link
    task = link.ask("start", self)
    try:
        while not link.ask("step", task):
            yield
    finally:
        link.ask("cancel", task)
    return link.ask("result", task)


# What stands for functions, generators and coroutines of the other process where it matters that they are of that kind.


class Steps:
    """A mirrored generator, for `yield from`: `iter` of the mirror would give what stands for it."""

    def __init__(self, mirror):
        self.mirror, self.send, self.throw, self.close = mirror, mirror.send, mirror.throw, mirror.close

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.mirror)


def generator(mirror):
    return (yield from Steps(mirror))


async def coroutine(mirror):
    return await mirror


def generator_function(mirror):
    def function(*arguments, **keywords):
        return (yield from mirror(*arguments, **keywords))

    return function


def coroutine_function(mirror):
    async def function(*arguments, **keywords):
        return await mirror(*arguments, **keywords)

    return function


STAND_INS = (generator, coroutine, generator_function, coroutine_function)


def stand_in_of(value):
    """The name of the function that makes what stands for `value`, if one is needed."""
    kind = type(value)
    if kind is types.FunctionType:
        flags = {inspect.CO_GENERATOR: "generator_function", inspect.CO_COROUTINE: "coroutine_function"}
        return next((name for flag, name in flags.items() if value.__code__.co_flags & flag), None)
    return {types.GeneratorType: "generator", types.CoroutineType: "coroutine"}.get(kind)


class Link:
    """One end of the connection. `ask` sends a request; meanwhile, and in `serve`, the other end's are answered."""

    def __init__(self, connection, serve, guarded):
        """serve: a function of a request that returns its result."""
        self.lines = connection.makefile("rw")
        self.serve_one = serve
        self.guarded = guarded
        self.lock = RLock()
        self.next = int(guarded)  # the two ends give different numbers
        self.kept = {}  # our objects that the other end has mirrors of, by number
        self.numbers = {}  # and their numbers, by id
        self.mirrors = {}  # the other end's objects, by number
        self.stand_ins = {}  # the numbers of those of them that have a stand-in, by its id
        self.shared = {}  # containers and what they contained when both ends last agreed, by number
        self.shared_numbers = {}  # and their numbers, by id
        self.before = tuple  # gives what to tell the other end before a request

    # --- messages

    def ask(self, what, thing, *details):
        """The answer to a request. Raises what the other process raised, and ProgramError."""
        with self.lock:
            self.send("ask", (what, thing, details))
            while True:
                kind, value = self.receive()
                if kind == "answer":
                    return value
                if kind == "raised":
                    raise self.as_error(value, what, details)
                self.answer(value)

    def serve(self):
        """Answers requests until the other end is closed."""
        while True:
            try:
                _, request = self.receive()
            except EOFError:
                return
            self.answer(request)

    def answer(self, request):
        try:
            told = "answer", self.serve_one(*request)
        except BaseException as error:  # the program may raise anything
            told = "raised", error
        try:
            self.send(*told)
        except (TypeError, ValueError, RecursionError) as error:
            self.send("raised", TypeError(f"this cannot be sent: {error}"))

    def send(self, kind, value):
        before, changes = self.encode(self.before()), self.changes()
        dropped = self.forget() if self.guarded else []
        parts = {"before": before, "changes": changes, "dropped": dropped, kind: self.encode(value)}
        self.lines.write(json.dumps(parts) + "\n")
        self.lines.flush()

    def receive(self):
        """The kind and the content of a message. Raises ProgramError, or, if this end belongs to the program, EOFError
        once the other one is closed."""
        try:
            line = self.lines.readline(MOST_CHARACTERS)
            if not line.endswith("\n"):
                raise EOFError("the program has ended, or has sent too much")
            message = json.loads(line)
            before = self.decode(message.pop("before"))
            for number, items in message.pop("changes"):
                self.set_items(number, items)
            for number in message.pop("dropped"):
                self.drop(number)
            if before and not self.guarded:
                self.serve_one("patch", before, ())
            ((kind, value),) = message.items()
            return kind, self.decode(value)
        except Exception as error:  # a message of the program may be anything
            if not self.guarded:
                raise
            raise ProgramError(f"{type(error).__name__}: {error}") from None

    def as_error(self, error, what, details):
        if not isinstance(error, BaseException):
            return ProgramError("the program raised no exception")
        asked_for_it = (what == "special" and details[0] in STEPS) or what == "result"
        if type(error).__name__ in ENDS and not asked_for_it and self.guarded:
            return ProgramError(f"the program raised {type(error).__name__}: {error}")
        return error

    # --- containers that both processes have

    def share(self, container, base, number=None):
        number = self.new_number() if number is None else number
        self.shared[number] = [container, SHARED[base][0](container), base]
        self.shared_numbers[id(container)] = number
        return number

    def changes(self):
        """The items of the containers that were changed here."""
        changed = []
        for number, entry in [*self.shared.items()]:
            container, known, base = entry
            items = SHARED[base][0](container)
            if len(items) != len(known) or not all(map(operator.is_, items, known)):
                entry[1] = items
                changed.append([number, [self.encode(item) for item in items]])
        return changed

    def set_items(self, number, items):
        if number in self.shared:
            container, _, base = entry = self.shared[number]
            SHARED[base][1](container, [self.decode(item) for item in items])
            entry[1] = SHARED[base][0](container)

    def forget(self):
        """Drops the containers that only this table still knows, and returns their numbers."""
        unused = []
        for number in [*self.shared]:
            if count_references(self.shared[number]) == NO_OTHER_REFERENCE:
                unused.append(number)
                self.drop(number)
        return unused

    def drop(self, number):
        if number in self.shared and number not in self.kept and number not in self.mirrors:
            del self.shared_numbers[id(self.shared.pop(number)[0])]

    # --- values as JSON

    def encode(self, value):
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in SHARED:
            return self.encode_container(value, kind)
        if kind in VALUES:
            name, parts, _ = VALUES[kind]
            return {name: [self.encode(part) for part in parts(value)]}
        if kind is Mirror or type(kind) is Mirror:
            return {"yours": number_of(value)}
        if id(value) in self.stand_ins:
            return {"yours": self.stand_ins[id(value)]}
        if isinstance(value, type) and value in NAMES:
            return {"type": NAMES[value]}
        for name, constant in CONSTANTS.items():
            if value is constant:
                return {"constant": name}
        if kind in BASES and isinstance(value, BaseException):
            parts = value.__reduce__()[1]  # of OSError, it has more than `args`
            return {"error": [NAMES[kind], [self.encode(part) for part in parts], self.encode(value.__cause__)]}
        if (kind.__module__, kind.__name__) in TEXTS:
            return {"text": [kind.__module__, kind.__name__, str(value)]}
        if kind.__module__ == "numpy" and (found := self.encode_numpy(value)):
            return found
        return self.encode_object(value)

    def encode_container(self, value, kind):
        if id(value) in self.shared_numbers:
            return {"shared": [self.shared_numbers[id(value)]]}
        number = self.share(value, kind)
        items = [self.encode(item) for item in self.shared[number][1]]
        extra = {collections.deque: "maxlen", collections.defaultdict: "default_factory"}.get(kind)
        return {"shared": [number, NAMES[kind], items, extra and self.encode(getattr(value, extra))]}

    def encode_numpy(self, value):
        import numpy

        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            return None
        array = numpy.asarray(value)
        shape = list(array.shape) if type(value) is numpy.ndarray else None
        if array.dtype.kind == "O":
            return {"objects": [shape, [self.encode(item) for item in array.flat]]}
        if array.dtype.kind not in "biufcSUmM?":
            return None
        return {"array": [array.dtype.str, shape, base64.b64encode(array.tobytes()).decode()]}

    def encode_object(self, value):
        if id(value) in self.numbers:
            return {"mine": [self.numbers[id(value)]]}
        number = self.new_number()
        self.kept[number] = value
        self.numbers[id(value)] = number
        if isinstance(value, type):
            return {"mine": [number, "class", self.description(value)]}
        base = base_of(type(value))
        owner, content = self.encode_object(type(value)), content_of(value, base)
        if base in SHARED:
            self.share(value, base, number)
        stand_in = stand_in_of(value)
        return {"mine": [number, "object", owner, content and [self.encode(part) for part in content], stand_in]}

    def description(self, kind):
        """What the other process needs in order to mirror a class."""
        base = base_of(kind)
        own = [owner for owner in kind.__mro__ if owner is not object and owner not in BASES]
        special = [name for name in SPECIAL - set(STEPS) if any(name in vars(owner) for owner in own)]
        if issubclass(kind, types.GeneratorType) or hasattr(kind, "__next__") or hasattr(kind, "__anext__"):
            special += [name for name in STEPS if hasattr(kind, name)]
        if base is object:
            special += ["__repr__", "__str__", "__format__"]
        return {
            "name": kind.__name__,
            "bases": [self.encode(one) for one in kind.__bases__ if one is not object],
            "special": special,
            "base": NAMES[base],
            "own": sorted({name for owner in own for name in vars(owner)}) if base is not object else [],
            "hashable": kind.__hash__ is not None,
            "doc": str(kind.__doc__)[:1000],
        }

    def is_theirs(self, value):
        return is_mirrored(value) or type(value) is Mirror or id(value) in self.stand_ins

    def new_number(self):
        self.next += 2
        return self.next

    # --- and back

    def decode(self, data):
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind in MAKERS:
            return MAKERS[kind](*map(self.decode, content))
        return getattr(self, f"decode_{kind}")(content)

    def decode_shared(self, content):
        number, *rest = content
        if rest:
            name, items, extra = rest
            kind, extra = TYPES[name], self.decode(extra)
            options: dict[Any, tuple[Any, ...]] = {collections.deque: ((), extra), collections.defaultdict: (extra,)}
            container = kind(*options.get(kind, ()))
            self.share(container, kind, number)
            self.set_items(number, items)
        return self.shared[number][0]

    def decode_yours(self, number):
        return self.kept[number]

    def decode_type(self, name):
        return TYPES[name]

    def decode_text(self, content):
        module, name, text = content
        if (module, name) not in TEXTS:
            raise ProgramError("a value of an unknown type")
        return getattr(importlib.import_module(module), name)(text)

    def decode_constant(self, name):
        return CONSTANTS[name]

    def decode_error(self, content):
        name, parts, cause = content
        kind = TYPES[name]
        error = kind.__new__(kind, *(parts := [self.decode(part) for part in parts]))
        with_suppressed(lambda: error.__init__(*parts))
        error.__cause__ = self.decode(cause)
        return error

    def decode_array(self, content):
        import numpy

        kind, shape, data = content
        array = numpy.frombuffer(base64.b64decode(data), numpy.dtype(str(kind)))
        return array[0] if shape is None else array.reshape(shape).copy()

    def decode_objects(self, content):
        import numpy

        shape, items = content
        array = numpy.empty(len(items), object)
        array[:] = [self.decode(item) for item in items]
        return array.reshape(shape)

    def decode_mine(self, content):
        number, *rest = content
        if rest and number not in self.mirrors:
            what, *details = rest
            self.mirrors[number] = (
                self.mirror(number, **details[0]) if what == "class" else self.instance(number, *details)
            )
        # The program may hand over any object, whatever it was made as.
        return with_trust(self.mirrors[number], False)

    def instance(self, number, owner, content, stand_in):
        kind = self.decode(owner)
        if type(kind) is not Mirror:
            raise ProgramError("an object of no class")
        base = kind._remote.base
        if base in SHARED:
            made = base.__new__(kind)
            self.share(made, base, number)
            self.set_items(number, content)
        elif base is object:
            made = object.__new__(kind)  # type: ignore[arg-type]
        else:
            parts = [self.decode(part) for part in content]
            made = base.__new__(kind, *([MAKERS[NAMES[base]](*parts)] if base in VALUES else parts))
        object.__setattr__(made, "_number", number)
        with_trust(made, False)
        for maker in STAND_INS:
            if maker.__name__ == stand_in:
                made = maker(made)
                self.stand_ins[id(made)] = number
        return made

    def mirror(self, number, name, bases, special, base, own, hashable, doc):
        base = TYPES[base]
        if base is not object and base not in BASES:
            raise ProgramError("a class of an unknown kind")
        if base.__name__ in ENDS:
            base = RuntimeError
        special = {one for one in special if one in SPECIAL}
        local = frozenset(dir(base)) - {*own} if base is not object else frozenset()
        namespace = {one: special_method(one) for one in special}
        namespace |= {
            "_remote": Remote(self, number, base, special, local), "__module__": "solution", "__doc__": str(doc),
            "__getattribute__": get_attribute, "__setattr__": set_attribute, "__delattr__": delete_attribute,
        }  # fmt: skip
        if base is object:
            namespace["__copy__"] = lambda value: self.ask("copy", value)
            namespace["__deepcopy__"] = lambda value, _: self.ask("deepcopy", value)
            if "__eq__" not in special:
                namespace.setdefault("__hash__", object.__hash__)
        if "__await__" in special:
            namespace["__await__"] = await_method
        if not hashable:
            namespace["__hash__"] = None
        elif "__hash__" not in namespace and "__eq__" in namespace:
            namespace["__hash__"] = base.__hash__
        mirrored = [one for one in map(self.decode, bases) if type(one) is Mirror]
        try:
            return type.__new__(Mirror, str(name), (*mirrored, base), namespace)
        except TypeError:  # the bases do not fit together
            return type.__new__(Mirror, str(name), (base,), namespace)

    def equals_unknown(self, thing):
        try:
            return self.ask("special", thing, "__eq__", (Unknown(),), ()) is True
        except Exception:  # it does not expect such an object
            return False


def with_suppressed(function):
    try:
        function()
    except Exception:  # some exceptions want other arguments
        pass


def base_of(kind):
    return next((one for one in kind.__mro__ if one in BASES), object)


def count_references(entry):
    return sys.getrefcount(entry[0])


NO_OTHER_REFERENCE = count_references([[]])


# --- what a process does on request


def perform(what, thing, details):
    """Carries out a request on an object of this process."""
    match what, *details:
        case "call", arguments, keywords:
            return thing(*arguments, **dict(keywords))
        case "special", name, arguments, keywords:
            method = getattr(thing, name) if name in STEPS else functools.partial(getattr(type(thing), name), thing)
            return method(*arguments, **dict(keywords))
        case "attribute", name:
            return getattr(thing, name)
        case "set", name, value:
            return setattr(thing, name, value)
        case "delete", name:
            return delattr(thing, name)
        case "derive", bases, parts:
            return type(bases[0])(thing, bases, {key: as_method(value) for key, value in parts})
        case ("iter" | "len" | "repr",):
            return getattr(builtins, what)(thing)
        case "getitem" | "contains", key:
            return getattr(operator, what)(thing, key)
        case ("copy" | "deepcopy",):
            return getattr(copy, what)(thing)
        case ("eval" | "exec", *scopes):
            return getattr(builtins, what)(thing, *scopes)
        case "library", module, name, arguments, keywords:
            return getattr(importlib.import_module(module), name)(thing, *arguments, **dict(keywords))
        case ("start",):
            return event_loop().create_task(awaited(thing))
        case ("step",):
            asyncio = sys.modules["asyncio"]
            event_loop().run_until_complete(asyncio.wait({thing}, timeout=STEP_SECONDS))
            return thing.done()
        case ("cancel" | "result",):
            return getattr(thing, what)()
    raise ValueError(what)


def as_method(value):
    """Functions of the other process do not bind to objects: a real function does."""
    if is_mirrored(value) and type(value).__name__ == "function":
        return lambda *arguments, **keywords: value(*arguments, **keywords)
    return value


@functools.cache
def event_loop():
    import asyncio  # it takes long

    return asyncio.new_event_loop()


async def awaited(thing):
    return await thing
