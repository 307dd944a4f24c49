"""The table of tokens: it grows, is cut and seen in part, and travels as columns and frames."""

import numpy as np
import pytest

from areal.samples.table import (
    COLUMNS,
    ENGINE_COLUMNS,
    NOT_SAMPLED,
    Generation,
    TokenTable,
    joined,
    pack,
    split,
    unpack,
    unsampled,
)


def sampled(*tokens: int, version: int = 3, **more: np.ndarray) -> Generation:
    n = len(tokens)
    columns = np.array(tokens, np.int32), np.linspace(-1, 0, n, dtype=np.float32), np.full(n, version, np.int32)
    return Generation(*columns, "stop", **more)


def test_rows_follow_each_other_whatever_they_are_made_of():
    table = TokenTable()
    table.append(unsampled([1, 2]))
    table.extend(2, {"tokens": [5, 6], "logprobs": np.float32([-0.5, -0.25]), "versions": 7})
    table.append(sampled(8))
    assert table.tokens.tolist() == [1, 2, 5, 6, 8] and len(table) == 5
    assert table.versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED, 7, 7, 3]
    assert table.logprobs.tolist() == [0, 0, -0.5, -0.25, -1]
    assert {name: array.dtype for name, array in table.columns.items()} == {
        name: COLUMNS[name].dtype for name in ENGINE_COLUMNS
    }


def test_what_was_seen_of_a_table_stays_as_it_was_whatever_is_added():
    table = TokenTable()
    for number in range(300):
        table.append(sampled(number, number + 1))
        if number == 2:
            seen = table.view(1, 4)
    cut = table.view(0, 3)
    cut.append(sampled(70))
    table.append(sampled(71))
    assert seen.tokens.tolist() == [1, 1, 2] and seen.versions.tolist() == [3, 3, 3]
    assert cut.tokens.tolist() == [0, 1, 1, 70] and cut.view(2, 99).tokens.tolist() == [1, 70]
    assert table.tokens[:4].tolist() == [0, 1, 1, 2]


def test_a_column_that_some_rows_lack_has_there_what_is_declared_for_tokens_that_were_not_sampled():
    table = TokenTable()
    table.append(unsampled([1]))
    likely = np.array([[4, 5], [6, 7]], np.int32)
    table.append(sampled(2, 3, teacher_logprobs=np.float32([-2, -3]), teacher_top_tokens=likely))
    table.append(sampled(9))
    assert table.columns["teacher_logprobs"].tolist() == [0, -2, -3, 0]
    assert table.columns["teacher_top_tokens"].tolist() == [[0, 0], [4, 5], [6, 7], [0, 0]]
    parts = [unsampled([1]), sampled(2, 3, teacher_top_tokens=likely), TokenTable(), sampled(9)]
    columns = joined(parts)
    assert columns["teacher_top_tokens"].tolist() == table.columns["teacher_top_tokens"].tolist()
    for rows, part in zip(split(columns, [1, 2, 0, 1]), parts, strict=True):
        for name in ENGINE_COLUMNS:
            np.testing.assert_array_equal(rows.columns[name], part.columns[name])


def test_no_tables_are_empty_columns():
    assert {name: (len(array), array.dtype) for name, array in joined([]).items()} == {
        name: (0, COLUMNS[name].dtype) for name in ENGINE_COLUMNS
    }


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"logprobs": None}, "other columns than they should: logprobs"),
        ({"mine": np.zeros(3)}, "other columns than they should: mine"),
        ({"versions": np.zeros(3, np.int64)}, "versions is int64"),
        ({"tokens": np.zeros((3, 1), np.int32)}, r"tokens is int32 \(3, 1\)"),
        ({"teacher_top_tokens": np.zeros(3, np.int32)}, r"teacher_top_tokens is int32 \(3,\)"),
        ({"returns": np.zeros(2)}, "should have 3 float64"),
    ],
)
def test_columns_from_outside_are_those_that_are_declared(wrong, sentence):
    columns = {name: array for name, array in (sampled(1, 2, 3).columns | wrong).items() if array is not None}
    with pytest.raises(ValueError, match=sentence):
        split(columns, [1, 2])


def test_arrays_come_back_from_a_frame_as_views_on_it():
    arrays = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.arange(6.0).reshape(3, 2),
        "c": np.zeros((0, 4), np.float32),
        "d": np.array([-5], np.int64),
        "e": np.arange(7, dtype=np.int32),
    }
    frame = np.frombuffer(pack(arrays), np.uint8)
    again = unpack(frame.data)
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)
        assert not array.size or np.shares_memory(again[name], frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"00000007tokens\0",
        b"00000007a <i4 1" + bytes(4),
        b"-0000001" + bytes(40),
        b"00000008a <i4 -1",
        b"00000010a |O 1   " + bytes(8),
        b"00000010a <i4 1 2" + bytes(9),
        b"99999999a <i4 1",
        b"0000000\xff",
        b"00000011a <i4 9x9x9" + bytes(8),
        pack({"a": np.zeros(2)}) + b"x",
        pack({"a": np.zeros(2)})[:-1],
    ],
    ids=range(12),
)
def test_bytes_that_are_no_frame_are_refused(frame):
    with pytest.raises(ValueError):
        unpack(frame)
