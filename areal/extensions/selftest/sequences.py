"""Sequences sampled by a generator, in a file for other processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal.samples.table import NOT_SAMPLED
from areal.samples.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Sampled:
    """A prompt [P], and the tokens, log-probs and versions sampled after it, [n] each."""

    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def write(sequences: Sequence[Sampled], file: Path) -> None:
    """Write the sequences as an npz file of plain arrays."""
    arrays = {f"{n}.{name}": getattr(s, name) for n, s in enumerate(sequences) for name in Sampled.__slots__}
    np.savez(file, **arrays)


def read(file: Path) -> list[Sampled]:
    """Read a file of `write`."""
    with np.load(file) as arrays:
        count = len(arrays.files) // len(Sampled.__slots__)
        return [Sampled(*(arrays[f"{n}.{name}"] for name in Sampled.__slots__)) for n in range(count)]


def as_group(sequences: Sequence[Sampled]) -> Group:
    """Return the sequences as a group for training, with different rewards."""
    return Group("sampled", 0, tuple(_trajectory(s, float(n % 2)) for n, s in enumerate(sequences)))


def _trajectory(sampled: Sampled, reward: float) -> Trajectory:
    count = len(sampled.prompt)
    return Trajectory(
        np.concatenate([sampled.prompt, sampled.tokens]).astype(np.int32),
        np.concatenate([np.zeros(count), sampled.logprobs]).astype(np.float32),
        np.concatenate([np.full(count, NOT_SAMPLED), sampled.versions]).astype(np.int32),
        reward,
        "length",
    )
