"""What goes through the codec comes out as it was; what was never a message is refused, and harms nobody."""

import ast
import inspect
import json
import struct
import sys
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.stored_samples import BRANCHED

from areal.samples.trajectory import Trajectory
from protocols import codec, messages
from protocols.attempt_messages import GroupFailed
from protocols.bus_errors import MalformedError, ProtocolVersionError
from protocols.codec import (
    MAX_BODY_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Header,
    decode_body,
    decode_header,
    encode,
)
from protocols.evaluation_messages import RowScores, RowsScored
from protocols.membership_messages import Join, Leave, Member, Policy, Snapshot, Welcome
from protocols.messages import Completion, Generate, NewSequence, Score, ScoredSample, StoreSamples, TokenColumns
from protocols.version import SUBJECTS

WITHOUT_NUMBERS = {
    "group_ready": {"group": "g", "start_version": 0, "signal": True, "reward_mean": 0.0},
    "heartbeat": {"state": "healthy", "serves": (), "activity": ""},
}
REFUSALS = (MalformedError, ProtocolVersionError)


def header(kind="generate", **fields):
    return Header(kind=kind, sender="rollout_manager/0#a", id="7", **fields)


def header_fields(kind="generate"):
    return header(kind)._asdict() | {"v": PROTOCOL_VERSION}


def frames_of(message):
    return [bytes(frame) for frame in encode(header(message.kind), message)]


def there_and_back(message):
    frames = frames_of(message)
    return decode_body(decode_header(frames).kind, frames)


def decode(frames):
    return decode_body(decode_header(frames).kind, frames)


def columns(*lengths):
    n = sum(lengths)
    return {
        "tokens": np.arange(n, dtype=np.int32),
        "logprobs": np.linspace(-3, 0, n, dtype=np.float32),
        "versions": np.full(n, 5, np.int32),
    }


def tokens(*counts):
    numbers, finishes = np.arange(len(counts)), np.ones(len(counts), np.int32)
    return TokenColumns(jobs=numbers, counts=np.array(counts, np.int32), finishes=finishes, columns=columns(*counts))


def group(*lengths, **more):
    frames = (np.concatenate([array.view(np.uint8) for array in columns(n).values()]) for n in lengths)
    samples = tuple(ScoredSample(place=place, frame=frame) for place, frame in enumerate(frames))
    return StoreSamples(**{"group": "g", "prompt_index": 3, "row": "", "samples": samples} | more)


def score(row=None, prompt="p"):
    one = Completion(job=0, function="f", prompt=prompt, completions=("c",), row=0)
    return Score(flow=0, rows=(row or {},), completions=(one,))


def generate(*prompts):
    new = NewSequence(job=0, prompt=0, temperature=1.0, top_p=1.0, max_new_tokens=1, min_version=0)
    return Generate(flow=0, prompts=prompts, sequences=(new,))


def body_with_array(index=0, dtype="int32", shape=(2,)):
    description = msgpack.packb([index, dtype, shape])
    body = {"flow": 0, "prompts": [msgpack.ExtType(1, description)], "sequences": []}
    return msgpack.packb(body)


def generate_frames(body, *arrays):
    return [msgpack.packb(header_fields()), body, *arrays]


# --- round trips


def test_an_array_arrives_as_a_view_on_its_frame():
    message = tokens(600, 400)
    frames = frames_of(message)
    got = decode(frames)
    arrived, sent = ({"jobs": m.jobs, "counts": m.counts, "finishes": m.finishes} | m.columns for m in (got, message))
    for (name, array), frame in zip(arrived.items(), frames[2:], strict=True):
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
        np.testing.assert_array_equal(array, sent[name])


def test_an_array_leaves_as_a_view_on_itself():
    message = generate(np.arange(1000, dtype=np.int32))
    frames = encode(header("generate"), message)
    assert np.shares_memory(message.prompts[0], np.frombuffer(frames[2], np.uint8))


def test_an_empty_array_keeps_its_type():
    got = there_and_back(tokens()).columns
    assert (got["tokens"].shape, got["tokens"].dtype, got["logprobs"].dtype) == ((0,), np.int32, np.float32)


