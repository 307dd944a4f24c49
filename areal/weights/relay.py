"""Chooses the source from which a generator gets new weights: a binary tree of generators, the trainer above its root.

The present generators are numbered in the order of their indices. Number k asks number (k - 1) // 2, and number 0 asks
the trainer. So the trainer sends each version once to any number of generators. If a source fails, the generator asks
the next source up the tree, up to the trainer, which never counts as failed. A generator asks only generators with a
smaller index. So no two generators wait for each other, even if they see different members.
"""

from collections.abc import Collection

# How long a failed generator is not asked: a dead generator is listed until its lease ends.
AVOIDED_SECONDS = 30.0


class Sources:
    """Makes the choices of the generator `index`, without I/O."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._avoided: dict[int, float] = {}

    def choose(self, generators: Collection[int], now: float) -> int | None:
        """Return the index of the generator to ask, out of the present `generators`. None: ask the trainer."""
        candidates = sorted(index for index in generators if index < self._index)
        position = len(candidates)
        while position:
            position = (position - 1) // 2
            if self._avoided.get(candidates[position], now) <= now:
                return candidates[position]
        return None

    def failed(self, index: int | None, now: float) -> None:
        """Record that a source did not deliver the weights. `index`: the result of `choose`."""
        if index is not None:
            self._avoided[index] = now + AVOIDED_SECONDS
