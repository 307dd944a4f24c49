"""The lengths of completions in the scaling model."""

from __future__ import annotations

from collections import Counter
from random import Random

from simulation.cluster.setups import GRAIN, Setup


class Lengths:
    """Draws the length of each completion. It depends only on the seed, the prompt, and the number of the sample, so
    that runs with different devices or settings have the same work."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._asked: Counter[int] = Counter()

    def next(self, prompt: int) -> tuple[int, bool]:
        """The length of the next sample of this prompt in tokens, a multiple of GRAIN, and True if it reached the
        limit."""
        setup, sample = self._setup, self._asked[prompt]
        self._asked[prompt] += 1
        between, within = setup.length_sigma
        of_prompt = Random(f"{setup.seed}:{prompt}").gauss(0.0, between)
        of_sample = Random(f"{setup.seed}:{prompt}:{sample}").gauss(0.0, within)
        length = setup.length_median * 2.718281828 ** (of_prompt + of_sample)
        if length > setup.max_new_tokens:
            return setup.max_new_tokens, True
        return max(1, round(length / GRAIN)) * GRAIN, False
