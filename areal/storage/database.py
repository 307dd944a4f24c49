"""Opens SQLite files that survive a crash of the machine, for the journal and the spool.

A lock keeps a second process out. Hence SQLite's WAL mode needs no shared memory, which would not work on a network
file system: with exclusive locking, SQLite keeps the index of the log in the memory of the only user.
"""

import fcntl
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import areal
from areal.base.errors import UserError, explain

Store = TypeVar("Store")

# A killed process may take a moment to exit.
LOCK_ATTEMPTS = 100
LOCK_RETRY_SECONDS = 0.1
# Facts about a file: `run`, the identity of the run; `program`, the version of the program that used the file last.
FACTS = "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);"
LOG_HEADER_BYTES = 32
COPY_ATTEMPTS = 20


class FormatError(sqlite3.DatabaseError):
    """Another version of this program has written the file."""


def open_store(
    path: Path,
    noun: str,
    make: Callable[[sqlite3.Connection, int], Store],
    original: Path | None = None,
    otherwise: str = "put back a backup of the run, or choose another folder for this one.",
) -> Store:
    """Open the file, which is made if it is missing, and return the result of `make(connection, lock)`.

    Any thread may use the connection. The lock is a descriptor that keeps other processes out until it is closed or
    this process ends. original: the file that `path` is a copy of, for messages. otherwise: the ways to go on with a
    damaged file. Raises UserError if another process keeps using the file, or if the file is unusable or is not a
    `noun`.
    """
    name = original or path
    try:
        with ExitStack() as undo:
            lock = _lock(path, noun)
            undo.callback(os.close, lock)
            connection = undo.enter_context(closing(sqlite3.connect(path, check_same_thread=False)))
            store = make(connection, lock)
            undo.pop_all()
        return store
    except FormatError as error:
        raise UserError(
            f"{name} cannot be used as a {noun} ({error}): resume the run with that version, or start a new run from "
            f"its last checkpoint with model=CHECKPOINT."
        ) from error
    except sqlite3.DatabaseError as error:
        raise UserError(f"{name} cannot be used as a {noun} ({error}): {otherwise}") from error


def prepare(connection: sqlite3.Connection, mark: int, version: int, schema: str) -> None:
    """Make every transaction survive a crash of the machine, and create the tables of `schema` in a new file.

    mark: the application id of this kind of file. version: the version of the format. Raises sqlite3.DatabaseError, and
    leaves the file as it is, if the file is of another kind or of another format.
    """
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before the first access, which would create shared memory
    marks = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    new = marks == [0, 0] and not tables
    if not new and marks[0] != mark:
        raise sqlite3.DatabaseError("it is a database of another program or purpose")
    if not new and marks[1] != version:
        program = _writer(connection)
        if program == _program():  # an unreleased commit has no version number
            program = f"{'an earlier' if marks[1] < version else 'a later'} commit of {program}"
        raise FormatError(f"{program} wrote it in format version {marks[1]}, this program reads {version}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if not new:
        _add_columns(connection, schema)
    if new:
        marked = f"PRAGMA application_id = {mark}; PRAGMA user_version = {version};"
        connection.executescript(f"BEGIN; {schema} {FACTS} {marked} COMMIT;")


def _add_columns(connection: sqlite3.Connection, schema: str) -> None:
    """Add the columns of `schema`, with their defaults, to the tables of a file by an earlier version. Raises
    FormatError if a missing table or column has no default, or if this version does not know a column of the file."""
    with closing(sqlite3.connect(":memory:")) as new:
        new.executescript(schema + FACTS)
        declared, present = _columns(new), _columns(connection)
    if unknown := sorted(present.keys() - declared.keys()):
        raise FormatError(f"{_writer(connection)} wrote it with other columns: {', '.join(map('.'.join, unknown))}")
    for (table, name), (kind, required, default) in declared.items():
        if (table, name) not in present:
            if default is None and required:
                raise FormatError(f"{_writer(connection)} wrote it without the column {table}.{name}")
            rule = f"{'NOT NULL ' if required else ''}DEFAULT {'NULL' if default is None else default}"
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind} {rule}")


def _writer(connection: sqlite3.Connection) -> str:
    return read_meta(connection, "program") or "an earlier version"


def _columns(connection: sqlite3.Connection) -> dict[tuple[str, str], tuple[str, bool, str | None]]:
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    rows = {table: connection.execute(f"PRAGMA table_info({table})").fetchall() for (table,) in tables}
    return {
        (table, name): (kind, bool(required or key), default)
        for table, columns in rows.items()
        for _, name, kind, required, default, key in columns
    }


def read_meta(connection: sqlite3.Connection, name: str) -> str:
    """Return a fact about the file; empty if the file lacks the fact."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
        return ""
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return row[0] if row else ""


def write_meta(connection: sqlite3.Connection, name: str, value: str) -> None:
    """Store a fact about the file."""
    if read_meta(connection, name) != value:
        with connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def note_program(connection: sqlite3.Connection) -> None:
    write_meta(connection, "program", _program())


def _program() -> str:
    return f"version {areal.__version__}"


def new_identity() -> str:
    """Return an identity for a new run."""
    return secrets.token_hex(8)


def copy_store(path: Path, folder: Path) -> Path:
    """Copy a file of `open_store` into `folder`, even while another process uses the file. Return the copy, with
    everything that was on disk at the begin of the call.

    Only the process that uses the file may open it. SQLite appends to a log, puts a complete log into the file, and
    begins a new log. File and log are copied in one state if neither happens meanwhile. Raises UserError if the file is
    written too fast.
    """
    log, copy = path.with_name(f"{path.name}-wal"), folder / path.name
    for _ in range(COPY_ATTEMPTS):
        marks = _marks(path, log)
        shutil.copyfile(path, copy)
        copied_log = copy.with_name(log.name)
        try:
            shutil.copyfile(log, copied_log)
        except FileNotFoundError:  # the user of the file has ended in order
            copied_log.unlink(missing_ok=True)
        if _marks(path, log) == marks:
            return copy
    raise UserError(f"{path} is written faster than it can be copied: stop the run before, which --resume continues.")


def _marks(path: Path, log: Path) -> tuple[int, int, bytes]:
    """Return marks that change when a log is put into the file, or when a new log begins."""
    stat = path.stat()
    try:
        with log.open("rb") as opened:
            header = opened.read(LOG_HEADER_BYTES)
    except FileNotFoundError:
        header = b""
    return stat.st_mtime_ns, stat.st_size, header


def try_lock(file: int, path: Path, attempts: int) -> bool:
    """Lock the open file at `path` against other processes until the file is closed or this process ends. Try
    `attempts` times, every LOCK_RETRY_SECONDS. Returns False if another process held the lock all the time. Raises
    UserError if the file system has no locks."""
    for _ in range(attempts):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_RETRY_SECONDS)
        except OSError as error:
            raise _lockless(path, error) from error
    return False


def _lockless(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be locked ({error.strerror}), and a lock keeps a second process out: choose a folder on a file "
        f"system that has locks (flock), such as a local disk."
    )


def _lock(path: Path, noun: str) -> int:
    """Return a descriptor with a lock against other processes. Raises UserError if it cannot be locked, or made."""
    with explain(OSError, f"{path} cannot be used as a {noun} ({{strerror}})"):
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    if not try_lock(lock, path, LOCK_ATTEMPTS):
        os.close(lock)
        raise UserError(f"{path} is in use by another process: stop that process, or choose another folder for the run")
    return lock
