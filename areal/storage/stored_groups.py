"""The trained groups of a run, from the files of rollouts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from areal.base.errors import explain
from areal.samples.table import COLUMNS, Column
from areal.samples.trajectory import Branch, Group, Trajectory
from areal.storage.rollout_files import ROWS_AT_ONCE, files, read_columns


def groups_by_step(folder: Path) -> Counter[int]:
    """Return the number of trained groups in `folder`, by step. Raises UserError if a file cannot be read."""
    tables = (read_columns(path, ["step", "place"]) for path in files(folder))
    pairs = (zip(*(table[name].to_pylist() for name in ("step", "place")), strict=True) for table in tables)
    return Counter(step for step, _ in set(chain.from_iterable(pairs)) if step is not None)


def batches(folder: Path, first: int = 1) -> Iterator[tuple[int, list[Group]]]:
    """Yield the trained groups in `folder`, step by step from `first` on, with the number of the step. Groups that were
    not kept are missing. Raises UserError if a file cannot be read.
    """
    of_group = ["step", "place", "group", "prompt_index", "row"]
    names = [*of_group, "sample", "branch", "shared", "finish", "reward", *COLUMNS]
    for path in files(folder):
        table = read_columns(path, names).filter(pc.field("step") >= first)
        ordered = table.sort_by([(name, "ascending") for name in ("step", "place", "sample", "branch")])
        every = chain.from_iterable(map(rows_of, ordered.to_batches(max_chunksize=ROWS_AT_ONCE)))
        for step, rows in groupby(every, key=itemgetter("step")):
            with explain((ValueError, TypeError, IndexError), f"{path} has a sample that no run writes ({{why}})"):
                groups = [_group(list(group)) for _, group in groupby(rows, key=itemgetter("place"))]
            yield step, groups


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch, with lists of numbers as arrays."""
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
