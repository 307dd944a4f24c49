"""The calls of an unfinished sample as a frame."""

from __future__ import annotations

import numpy as np
import pytest

from areal.samples.table import Generation, pack, unpack
from areal.storage.saved_calls import NO_LIMIT, SavedCall, digest_of, packed, unpacked


def call(prompt: list[int], *tokens: int, limit: int = NO_LIMIT, finish=None) -> SavedCall:
    n = len(tokens)
    logprobs, versions = np.linspace(-1, 0, n, dtype=np.float32), np.arange(n, dtype=np.int32)
    return SavedCall(
        digest_of(np.array(prompt)), limit, Generation(np.array(tokens, np.int32), logprobs, versions, finish)
    )


CALLS = [call([1, 2], 3, 4, finish="stop"), call([1, 2], 5, limit=7, finish="length"), call([1], 2, 3, 4)]


def test_calls_come_back_as_they_were_packed():
    def plain(calls: list[SavedCall]) -> list[tuple]:
        columns = [[f"{name} {v.dtype} {v}" for name, v in call.sampled.columns.items()] for call in calls]
        return [(c.prompt, c.limit, c.sampled.finish, *column) for c, column in zip(calls, columns, strict=True)]

    assert plain(unpacked(packed(CALLS))) == plain(CALLS)
    assert len({results.prompt for results in CALLS}) == 2, "equal prompts have equal digests, and others do not"
    assert sum(column.nbytes for column in unpack(packed(CALLS)).values()) == 12 * 6 + 25 * 3


WRONG = {
    "other columns": lambda table: table | {"rewards": np.zeros(1)},
    "should have 6 int32": lambda table: table | {"tokens": table["tokens"][1:]},
    "logprobs is float64": lambda table: table | {"logprobs": table["logprobs"].astype(np.float64)},
    "prompts of 3": lambda table: table | {"prompts": table["prompts"][1:]},
    "no token": lambda table: table | {"lengths": np.array([0, 3, 3], np.int32)},
    "unknown finish": lambda table: table | {"finishes": np.array([0, 3, 0], np.uint8)},
    "version or a log-prob": lambda table: table | {"versions": table["versions"] - 1},
    "log-prob that no": lambda table: table | {"logprobs": table["logprobs"] * np.nan},
}


@pytest.mark.parametrize("words", WRONG)
def test_columns_that_are_of_no_calls_are_refused(words: str):
    with pytest.raises(ValueError, match=words):
        unpacked(pack(WRONG[words](unpack(packed(CALLS)))))
