"""The SQLite file of a spool: the tables, changes of several threads in one commit, and damage."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

from areal.base.errors import UserError, explain
from areal.storage.database import prepare
from areal.storage.run_folder import ways_on

FORMAT_VERSION = 11
_MARK = 0x53504F4C  # application_id: tells this kind of file from other SQLite files
_PARTS = """
    CREATE TABLE parts (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL, place INTEGER NOT NULL, prompt_index INTEGER NOT NULL,
        crc INTEGER NOT NULL, note TEXT NOT NULL, row TEXT NOT NULL, frame BLOB NOT NULL, UNIQUE (id, place)
    );
    CREATE INDEX parts_of_prompts ON parts (prompt_index);
"""
_UNFINISHED = """
    CREATE TABLE unfinished (
        id TEXT NOT NULL, place INTEGER NOT NULL, prompt_index INTEGER NOT NULL, oldest INTEGER NOT NULL,
        number INTEGER NOT NULL, crc INTEGER NOT NULL, frame BLOB NOT NULL, PRIMARY KEY (id, place)
    );
    CREATE INDEX unfinished_of_prompts ON unfinished (prompt_index);
    CREATE TABLE holders (id TEXT PRIMARY KEY, holder TEXT NOT NULL);
"""

Changes = tuple[tuple[str, tuple[Any, ...]], ...]
"""Statements with their values, for one transaction."""


class SpoolError(Exception):
    """A group is not, or no longer, in the spool, or the disk failed."""


class SpoolDamage(SpoolError, UserError):
    """A group is missing in the spool, or damaged."""


class SpoolFile:
    """The SQLite file of a spool. Any thread may call the methods. A change is on disk when its method returns.

    connection: usable from several threads; missing tables are created. file_lock: a descriptor that `close` closes.
    `lock`: a caller that holds the lock keeps other threads out. All methods raise SpoolError if the disk fails.
    """

    def __init__(self, connection: sqlite3.Connection, file_lock: int | None) -> None:
        prepare(connection, _MARK, FORMAT_VERSION, _PARTS + _UNFINISHED)
        connection.execute("PRAGMA secure_delete = ON")
        self.connection = connection
        (_, _, file), *_ = connection.execute("PRAGMA database_list")
        self.path = Path(file)
        self.lock = threading.RLock()
        self._file_lock = file_lock
        self._waiting: dict[object, Changes] = {}  # changes of waiting threads

    def store(self, changes: Changes) -> None:
        """Make the changes of all waiting threads in one commit, which takes as long as the disk needs. If the commit
        fails, `changes` are not made, and the changes of other threads go on waiting."""
        mark = object()
        self._waiting[mark] = changes
        with self.lock:
            together = self._waiting.copy()  # other threads may add changes meanwhile
            if mark not in together:  # another thread has made the changes
                return
            try:
                with self.transaction() as connection:
                    for statement, values in chain(*together.values()):
                        connection.execute(statement, values)
            except BaseException:
                del self._waiting[mark]
                raise
            for stored in together:
                del self._waiting[stored]

    def select(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of a SELECT statement."""
        with self.transaction() as connection:
            return connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self.lock, explain(sqlite3.Error, "the spool cannot be used: {why}", SpoolError), self.connection:
            try:
                yield self.connection
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT:
                    raise self.damage(f"is damaged ({error}):") from error
                raise

    def damage(self, problem: str, effect: str = "") -> SpoolDamage:
        """The error for a damaged file. problem, effect: the sentence before and after the ways to go on."""
        return SpoolDamage(f"The spool {self.path} {problem} {ways_on(self.path.parent)}{effect}")

    def close(self) -> None:
        """Close the file, after any call in another thread."""
        with self.lock:
            self.connection.close()
            if self._file_lock is not None:
                os.close(self._file_lock)
                self._file_lock = None


def checksum(group_id: str, place: int, prompt_index: int, note: str, row: str, frame: bytes | memoryview) -> int:
    """Return the CRC-32 of a stored part, or of stored calls."""
    return crc32(f"{group_id} {prompt_index} {note} {row}".encode(), crc32(frame, place))
