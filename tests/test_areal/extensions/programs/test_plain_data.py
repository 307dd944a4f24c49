"""The codec of what a program and its tests exchange: what is decoded is of the table, whatever was sent."""

from __future__ import annotations

import array
import collections
import copy
import datetime
import json
import math
import random
import sys
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.extensions.programs import plain_data

EXACT = {*plain_data.BASES, bool, type(None), np.ndarray, type(NotImplemented), type(...), types.GeneratorType}


def encoded(value):
    return json.dumps(plain_data.Encoder().encode(value)).encode()


def decoded(data, wide=False):
    return plain_data.Decoder(wide=wide).decode(plain_data.read_message(data))


ZONE = datetime.timezone(datetime.timedelta(hours=2))
numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(1400, 1500).map(lambda n: 7**n),
    st.floats(),
    st.text(),
    st.complex_numbers(),
    st.binary(),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.dates(),
    st.timedeltas(),
    st.datetimes(allow_imaginary=False).map(lambda v: v.replace(fold=0)),
    st.times().map(lambda v: v.replace(tzinfo=ZONE, fold=0)),
    st.builds(range, st.integers(), st.integers()),
    st.sampled_from([int, len, ValueError, NotImplemented, ...]),
    st.binary().map(memoryview),
    st.lists(st.integers(0, 99)).map(lambda v: array.array("i", v)),
)
keys = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.booleans()), st.frozensets(st.integers()))


def containers(items):
    dicts = st.dictionaries(keys, items, max_size=4)
    return st.one_of(
        st.lists(items, max_size=4),
        st.lists(items, max_size=4).map(tuple),
        st.sets(keys, max_size=4),
        dicts,
        st.binary(max_size=9).map(bytearray),
        st.lists(items, max_size=4).map(lambda v: collections.deque(v, maxlen=9)),
        dicts.map(collections.OrderedDict),
        dicts.map(lambda d: collections.defaultdict(list, d)),
        st.text(max_size=9).map(collections.Counter),
        st.lists(st.floats(), max_size=4).map(np.array),
    )


values = st.recursive(numbers, containers, max_leaves=12)
NAMES = [*plain_data.MAKERS, *plain_data.NAMED]
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 1 << 40), st.floats(), st.text(max_size=9)),
    lambda items: st.one_of(
        st.lists(items, max_size=4),
        st.dictionaries(
            st.sampled_from([*plain_data.MAKERS, *plain_data.NAMED, "ref", "int", "ndarray"])
            | st.sampled_from(["error", "builtin", "iterator", "object", "callback", "__class__", "eval"]),
            items,
            max_size=2,
        ),
    ),
    max_leaves=20,
)


def same(first, second):
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and same(first.tolist(), second.tolist())
    if isinstance(first, memoryview):
        return bytes(first) == bytes(second)
    if isinstance(first, (float, complex)):
        return repr(first) == repr(second)
    if isinstance(first, dict):
        return [*first] == [*second] and all(map(same, first.values(), second.values()))
    if isinstance(first, (list, tuple, collections.deque)):
        return len(first) == len(second) and all(map(same, first, second))
    return (
        bool(first == second) and repr(first) == repr(second) or first == second and isinstance(first, (set, frozenset))
    )


def parts_of(value):
    """A value and all that it holds."""
    queue, seen = [value], set()
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        match value:
            case dict():
                queue += [*value.keys(), *value.values()]
            case list() | tuple() | set() | frozenset() | collections.deque():
                queue += value
            case slice():
                queue += [value.start, value.stop, value.step]
            case np.ndarray() if value.dtype.kind == "O":
                queue += value.flat
            case BaseException():
                queue += [*value.args, *vars(value).values()]


@given(values)
@settings(max_examples=3 * settings.default.max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_data_of_the_table_come_out_as_they_went_in(value):
    assert same(decoded(encoded(value)), value)


def test_containers_that_occur_twice_stay_one():
    inner = [1]
    outer = decoded(encoded([inner, {"a": inner}, (inner,)]))
    assert outer[0] is outer[1]["a"] is outer[2][0]
    outer.append(outer)
    again = decoded(encoded(outer))
    assert again[3] is again


class Watch:
    """The events of Python's audit while something is decoded: what runs code, or uses files and processes."""

    FORBIDDEN = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "pickle.", "ctypes.", "marshal.")

    def __init__(self):
        self.events, self.active = [], False
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if self.active and event.startswith(self.FORBIDDEN):
            self.events.append((event, arguments))


