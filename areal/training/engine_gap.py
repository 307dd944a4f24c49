"""Compares an engine with the trainer on a few tokens of each batch. No I/O and no clock.

`logprob_gap` needs tokens of exactly the version in training; under a large bound on staleness most steps have none.
For `engine_gap` an engine computes the log-probs of one sample of the batch under the version with which the step
begins. The step computes these log-probs anyway.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from areal.samples.trajectory import Group

PROBE_TOKENS = 256
"""The engine computes the logits of all probed tokens at once, in fp32."""
# The gap, in nats, that is unusual while the usual gap is unknown.
GAP = 0.05
# A gap is unusual above this multiple of the usual gap, and above the rounding of sums in fp32.
TIMES_USUAL, LEAST_GAP = 10.0, 1e-5
# The usual gap is known from this number of gaps on. Before, a gap above the alert's limit is unusual.
KNOWN = 3
KEPT = 64


class Probe(NamedTuple):
    """The first tokens of a sample. tokens: int32 [T], T <= PROBE_TOKENS. sampled: int [n], the places of sampled
    tokens. start: the place of the first sampled token in the columns of `TokenValues`."""

    tokens: np.ndarray
    sampled: np.ndarray
    start: int


def probe_of(groups: Sequence[Group], every: int = 1) -> Probe | None:
    """Choose the sample with the most sampled tokens among its first PROBE_TOKENS, or None if no sample has one. every:
    the number of minibatches; only the groups of the first minibatch, every `every`-th, are considered."""
    best, start = None, 0
    for number, sample in ((number, sample) for number, group in enumerate(groups) for sample in group.trajectories):
        sampled = np.flatnonzero(sample.sampled[:PROBE_TOKENS])
        if number % every == 0 and not sample.branches and len(sampled) > (0 if best is None else len(best.sampled)):
            best = Probe(sample.tokens[:PROBE_TOKENS], sampled, start)
        start += sample.unrolled
    return best


def unusual_gap(usual: float) -> float:
    """From where on the gap of an engine is unusual, nats; usual: its median."""
    return max(TIMES_USUAL * usual, LEAST_GAP)


class EngineGaps:
    """The gaps of engines, by name: mean |log pi_engine - log pi_theta| of the probe's sampled tokens, nats."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=KEPT)
        self._unusual: set[str] = set()

    def add(self, engine: str, version: int, gap: float) -> str | None:
        """Add a gap. Returns a sentence if the gap is far above earlier gaps, once for several such gaps."""
        known = len(self._usual) >= KNOWN
        if gap <= (unusual_gap(median(self._usual)) if known else GAP):  # NaN is unusual
            self._usual.append(gap)
            self._unusual.discard(engine)
            return None
        if engine in self._unusual:
            return None
        self._unusual.add(engine)
        before = f"usually {median(self._usual):.1e}" if known else f"at most {GAP:g} is expected"
        return (
            f"{engine} computes log-probs {gap:.1e} nats a token from the trainer's under version {version}; {before}: "
            f"its weights are not those of this version, or its kernels are wrong. If it stays so, end that process: "
            f"it is started again, and loads all weights anew."
        )
