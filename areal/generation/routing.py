"""Routing: how many sequences a generator takes, which generator gets the next sequence, and which sequences move.

This module only decides: no I/O, and the caller passes in the time. A generator observes its own engine and adapts its
limit (`Concurrency`). A rollout manager starts groups while generators have room (`groups_that_fit`). An *asker* is an
actor that asks generators for sequences, such as a rollout manager. An asker receives the generators' `GeneratorLoad`
at intervals, and adds the sequences that the asker has started and ended since (`expected`). A new sequence goes to the
generator with the smallest share of its limit in use (`fullness`). Sequences move from full generators to generators
that run out of work (`plan_moves`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S", bound="Sequence")

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
# With this share of its limit an engine has half of its highest total throughput: less work does not end much sooner.
HALF_SPEED = 0.25
_EMPTY = HALF_SPEED / (1 + HALF_SPEED)  # the slowness of a generator without sequences
# A generator with weights too old for a sequence counts as fuller by this share of its limit.
BEHIND = 0.25
# A move has to save a sequence this share of the time per token on a full engine. So nothing moves in balance.
LEAST_GAIN = 0.25
# Costs of a move, in units of the time per token on a full engine: per token prefilled again, and per move.
PREFILL = 0.05
FIXED_COST = 16
# The least number of tokens that a sequence is expected to sample, as a share of the most tokens it may sample.
SHORT = 0.25
# A sequence stays on a generator at least this long: loads are reported once a second, and are a second old.
REST_SECONDS = 10.0


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


class Sequence(Protocol):
    """A sequence of the asker. `generator`: the generator that has the sequence, or None. `since`: the start on the
    generator (seconds on the caller's clock). `prefix`: tokens to prefill on another generator, including the prompt.
    `sampled`: tokens sampled so far. `remaining`: the most tokens that may follow."""

    @property
    def generator(self) -> str | None: ...
    @property
    def since(self) -> float: ...
    @property
    def prefix(self) -> int: ...
    @property
    def sampled(self) -> int: ...
    @property
    def remaining(self) -> int: ...
    @property
    def min_version(self) -> int: ...


def plan_moves(
    loads: Mapping[str, GeneratorLoad], sequences: Iterable[S], askers: int, now: float
) -> list[tuple[S, str]]:
    """Plan moves of sequences: pairs of a sequence and the name of its new generator.

    `loads`: of the generators that take sequences, by name. Sequences move one at a time from the slowest generator to
    the fastest while a move ends the sequence sooner, including the prefill. Each of the `askers` is assumed to move as
    many.
    """
    sequences_at_rest: dict[str, list[S]] = {}
    own_sequences: Counter[str] = Counter()
    for sequence in sequences:
        if (name := sequence.generator) is not None and name in loads:
            own_sequences[name] += 1
            if now - sequence.since >= REST_SECONDS:
                sequences_at_rest.setdefault(name, []).append(sequence)

    def slowness(name: str, added: int = 0) -> float:
        return _slowness(expected(loads[name], own_sequences[name] + added, askers), loads[name])

    slow = {name: slowness(name) for name in sequences_at_rest}
    if max(slow.values(), default=0.0) < LEAST_GAIN + _EMPTY:  # the usual case with many generators
        return []
    slow_with_one_more = {name: slowness(name, 1) for name in loads}
    moves = []
    while sequences_at_rest:
        source = max(sequences_at_rest, key=slow.__getitem__)
        target = min(loads, key=slow_with_one_more.__getitem__)
        gain = slow[source] - slow_with_one_more[target]
        if source == target or gain < LEAST_GAIN:
            break
        movable = sequences_at_rest[source]
        fit = [sequence for sequence in movable if sequence.min_version <= loads[target].version]
        best = max(fit, key=lambda sequence: _spared(sequence, gain), default=None)
        if best is None or _spared(best, gain) <= 0:
            del sequences_at_rest[source]
            continue
        movable.remove(best)
        if not movable:
            del sequences_at_rest[source]
        own_sequences.update({source: -1, target: 1})
        for name in source, target:
            slow[name], slow_with_one_more[name] = slowness(name), slowness(name, 1)
        moves.append((best, target))
    return moves


def _slowness(sequences: int, load: GeneratorLoad) -> float:
    """Return the time per token of a sequence: 1 with exactly `limit` sequences, more if sequences wait."""
    half = HALF_SPEED * load.limit
    return max((sequences + half) / (load.limit + half), sequences / load.limit)


def _spared(sequence: Sequence, gain: float) -> float:
    """Return the time that a move saves, in units of the time per token on a full engine. Lengths have long tails, so a
    sequence is expected to sample as many tokens again as it has sampled."""
    following = max(sequence.sampled, SHORT * (sequence.sampled + sequence.remaining))
    return min(following, sequence.remaining) * gain - PREFILL * sequence.prefix - FIXED_COST
