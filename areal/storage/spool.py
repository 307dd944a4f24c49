"""The spool keeps finished groups on the trainer's disk, from their arrival until a checkpoint covers their step."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from zlib import crc32

import safetensors.numpy

from areal.config import UserError
from areal.storage.database import FACTS, fact, note, note_program, open_store, prepare
from areal.storage.run_folder import ways_out
from areal.trajectory import Group, columns, trajectories

FORMAT_VERSION = 4
_MARK = 0x53504F4C  # application_id: tells this kind of file from other SQLite files
_SCHEMA = """
    CREATE TABLE groups (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, prompt_index INTEGER NOT NULL, arrays BLOB NOT NULL,
        notes TEXT NOT NULL, crc INTEGER
    );
"""
_UPGRADES = {3: f"ALTER TABLE groups ADD COLUMN crc INTEGER; {FACTS}"}


class SpoolError(Exception):
    """A group is not, or no longer, in the spool, or the disk failed."""


class SpoolDamage(SpoolError, UserError):
    """A group in the spool is not as it was stored."""


class Spool:
    """See the module. Every method may be called from any thread. Its changes are on disk when it returns.

    connection: usable from several threads; the spool's tables are created unless it has them. lock: a descriptor that
    `close` closes. All methods raise SpoolError if the disk fails.
    """

    def __init__(self, connection: sqlite3.Connection, lock: int | None = None) -> None:
        prepare(connection, _MARK, FORMAT_VERSION, _SCHEMA, _UPGRADES)
        self._connection = connection
        (_, _, file), *_ = connection.execute("PRAGMA database_list")
        self._file = Path(file)
        self._file_lock = lock
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the spool in the file, which is made if it is missing. Raises UserError if another process, such as
        another trainer of the run, keeps using it, or if it is not a spool."""
        spool = open_store(path, "spool", cls)
        try:
            note_program(spool._connection)
        except sqlite3.Error:  # a full disk: the file is opened again
            spool.close()
            raise
        return spool

    def assign(self, run: str) -> None:
        """Make this the spool of a run. Raises UserError if it is that of another one."""
        with self._transaction() as connection:
            if fact(connection, "run") not in ("", run):
                raise UserError(
                    f"{self._file} is the spool of another run: move it away, or put back that of this run."
                )
            note(connection, "run", run)

    def put(self, group: Group) -> None:
        """Store a group. A group whose id is there already changes nothing."""
        fields = (group.id, group.prompt_index, safetensors.numpy.save(columns(group.trajectories)), group.notes)
        row = (*fields, _checksum(*fields))
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO groups (id, prompt_index, arrays, notes, crc) VALUES (?, ?, ?, ?, ?)", row
            )

    def get(self, ids: Sequence[str]) -> list[Group]:
        """Return the groups with these ids, in this order. Raises SpoolError with the ids that are missing, and
        SpoolDamage with one that is not as it was stored."""
        rows = {group_id: row for group_id in ids if (row := self._row(group_id)) is not None}
        if missing := [group_id for group_id in ids if group_id not in rows]:
            raise SpoolError(f"not in the spool: {', '.join(missing)}")
        return [self._unpacked(group_id, *rows[group_id]) for group_id in ids]

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

    def _row(self, group_id: str) -> tuple[int, bytes, str, int | None] | None:
        with self._transaction() as connection:
            return connection.execute(
                "SELECT prompt_index, arrays, notes, crc FROM groups WHERE id = ?", (group_id,)
            ).fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                with self._connection:
                    yield self._connection
            except sqlite3.Error as error:
                raise SpoolError(f"the spool cannot be used: {error}") from error

    def _unpacked(self, group_id: str, prompt_index: int, arrays: bytes, notes: str, crc: int | None) -> Group:
        if crc not in (None, _checksum(group_id, prompt_index, arrays, notes)):  # None: of an earlier version
            raise SpoolDamage(
                f"The spool {self._file} is damaged (group {group_id} does not have the checksum that it was stored "
                f"with): {ways_out(self._file.parent)}"
            )
        return Group(group_id, prompt_index, tuple(trajectories(safetensors.numpy.load(arrays))), notes)


def _checksum(group_id: str, prompt_index: int, arrays: bytes, notes: str) -> int:
    return crc32(f"{group_id} {prompt_index} {notes}".encode(), crc32(arrays))
