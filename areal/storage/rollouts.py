"""Rollouts: the samples of a run with their fate, in Parquet files, rollouts/000001.parquet and so on.

A row is a branch of a sample; most samples have one branch. `rollout_files` has the columns, docs/observe.md explains
them. A file is written whole, or not at all. The trained groups of a step are all in one file: after a crash the newest
step in the files says where to go on. The oldest files are removed once all files exceed a limit.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog

from areal.base.errors import UserError
from areal.samples.table import COLUMNS, NOT_SAMPLED
from areal.samples.trajectory import Group, Note, TokenValues, Trajectory
from areal.storage.disk import rename, shortage
from areal.storage.rollout_files import ROWS_AT_ONCE, SCHEMA, files, read_columns, run_of

log = structlog.get_logger()

Fate = Literal["trained", "filtered", "discarded"]

ONE_OF = 16
"""`sample` keeps one group of this number."""
TOKENS_AT_ONCE = 1 << 20
"""The most tokens of a row group (and one more row), which limit the memory for writing."""
KNOWN_GROUPS = 10_000
"""The number of known ids of newest groups: a group that arrives again, even after its training, is not added."""
PATIENCE_SECONDS = 60.0
"""How long a write may keep other writes waiting: a run does not stand still for rollouts, which are a record."""
MOST_BYTES = 256 << 20
"""The most bytes that wait for a slow write. Further groups are left out, and counted."""
_DICTIONARY = ["group", "fate", "reason", "row", "prompt", "reward_parts", "finish", "generators"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A group and its fate. step, place, values: None for a group without training."""

    group: Group
    fate: Fate
    reason: str = ""
    step: int | None = None
    place: int | None = None
    values: TokenValues | None = None


