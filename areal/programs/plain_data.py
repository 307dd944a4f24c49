"""Plain data between two processes of the sandbox: all that a program and its tests exchange.

A message is JSON. Numbers, texts, lists, None and booleans stand for themselves, any other value is `{name: content}`.
`VALUES`, `CONTAINERS` and `TEXTS` have all types that cross, besides arrays and numbers of numpy. Only exact types are
encoded, and what is decoded is made by this file. Lists, dicts and the like are numbered in the order in which a
message has them: a container may occur twice, and an answer may refer to those of its request. It needs only Python.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import re
import sys
from operator import index
from typing import Any

# Longest message, and most lists and objects in one: memory and time of the receiver are bounded.
MOST_BYTES, MOST_PARTS = 1 << 25, 1 << 21
# Larger integers are sent in base 16: reading them in base 10 takes quadratic time. Python reads no longer ones.
MOST_DIGITS = 50_000
HUGE = 1 << 4096
LIGHT, NUMBERS = {str, float, bool, type(None)}, {int, float, bool}
ARRAY = re.compile(r"[<>|=][biufcSUmM][1-9]\d{0,8}(\[\d{0,9}[A-Za-z]{1,7}\])?")


def _zone(value):
    return value.tzinfo and datetime.timezone(value.utcoffset())


# By type of a value that does not change: its parts, and how it is made of them.
VALUES: dict[Any, Any] = {
    tuple: (list, lambda *items: items),
    frozenset: (list, lambda *items: frozenset(items)),
    bytes: (lambda v: [v.hex()], bytes.fromhex),
    complex: (lambda v: [v.real, v.imag], complex),
    range: (lambda v: [v.start, v.stop, v.step], range),
    slice: (lambda v: [v.start, v.stop, v.step], slice),
    decimal.Decimal: (lambda v: [str(v)], decimal.Decimal),
    fractions.Fraction: (
        lambda v: [v.numerator, v.denominator],
        lambda over, under: fractions.Fraction(index(over), index(under)),
    ),
    datetime.date: (lambda v: [v.year, v.month, v.day], datetime.date),
    datetime.time: (lambda v: [v.hour, v.minute, v.second, v.microsecond, _zone(v)], datetime.time),
    datetime.datetime: (
        lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, _zone(v)],
        datetime.datetime,
    ),
    datetime.timedelta: (lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
    datetime.timezone: (lambda v: [v.utcoffset(None)], datetime.timezone),
    type({}.keys()): (list, lambda *items: dict.fromkeys(items).keys()),
    type({}.values()): (list, lambda *items: dict(enumerate(items)).values()),
    type({}.items()): (list, lambda *items: dict(items).items()),
}
MAKERS = {kind.__name__: make for kind, (_, make) in VALUES.items()}


def _mapping(kind):
    def fill(target, items):
        kind.clear(target)
        for key, value in zip(items[::2], items[1::2], strict=True):
            kind.__setitem__(target, key, value)

    return (lambda target: [part for pair in kind.items(target) for part in pair]), fill


def _collection(kind, extend):
    return (lambda target: [*kind.__iter__(target)]), lambda target, items: [kind.clear(target), extend(target, items)]


# By type of a container that changes: its items, and how it gets new ones.
CONTAINERS: dict[Any, Any] = {
    list: (list.copy, lambda target, items: list.__setitem__(target, slice(None), items)),
    set: _collection(set, set.update),
    bytearray: _collection(bytearray, bytearray.extend),
    collections.deque: _collection(collections.deque, collections.deque.extend),
    **{kind: _mapping(kind) for kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)},
}
# Types whose modules are imported only where they are needed; made of text.
TEXTS = {"UUID": "uuid", "PosixPath": "pathlib", "PurePosixPath": "pathlib"}
NAMED = {kind.__name__: kind for kind in CONTAINERS}
# What a defaultdict may make.
FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
BASES = (*CONTAINERS, *VALUES, int, float, str)


def base_of(kind):
    """The type of the table from which a class is derived, or None."""
    return next((base for base in kind.__mro__ if base in BASES), None)


def as_base(value, base):
    """A copy of what an instance of a derived class is as its base."""
    if base in (int, float, str):
        return getattr(base, "__str__" if base is str else f"__{base.__name__}__")(value)
    if base in CONTAINERS:
        fill(container := base(), CONTAINERS[base][0](value))
        return container
    parts, make = VALUES[base]
    return make(*parts(value))


def contents(container):
    return CONTAINERS[type(container)][0](container)


def fill(container, items):
    CONTAINERS[type(container)][1](container, items)


def types():
    """All types of the table, and those of numpy if it is imported."""
    numpy = sys.modules.get("numpy")
    return (*BASES, *((numpy.ndarray, numpy.generic) if numpy else ()))


class Encoder:
    """Values as JSON. `encode_other` encodes what is not in the table; `objects` is for it. containers: those that have
    a number."""

    def __init__(self, encode_other, containers=()):
        self.encode_other, self.containers, self.objects = encode_other, [*containers], ""
        self.numbers = {id(container): number for number, container in enumerate(self.containers)}

    def encode(self, value):
        kind = type(value)
        if kind in LIGHT:
            return value
        if kind is int:
            return value if -HUGE < value < HUGE else {"int": hex(value)}
        if kind in VALUES:
            return {kind.__name__: self.items(VALUES[kind][0](value))}
        if kind in CONTAINERS:
            return self.encode_container(value, kind)
        if TEXTS.get(kind.__name__) == kind.__module__:
            return {kind.__name__: str(value)}
        if kind.__module__ == "numpy" and (encoded := self.encode_array(value)):
            return encoded
        return self.encode_other(value, self)

    def items(self, values):
        kinds = {*map(type, values)}
        if kinds <= LIGHT or (kinds <= NUMBERS and min(values) > -HUGE and max(values) < HUGE):
            return values
        return [*map(self.encode, values)]

    def encode_container(self, value, kind):
        if id(value) in self.numbers:
            return {"ref": self.numbers[id(value)]}
        self.numbers[id(value)] = len(self.containers)
        self.containers.append(value)
        items = self.items(CONTAINERS[kind][0](value))
        if kind is list:
            return items
        extra = value.maxlen if kind is collections.deque else None
        if kind is collections.defaultdict:
            extra = next((name for name, factory in FACTORIES.items() if value.default_factory is factory), None)
        return {kind.__name__: [extra, items]}

    def encode_array(self, value):
        import numpy

        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            return None
        array = numpy.asarray(value)
        shape = None if isinstance(value, numpy.generic) else [*array.shape]
        if array.dtype.kind == "O":
            return {"objects": [shape, self.items([*array.flat])]}
        return {"array": [array.dtype.str, shape, array.tobytes().hex()]} if ARRAY.fullmatch(array.dtype.str) else None


class Decoder:
    """Values of JSON, as Encoder has made them. Malformed data raises some Exception."""

    def __init__(self, decode_other, containers=(), objects=""):
        self.decode_other, self.containers, self.objects = decode_other, [*containers], objects

    def decode(self, data):
        if type(data) is list:
            self.containers.append(data)
            data[:] = self.items(data)
            return data
        if type(data) is not dict:
            return data
        ((name, content),) = data.items()
        if name in MAKERS:
            return MAKERS[name](*self.items(content))
        if name in NAMED:
            return self.decode_container(NAMED[name], *content)
        if name in TEXTS:
            return getattr(importlib.import_module(TEXTS[name]), name)(content)
        match name:
            case "ref":
                return self.containers[content]
            case "int":
                return int(content, 16)
            case "array":
                return self.decode_array(*content)
            case "objects":
                return self.decode_objects(*content)
        return self.decode_other(name, content, self)

    def items(self, values):
        kinds = {*map(type, values)}
        return [*map(self.decode, values)] if list in kinds or dict in kinds else values

    def decode_container(self, kind, extra, items):
        options = {collections.deque: ((), extra), collections.defaultdict: (FACTORIES.get(extra),)}
        container = kind(*options.get(kind, ()))
        self.containers.append(container)
        fill(container, self.items(items))
        return container

    def decode_array(self, kind, shape, data):
        import numpy

        data = bytes.fromhex(data)
        if not ARRAY.fullmatch(kind) or max(shape or (), default=0) > len(data) + (1 << 16):
            raise ValueError("an array of another kind, or of no bytes")
        array = numpy.ndarray(tuple(shape or ()), numpy.dtype(kind), data).copy()
        return array[()] if shape is None else array

    def decode_objects(self, shape, items):
        import numpy

        array = numpy.empty(len(items), object)
        for place, item in enumerate(self.items(items)):
            array[place] = item
        return array.reshape(shape)


def read_message(data):
    """The JSON of a message. Raises ValueError if it has too many parts, or is none."""
    if data.count(b"[") + data.count(b"{") > MOST_PARTS:
        raise ValueError("the message has too many parts")
    return json.loads(data)


# --- exceptions

# What would end an iteration, or hold other exceptions, never arrives as that.
NEVER = (StopIteration, StopAsyncIteration, GeneratorExit, BaseExceptionGroup)
EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, NEVER)
}


class ProgramError(Exception):
    """The other process raised what cannot be raised here, has ended, or has sent what is no message."""


class Errors:
    """Exceptions as data: a class is the name of a built-in one, or a name and what it is derived from. Such a class is
    made here, once for each such description. namespace: what the classes that are made here have."""

    def __init__(self, namespace):
        self.namespace = {"__module__": "solution", "__str__": lambda error: vars(error).get("_text", ""), **namespace}
        self.classes = {}

    def describe(self, kind):
        if EXCEPTIONS.get(name := kind.__name__) is kind:
            return name
        bases = [self.describe(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        if not issubclass(kind, NEVER):
            self.classes.setdefault(json.dumps([kind.__name__, bases]), kind)
        return [kind.__name__, bases]

    def class_of(self, description):
        if type(description) is str:
            return EXCEPTIONS[description]
        name, bases = description
        key = json.dumps(description)
        if key not in self.classes:
            kinds = tuple(map(self.class_of, bases)) or (ProgramError,)
            try:
                self.classes[key] = type(str(name), kinds, dict(self.namespace))
            except TypeError:  # they do not fit together
                self.classes[key] = type(str(name), (ProgramError,), dict(self.namespace))
        return self.classes[key]

    def encode(self, error, encoder):
        try:
            text, parts = str(error), error.__reduce__()[1]  # of OSError, it has more than `args`
        except BaseException:  # an exception of the program may be anything
            text, parts = "", error.args
        fields = [part for name, value in vars(error).items() for part in (name, value)]
        cause = error.__cause__ and self.encode(error.__cause__, encoder)
        return [self.describe(type(error)), text, encoder.items([*parts]), encoder.items(fields), cause]

    def decode(self, data, decoder):
        description, text, parts, fields, cause = data
        kind, parts, fields = self.class_of(description), decoder.items(parts), decoder.items(fields)
        error = kind.__new__(kind, *parts)
        if kind in EXCEPTIONS.values():
            error.__init__(*parts)
        else:
            error.args = parts
            names = zip(fields[::2], fields[1::2], strict=True)
            vars(error).update({name: value for name, value in names if not name.startswith("_")}, _text=str(text))
        error.__cause__ = cause and self.decode(cause, decoder)
        return error