@pytest.mark.parametrize("dtype", sorted(codec.DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0, 3), (2, 3, 4, 5)])
def test_every_dtype_and_shape_that_may_travel_does(dtype, shape):
    array = (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
    got = there_and_back(score({"array": array})).rows[0]["array"]
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


def test_a_strided_array_arrives_in_order():
    array = np.arange(12, dtype=np.int64).reshape(3, 4).T[::-1]
    got = there_and_back(score({"array": array}))
    np.testing.assert_array_equal(got.rows[0]["array"], array)


def test_nested_parts_keep_their_own_arrays():
    prompts = [np.arange(n, dtype=np.int32) for n in (4, 0, 9)]
    for sent, received in zip(prompts, there_and_back(generate(*prompts)).prompts, strict=True):
        np.testing.assert_array_equal(received, sent)


def test_nested_models_and_maps_come_back_equal():
    member = Member(identity="reward/0#b", role="reward", index=0, address="tcp://a:1", state="healthy")
    welcome = Welcome(
        identity="generator/1#c",
        start="2/1",
        config={"a": {"b": None, "c": 1.5, "d": "é"}},
        snapshot=Snapshot(
            policy=Policy(lineage=0, version=2, folder="f"), members=(member,), sequence=9, events="tcp://a:2"
        ),
    )
    assert there_and_back(welcome) == welcome


def test_long_texts_of_a_large_message_travel_as_frames_of_their_own():
    tests = [{"input": "1\n" * 700_000, "output": "é" * 40_000}, {"input": "2", "output": None}]
    message = score({"tests": tests, "n": 3}, "p" * MAX_BODY_BYTES)
    frames = frames_of(message)
    assert len(frames[1]) < 1000
    got = there_and_back(message)
    assert got.completions == message.completions
    assert json.loads(json.dumps(got.rows[0])) == {"tests": tests, "n": 3}


def test_a_small_message_has_no_frame_for_its_texts():
    assert len(frames_of(score(prompt="p" * 100_000))) == 2


@pytest.mark.parametrize(
    ("index", "frame", "sentence"), [(0, b"\xff\xfe", "not UTF-8"), (1, b"a", "malformed"), ("0", b"a", "malformed")]
)
def test_a_text_apart_that_is_broken_is_refused(index, frame, sentence):
    frames = frames_of(score(prompt="p" * MAX_BODY_BYTES))
    place = msgpack.ExtType(2, msgpack.packb(index))
    frames[1] = msgpack.packb({"flow": 0, "rows": [place], "completions": []})
    frames[2] = frame
    with pytest.raises(MalformedError, match=sentence):
        decode(frames)


# --- what may not leave


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.zeros(3, np.float16),
        np.arange(3, dtype=">i4"),
        np.zeros((1,) * 5, np.int32),
    ],
    ids=["object", "str", "float16", "byte order", "five dimensions"],
)
def test_an_array_the_receiver_would_refuse_does_not_leave(array):
    with pytest.raises(MalformedError, match="cannot be sent"):
        frames_of(score({"array": array}))


@pytest.mark.parametrize("value", [{1, 2}, 1 << 70, "\udc80", np.float32(1), print], ids=repr)
def test_a_value_that_is_no_message_part_does_not_leave(value):
    with pytest.raises(MalformedError):
        frames_of(score({"x": value}))


def test_nesting_without_end_does_not_leave():
    row = {}
    row["again"] = row
    with pytest.raises(MalformedError):
        frames_of(score(row))


def test_a_message_too_large_does_not_leave(monkeypatch):
    with pytest.raises(MalformedError, match="bytes of body"):
        frames_of(score({"tests": ["x" * 1000] * 1100}))
    with pytest.raises(MalformedError, match="arrays"):
        frames_of(generate(*[np.zeros(1, np.int32)] * 4200))
    with pytest.raises(MalformedError, match="cannot be sent"):
        huge = np.broadcast_to(np.int32(0), (MAX_FRAME_BYTES,))
        frames_of(generate(huge))


# --- what is refused on arrival


def test_another_protocol_version_is_its_own_error():
    frames = frames_of(Leave(reason="x"))
    frames[0] = msgpack.packb(header_fields("leave") | {"v": PROTOCOL_VERSION + 1, "new_field": 1})
    with pytest.raises(ProtocolVersionError, match="install the same version"):
        decode(frames)


@pytest.mark.parametrize("version", [None, "1", 1.0, True, [[1]]], ids=repr)
def test_a_version_that_is_no_number_is_no_version(version):
    frames = frames_of(Leave(reason="x"))
    frames[0] = msgpack.packb(header_fields("leave") | {"v": version})
    with pytest.raises(MalformedError):
        decode(frames)


