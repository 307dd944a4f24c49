"""Plain data, exchanged between a program and tests in two processes.

A message is JSON. Numbers, texts, lists, None and booleans are plain JSON, any other value is `{name: content}`.
`VALUES`, `CONTAINERS` and `BUILTINS` list the types that cross, besides arrays of numpy, iterators and exceptions. A
value of a derived type arrives as its base. This file makes every decoded value, whatever was sent, with an `==` no
weaker than Python's: numbers of numpy arrive as Python's, arrays with 64 bits a number, and empty arrays as lists.
Containers are numbered in the order of the message; an answer may refer to containers of the request by number.

>>> Decoder().decode(Encoder().encode({(1, 2): 0.5}))
{(1, 2): 0.5}
"""

import array
import builtins
import collections
import datetime
import decimal
import fractions
import itertools
import json
import re
import types
from operator import index
from typing import Any

# The longest message, and the most lists and objects in a message: bounds of the receiver's memory and time.
MOST_BYTES, MOST_PARTS = 1 << 25, 1 << 21
# Larger integers are sent in base 16: base 10 takes quadratic time, and Python reads no more digits.
MOST_DIGITS = 50_000
# The most items of an iterator that are sent; a further item is an error.
MOST_ITEMS = 10_000
HUGE = 1 << 4096
LIGHT, NUMBERS = {str, float, bool, type(None)}, {int, float, bool}
# Kinds of arrays: sent to a program, accepted from a program, and the wider kinds into which a program's are changed.
ARRAY = re.compile(r"\|O|[<>|=][biufcSU][1-9]\d{0,8}")
WIDE = re.compile(r"\|O|\|b1|<[iuf]8|<c16|[<|][SU][1-9]\d{0,8}")
WIDER = {"i": "<i8", "u": "<u8", "f": "<f8", "c": "<c16"}
ALIKE = (int, float, str, bytes, complex)


class NotPlain(BaseException):
    """A value that is no plain data. Not an Exception: tests that expect some Exception must not catch a NotPlain."""


def _zone(value):
    return value.tzinfo and datetime.timezone(value.utcoffset())


# By type of an immutable value: a function to take a value apart, and a function to make a value from the parts.
VALUES: dict[Any, Any] = {
    tuple: (list, lambda *items: items),
    frozenset: (list, lambda *items: frozenset(items)),
    bytes: (lambda v: [v.hex()], bytes.fromhex),
    memoryview: (lambda v: [v.tobytes()], memoryview),
    array.array: (lambda v: [v.typecode, v.tolist()], array.array),
    types.MappingProxyType: (lambda v: [dict(v)], types.MappingProxyType),
    complex: (lambda v: [v.real, v.imag], complex),
    range: (lambda v: [v.start, v.stop, v.step], range),
    slice: (lambda v: [v.start, v.stop, v.step], slice),
    decimal.Decimal: (lambda v: [str(v)], decimal.Decimal),
    fractions.Fraction: (
        lambda v: [v.numerator, v.denominator],
        lambda over, under: fractions.Fraction(index(over), index(under)),
    ),
    datetime.datetime: (
        lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, _zone(v)],
        datetime.datetime,
    ),
    datetime.date: (lambda v: [v.year, v.month, v.day], datetime.date),
    datetime.time: (lambda v: [v.hour, v.minute, v.second, v.microsecond, _zone(v)], datetime.time),
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


# By type of a mutable container: a function to read the items, and a function to replace the items.
CONTAINERS: dict[Any, Any] = {
    list: (list.copy, lambda target, items: list.__setitem__(target, slice(None), items)),
    set: _collection(set, set.update),
    bytearray: _collection(bytearray, bytearray.extend),
    collections.deque: _collection(collections.deque, collections.deque.extend),
    **{kind: _mapping(kind) for kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)},
}
NAMED = {kind.__name__: kind for kind in CONTAINERS}
# The types that a defaultdict may make.
FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
BASES = (*CONTAINERS, *VALUES, int, float, str)

# Exceptions that cross unchanged. Not among them: exceptions that catch all, come from failing tests, end an iteration
# or hold further exceptions.
NEVER = (AssertionError, AttributeError, NameError, StopIteration, StopAsyncIteration, BaseExceptionGroup)
EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and (issubclass(kind, Exception) or kind is SystemExit)
    if kind is not Exception and not issubclass(kind, NEVER)
}
# Built-in types, functions and constants cross unchanged, except functions that run text or reach files.
BUILTINS: dict[str, Any] = EXCEPTIONS | {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, (type, types.BuiltinFunctionType, type(NotImplemented), type(...)))
    if not (isinstance(value, type) and issubclass(value, BaseException))
    if name not in ("eval", "exec", "compile", "open", "input", "breakpoint", "__import__", "globals", "locals", "vars")
}
BUILTIN_NAMES = {id(value): name for name, value in BUILTINS.items()}


def as_base(value):
    """Return a copy of an instance of a derived class as an instance of its base. Raises NotPlain."""
    base = next((base for base in type(value).__mro__ if base in BASES), None)
    if base is None or type(value) is base:
        raise NotPlain(f"an object of the class {type(value).__name__}")
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


