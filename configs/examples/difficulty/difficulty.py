"""A sampler of prompts of one's own: rows that the policy solves sometimes."""

import math
from collections.abc import Sequence

from areal.data import History, RowHistory


class Difficulty:
    """Chooses rows with a pass rate that is probably in the band from `low` to `high`.

    With probability `explore`, and while nothing is measured, the choice is a new row, never chosen before. Otherwise
    `candidates` measured rows are drawn, and the choice is the row with the highest probability to be in the band;
    among equals the row that was chosen longest ago. If an unmeasured rate is more probably in the band, the choice is
    a new row, if any is left. A measurement counts half as much after `half_life` versions. reward_range: the rewards
    of a sample with nothing and with everything right.

    The rates have discounted Beta distributions, as in MoPPS (Qu et al. 2025).
    """

    def __init__(
        self,
        low: float = 0.2,
        high: float = 0.8,
        explore: float = 0.5,
        half_life: float = 50.0,
        candidates: int = 8,
        reward_range: Sequence[float] = (0.0, 1.0),
    ) -> None:
        worst, best = reward_range
        _must(0 <= low < high <= 1, "low and high must be shares, low below high")
        _must(0 <= explore <= 1 and half_life > 0 and candidates >= 1, "explore must be a share, the others positive")
        _must(worst < best, "reward_range must be two numbers, the lower first")
        self._band, self._explore, self._half_life, self._candidates = (low, high), explore, half_life, candidates
        self._worst, self._width = worst, best - worst

    def __call__(self, history: History, prompt: int) -> int:
        random = history.random(prompt)
        new = history.unseen()
        if new is not None and (not history.measured or random.random() < self._explore):
            return new
        if not history.measured:  # all rows were chosen, and no group is finished yet
            return random.choice(list(history.rows.values())).index
        rows = [history.rows[random.choice(history.measured)] for _ in range(self._candidates)]
        fit, _, index = max((self._fit(row, history), -row.prompt, row.index) for row in rows)
        return index if new is None or fit >= self._fit(None, history) else new

    def _fit(self, row: RowHistory | None, history: History) -> float:
        """Return the probability, to a tenth, that the rate of the row is in the band; rounding makes ties. The rate is
        unknown if row is None. A normal distribution approximates the Beta distribution."""
        known = rate = 0.0
        if row is not None:
            known = history.group_size * row.weight * 0.5 ** ((history.version - row.version) / self._half_life)
            rate = min(1.0, max(0.0, (row.rate - self._worst) / self._width))
        mean = (1 + known * rate) / (2 + known)
        width = (2 * mean * (1 - mean) / (3 + known)) ** 0.5
        below, above = (math.erf((edge - mean) / width) for edge in self._band)
        return round((above - below) / 2, 1)


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
