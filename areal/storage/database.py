"""Opens SQLite files that survive a crash of the machine, for the journal and the spool.

A lock keeps a second process out. So SQLite's WAL mode needs no memory that processes share, which would not work on a
network file system: with exclusive locking, SQLite keeps the index of the log in the memory of the only user.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

from areal.config import UserError

Store = TypeVar("Store")

# A previous process that was just killed may take a moment to exit.
LOCK_ATTEMPTS = 100
LOCK_RETRY_SECONDS = 0.1


def open_store(path: Path, noun: str, make: Callable[[sqlite3.Connection, int], Store]) -> Store:
    """Open the file, which is made if it is missing, and return what `make` makes of the connection and the lock.

    Any thread may use the connection. The lock is a descriptor that keeps other processes out until it is closed or
    this process ends. Raises UserError if another process keeps using the file, if the file is not a `noun`, or if it
    cannot be used.
    """
    try:
        with ExitStack() as undo:
            lock = _lock(path, noun)
            undo.callback(os.close, lock)
            connection = undo.enter_context(closing(sqlite3.connect(path, check_same_thread=False)))
            store = make(connection, lock)
            undo.pop_all()
        return store
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{path} cannot be used as a {noun} ({error}): move it away or choose another folder for the run"
        ) from error


def prepare(connection: sqlite3.Connection, mark: int, version: int, schema: str) -> None:
    """Make every transaction survive a crash of the machine, and create the tables of `schema` in a new file.

    mark: the application id of this kind of file. version: its format version. Raises sqlite3.DatabaseError, without
    changing the file, if the file is of another kind or format version.
    """
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before the first access, which would create shared memory
    marks = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    new = marks == [0, 0] and not tables
    if not new and marks[0] != mark:
        raise sqlite3.DatabaseError("it is a database of another program or purpose")
    if not new and marks[1] != version:
        raise sqlite3.DatabaseError(f"it has format version {marks[1]}, this program reads {version}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if new:
        marking = f"PRAGMA application_id = {mark}; PRAGMA user_version = {version};"
        connection.executescript(f"BEGIN; {schema} {marking} COMMIT;")


def try_lock(file: int, attempts: int) -> bool:
    """Lock the open file against other processes until it is closed or this process ends; `attempts` are made, one each
    LOCK_RETRY_SECONDS. Returns False if another process has held it all that time."""
    for _ in range(attempts):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_RETRY_SECONDS)
    return False


def _lock(path: Path, noun: str) -> int:
    """Return a file descriptor that holds a lock against other processes until it is closed or this process ends.

    Raises UserError if another process holds the lock, or if the lock file cannot be made.
    """
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be used as a {noun} ({error.strerror})") from error
    if not try_lock(lock, LOCK_ATTEMPTS):
        os.close(lock)
        raise UserError(f"{path} is in use by another process: stop that process, or choose another folder for the run")
    return lock
