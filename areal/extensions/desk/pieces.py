"""The pieces of a row of tokens, for tools that show or write the turns of a sample."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal.samples.table import NOT_SAMPLED


class Piece(NamedTuple):
    """Tokens from `start` to `end` - 1 of a row: all sampled, or all not."""

    sampled: bool
    start: int
    end: int


def pieces(versions: Sequence[int]) -> list[Piece]:
    """Split a row with the versions [T] into turns: tokens sampled by the policy, and given tokens."""
    sampled = np.asarray(versions) != NOT_SAMPLED
    ends = np.flatnonzero(np.diff(sampled)) + 1
    return [Piece(bool(sampled[a]), a, b) for a, b in pairwise([0, *ends.tolist(), len(sampled)])]
