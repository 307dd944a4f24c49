"""A sample with every column, and samples in a spool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from areal.samples.trajectory import Branch, Group, Trajectory
from areal.storage.spool import Spool, SpoolPart

# A prompt 0 1 and two answers, of which the second branches off within the first; then a conversation of its own.
BRANCHED = Trajectory(
    tokens=np.array([0, 1, 2, 3, 7, 8, 9, 5], np.int32),
    logprobs=np.array([0, 0, -2, -3, 0, -8, 0, -5], np.float32),
    versions=np.array([-1, -1, 4, 4, -1, 5, -1, 3], np.int32),
    reward=1.0,
    finish="stop",
    branches=(Branch(0, 4), Branch(3, 2), Branch(0, 2)),
    returns=np.arange(8.0),
    teacher_logprobs=np.array([0, 0, -1, -2, 0, -3, 0, -4], np.float32),
    reference_logprobs=np.array([0, 0, -4, -3, 0, -2, 0, -1], np.float32),
    teacher_top_tokens=np.array([(0, 0), (0, 0), (2, 7), (5, 6), (0, 0), (8, 1), (0, 0), (9, 5)], np.int32),
    teacher_top_logprobs=np.array([(0, 0), (0, 0), (-1, -2), (-2, -3), (0, 0), (-1, -4), (0, 0), (-1, -5)], np.float32),
    routes=np.array([(0, 0), (0, 0), (1, 0), (3, 1), (0, 0), (0, 255), (0, 0), (2, 1)], np.uint8),
    pictures=np.repeat(np.array([[0], [7], [0], [0], [0], [0], [255], [0]], np.uint8), 16, 1),
)


def put(spool: Spool, group: Group, place: int = 0, size: int = 0) -> Group | None:
    """Store samples of a group from `place` on. size: that of the group; 0: it has just these."""
    parts = {
        place + n: SpoolPart(replace(group, trajectories=(sample,), notes=group.notes[n : n + 1]), sample.frame())
        for n, sample in enumerate(group.trajectories)
    }
    return spool.put_all(parts, size or len(parts)).group