class Encoder:
    """Encodes values as JSON. containers: already numbered. wide: arrays as a program sends them. Raises NotPlain."""

    def __init__(self, containers=(), wide=False):
        self.containers, self.wide = [*containers], wide
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
        if id(value) in BUILTIN_NAMES:
            return {"builtin": BUILTIN_NAMES[id(value)]}
        if kind.__module__ == "numpy":
            return self.encode_numpy(value)
        if isinstance(value, BaseException):
            return {"error": encode_error(value, self)}
        if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
            return self.encode_iterator(value)
        return self.encode(as_base(value))

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

    def encode_iterator(self, steps):
        """Return the items, and the error at which the iterator ended, or None."""
        items: list[Any] = []
        error: Any = None
        try:
            items += itertools.islice(steps, MOST_ITEMS)
            if len(items) == MOST_ITEMS:
                error = ["ProgramError", "an iterator has too many items", [], []]
        except BaseException as raised:  # the program may raise anything
            error = encode_error(raised, self)
        return {"iterator": [self.items(items), error]}

    def encode_numpy(self, value):
        import numpy

        if isinstance(value, numpy.generic) or (type(value) is numpy.ndarray and value.shape == ()):
            item = value.item()
            if type(item) not in (bool, *ALIKE):
                raise NotPlain(f"a number of the class {type(value).__name__}")
            return self.encode(item)
        if type(value) is not numpy.ndarray:
            raise NotPlain(f"an object of the class {type(value).__name__}")
        if self.wide and not value.size:  # for numpy, empty arrays equal any array
            return self.encode([])
        kind = WIDER.get(value.dtype.kind, value.dtype.str) if self.wide else value.dtype.str
        if not ARRAY.fullmatch(kind):
            raise NotPlain(f"an array of {value.dtype}")
        return {"ndarray": [kind, [*value.shape], self.items(value.ravel().tolist())]}


class Decoder:
    """Decodes values from an Encoder's JSON. Malformed data raises some Exception."""

    def __init__(self, containers=(), wide=False):
        self.containers, self.wide = [*containers], wide

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
        match name:
            case "ref":
                return self.containers[content]
            case "int":
                return int(content, 16)
            case "builtin":
                return BUILTINS[content]
            case "error":
                return decode_error(content, self)
            case "iterator":
                return iterate(self.items(content[0]), content[1] and decode_error(content[1], self))
            case "ndarray":
                return self.decode_array(*content)
        raise ValueError(name)

    def items(self, values):
        kinds = {*map(type, values)}
        return [*map(self.decode, values)] if list in kinds or dict in kinds else values

    def decode_container(self, kind, extra, items):
        options = {collections.deque: ((), extra), collections.defaultdict: (FACTORIES.get(extra),)}
        container = kind(*options.get(kind, ()))
        self.containers.append(container)
        fill(container, self.items(items))
        return container

    def decode_array(self, kind, shape, items):
        import numpy

        if not (WIDE if self.wide else ARRAY).fullmatch(kind) or (self.wide and not items):
            raise ValueError("an array of another kind, or of nothing")
        if numpy.dtype(kind).itemsize * len(items) > MOST_BYTES:
            raise ValueError("an array of too long texts")
        array = numpy.empty(len(items), kind)
        for place, item in enumerate(self.items(items)):
            array[place] = item
        return array.reshape(shape)


def iterate(items, error):
    yield from items
    if error:
        raise error


def read_message(data):
    """Return the JSON of a message. Raises ValueError if the message has too many parts, or is no JSON."""
    if data.count(b"[") + data.count(b"{") > MOST_PARTS:
        raise ValueError("the message has too many parts")
    return json.loads(data)


# --- exceptions: a class is the name of a built-in one, or a name and what it is derived from

CLASSES: dict[str, type] = {}


class ProgramError(Exception):
    """The program has ended, or has sent no message or no plain data."""


def describe(kind):
    if EXCEPTIONS.get(name := kind.__name__) is kind:
        return name
    return [name, [describe(base) for base in kind.__bases__ if issubclass(base, BaseException)]]


def class_of(description):
    """Return the class of a description: a built-in class of EXCEPTIONS, or a class made here, once for each
    description. So a program can never name a class of the tests."""
    if type(description) is str and description in EXCEPTIONS:
        return EXCEPTIONS[description]
    name, bases = (description, []) if type(description) is str else description
    key = json.dumps(description)
    if key not in CLASSES:
        parents = tuple(dict.fromkeys(map(class_of, bases))) or (Exception,)
        namespace = {"__module__": "solution", "__str__": lambda error: vars(error).get("_text", "")}
        try:
            CLASSES[key] = type(str(name), parents, namespace)
        except TypeError:  # the bases do not fit together
            CLASSES[key] = type(str(name), (Exception,), namespace)
    return CLASSES[key]


def plain_items(values, encoder):
    """Return the values as JSON, with None for values that are not plain."""

    def encode(value):
        count = len(encoder.containers)
        try:
            return encoder.encode(value)
        except (NotPlain, RecursionError):
            for container in encoder.containers[count:]:
                del encoder.numbers[id(container)]
            del encoder.containers[count:]
            return None

    return [*map(encode, values)]


def encode_error(error, encoder):
    try:
        text, parts = str(error), error.__reduce__()[1]  # an OSError has more parts than `args`
    except BaseException:  # an exception of the program may be anything
        text, parts = "", error.args
    fields = [part for name, value in vars(error).items() for part in (name, value)]
    return [describe(type(error)), text, plain_items(parts, encoder), plain_items(fields, encoder)]


def decode_error(data, decoder):
    description, text, parts, fields = data
    kind, parts, fields = class_of(description), decoder.items(parts), decoder.items(fields)
    error = kind.__new__(kind, *parts)
    if kind in EXCEPTIONS.values():
        error.__init__(*parts)
    else:
        error.args = tuple(parts)
        names = zip(fields[::2], fields[1::2], strict=True)
        vars(error).update({name: value for name, value in names if not name.startswith("_")}, _text=str(text))
    return error
