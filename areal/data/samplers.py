"""Samplers choose the row of each new prompt, from what the prompts before have shown.

A sampler is a function of the history and of the number of the next prompt, 0, 1, 2, ..., which returns a training
index (areal.data.sources); or a class with options whose instances are such functions:

    def my_sampler(history: History, prompt: int) -> int: ...

It does no I/O and keeps no state of its own: all that it may remember is the history. The master journals each choice
with the permit, and what a group has shown when it is ready. So a restarted master has the same history, and a choice
that was made is never made again. docs/curriculum.md says which bias each sampler has.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from random import Random
from typing import Any

from areal.config import DataConfig, UserError
from areal.data.sources import PromptSource
from areal.plugins import load

Choose = Callable[["History", int], int]

# The weight of a new group in the share of groups with signal of a source.
SIGNAL_WEIGHT = 0.02


@dataclass(slots=True)
class RowHistory:
    """What is known of a row of which a prompt was chosen.

    index, prompt: the training index and the number of the last such prompt. choices: number of its prompts. groups:
    number of its groups that were finished. The others are of these groups: mean, spread: mean and standard deviation
    of the rewards of the last one. flat: how many, up to the last one, had no signal: all rewards the same. rate: mean
    of all means, in which each group counts half as much as the next one. version: that of the run when the last one
    was finished. tokens: sampled in all of them.
    """

    index: int
    prompt: int
    choices: int = 1
    groups: int = 0
    mean: float = 0.0
    spread: float = 0.0
    flat: int = 0
    rate: float = 0.0
    version: int = 0
    tokens: int = 0

    def add(self, mean: float, spread: float, signal: bool, version: int, tokens: int) -> None:
        """Add a finished group."""
        share = 1 / (2 - 0.5**self.groups)
        self.rate += share * (mean - self.rate)
        self.groups, self.mean, self.spread = self.groups + 1, mean, spread
        self.flat = 0 if signal else self.flat + 1
        self.version, self.tokens = version, self.tokens + tokens

    @property
    def weight(self) -> float:
        """How many groups `rate` is worth: 1 after the first one, at most 2."""
        return 2 - 0.5 ** (self.groups - 1) if self.groups else 0.0


_values = attrgetter(*(column.name for column in fields(RowHistory)))


@dataclass(slots=True)
class SourceHistory:
    """Of one source of several: the last training index that was chosen of it, and the recent share of its finished
    groups with signal; 1 before the first."""

    last: int = -1
    signal: float = 1.0


@dataclass
class History:
    """What a run's prompts have shown. A sampler reads it; only the run changes it.

    source: the rows. Without one, `load` and `dump` are all that can be used. seed: of the run. group_size: samples of
    a group. prompts: number of prompts that the run trains, if none is discarded. last: the training index of the last
    choice, -1 before the first. version: the newest one that has trained a finished group. rows: by `source.key`, in
    the order of their first choice. measured: keys of the rows of which a group was finished.
    """

    source: PromptSource | None = field(default=None, compare=False)
    seed: int = 0
    group_size: int = 1
    prompts: int = 1
    last: int = -1
    version: int = 0
    rows: dict[int, RowHistory] = field(default_factory=dict)
    measured: list[int] = field(default_factory=list)
    sources: list[SourceHistory] = field(default_factory=list)
    _unseen: int = field(default=0, compare=False)

    @property
    def data(self) -> PromptSource:
        assert self.source is not None  # nothing is chosen without one
        return self.source

    def of(self, index: int) -> RowHistory | None:
        """What is known of the row of a training index; None if no prompt was chosen of it."""
        return self.rows.get(self.data.key(index))

    def unseen(self) -> int | None:
        """The lowest training index of a row of which no prompt was chosen yet; None if there is none."""
        if len(self.rows) == self.data.rows:
            return None
        while self.of(self._unseen):
            self._unseen += 1
        return self._unseen

    def random(self, prompt: int) -> Random:
        """The source of randomness for the choice of this prompt."""
        return Random(f"{self.seed}/sampler/{prompt}")

    def coverage(self) -> float | None:
        """The share of all rows of which a prompt was chosen; None if the data has no end."""
        return None if self.source is None or self.source.rows is None else len(self.rows) / self.source.rows

    # --- what only the run calls

    def chosen(self, prompt: int, index: int) -> None:
        """A new prompt is of the row of this training index."""
        if self.source is None:
            return
        key = self.source.key(index)
        self.last = index
        self._parts()[key % len(self.source.shares)].last = index
        if known := self.rows.get(key):
            known.index, known.prompt, known.choices = index, prompt, known.choices + 1
        else:
            self.rows[key] = RowHistory(index, prompt)

    def finished(self, index: int, mean: float, spread: float, signal: bool, version: int, tokens: int) -> None:
        """A group of this training index is ready: the mean and the standard deviation of its rewards, whether they
        differ, the version of the run, and the number of its sampled tokens."""
        if self.source is None:
            return
        key = self.source.key(index)
        row, source = self.rows[key], self._parts()[key % len(self.source.shares)]
        if not row.groups:
            self.measured.append(key)
        row.add(mean, spread, signal, version, tokens)
        source.signal += SIGNAL_WEIGHT * (signal - source.signal)
        self.version = version

    def _parts(self) -> list[SourceHistory]:
        if not self.sources:
            self.sources = [SourceHistory() for _ in self.data.shares]
        return self.sources

    def dump(self) -> dict[str, Any]:
        """All that the run has told it, fit for JSON."""
        return {
            "last": self.last,
            "version": self.version,
            "rows": [[key, *_values(row)] for key, row in self.rows.items()],
            "measured": self.measured,
            "sources": [[source.last, source.signal] for source in self.sources],
        }

    def load(self, dump: Mapping[str, Any]) -> None:
        """Become the history that `dump` was made from."""
        self.last, self.version, self.measured = dump["last"], dump["version"], list(dump["measured"])
        self.rows = {key: RowHistory(*values) for key, *values in dump["rows"]}
        self.sources = [SourceHistory(*values) for values in dump["sources"]]
        self._unseen = 0


# ------------------------------------------------------------------------------------------------------------ samplers


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
        self, low: float = 0.2, high: float = 0.8, explore: float = 0.5, half_life: float = 50.0, candidates: int = 8,
        reward_range: Sequence[float] = (0.0, 1.0),
    ) -> None:  # fmt: skip
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


class SkipSolved:
    """As `shuffle`, but a row that was solved `times` times in a row is left out of the next `epochs` epochs. Solved:
    all samples of a group have the same reward, which is at least `reward`; null: any reward.

    With `reward: null` it is the rule of GRESO (Zheng et al. 2025) without chance: a row without signal is skipped.
    """

    def __init__(self, times: int = 2, epochs: int = 2, reward: float | None = 1.0) -> None:
        _must(times >= 1 and epochs >= 1, "times and epochs must be at least 1")
        self._times, self._epochs, self._reward = times, epochs, reward

    def __call__(self, history: History, prompt: int) -> int:
        index = history.last + 1
        while self._skips(history.of(index), index // len(history.data), history):
            index += 1
        return index

    def _skips(self, row: RowHistory | None, epoch: int, history: History) -> bool:
        if row is None or row.flat < self._times or (self._reward is not None and row.mean < self._reward):
            return False
        return epoch - row.index // len(history.data) <= self._epochs


class EasyToHard:
    """Rows drawn at random from the easiest, whose share grows from `start` to 1 over the first `until` of the run.

    The share is the competence of Platanios et al. 2019: the square root of what grows evenly from start^2 to 1. field:
    the number in the row by which rows are ordered, the easiest has the lowest; null: the measured rate, highest first,
    0.5 for a row that was not measured. The order is that of `candidates` rows drawn at random.
    """

    def __init__(
        self, field: str | None = None, start: float = 0.1, until: float = 0.5, candidates: int = 16
    ) -> None:  # fmt: skip
        _must(0 < start <= 1 and 0 < until <= 1 and candidates >= 1, "start and until must be shares above 0")
        self._field, self._start, self._until, self._candidates = field, start, until, candidates

    def __call__(self, history: History, prompt: int) -> int:
        random, size = history.random(prompt), len(history.data)
        drawn = sorted(
            (random.randrange(size) for _ in range(self._candidates)), key=lambda i: self._hardness(history, i)
        )
        grown = min(1.0, prompt / (self._until * history.prompts))
        competence = (self._start**2 + grown * (1 - self._start**2)) ** 0.5
        return drawn[int(random.random() * competence * len(drawn))]

    def _hardness(self, history: History, index: int) -> float:
        if self._field is None:
            row = history.of(index)
            return -row.rate if row is not None and row.groups else -0.5
        try:
            return float(history.data.row(index).fields[self._field])
        except (UserError, KeyError, TypeError, ValueError):  # such a row is discarded, or comes last
            return float("inf")


class Mixture:
    """Each source in its own order, with weights that move towards the sources whose groups have signal.

    A source's weight is its share of the rows, times its recent share of groups with signal relative to the mean of all
    sources, which is kept between `least` and `most`. A bandit over sources, as in SEC (Chen et al. 2025).
    """

    def __init__(self, least: float = 0.5, most: float = 2.0) -> None:
        _must(0 < least <= 1 <= most, "least must be above 0 and at most 1, and most at least 1")
        self._least, self._most = least, most

    def __call__(self, history: History, prompt: int) -> int:
        data, parts = history.data, history.sources
        shares = data.shares
        weights = list(shares)
        if parts:
            mean = sum(share * part.signal for share, part in zip(shares, parts, strict=True)) / sum(shares)
            moved = [part.signal / mean if mean else 1.0 for part in parts]
            weights = [share * min(self._most, max(self._least, x)) for share, x in zip(shares, moved, strict=True)]
        part = history.random(prompt).choices(range(len(shares)), weights)[0]
        index = parts[part].last + 1 if parts else 0
        while data.key(index) % len(shares) != part:
            index += 1
        return index


BUILT_IN: dict[str, Callable[..., Any]] = {
    "shuffle": shuffle,
    "difficulty": Difficulty,
    "skip_solved": SkipSolved,
    "easy_to_hard": EasyToHard,
    "mixture": Mixture,
}


def open_sampler(config: DataConfig, source: PromptSource) -> Choose:
    """Return the sampler that `config` names, after it has made a first choice. Raises UserError."""
    name, options = config.sampler, config.sampler_options
    choose = _made(name, options)
    if name in ("skip_solved", "easy_to_hard") and source.size is None:
        raise UserError(f"data.sampler={name} needs epochs, but the data has no end: set data.size, or another sampler")
    if name == "mixture" and len(source.shares) < 2:
        raise UserError("data.sampler=mixture needs several data.sources: name them, or another sampler")
    column = options.get("field") if name == "easy_to_hard" else None
    if column is not None and not isinstance(source.row(0).fields.get(column), int | float):
        raise UserError(f"data.sampler_options.field is {column!r}, but the first row has no such number: correct it")
    safe_choice(name, choose, History(source), 0)
    return choose


def safe_choice(name: str, choose: Choose, history: History, prompt: int) -> int:
    """The choice of the sampler of this name. Raises UserError if it fails, or chooses no row."""
    try:
        index = choose(history, prompt)
    except Exception as error:  # the user's code raises anything
        raise UserError(
            f"data.sampler {name!r} failed at prompt {prompt} with {type(error).__name__}: {error}: correct it"
        ) from error
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise UserError(f"data.sampler {name!r} returned {index!r:.80}: it must be a training index, 0 or more")
    return index


def _made(name: str, options: Mapping[str, Any]) -> Choose:
    target: Any = BUILT_IN.get(name)
    if target is None:
        if ":" not in name:
            known = ", ".join(BUILT_IN)
            raise UserError(f"data.sampler {name!r} is unknown: choose from {known}, or write package.module:function")
        target = load(name, "data.sampler")
    if not inspect.isclass(target):
        if options:
            raise UserError(f"data.sampler {name!r} is a function, which has no data.sampler_options: make it a class")
        return target
    try:
        inspect.signature(target).bind(**options)
        made: Any = target(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"data.sampler {name!r}: {error}: correct data.sampler_options, {dict(options)}") from None
    return made


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