def test_a_header_without_a_version_is_malformed():
    with pytest.raises(MalformedError, match="version"):
        decode_header([msgpack.packb({"kind": "scored", "sender": "x"}), b"\x80"])


def test_a_version_nested_beyond_the_recursion_limit_is_malformed():
    frame = b"\x81\xa1v" + b"\x91" * 900 + b"\x01"
    with pytest.raises(MalformedError):
        decode_header([frame, b"\x80"])


@pytest.mark.parametrize("change", [{"unknown": 1}, {"sender": None}, {"id": "x" * 200}, {"remaining_ms": -1}], ids=str)
def test_a_wrong_header_field_is_refused(change):
    with pytest.raises(MalformedError):
        decode_header([msgpack.packb(header_fields() | change), b"\x80"])


def test_a_header_over_its_limit_is_refused_unread():
    with pytest.raises(MalformedError, match="at most 4096"):
        decode_header([b"\xc1" * 5000, b"\x80"])


def test_too_few_and_too_many_frames_are_refused():
    frames = frames_of(Leave(reason="x"))
    with pytest.raises(MalformedError):
        decode_header(frames[:1])
    with pytest.raises(MalformedError):
        decode_header(frames + [b""] * 5000)


def test_a_body_over_its_limit_is_refused_unread():
    with pytest.raises(MalformedError, match="a frame of"):
        decode_body("leave", [b"", b"\xc1" * (MAX_BODY_BYTES + 1)])


def test_an_unknown_kind_is_refused():
    with pytest.raises(MalformedError, match="unknown kind"):
        decode_body("no_such_kind", frames_of(Leave(reason="x")))


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb({"score": 1.0, "more": 1}),
        msgpack.packb({}),
        msgpack.packb({"score": "1.0"}),
        msgpack.packb({b"score": 1.0}),
        msgpack.packb({1: 1.0}),
        msgpack.packb([1.0]),
        msgpack.packb({"score": 1.0}) + b"\x00",
        b"\x82" + 2 * (msgpack.packb("score") + msgpack.packb(1.0)),
        b"",
    ],
    ids=[
        "unknown key",
        "missing key",
        "wrong type",
        "bytes key",
        "int key",
        "no map",
        "trailing",
        "key twice",
        "empty",
    ],
)
def test_a_wrong_body_is_refused(body):
    with pytest.raises(MalformedError):
        decode_body("leave", [b"", body])


@pytest.mark.parametrize(
    "described",
    [
        {"index": 1},
        {"index": -1},
        {"index": "0"},
        {"dtype": "object"},
        {"dtype": "O"},
        {"dtype": "float16"},
        {"dtype": 3},
        {"shape": (3,)},
        {"shape": (-2,)},
        {"shape": (True, 2)},
        {"shape": 2},
        {"shape": (1, 1, 1, 1, 2)},
        {"shape": (1 << 63, 1 << 63)},
    ],
    ids=str,
)
def test_a_wrongly_described_array_is_refused(described):
    with pytest.raises(MalformedError):
        decode(generate_frames(body_with_array(**described), np.arange(2, dtype=np.int32).tobytes()))


@pytest.mark.parametrize(
    "dtype_and_shape", [("int64", (2,)), ("bool", (2,)), ("int32", (1, 2)), ("int32", ())], ids=str
)
def test_an_array_of_another_type_than_the_field_s_is_refused(dtype_and_shape):
    dtype, shape = dtype_and_shape
    data = np.zeros(shape, dtype).tobytes()
    with pytest.raises(MalformedError, match="prompts.0: .*not of int32 with one"):
        decode(generate_frames(body_with_array(0, dtype, shape), data))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(number):
    with pytest.raises(MalformedError, match="finite"):
        decode_body("group_ready", [b"", msgpack.packb(WITHOUT_NUMBERS["group_ready"] | {"reward_mean": number})])


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("group_ready", "reward_mean", 1.7e308),
        ("group_ready", "reward_parts", {"form": 1.7e308}),
        ("heartbeat", "stats", {"tokens_generated": 1.7e308}),
    ],
    ids=str,
)
def test_a_number_that_has_no_finite_sum_with_another_is_refused(kind, field, value):
    with pytest.raises(MalformedError, match=f"{field}.*less than or equal to 1"):
        decode_body(kind, [b"", msgpack.packb({**WITHOUT_NUMBERS[kind], field: value})])