class RolloutWriter:
    """Writes the rollouts of a run into `folder`. Every method may be called from any thread.

    selection: `all`, `sample` or `none`. limit: bytes of all files together. texts: decodes sequences of tokens.
    `step`: the newest step with trained groups in the files or added. `waiting`: bytes for the next `write`, before
    compression. `lost`: groups left out because a write took too long. `run`: the identity of the run, written into
    each file.
    """

    def __init__(
        self, folder: Path, selection: str, limit: int, texts: Callable[[list[np.ndarray]], list[str]]
    ) -> None:
        self._folder = folder
        self._keep_every = {"all": 1, "sample": ONE_OF}.get(selection)
        self._limit = limit
        self._texts = texts
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._pending: list[Rollout] = []
        self.run = ""
        self._newest_ids: deque[str] = deque(maxlen=KNOWN_GROUPS)
        self._number = self.step = self.waiting = self.lost = 0
        for step, ids in self.earlier() if self._keep_every else ():
            self.step = max(self.step, step)
            self._newest_ids.extend(ids)

    def earlier(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the newest step and the ids of the groups of each file that earlier trainers of the run have stored."""
        for path in files(self._folder):
            self._number = int(path.stem)
            try:
                table = read_columns(path, ["step", "group"])
            except UserError as error:
                log.error(str(error))
                continue
            yield pc.max(table["step"]).as_py() or 0, table["group"].unique().to_pylist()

    def assign(self, run: str) -> None:
        """Write for the run with this identity. Raises UserError if the files are of another run."""
        self.run = run
        for path in files(self._folder)[-1:]:
            if run_of(path) not in ("", run):
                raise UserError(f"The rollouts in {self._folder} are those of another run: move the folder away.")

    def add_trained(self, step: int, groups: Sequence[Group], values: TokenValues | None) -> None:
        """Add the groups that a step has trained, unless the files have the step."""
        if step <= self.step:
            return
        start = 0
        for place, group in enumerate(groups):
            end = start + sum(sample.unrolled for sample in group.trajectories)
            group_values = None if values is None else TokenValues(*(array[start:end] for array in values))
            self._add(Rollout(group, "trained", "", step, place, group_values))
            start = end
        self.step = step

    def add_untrained(self, group: Group, fate: Fate, reason: str) -> None:
        """Add a group without training, unless the group was added before."""
        if group.id not in self._newest_ids:
            self._add(Rollout(group, fate, reason))

    def write(self) -> None:
        """Write the added rollouts into a new file. If the disk is full, the next call writes them; after any other
        error they are lost. Nothing is written if another thread writes for longer than PATIENCE_SECONDS."""
        if not self._writing.acquire(timeout=PATIENCE_SECONDS):
            return
        try:
            with self._lock:  # not while the file is written: an event loop adds rollouts meanwhile
                added, self._pending, self.waiting = self._pending, [], 0
            try:
                if added:
                    self.store(added)
            except Exception as error:
                if shortage(error, self._folder):
                    with self._lock:
                        self._pending[:0] = added
                raise
        finally:
            self._writing.release()

    def _add(self, rollout: Rollout) -> None:
        with self._lock:
            self._newest_ids.append(rollout.group.id)
            if not self._keep_every or crc32(rollout.group.id.encode()) % self._keep_every:
                return
            if self.waiting > MOST_BYTES:
                self.lost += 1
            else:
                self._pending.append(rollout)
                arrays = (array for t in rollout.group.trajectories for array in t.columns.values())
                self.waiting += sum(array.nbytes for array in arrays) + len(rollout.group.row)

    def store(self, rollouts: Sequence[Rollout]) -> None:
        """Write the rollouts into a new file."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self._number + 1:06}.parquet"
        with writing(path, SCHEMA.with_metadata({**SCHEMA.metadata, b"run": self.run.encode()})) as parquet:
            for portion in _portions(_branches(rollouts)):
                parquet.write_table(_table(portion, self._texts))
        self._number += 1
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        sizes = [(path, path.stat().st_size) for path in files(self._folder)]
        over = sum(size for _, size in sizes) - self._limit
        for path, size in sizes[:-1]:
            if over <= 0:
                return
            path.unlink()
            over -= size


_OF_BRANCHES = ("row", "sample", "branch", "shared", "start_version", "staleness")
"""Columns with a value of the branch."""
_OF_NOTES = ("began", "seconds", "waited", "scoring")
"""Columns with a value of the note."""


class _Branch(NamedTuple):
    rollout: Rollout
    staleness: int | None
    sample: int
    branch: int
    shared: int
    start_version: int
    sequence: Trajectory
    values: TokenValues | None
    note: Note
    row: str


def _branches(rollouts: Iterable[Rollout]) -> Iterator[_Branch]:
    for rollout in rollouts:
        group = rollout.group
        row, notes = group.row or "{}", group.notes or [Note()] * len(group.trajectories)
        starts = [trajectory.start_version for trajectory in group.trajectories]
        staleness = rollout.step and rollout.step - 1 - min(starts)
        start = 0
        for sample, (trajectory, note) in enumerate(zip(group.trajectories, notes, strict=True)):
            for branch, sequence in enumerate(trajectory.sequences()):
                end = start + len(sequence)
                values = rollout.values and TokenValues(*(array[start:end] for array in rollout.values))
                shared = trajectory.branches[branch].shared if trajectory.branches else 0
                yield _Branch(rollout, staleness, sample, branch, shared, starts[sample], sequence, values, note, row)
                start = end


def _portions(branches: Iterable[_Branch]) -> Iterator[list[_Branch]]:
    portion: list[_Branch] = []
    tokens = 0
    for branch in branches:
        portion.append(branch)
        tokens += len(branch.sequence)
        if len(portion) == ROWS_AT_ONCE or tokens >= TOKENS_AT_ONCE:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def _table(branches: Sequence[_Branch], texts: Callable[[list[np.ndarray]], list[str]]) -> pa.Table:
    rollouts, sequences = [branch.rollout for branch in branches], [branch.sequence for branch in branches]
    lengths = np.array([len(t) for t in sequences])
    begins = lengths.cumsum() - lengths
    sampled = np.concatenate([t.versions for t in sequences]) != NOT_SAMPLED
    counts = np.add.reduceat(sampled, begins, dtype=np.int64)
    firsts = np.minimum.reduceat(np.where(sampled, np.arange(len(sampled)), len(sampled)), begins) - begins
    starts = np.minimum(firsts, lengths).tolist()
    turns = np.add.reduceat(sampled & ~np.append(False, sampled[:-1]), begins, dtype=np.int64)
    gains = np.concatenate(
        [branch.values.advantages if branch.values else np.zeros(len(branch.sequence)) for branch in branches]
    )
    gain = (np.add.reduceat(gains, begins) / np.maximum(1, counts)).tolist()
    columns = {
        **{name: [getattr(r, name) for r in rollouts] for name in ("step", "place", "fate", "reason")},
        **{name: [getattr(branch, name) for branch in branches] for name in _OF_BRANCHES},
        "group": [r.group.id for r in rollouts],
        "prompt_index": [r.group.prompt_index for r in rollouts],
        "prompt": texts([t.tokens[:start] for t, start in zip(sequences, starts, strict=True)]),
        "completion": texts([t.tokens[start:] for t, start in zip(sequences, starts, strict=True)]),
        "turns": turns,
        "prompt_tokens": starts,
        "completion_tokens": counts,
        "reward": [t.reward for t in sequences],
        "reward_parts": [json.dumps(branch.note.parts) for branch in branches],
        "advantage": [advantage if branch.values else None for advantage, branch in zip(gain, branches, strict=True)],
        "finish": [t.finish for t in sequences],
        "generators": [",".join(branch.note.generators) for branch in branches],
        **{name: [getattr(branch.note, name) for branch in branches] for name in _OF_NOTES},
        **{name: _lists([getattr(t, name) for t in sequences], name) for name in COLUMNS},
        **{
            name: _lists([branch.values and getattr(branch.values, name) for branch in branches], name)
            for name in TokenValues._fields
        },
    }
    return pa.table(columns, SCHEMA)


def _lists(arrays: Sequence[np.ndarray | None], column: str) -> pa.Array:
    kind = SCHEMA.field(column).type
    ends = np.cumsum([0, *(0 if a is None else a.size for a in arrays)], dtype=np.int32)
    present = [a.ravel() for a in arrays if a is not None]  # row by row, if the column is wide
    values = pa.array(np.concatenate(present) if present else [], kind.value_type)
    return pa.ListArray.from_arrays(ends, values, kind, mask=pa.array([a is None for a in arrays]))


@contextmanager
def writing(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Write a file that appears, and is on disk, only once it is whole."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        with pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=_DICTIONARY, write_page_checksum=True
        ) as parquet:
            yield parquet
        file.flush()
        os.fsync(file.fileno())
    rename(temporary, path)
