"""The spool keeps finished groups on the trainer's disk, from their arrival until a checkpoint covers their step."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import safetensors.numpy

from areal.storage.database import open_store, prepare
from areal.trajectory import Group, Trajectory

FORMAT_VERSION = 1
_MARK = 0x53504F4C  # application_id: tells this kind of file from other SQLite files
_SCHEMA = """
    CREATE TABLE groups (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, description TEXT NOT NULL, arrays BLOB NOT NULL
    );
"""
_ARRAYS = ("tokens", "logprobs", "versions")


class SpoolError(Exception):
    """A group is not, or no longer, in the spool, or the disk failed."""


class Spool:
    """See the module. Every method may be called from any thread. Its changes are on disk when it returns.

    connection: usable from several threads; the spool's tables are created unless it has them. lock: a descriptor that
    `close` closes. All methods raise SpoolError if the disk fails.
    """

    def __init__(self, connection: sqlite3.Connection, lock: int | None = None) -> None:
        prepare(connection, _MARK, FORMAT_VERSION, _SCHEMA)
        self._connection = connection
        self._file_lock = lock
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the spool in the file, which is made if it is missing. Raises UserError if another process, such as
        another trainer of the run, keeps using it, or if it is not a spool."""
        return open_store(path, "spool", cls)

    def put(self, group: Group) -> None:
        """Store a group. A group whose id is there already changes nothing."""
        row = (group.id, *_packed(group))
        with self._transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO groups (id, description, arrays) VALUES (?, ?, ?)", row)

    def get(self, ids: Sequence[str]) -> list[Group]:
        """Return the groups with these ids, in this order. Raises SpoolError with the ids that are missing."""
        rows = {group_id: row for group_id in ids if (row := self._row(group_id)) is not None}
        if missing := [group_id for group_id in ids if group_id not in rows]:
            raise SpoolError(f"not in the spool: {', '.join(missing)}")
        return [_unpacked(group_id, *rows[group_id]) for group_id in ids]

    def ids(self) -> list[str]:
        """The ids of all groups, in order of arrival."""
        with self._transaction() as connection:
            return [group_id for (group_id,) in connection.execute("SELECT id FROM groups ORDER BY seq")]

    def forget(self, ids: Iterable[str]) -> None:
        """Remove groups. Ids that are not there are ignored."""
        rows = [(group_id,) for group_id in ids]
        with self._transaction() as connection:
            connection.executemany("DELETE FROM groups WHERE id = ?", rows)

    def close(self) -> None:
        """Close the file, after the call that is running in another thread, if any."""
        with self._lock:
            self._connection.close()
            if self._file_lock is not None:
                os.close(self._file_lock)
                self._file_lock = None

    def _row(self, group_id: str) -> tuple[str, bytes] | None:
        with self._transaction() as connection:
            return connection.execute("SELECT description, arrays FROM groups WHERE id = ?", (group_id,)).fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                with self._connection:
                    yield self._connection
            except sqlite3.Error as error:
                raise SpoolError(f"the spool cannot be used: {error}") from error


def _packed(group: Group) -> tuple[str, bytes]:
    """Return the values that JSON represents exactly, and the arrays of all samples one after the other."""
    samples = group.trajectories
    description = {
        "prompt_index": group.prompt_index,
        "lengths": [len(sample) for sample in samples],
        "rewards": [float(sample.reward) for sample in samples],
        "finishes": [sample.finish for sample in samples],
    }
    arrays = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in _ARRAYS}
    return json.dumps(description), safetensors.numpy.save(arrays)


def _unpacked(group_id: str, description: str, arrays: bytes) -> Group:
    about = json.loads(description)
    ends = np.cumsum(about["lengths"])[:-1]
    whole = safetensors.numpy.load(arrays)
    columns = [np.split(whole[name], ends) for name in _ARRAYS]
    samples = zip(*columns, about["rewards"], about["finishes"], strict=True)
    return Group(group_id, about["prompt_index"], tuple(Trajectory(*sample) for sample in samples))
