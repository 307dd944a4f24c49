"""A sample with every column, and samples in a spool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from areal.samples.table import COLUMNS, Column
from areal.samples.trajectory import Branch, Group, Trajectory
from areal.storage.spool import Spool, SpoolPart


def some_values(column: Column, sampled: np.ndarray) -> np.ndarray:
    """Values of a column of a sample, where what was not sampled has what the declaration says."""
    values = np.arange(1, 1 + len(sampled) * (1 + column.wide), dtype=column.dtype).reshape(len(sampled), -1)
    values[~sampled] = values[~sampled] if column.unsampled is None else column.unsampled
    return values if column.wide else values[:, 0]


VERSIONS = np.array([-1, -1, 4, 4, -1, 5, -1, 3], np.int32)
COLUMNS_OF_BRANCHED = {name: some_values(column, VERSIONS >= 0) for name, column in COLUMNS.items()} | {
    "tokens": np.array([0, 1, 2, 3, 7, 8, 9, 5], np.int32),
    "logprobs": np.array([0, 0, -2, -3, 0, -8, 0, -5], np.float32),
    "versions": VERSIONS,
    "returns": np.arange(8.0),
    "pictures": np.repeat(np.array([[0], [7], [0], [0], [0], [0], [255], [0]], np.uint8), 16, 1),
}
# A prompt 0 1 and two answers, of which the second branches off within the first; then a conversation of its own.
BRANCHED = Trajectory(
    **COLUMNS_OF_BRANCHED, reward=1.0, finish="stop", branches=(Branch(0, 4), Branch(3, 2), Branch(0, 2))
)


def put(spool: Spool, group: Group, place: int = 0, size: int = 0) -> Group | None:
    """Store samples of a group from `place` on. size: that of the group; 0: it has just these."""
    parts = {
        place + n: SpoolPart(replace(group, trajectories=(sample,), notes=group.notes[n : n + 1]), sample.frame())
        for n, sample in enumerate(group.trajectories)
    }
    return spool.put_all(parts, size or len(parts)).group
