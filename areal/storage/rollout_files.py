"""The files of rollouts: columns, and reading. A file may be anybody's, so all values are checked."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from areal.base.errors import UserError, explain
from areal.samples.table import COLUMNS, NOT_SAMPLED
from areal.samples.trajectory import FINISHES, TokenValues

FORMAT_VERSION = 3
ROWS_AT_ONCE = 1024
"""Rows of a row group."""
_TEXT = pa.string()
SCHEMA = pa.schema(
    {
        "step": pa.int32(),  # the training step, as in metrics.jsonl; null: not trained
        "place": pa.int32(),  # place of the group in the batch; null: not trained
        "group": _TEXT,
        "prompt_index": pa.int64(),
        "sample": pa.int32(),  # number in the group
        "branch": pa.int32(),  # number in the sample
        "fate": _TEXT,  # trained, filtered or discarded
        "reason": _TEXT,  # null if the sample was trained
        "row": _TEXT,  # row of the data, JSON
        "prompt": _TEXT,  # up to the first sampled token
        "completion": _TEXT,  # from the first sampled token on
        "turns": pa.int32(),  # pieces of sampled tokens
        "prompt_tokens": pa.int32(),
        "completion_tokens": pa.int32(),  # sampled tokens
        "reward": pa.float64(),
        "reward_parts": _TEXT,  # JSON
        "advantage": pa.float64(),  # mean over the sampled tokens, 0 for tokens outside the loss
        "finish": _TEXT,  # stop or length
        "start_version": pa.int32(),  # oldest version of a sampled token in the sample
        "staleness": pa.int32(),  # staleness of the group; null: not trained
        "generators": _TEXT,  # generators of its tokens, comma-separated
        "began": pa.float64(),  # seconds since 1970
        "seconds": pa.float64(),
        "waited": pa.float64(),  # seconds from the group's permit to `began`
        "scoring": pa.float64(),  # part of `seconds`
        "shared": pa.int32(),  # first tokens in common with the branch before
        **{name: pa.list_(pa.from_numpy_dtype(column.dtype)) for name, column in COLUMNS.items()},
        **{name: pa.list_(pa.float32()) for name in TokenValues._fields},  # null: not trained
    },
    metadata={"areal_rollouts": str(FORMAT_VERSION)},
)
OPTIONAL = {"waited", "scoring", *TokenValues._fields, *(name for name, column in COLUMNS.items() if not column.engine)}
"""A file of an earlier version may lack these columns; they are read as null. Every new column is added here."""
REQUIRED = {
    *("group", "prompt_index", "sample", "branch", "fate", "row", "prompt", "completion", "reward", "reward_parts"),
    *("finish", "shared"),
    *(name for name, column in COLUMNS.items() if column.engine),
}
"""Columns with a value in every row."""
LONG = {*COLUMNS, "row", "prompt", "completion"}
"""Columns that are slow to read."""
_BY_TOKEN = {*TokenValues._fields, *(name for name, column in COLUMNS.items() if not column.wide)}
LEAST = {"tokens": 0, "versions": NOT_SAMPLED, "shared": 0, "sample": 0, "branch": 0, "step": 0, "place": 0}
"""The least values of columns."""


def files(folder: Path) -> list[Path]:
    """Return the files of rollouts in `folder`, oldest first."""
    return sorted((p for p in folder.glob("*.parquet") if p.stem.isdecimal()), key=lambda path: int(path.stem))


class RolloutFile:
    """An open file of rollouts. lacking: the columns of SCHEMA that are missing in the file, and are read as null."""

    def __init__(self, parquet: pq.ParquetFile) -> None:
        self.parquet = parquet
        self.lacking = [name for name in SCHEMA.names if name not in parquet.schema_arrow.names]

    def read(self, columns: Sequence[str], row_groups: Sequence[int] | None = None) -> pa.Table:
        """Return the columns of all row groups, or of some."""
        numbers = range(self.parquet.num_row_groups) if row_groups is None else row_groups
        return self._filled(self.parquet.read_row_groups(list(numbers), self._present(columns)), columns)

    def batches(self, rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the columns, at most `rows` rows at a time."""
        for batch in self.parquet.iter_batches(rows, columns=self._present(columns)):
            yield self._filled(batch, columns)

    def check_nulls(self) -> None:
        """Raise pa.ArrowInvalid if a row lacks a value, by the statistics of the file's columns."""
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
            if pc.all(same).as_py() is False:  # None: a row without a list
                raise pa.ArrowInvalid(f"the columns {by_token[0]} and {name} of a row differ in length")
        for name in columns:
            if name in self.lacking:
                rows = rows.append_column(SCHEMA.field(name), pa.nulls(rows.num_rows, SCHEMA.field(name).type))
        return rows


def _check(name: str, column: Any) -> None:
    """Raise pa.ArrowInvalid for values that no run writes: a file may be anybody's."""
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
    """Return the parts of a reward by name. Raises pa.ArrowInvalid."""
    parts = _read_json(text)
    if not isinstance(parts, dict) or not all(isinstance(part, int | float) for part in parts.values()):
        raise pa.ArrowInvalid("the parts of a reward are no numbers by name")
    return parts


def _read_json(text: str) -> Any:
    with explain((TypeError, ValueError, RecursionError), "a row's text is no JSON", pa.ArrowInvalid):
        return json.loads(text)


@contextmanager
def opened(path: Path) -> Iterator[RolloutFile]:
    """Open a file of rollouts. Raises UserError if the file cannot be read, lacks a column that is not OPTIONAL, or has
    a column that is unknown to this version or has another type."""
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
    """Return the missing columns of a file, as in RolloutFile. Raises UserError for a wrong file."""
    try:
        with opened(path) as file:
            file.check_nulls()
            file.read([*(REQUIRED - LONG)])  # reading checks the values
            return file.lacking
    except UserError:
        if path.exists():  # a run removes the oldest files
            raise
        return []


def read_columns(path: Path, columns: list[str]) -> pa.Table:
    with opened(path) as file:
        return file.read(columns)


def run_of(path: Path) -> str:
    """Return the identity of a file's run; empty if the file has none or cannot be read."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return ""
    return metadata.get(b"run", b"").decode()