@pytest.mark.parametrize("item", [0, {}], ids=str)
def test_a_long_list_of_wrong_items_costs_one_error(item):
    body = msgpack.packb({"groups": (item,) * 100_000})
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError, match=r"groups\.0"):
            decode_body("renew_leases", [b"", body])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_list_without_end_is_refused_before_it_is_built():
    with pytest.raises(MalformedError, match="max_array_len"):
        decode_body("renew_leases", [b"", msgpack.packb({"groups": (0,) * 1_000_000})])


@pytest.mark.parametrize("shape", [(0, 1 << 62), (0, 1 << 63), (0, 1 << 40, 1 << 40), (0, (1 << 64) - 1)])
def test_an_empty_array_of_impossible_shape_is_refused(shape):
    with pytest.raises(MalformedError):
        decode(generate_frames(body_with_array(shape=shape), b""))


def test_an_array_without_its_frame_is_refused():
    with pytest.raises(MalformedError):
        decode(generate_frames(body_with_array()))


@pytest.mark.parametrize("code", [0, 3, 5, 127])
def test_an_unknown_extension_is_refused(code):
    with pytest.raises(MalformedError, match="extension"):
        decode_body("leave", [b"", msgpack.packb({"score": msgpack.ExtType(code, b"x" * 8)})])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, b"\xd4\x01\x00" * 3])
def test_an_extension_with_rubbish_inside_is_refused(data):
    with pytest.raises(MalformedError):
        decode_body("leave", [b"", msgpack.packb({"score": msgpack.ExtType(1, data)})])


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("depth", [1000, 3000, 100_000])
def test_deep_nesting_does_not_break_the_reader(opening, depth):
    fields = {"function": "f", "prompt": "p", "completion": "c"}
    body = b"\x84" + b"".join(msgpack.packb(item) for pair in fields.items() for item in pair)
    body += msgpack.packb("row") + opening * depth + b"\x01"
    try:
        assert decode_body("score", [b"", body]).kind == "score" and depth == 1000
    except MalformedError:
        pass


@pytest.mark.parametrize(
    "head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"], ids=["array", "map", "str", "bin", "ext"]
)
def test_a_length_that_the_frame_cannot_hold_is_refused(head):
    for length in (1 << 10, MAX_BODY_BYTES - 100, (1 << 32) - 1):
        with pytest.raises(MalformedError):
            decode_body("leave", [b"", b"\x81\xa5score" + head + struct.pack(">I", length)])


def test_a_map_of_a_million_unknown_keys_is_refused_before_it_is_built():
    body = b"\xdf" + struct.pack(">I", 200_000) + b"".join(b"\xa5%05x\x00" % i for i in range(140_000))
    assert len(body) < MAX_BODY_BYTES
    with pytest.raises(MalformedError, match="not msgpack"):
        decode_body("leave", [b"", body])


def test_the_text_of_a_refusal_stays_short():
    body = msgpack.packb({"x" * 500_000: 1})
    with pytest.raises(MalformedError) as refusal:
        decode_body("leave", [b"", body])
    assert len(str(refusal.value)) < 1000


def test_nothing_in_the_protocol_can_execute_what_it_reads():
    for module in (codec, messages, sys.modules["protocols.bus_errors"]):
        tree = ast.parse(inspect.getsource(module))
        imported = {
            name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
        } | {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        assert not called & {"eval", "exec", "__import__"}


EXAMPLES = [
    frames_of(message)
    for message in (
        tokens(3, 2),
        group(3, 2),
        generate(np.arange(5, dtype=np.int32)),
        Join(role="reward", index=None, address="tcp://a:1"),
        Snapshot(policy=Policy(lineage=0, version=2, folder="f"), members=(), sequence=9, events="tcp://a:2"),
        score({"a": [1, {"b": None}]}),
        GroupFailed(group="g", cause="reward", reason="é"),
    )
]

mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "drop", "swap", "repeat"]),
        st.integers(0, 1 << 16),
        st.integers(0, 1 << 16),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def mutated(frames, changes):
    frames = list(frames)
    for what, where, at, data in changes:
        i = where % len(frames)
        at %= len(frames[i]) + 1
        match what:
            case "flip":
                frames[i] = frames[i][:at] + data + frames[i][at + len(data) :]
            case "cut":
                frames[i] = frames[i][:at]
            case "insert":
                frames[i] = frames[i][:at] + data + frames[i][at:]
            case "drop" if len(frames) > 1:
                del frames[i]
            case "swap":
                frames[i], frames[-1] = frames[-1], frames[i]
            case "repeat":
                frames.insert(i, frames[i])
    return frames


