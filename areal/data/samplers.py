"""Samplers choose the row of each new prompt, from what the prompts before have shown.

A sampler is a function of the history and of the number of the next prompt, 0, 1, 2, ..., which returns a training
index (areal.data.sources); or a class with options whose instances are such functions:

    def my_sampler(history: History, prompt: int) -> int: ...

It does no I/O and keeps no state of its own: all that it may remember is the history. The master journals each choice
with the permit, and what a group has shown when it is ready. So a restarted master has the same history, and a choice
that was made is never made again. docs/curriculum.md says which bias each sampler has.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal.base.errors import UserError, explain
from areal.base.plugins import load
from areal.config.data_section import DataConfig
from areal.data.history import History, RowHistory
from areal.data.sources import PromptSource

Choose = Callable[[History, int], int]


def shuffle(history: History, prompt: int) -> int:
    """Every row once in each epoch, in an order of its own for each."""
    return prompt


class Difficulty:
    """Rows whose pass rate is probably in the band from `low` to `high`.

    With probability `explore`, and while nothing is measured, the choice is a row that was not chosen yet. Otherwise
    `candidates` measured rows are drawn, and the choice is the one whose rate is most probably in the band; among
    equals the one that was chosen longest ago; but a new row, if any is left, where a rate of which nothing is known is
    more probably there. What is known of a rate counts half as much after `half_life` versions. reward_range: the
    rewards of a sample with nothing and with everything right.

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
        """The probability that the rate of the row is in the band, to a tenth, so that there are equals. Of a row that
        is None, nothing is known. The Beta distribution has the tails of a normal one here."""
        known = rate = 0.0
        if row is not None:
            known = history.group_size * row.weight * 0.5 ** ((history.version - row.version) / self._half_life)
            rate = min(1.0, max(0.0, (row.rate - self._worst) / self._width))
        mean = (1 + known * rate) / (2 + known)
        width = (2 * mean * (1 - mean) / (3 + known)) ** 0.5
        below, above = (math.erf((edge - mean) / width) for edge in self._band)
        return round((above - below) / 2, 1)


BUILT_IN: dict[str, Callable[..., Any]] = {"shuffle": shuffle, "difficulty": Difficulty}


def open_sampler(config: DataConfig, source: PromptSource) -> Choose:
    """Return the sampler that `config` names, after it has made a first choice. Raises UserError."""
    choose = _make(config.sampler, config.sampler_options)
    safe_choice(config.sampler, choose, History(source), 0)
    return choose


def safe_choice(name: str, choose: Choose, history: History, prompt: int) -> int:
    """The choice of the sampler of this name. Raises UserError if it fails, or chooses no row."""
    # The user's code raises anything.
    with explain(Exception, f"data.sampler {name!r} failed at prompt {prompt} with {{why}}: correct it"):
        index = choose(history, prompt)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise UserError(f"data.sampler {name!r} returned {index!r:.80}: it must be a training index, 0 or more")
    return index


def _make(name: str, options: Mapping[str, Any]) -> Choose:
    target: Any = BUILT_IN.get(name)
    if target is None:
        if ":" not in name:
            names = ", ".join(BUILT_IN)
            raise UserError(f"data.sampler {name!r} is unknown: choose from {names}, or write package.module:function")
        target = load(name, "data.sampler")
    if not inspect.isclass(target):
        if options:
            raise UserError(f"data.sampler {name!r} is a function, which has no data.sampler_options: make it a class")
        return target
    with explain(
        (TypeError, ValueError), f"data.sampler {name!r}: {{why}}: correct data.sampler_options, {dict(options)}"
    ):
        made: Any = target(**options)
    return made


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