@pytest.fixture(scope="module")
def watch():
    return Watch()


def check(data, watch):
    """Decodes what may be anything; true if it is data."""
    watch.active, watch.events = True, []
    try:
        value = decoded(data)
    except Exception:
        return False
    finally:
        watch.active = False
        assert watch.events == []
    size = 0
    for part in parts_of(value):
        kind = type(part)
        is_known = kind in EXACT or isinstance(part, BaseException) or part in plain_data.BUILTINS.values()
        assert is_known, kind
        if isinstance(part, BaseException):
            assert not isinstance(part, plain_data.NEVER)
            assert kind.__module__ in ("builtins", "solution", "areal.extensions.programs.plain_data")
        size += part.nbytes if isinstance(part, np.ndarray) else sys.getsizeof(part)
    assert size <= 1000 * len(data) + (1 << 17)
    return True


@given(JUNK)
@settings(max_examples=6 * settings.default.max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_sent_only_data_come_out(watch, junk):
    check(json.dumps(junk).encode(), watch)


@given(values, st.randoms(use_true_random=False))
@settings(max_examples=3 * settings.default.max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_messages_that_are_changed_give_only_data(watch, value, chance):
    data = bytearray(encoded(value))
    check(bytes(mutated(data, chance)), watch)
    check(json.dumps(shuffled(json.loads(encoded(value)), chance)).encode(), watch)


def mutated(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        data[place : place + chance.randint(0, 2)] = chance.choice(
            [b"", b"9", b"[", b"]", b"{", b'"', b"-", b"e9", b"null"]
        )
    return data


def shuffled(message, chance):
    """A message, in which names and contents have changed places."""
    match message:
        case list():
            message = [shuffled(item, chance) for item in message]
            chance.shuffle(message)
            return message
        case dict():
            return {
                chance.choice([name, *NAMES, "ref", "ndarray", "error", "builtin", "iterator"]): shuffled(
                    content, chance
                )
                for name, content in message.items()
            }
    return chance.choice([message, message, -1, True, "int", 1e9, [], None])


@pytest.mark.parametrize(
    "message",
    [
        {"Fraction": ["1e999999999", None]},
        {"Fraction": [1, 0]},
        {"int": "zz"},
        {"ndarray": ["|O", [1], "00"]},
        {"ndarray": ["<f8", [2], [1, [2]]]},
        {"ndarray": ["<f8", [1 << 62], [1]]},
        {"ndarray": ["<f8", [2], [1, "x"]]},
        {"ndarray": ["<U9", [9], ["00"]]},
        {"ndarray": ["<U999999999", [1], ["00"]]},
        {"ndarray": ["V8", [1], [0]]},
        {"deque": [-1, []]},
        {"dict": [None, [1]]},
        {"set": [None, [[]]]},
        {"ref": 0},
        {},
        {"type": ["X"]},
        {"object": [1, []]},
        {"bytes": [5]},
        {"range": [1.5]},
        {"error": ["E", "", 5, []]},
        {"builtin": "exec"},
        {"builtin": "AssertionError"},
        {"error": [["\0", ["Exception"]], "", [], []]},
        {"ndarray": ["<f8", [], [1, 2]]},
    ],
)
def test_malformed_messages_are_refused(watch, message):
    assert not check(json.dumps(message).encode(), watch)


def test_messages_of_too_many_parts_or_that_are_too_deep_are_refused():
    with pytest.raises(ValueError, match="too many parts"):
        plain_data.read_message(b"[" + b"[]," * plain_data.MOST_PARTS + b"[]]")
    with pytest.raises(RecursionError):
        decoded(b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(ValueError, match="digits"):
        decoded(b"9" * 100_000)


def test_an_error_with_no_base_or_of_bases_that_do_not_fit_is_an_error_of_the_program():
    for bases in ([], ["OSError", "SyntaxError", "KeyError"]):
        error = decoded(json.dumps({"error": [["E", bases], "text", [1], ["x", 2, "_y", 3]]}).encode())
        assert type(error).__bases__ == (Exception,) and error.args == (1,) and error.x == 2
        assert not hasattr(error, "_y") and str(error) == "text"


class Forged(AssertionError, LookupError):
    pass


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ValueError(1), ValueError),
        (KeyError("x"), KeyError),
        (SystemExit(2), SystemExit),
        (Forged(), LookupError),
        *((kind("x"), Exception) for kind in (Exception, BaseException, AssertionError, AttributeError, NameError)),
        *((kind("x"), Exception) for kind in (UnboundLocalError, StopIteration, KeyboardInterrupt, GeneratorExit)),
    ],
)
def test_no_error_arrives_as_what_catches_all_or_what_tests_raise_themselves(error, base):
    arrival = decoded(encoded(error))
    assert isinstance(arrival, base) and isinstance(arrival, Exception | SystemExit) and type(arrival) is not Exception
    assert not isinstance(arrival, AssertionError | AttributeError | NameError | StopIteration)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float16("inf"), math.inf),
        (np.float32(16777216), 16777216.0),
        (np.float64(2**53), float(2**53)),
        (np.int64(2**53 + 1), 2**53 + 1),
        (np.int8(-1), -1),
        (np.bool_(True), True),
        (np.str_("é"), "é"),
        (np.complex64(1j), 1j),
        (np.array(3, np.float16), 3.0),
    ],
)
def test_numbers_of_numpy_arrive_as_pythons(value, expected):
    arrival = decoded(encoded(value))
    assert arrival == expected and type(arrival) is type(expected)
    assert arrival not in (70_000, 16777217, 2**53 + 1) or arrival == expected


