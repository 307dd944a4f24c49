"""Rollouts: the samples of a run with their fate, in Parquet files, rollouts/000001.parquet and so on.

A row is a branch of a sample; most samples have one. `SCHEMA` has the columns, docs/observe.md explains them. A file is
written whole, or not at all. The trained groups of a step are all in one file, so after a crash the newest step in the
files says where to go on. The oldest files are removed once all together are larger than a limit.
"""

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog

from areal.base.errors import UserError, explain
from areal.samples.table import COLUMNS, NOT_SAMPLED, Column
from areal.samples.trajectory import FINISHES, Branch, Group, Note, TokenValues, Trajectory
from areal.storage.disk import rename, shortage

log = structlog.get_logger()

Fate = Literal["trained", "filtered", "discarded"]

FORMAT_VERSION = 3
ONE_OF = 16
"""`sample` keeps one group of this many."""
ROWS_AT_ONCE = 1024
TOKENS_AT_ONCE = 1 << 20
"""Rows of a row group, and its tokens (one more row at most), which limits the memory that writing takes."""
KNOWN_GROUPS = 10_000
"""Ids of the newest groups: one that arrives a second time, also after it was trained, is not added again."""
PATIENCE_SECONDS = 60.0
"""How long a write may keep others waiting: rollouts are a record, and a run does not stand still for it."""
MOST_BYTES = 256 << 20
"""Groups that come while so many bytes wait for a slow write are left out, and counted."""
_TEXT = pa.string()
SCHEMA = pa.schema(
    {
        "step": pa.int32(),  # that trained it, as in metrics.jsonl; null if none did
        "place": pa.int32(),  # of the group in the batch; null if it was not trained
        "group": _TEXT,
        "prompt_index": pa.int64(),
        "sample": pa.int32(),  # its number in the group
        "branch": pa.int32(),  # its number in the sample
        "fate": _TEXT,  # trained, filtered or discarded
        "reason": _TEXT,  # of what was not trained
        "row": _TEXT,  # of the data, JSON
        "prompt": _TEXT,  # up to the first sampled token
        "completion": _TEXT,  # from there on
        "turns": pa.int32(),  # pieces of sampled tokens
        "prompt_tokens": pa.int32(),
        "completion_tokens": pa.int32(),  # sampled ones
        "reward": pa.float64(),
        "reward_parts": _TEXT,  # JSON
        "advantage": pa.float64(),  # mean over the sampled tokens, 0 for those that are not in the loss
        "finish": _TEXT,  # stop or length
        "start_version": pa.int32(),  # oldest version of a sampled token in the sample
        "staleness": pa.int32(),  # of the group; null if it was not trained
        "generators": _TEXT,  # that sampled it, comma-separated
        "began": pa.float64(),  # seconds since 1970
        "seconds": pa.float64(),
        "shared": pa.int32(),  # first tokens in common with the branch before
        **{name: pa.list_(pa.from_numpy_dtype(column.dtype)) for name, column in COLUMNS.items()},
        **{name: pa.list_(pa.float32()) for name in TokenValues._fields},  # null if it was not trained
    },
    metadata={"areal_rollouts": str(FORMAT_VERSION)},
)
OPTIONAL = {*TokenValues._fields, *(name for name, column in COLUMNS.items() if not column.engine)}
"""A file of an earlier version may lack these columns, which are null in its rows. A new column is one of them."""
REQUIRED = {
    *("group", "prompt_index", "sample", "branch", "fate", "row", "prompt", "completion", "reward", "reward_parts"),
    *("finish", "shared"),
    *(name for name, column in COLUMNS.items() if column.engine),
}
"""Columns that have a value in every row."""
LONG = {*COLUMNS, "row", "prompt", "completion"}
"""Columns that take long to read."""
_BY_TOKEN = {*TokenValues._fields, *(name for name, column in COLUMNS.items() if not column.wide)}
LEAST = {"tokens": 0, "versions": NOT_SAMPLED, "shared": 0, "sample": 0, "branch": 0, "step": 0, "place": 0}
"""The least values of columns."""
_DICTIONARY = ["group", "fate", "reason", "row", "prompt", "reward_parts", "finish", "generators"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A group and its fate. step, place, values: None if it was not trained."""

    group: Group
    fate: Fate
    reason: str = ""
    step: int | None = None
    place: int | None = None
    values: TokenValues | None = None


class RolloutWriter:
    """Writes the rollouts of a run into `folder`. Every method may be called from any thread.

    selection: `all`, `sample` or `none`. limit: bytes of all files together. texts: decodes sequences of tokens.
    `step`: the newest step whose trained groups are in the files or added. `waiting`: bytes that `write` would write,
    before they are compressed; `lost`: groups that were left out because a write took too long. `run`: the identity of
    the run, which each file has.
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
        """What earlier trainers of the run have stored: the newest step and the ids of the groups of each file."""
        for path in files(self._folder):
            self._number = int(path.stem)
            try:
                table = _read(path, ["step", "group"])
            except UserError as error:
                log.error(str(error))
                continue
            yield pc.max(table["step"]).as_py() or 0, table["group"].unique().to_pylist()

    def assign(self, run: str) -> None:
        """Write for the run with this identity. Raises UserError if the files are of another one."""
        self.run = run
        for path in files(self._folder)[-1:]:
            if _run_of(path) not in ("", run):
                raise UserError(f"The rollouts in {self._folder} are those of another run: move the folder away.")

    def add_trained(self, step: int, groups: Sequence[Group], values: TokenValues | None) -> None:
        """Add the groups that a step has trained, unless the files have this step."""
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
        """Add a group that is not trained, unless it was added before."""
        if group.id not in self._newest_ids:
            self._add(Rollout(group, fate, reason))

    def write(self) -> None:
        """Write what was added into a new file. If the disk is full, it is kept for the next call; if that raises
        anything else, it is lost. Nothing is written while another thread writes for longer than PATIENCE_SECONDS."""
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
        with _writing(path, SCHEMA.with_metadata({**SCHEMA.metadata, b"run": self.run.encode()})) as parquet:
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
"""Columns that a row has as they are."""


class _Branch(NamedTuple):
    """A row of a file."""

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
    """The branches of each row group."""
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
        "began": [branch.note.began for branch in branches],
        "seconds": [branch.note.seconds for branch in branches],
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


def files(folder: Path) -> list[Path]:
    """The files of rollouts in `folder`, oldest first."""
    return sorted((p for p in folder.glob("*.parquet") if p.stem.isdecimal()), key=lambda path: int(path.stem))


def move_rollouts(folder: Path, to: Path, moved: Callable[[str], bool]) -> None:
    """Move the rows of groups for whose ids `moved` is true into files of the same names in another folder. A call that
    was interrupted is repeated. A file that cannot be read stays."""
    for path in files(folder):
        try:
            table = pq.read_table(path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            log.error(f"The rollouts in {path} cannot be read ({error}): move the file away.")
            continue
        gone = pa.array([moved(group) for group in table["group"].to_pylist()], pa.bool_())
        if not pc.any(gone).as_py():
            continue
        to.mkdir(parents=True, exist_ok=True)
        _replace(to / path.name, table.filter(gone))
        remaining = table.filter(pc.invert(gone))
        if remaining.num_rows:
            _replace(path, remaining)
        else:
            path.unlink()


def _replace(path: Path, table: pa.Table) -> None:
    with _writing(path, table.schema) as parquet:
        parquet.write_table(table, row_group_size=ROWS_AT_ONCE)


@contextmanager
def _writing(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Writes a file that is there, and on disk, only once it is whole."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        with pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=_DICTIONARY, write_page_checksum=True
        ) as parquet:
            yield parquet
        file.flush()
        os.fsync(file.fileno())
    rename(temporary, path)


def groups_by_step(folder: Path) -> Counter[int]:
    """The number of trained groups in `folder`, by step. Raises UserError if a file cannot be read."""
    tables = (_read(path, ["step", "place"]) for path in files(folder))
    pairs = (zip(*(table[name].to_pylist() for name in ("step", "place")), strict=True) for table in tables)
    return Counter(step for step, _ in set(chain.from_iterable(pairs)) if step is not None)


def batches(folder: Path, first: int = 1) -> Iterator[tuple[int, list[Group]]]:
    """The trained groups in `folder`, step by step from `first` on, with the number of the step. Groups that were not
    kept are missing.

    Raises UserError if a file cannot be read.
    """
    of_group = ["step", "place", "group", "prompt_index", "row"]
    names = [*of_group, "sample", "branch", "shared", "finish", "reward", *COLUMNS]
    for path in files(folder):
        table = _read(path, names).filter(pc.field("step") >= first)
        ordered = table.sort_by([(name, "ascending") for name in ("step", "place", "sample", "branch")])
        every = chain.from_iterable(map(rows_of, ordered.to_batches(max_chunksize=ROWS_AT_ONCE)))
        for step, rows in groupby(every, key=itemgetter("step")):
            with explain((ValueError, TypeError, IndexError), f"{path} has a sample that no run writes ({{why}})"):
                groups = [_group(list(group)) for _, group in groupby(rows, key=itemgetter("place"))]
            yield step, groups


class RolloutFile:
    """A file of rollouts to read. lacking: the columns of SCHEMA that the file does not have; they are read as null."""

    def __init__(self, parquet: pq.ParquetFile) -> None:
        self.parquet = parquet
        self.lacking = [name for name in SCHEMA.names if name not in parquet.schema_arrow.names]

    def read(self, columns: Sequence[str], row_groups: Sequence[int] | None = None) -> pa.Table:
        """These columns of all row groups, or of some."""
        numbers = range(self.parquet.num_row_groups) if row_groups is None else row_groups
        return self._filled(self.parquet.read_row_groups(list(numbers), self._present(columns)), columns)

    def batches(self, rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """These columns of at most so many rows at a time."""
        for batch in self.parquet.iter_batches(rows, columns=self._present(columns)):
            yield self._filled(batch, columns)

    def check_nulls(self) -> None:
        """Raises pa.ArrowInvalid if a row lacks something, by what the file says of its columns."""
        facts = self.parquet.metadata
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        for column in (group.column(number) for group in groups for number in range(group.num_columns)):
            name = column.path_in_schema.partition(".")[0]
            if name in REQUIRED and column.statistics and column.statistics.null_count:
                raise pa.ArrowInvalid(f"a row has no {name}")

    def _present(self, columns: Sequence[str]) -> list[str]:
        return [name for name in columns if name not in self.lacking]

    def _filled(self, rows: Any, columns: Sequence[str]) -> Any:
        for name in self._present(columns):
            _check(name, rows[name])
        by_token = [name for name in self._present(columns) if name in _BY_TOKEN]
        for name in by_token[1:]:
            same = pc.equal(*(pc.list_value_length(rows[each]) for each in (by_token[0], name)))
            if pc.all(same).as_py() is False:  # None: one of them has none
                raise pa.ArrowInvalid(f"the columns {by_token[0]} and {name} of a row differ in length")
        for name in columns:
            if name in self.lacking:
                rows = rows.append_column(SCHEMA.field(name), pa.nulls(rows.num_rows, SCHEMA.field(name).type))
        return rows


def _check(name: str, column: Any) -> None:
    """Raises pa.ArrowInvalid for values that no run writes: a file may be anybody's."""
    if name in REQUIRED and column.null_count:
        raise pa.ArrowInvalid(f"a row has no {name}")
    if pa.types.is_list(column.type):
        column = pc.list_flatten(column)
        if column.null_count:
            raise pa.ArrowInvalid(f"a token has no {name}")
    least = LEAST.get(name)
    if least is not None and len(column) and (pc.min(column).as_py() or 0) < least:
        raise pa.ArrowInvalid(f"the column {name} has values below {least}")
    if name == "reward" and not pc.all(pc.is_finite(column)).as_py() and len(column):
        raise pa.ArrowInvalid("a reward is no number")
    if name == "finish" and not {*pc.unique(column).to_pylist()} <= {*FINISHES}:
        raise pa.ArrowInvalid("a row has another finish")
    for text in pc.unique(column).to_pylist() if name in ("reward_parts", "row") else ():
        parts_of(text) if name == "reward_parts" else _read_json(text or "null")


def parts_of(text: str) -> dict[str, float]:
    """The parts of a reward by name. Raises pa.ArrowInvalid."""
    parts = _read_json(text)
    if not isinstance(parts, dict) or not all(isinstance(part, int | float) for part in parts.values()):
        raise pa.ArrowInvalid("the parts of a reward are no numbers by name")
    return parts


def _read_json(text: str) -> Any:
    with explain((TypeError, ValueError, RecursionError), "a row's text is no JSON", pa.ArrowInvalid):
        return json.loads(text)


@contextmanager
def opened(path: Path) -> Iterator[RolloutFile]:
    """A file of rollouts to read. Raises UserError if it cannot be read, if it lacks a column that is not OPTIONAL, or
    if it has a column that this version does not know, or of another type."""
    message = f"The rollouts in {path} cannot be read ({{why}}): move the file away."
    with explain((OSError, pa.ArrowException), message), pq.ParquetFile(path, page_checksum_verification=True) as file:
        columns = RolloutFile(file)
        if wrong := [name for name in columns.lacking if name not in OPTIONAL]:
            raise pa.ArrowInvalid(f"rollouts of this format have other columns {', '.join(wrong)}")
        if unknown := [
            c.name for c in file.schema_arrow if c.name not in SCHEMA.names or SCHEMA.field(c.name).type != c.type
        ]:
            raise UserError(
                f"The rollouts in {path} have columns that this version does not know, or that have other types here: "
                f"{', '.join(unknown)}. Read them with the version that wrote them, or move the file away."
            )
        yield columns


def lacking(path: Path) -> list[str]:
    """The columns that a file of rollouts does not have, as in RolloutFile. Raises UserError if a file that is there is
    none of rollouts, or has values that no run writes."""
    try:
        with opened(path) as file:
            file.check_nulls()
            file.read([*(REQUIRED - LONG)])  # whose values are checked
            return file.lacking
    except UserError:
        if path.exists():  # a run removes its oldest files
            raise
        return []


def _read(path: Path, columns: list[str]) -> pa.Table:
    with opened(path) as file:
        return file.read(columns)


def _run_of(path: Path) -> str:
    """The identity of the run that a file is of; empty if it has none or cannot be read."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return ""
    return metadata.get(b"run", b"").decode()


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Its rows, with lists of numbers as arrays."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for n in range(batch.num_rows):
        yield {name: _value(column[n]) for name, column in columns.items()}


def _value(scalar: pa.Scalar) -> Any:
    if pa.types.is_list(scalar.type):
        return None if scalar.values is None else scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _group(rows: Sequence[dict[str, Any]]) -> Group:
    samples = [_trajectory(list(of_sample)) for _, of_sample in groupby(rows, key=itemgetter("sample"))]
    return Group(rows[0]["group"], rows[0]["prompt_index"], tuple(samples), rows[0]["row"])


def _by_token(row: Mapping[str, Any], name: str, column: Column) -> np.ndarray:
    values: np.ndarray = row[name]
    return values.reshape(len(row["tokens"]), -1) if column.wide else values


def _trajectory(rows: Sequence[dict[str, Any]]) -> Trajectory:
    arrays = {
        name: np.concatenate([_by_token(row, name, column)[row["shared"] :] for row in rows])
        for name, column in COLUMNS.items()
        if rows[0].get(name) is not None
    }
    branches = [Branch(row["shared"], len(row["tokens"]) - row["shared"]) for row in rows]
    return Trajectory(
        **arrays, reward=rows[0]["reward"], finish=rows[0]["finish"], branches=tuple(branches if len(rows) > 1 else ())
    )
