"""Sources of prompts. A row is a pure function of its index.

The master hands out training indices: 0, 1, 2, ... or the choices of `data.sampler`. Any rollout manager can look up
any index, in any order and after any restart: the same configuration and seed give the same row. A source has no
position, so there is nothing to resume.

A finite source is used epoch by epoch, in a new shuffled order in every epoch. No training row has the prompt of a
held-out row: rows of a table with such a prompt are left out, and generated rows are drawn again.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from areal.base.errors import UserError
from areal.config.data_section import SourceConfig
from areal.data.row_reading import make_row, with_pictures, written_prompt
from areal.data.rows import Row, has_parts, prompt_or_none
from areal.samples.pictures import FIELDS

# A generated task that still repeats held-out prompts after this many draws has too few problems to hold some out.
MAX_DRAWS = 100
# The number of rows that are compared with the rows at the beginning of a run.
DIGESTED_ROWS = 1000


@dataclass(frozen=True)
class Table:
    """A finite source of at least one row. rows: the source's raw rows, a list or a Hugging Face data set. place:
    returns the place of a row for messages."""

    config: SourceConfig
    rows: Any
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, position: int) -> Row:
        return make_row(self.rows[position], self.config, self.place(position), not isinstance(self.rows, list))

    def prompts(self) -> Iterable[Any]:
        """Return the prompts of all rows, as the source or the template writes them; None for an unusable row."""
        key, columns = self.config.prompt_key, [] if isinstance(self.rows, list) else self.rows.column_names
        is_plain = key in columns and not {*FIELDS} & {*columns}
        if self.config.prompt_template is None and is_plain and not has_parts(prompt_or_none(self.rows[0][key]) or ""):
            return self.rows[key][:]  # a column, without loading the rows
        return map(self._prompt, self.rows)

    def _prompt(self, raw: Mapping[str, Any]) -> Any:
        with suppress(UserError):
            written = written_prompt(raw, self.config, "")
            read = prompt_or_none(written)
            return written if read is None else with_pictures(read, raw, self.config, "")[0]
        return None


Draw = Callable[[str, int, int], Row]
"""An endless source: a function of a side, a number and an attempt that returns a row; the same arguments give the same
row. The side is `train` or `held_out`. Another attempt at the same number gives another row."""


class PromptSource:
    """Training rows by index and held-out rows by number. Made by `open_source`.

    size: the number of rows of an epoch; None if the source is endless. rows: the number of different rows; None if
    there is no end. shares: the share of each source in the rows. held_out: all held-out rows.
    """

    size: int | None
    rows: int | None
    shares: Sequence[float] = (1.0,)

    def __init__(self, held_out: Sequence[Row]) -> None:
        self.held_out = held_out

    def __len__(self) -> int:
        """The number of rows of an epoch. Raises TypeError if the source is endless."""
        if self.size is None:
            raise TypeError("an endless source has no length")
        return self.size

    def row(self, index: int) -> Row:
        """Return the row of training index `index` >= 0: number index % size in the order of epoch index // size.

        Raises UserError if the row is not usable, and IndexError if index < 0.
        """
        if index < 0:
            raise IndexError(f"training index {index}")
        return dataclasses.replace(self._row(index), index=index)

    def _row(self, index: int) -> Row:
        raise NotImplementedError

    def key(self, index: int) -> int:
        """Return the key of the row `row(index)` in the data. The key modulo the number of sources is the source."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return the number of rows of an epoch and a digest of some rows; empty if the source is endless."""
        if not self.size:
            return ""
        digest = hashlib.blake2b(digest_size=8)
        for index in range(0, self.size, -(-self.size // DIGESTED_ROWS)):
            with suppress(UserError):  # the row is discarded when it is used
                row = self.row(index)
                digest.update(json.dumps([problem_of(row.prompt), row.answer], default=lambda value: "").encode())
        return f"{self.size} {digest.hexdigest()}"

    def heldout(self, i: int) -> Row:
        """Return held-out row i, for i in range(eval_size)."""
        return self.held_out[i]


class OneSource(PromptSource):
    """The rows of a source. held_out: the source's held-out rows. apart: prompts that may not be trained on."""

    def __init__(
        self, source: Table | Draw, held_out: Sequence[Row], apart: Set[str], size: int | None, seed: int, what: str
    ) -> None:
        super().__init__(held_out)
        self._source = source
        self._apart = apart
        self._seed = seed
        self._what = what
        self._positions = self._training_positions(source) if isinstance(source, Table) else range(size or 0)
        self.size = self.rows = len(self._positions) if isinstance(source, Table) else size
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def key(self, index: int) -> int:
        if self.size is None:
            return index
        epoch, number = divmod(index, self.size)
        return self._order(epoch)[number]

    def _row(self, index: int) -> Row:
        position = self.key(index)
        if isinstance(self._source, Table):
            return self._source.row(position)
        for attempt in range(MAX_DRAWS):
            row = self._source("train", position, attempt)
            if problem_of(row.prompt) not in self._apart:
                return row
        raise UserError(
            f"{self._what} makes too few different problems to hold {len(self.held_out)} of them out of training: "
            f"lower data.eval_size or widen data.options"
        )

    def _training_positions(self, table: Table) -> Sequence[int]:
        if not self._apart:
            return range(len(table))
        positions = [i for i, prompt in enumerate(table.prompts()) if problem_of(prompt) not in self._apart]
        if not positions:
            raise UserError(
                f"{self._what}: every row has a prompt that is also held out, so none is left to train on: "
                f"lower data.eval_size or name another data.eval_source"
            )
        return positions

    def _shuffled(self, epoch: int) -> Sequence[int]:
        return Random(f"{self._seed}/epoch/{epoch}").sample(self._positions, len(self._positions))


class Mixture(PromptSource):
    """The rows of several sources, in blocks. A block has counts[k] rows of sources[k], in a shuffled order. If
    `by_epoch`, a block is an epoch with every row of every source once; otherwise the mixture is endless."""

    def __init__(self, sources: Sequence[OneSource], counts: Sequence[int], by_epoch: bool, seed: int) -> None:
        held_out = [row for source in sources for row in source.held_out]
        super().__init__([dataclasses.replace(row, index=i) for i, row in enumerate(held_out)])
        self.size = sum(counts) if by_epoch else None
        sizes = [source.rows for source in sources]
        self.rows = None if None in sizes else sum(size or 0 for size in sizes)
        self.shares = [float(count) for count in counts]
        self._sources = sources
        self._counts = counts
        self._seed = seed
        # A sampler may use several blocks at a time, as many as there are sources.
        self._block = functools.lru_cache(maxsize=2 + len(sources))(self._mixed)

    def key(self, index: int) -> int:
        which, number = self._place(index)
        return self._sources[which].key(number) * len(self._sources) + which

    def _row(self, index: int) -> Row:
        which, number = self._place(index)
        return self._sources[which].row(number)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the source of a training index, and the training index within the source."""
        block, position = divmod(index, sum(self._counts))
        which, number = self._block(block)[position]
        return which, block * self._counts[which] + number

    def _mixed(self, block: int) -> list[tuple[int, int]]:
        """For each row of the block, return the source, and the number among the source's rows in the block."""
        places = [(which, number) for which, count in enumerate(self._counts) for number in range(count)]
        Random(f"{self._seed}/block/{block}").shuffle(places)
        return places


def problem_of(prompt: Any) -> str:
    """Return the part of a prompt that names the problem: the text, or the messages without system messages."""
    read = prompt_or_none(prompt)
    if read is None:
        return json.dumps(prompt, sort_keys=True, default=str)
    messages = [{"role": "user", "content": read}] if isinstance(read, str) else read
    return json.dumps([[m["role"], m["content"]] for m in messages if m["role"] != "system"])