@settings(max_examples=6 * settings.default.max_examples)
@given(st.sampled_from(EXAMPLES), mutations)
def test_a_mutated_message_is_understood_or_refused(frames, changes):
    frames = mutated(frames, changes)
    try:
        decode(frames)
    except REFUSALS as refusal:
        assert len(str(refusal)) < 1000


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_random_frames_are_refused(frames):
    with pytest.raises(REFUSALS):
        decode(frames)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.sampled_from(sorted(messages.KINDS)), st.binary(max_size=64), st.lists(st.binary(max_size=16), max_size=3))
def test_a_random_body_of_any_kind_is_understood_or_refused(kind, body, arrays):
    try:
        decode_body(kind, [b"", body, *arrays])
    except REFUSALS:
        pass


# --- the table of messages


def test_every_message_stands_in_the_table_or_in_a_list():
    for module in SUBJECTS:
        words = set(module.__doc__.replace(",", " ").replace("|", " ").replace(".", " ").split())
        classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
        sent = {cls.__name__ for cls in classes if issubclass(cls, messages.Message) and cls is not messages.Message}
        assert sent <= words, sent - words


def test_every_message_is_known_by_its_kind():
    assert messages.KINDS["token_columns"] is TokenColumns
    assert all(cls.kind == kind for kind, cls in messages.KINDS.items())


# --- scores of rows


def test_columns_that_do_not_fit_together_are_refused():
    frames = frames_of(tokens(3, 2))
    body = msgpack.unpackb(frames[1], strict_map_key=False)
    for field in ("jobs", "counts", "finishes", "tokens", "logprobs", "versions"):
        wrong = body["columns"]["tokens"] if field == "jobs" else body["jobs"]
        changed = {field: wrong} if field in body else {"columns": body["columns"] | {field: wrong}}
        with pytest.raises(MalformedError):
            decode([frames[0], msgpack.packb(body | changed), *frames[2:]])


@pytest.mark.parametrize(
    ("message", "wrong", "said"),
    [
        (tokens(1, 1), {"counts": np.array([3, -1], np.int32)}, "as the counts say"),
        (tokens(1, 1), {"finishes": np.array([1, -1], np.int32)}, "out of range"),
        (tokens(1, 1), {"finishes": np.array([1, 3], np.int32)}, "out of range"),
    ],
)
def test_columns_out_of_range_are_refused(message, wrong, said):
    with pytest.raises(MalformedError, match=said):
        there_and_back(message.model_copy(update=wrong))


def test_a_sample_arrives_with_its_branches_and_returns():
    frame = np.frombuffer(BRANCHED.frame(), np.uint8)
    arrived = there_and_back(group(3, samples=(ScoredSample(place=2, frame=frame, parts={"exact": 0.5}),)))
    (sample,) = arrived.samples
    assert (sample.place, sample.parts) == (2, {"exact": 0.5}) and bytes(sample.frame) == BRANCHED.frame()
    again = Trajectory.of_frame(sample.frame.data)
    assert again.branches == BRANCHED.branches and again.returns.tolist() == BRANCHED.returns.tolist()
    with pytest.raises(ValidationError):
        group(3, samples=())


def test_scores_of_rows_arrive_as_they_were_sent():
    rows = {7: ([0.1, 1.0], 12), 2: ([-3.5], 0)}
    assert decode(frames_of(RowsScored(version=3, scored=RowScores.of(rows)))).scored.by_row() == rows
    assert RowScores.of({}).by_row() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.array([1, 2], np.int32)},
        {"counts": np.array([2], np.int32)},
        {"counts": np.array([0], np.int32), "scores": np.array([], np.float64)},
        {"scores": np.array([np.nan])},
        {"scores": np.array([1e200])},
        {"tokens": np.array([-1], np.int64)},
    ],
    ids=str,
)
def test_scores_that_do_not_fit_their_rows_are_refused(wrong):
    fields = {name: getattr(RowScores.of({1: ([0.5], 3)}), name) for name in RowScores.model_fields} | wrong
    with pytest.raises(MalformedError):
        decode(frames_of(RowsScored.model_construct(version=1, scored=RowScores.model_construct(**fields))))