@pytest.mark.parametrize("kind", ["float16", "float32", "int8", "uint16", "complex64", "bool", "<U3", "S2"])
def test_arrays_of_a_program_arrive_with_64_bits_a_number(kind):
    value = np.array([1, 0], kind)
    arrival = decoded(json.dumps(plain_data.Encoder(wide=True).encode(value)).encode(), wide=True)
    assert arrival.tolist() == value.tolist() and (arrival.dtype.itemsize >= 8 or arrival.dtype.kind in "bUS")
    if value.dtype.itemsize < 8 and value.dtype.kind in "iufc":
        with pytest.raises(ValueError, match="another kind"):
            decoded(encoded(value), wide=True)
    assert plain_data.Encoder(wide=True).encode(np.empty((0, 1, 1), kind)) == []
    for shape in ([0], [1, 0], [-1]):
        with pytest.raises(ValueError):
            decoded(json.dumps({"ndarray": ["<f8", shape, []]}).encode(), wide=True)
    for refused in (np.longdouble(1), np.array([1], np.longdouble), np.array([1], "M8[s]"), np.ma.masked):
        with pytest.raises(plain_data.NotPlain):
            plain_data.Encoder(wide=True).encode(refused)


def test_derived_values_are_sent_as_their_base():
    class Own(dict):
        __eq__ = __contains__ = lambda *_: True

    class Number(int):
        __int__ = __index__ = lambda _: 5

    for value, base in ((Own(a=1), {"a": 1}), (Number(7), 7), (collections.namedtuple("P", "x")(3), (3,))):
        assert same(plain_data.as_base(value), base)
    for value in (object(), lambda: 0, print, Number):
        if value is not print:
            with pytest.raises(plain_data.NotPlain):
                encoded(value)


def test_a_message_has_only_what_its_arguments_have():
    sizes = [len(encoded([[i] * 1000])) for i in range(10, 20)]
    lists = [[i] * 1000 for i in range(100)]
    assert len({*sizes}) == 1 and len(encoded([lists[50]])) == sizes[0]
    assert math.isclose(len(encoded(copy.deepcopy(lists))), 100 * sizes[0], rel_tol=0.1)
