"""Limits how far generation runs ahead of training: just far enough to keep the trainer fed, and never beyond rule 1.

A group spends alive / batch_size steps between its admission and its training. Hence the mean staleness depends only on
the number of alive groups beyond the batch in training. Two observations after each step change the limit:

* The trainer waited while fewer than a batch of groups were ready. The limit was too low, and rises at once, in
  proportion to the wait.
* Ready groups were left over when the batch was formed. The limit was too high, and falls by a small share of them.

At the balance, the waits cost the share SURRENDER of the throughput for each left-over batch. A wait for single groups
that rule 3 names changes nothing, because a higher limit does not end the wait.

The limit never exceeds rule 1. The limit leaves room for a whole batch beside the batch in training, except with
`max_staleness` 0, where rule 1 allows a single batch. This module does no I/O and reads no clock.
"""

from typing import Any

from areal.base.fields import with_defaults

# The limit falls by this share of the left-over groups after each step. A higher share means less staleness and more
# waits. At 0.02, noise costs up to 3 % of the throughput in runs whose generators are just fast enough.
SURRENDER = 0.01


class RunAhead:
    """Computes `limit`: groups are admitted only while fewer are alive, counting the batch in training."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self._batch_size = batch_size
        self._min_limit = batch_size * min(2, max_staleness + 1)
        self._max_limit = batch_size * (max_staleness + 1)
        self._limit = float(self._min_limit)
        # The waits of the first steps are not counted: the first groups take just as long under any limit.
        self._filling = self._min_limit // batch_size

    @property
    def limit(self) -> int:
        """The allowed number of alive groups: from two batches (a single batch with `max_staleness` 0) to rule 1's."""
        return int(self._limit)

    def stepped(self, waited_seconds: float, step_seconds: float, left_over: int) -> None:
        """Adjust the limit after a committed step.

        `waited_seconds`: how long the trainer waited for a batch while fewer groups than a batch were ready.
        `step_seconds`: the time since the previous commit. `left_over`: the number of ready groups outside the batch,
        right after the batch was formed.
        """
        share = min(1.0, waited_seconds / step_seconds) if step_seconds > 0 and not self._filling else 0.0
        self._filling = max(0, self._filling - 1)
        self._set(self._limit + share * self._batch_size - SURRENDER * left_over)

    def dump(self) -> dict[str, Any]:
        """Return the state from which a restarted master continues, fit for JSON."""
        return {"limit": self._limit, "filling": self._filling}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a `dump`, within the bounds of this run's settings."""
        state = with_defaults(state, self.dump())
        self._filling = state["filling"]
        self._set(state["limit"])

    def _set(self, limit: float) -> None:
        self._limit = min(float(self._max_limit), max(float(self._min_limit), limit))
