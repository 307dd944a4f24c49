"""Moves of sequences from full generators to generators that run out of work. Decisions only, as in `routing`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from areal.generation.routing import GeneratorLoad, expected

S = TypeVar("S", bound="Sequence")

# With this share of its limit an engine has half of its highest total throughput: less work does not end much sooner.
HALF_SPEED = 0.25
_EMPTY = HALF_SPEED / (1 + HALF_SPEED)  # the slowness of a generator without sequences
# A move has to save a sequence this share of the time per token on a full engine. So nothing moves in balance.
LEAST_GAIN = 0.25
# Costs of a move, in units of the time per token on a full engine: per token prefilled again, and per move.
PREFILL = 0.05
FIXED_COST = 16
# The least number of tokens that a sequence is expected to sample, as a share of the most tokens it may sample.
SHORT = 0.25
# A sequence stays on a generator at least this long: loads are reported once a second, and are a second old.
REST_SECONDS = 10.0


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
