"""The history of a run's prompts, for samplers (areal.data.samplers). No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any

from areal.base.fields import with_defaults

if TYPE_CHECKING:
    from areal.data.prompt_sources import PromptSource

# The weight of a new group in a source's share of groups with signal.
SIGNAL_WEIGHT = 0.02


@dataclass(slots=True)
class RowHistory:
    """The history of a row with at least one prompt.

    index, prompt: the training index and the number of the row's last prompt. choices: number of prompts. groups:
    number of finished groups. mean, spread: mean and standard deviation of the rewards of the last finished group.
    flat: the number of last groups in a row without signal (equal rewards). rate: the mean over the groups' means, in
    which a group counts half as much as the next group. version: the version of the run when the last group was
    finished. tokens: sampled in all groups.
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
        """The number of groups that `rate` is worth: 1 after the first group, at most 2."""
        return 2 - 0.5 ** (self.groups - 1) if self.groups else 0.0


_values = attrgetter(*(column.name for column in fields(RowHistory)))


@dataclass(slots=True)
class SourceHistory:
    """The history of one source among several: the last training index of the source, and the recent share of groups
    with signal; 1 before the first group."""

    last: int = -1
    signal: float = 1.0


@dataclass
class History:
    """The results of a run's prompts so far. Samplers read the history; only the run changes it.

    source: the rows. Without a source, only `load` and `dump` work. seed: the seed of the run. group_size: samples of a
    group. prompts: number of prompts that the run trains, if none is discarded. last: the training index of the last
    choice, -1 before the first. version: the version of the run when the last group was finished. rows: by
    `source.key`, in the order of the first choice. measured: keys of the rows with a finished group. sources: in order;
    empty before the first choice.
    """

    source: "PromptSource | None" = field(default=None, compare=False)
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
    def data(self) -> "PromptSource":
        assert self.source is not None  # nothing is chosen without a source
        return self.source

    def of(self, index: int) -> RowHistory | None:
        """Return the history of the row of a training index, or None if the row has had no prompt."""
        return self.rows.get(self.data.key(index))

    def unseen(self) -> int | None:
        """Return the lowest training index of a row without a prompt so far, or None if every row has had a prompt."""
        if len(self.rows) == self.data.rows:
            return None
        while self.of(self._unseen):
            self._unseen += 1
        return self._unseen

    def random(self, prompt: int) -> Random:
        """Return the source of randomness for the choice of this prompt."""
        return Random(f"{self.seed}/sampler/{prompt}")

    def coverage(self) -> float | None:
        """Return the share of rows that have had a prompt, or None if the data has no end."""
        return None if self.source is None or self.source.rows is None else len(self.rows) / self.source.rows

    # --- what only the run calls

    def chosen(self, prompt: int, index: int) -> None:
        """Note that a new prompt is the row of this training index."""
        if self.source is None:
            return
        key = self.source.key(index)
        self.last = index
        self._parts()[key % len(self.source.shares)].last = index
        if row := self.rows.get(key):
            row.index, row.prompt, row.choices = index, prompt, row.choices + 1
        else:
            self.rows[key] = RowHistory(index, prompt)

    def finished(self, index: int, mean: float, spread: float, signal: bool, version: int, tokens: int) -> None:
        """Note that a group of this training index is ready. mean, spread: mean and standard deviation of the rewards.
        signal: whether rewards differ. version: the version of the run. tokens: the number of sampled tokens."""
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
        """Return the whole history, fit for JSON."""
        return {
            "last": self.last,
            "version": self.version,
            "rows": [[key, *_values(row)] for key, row in self.rows.items()],
            "measured": self.measured,
            "sources": [[source.last, source.signal] for source in self.sources],
        }

    def load(self, dump: Mapping[str, Any]) -> None:
        """Become the history that `dump` has returned."""
        dump = with_defaults(dump, self.dump())
        self.last, self.version, self.measured = dump["last"], dump["version"], list(dump["measured"])
        self.rows = {key: RowHistory(*values) for key, *values in dump["rows"]}
        self.sources = [SourceHistory(*values) for values in dump["sources"]]
        self._unseen = 0
