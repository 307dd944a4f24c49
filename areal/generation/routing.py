"""Routing: how many sequences a generator takes, and which generator gets the next sequence.

This module only decides: no I/O, and the caller passes in the time. A generator observes its own engine and adapts its
limit (`Concurrency`). A rollout manager starts groups while generators have room (`groups_that_fit`). An *asker* is an
actor that asks generators for sequences, such as a rollout manager. An asker receives the generators' `GeneratorLoad`
at intervals, and adds the sequences that the asker has started and ended since (`expected`). A new sequence goes to the
generator with the smallest share of its limit in use (`fullness`). `moves.py` has the moves between generators.
"""

import math
from dataclasses import dataclass

# Shares of the KV cache in use. From KV_FULL on, sequences seem to wait for KV cache. Below KV_ROOMY there is room.
KV_FULL = 0.95
KV_ROOMY = 0.92
# Sequences given to a generator, per place: a waiting sequence takes a free place at once.
GIVEN = 1.125
# Samples in hand, per place: some samples are being scored or wait for tools.
IN_HAND = 2
# A sign of pressure lowers the limit to this share of the running sequences.
BACK_OFF = 0.95
# Each look without pressure raises the limit by this share of the ceiling: 32 looks from 0 to the ceiling.
STEP = 1 / 32
# A generator with weights too old for a sequence counts as fuller by this share of its limit.
BEHIND = 0.25


class Concurrency:
    """The limit on how many sequences a generator takes, from 1 to `ceiling`.

    The limit starts at the ceiling. It follows additive increase and multiplicative decrease, as TCP does to find the
    capacity of a link (Chiu and Jain 1989). Preempted sequences, or sequences that wait for KV cache, correspond to
    lost packets. The lowered limit is a share of the sequences that *run* at the moment. So further signs of the same
    pressure do not lower the limit again before fewer sequences run.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._limit = float(ceiling)
        self._preemptions = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def adapt(self, running: int, waiting: int, kv_use: float, preemptions: int) -> None:
        """Adapt the limit; call at even intervals. `kv_use`: 0 to 1; `preemptions`: since the engine's start."""
        preempted, self._preemptions = preemptions > self._preemptions, preemptions
        if preempted or (kv_use >= KV_FULL and waiting):
            self._limit = max(1.0, min(self._limit, BACK_OFF * running))
        elif kv_use < KV_ROOMY and running + waiting >= self._limit * (1 - STEP) - 1:  # the limit is the bottleneck
            self._limit = min(float(self._ceiling), self._limit + STEP * self._ceiling)


def groups_that_fit(samples: int, places: float, sequences: int, in_hand: int) -> int:
    """Return how many groups of `samples` samples to start now. The last group may partly exceed `GIVEN * places`.

    `places`: sequences that generators run at once. `sequences`: sequences that generators have, or are about to get.
    `in_hand`: unfinished samples, including the samples of `sequences`.

        >>> groups_that_fit(samples=8, places=64, sequences=50, in_hand=50)
        3
    """
    return min(math.ceil((GIVEN * places - sequences) / samples), int((IN_HAND * places - in_hand) // samples))


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """A generator's report: `sequences`, running or waiting, including `asker_sequences` of the asker."""

    sequences: int
    asker_sequences: int
    limit: int
    version: int


def expected(load: GeneratorLoad, asker_sequences: int, askers: int) -> int:
    """Estimate the sequences that a generator has now, including `asker_sequences` of this asker. Each of all `askers`
    is assumed to have started or ended as many sequences as this asker since `load` was reported."""
    return max(asker_sequences, load.sequences + askers * (asker_sequences - load.asker_sequences))


def fullness(load: GeneratorLoad, asker_sequences: int, askers: int, min_version: int) -> float:
    """Return how full a generator is, as a share of its limit, for a sequence with weights of `min_version` on."""
    return expected(load, asker_sequences, askers) / load.limit + BEHIND * (load.version < min_version)
