"""The journal persists the master's changes before the master replies. It is an SQLite file with a single writer.

    append(kind, body) ──▶ buffer ──one transaction──▶ events on disk ──▶ durable() returns
    compact(snapshot)  ──▶ the same way; its transaction also deletes everything before it
    keep(version, state) ─▶ the same way; the state stays, whatever is compacted later

Changes during a transaction go into the next transaction, and callers of `durable` share the cost of a disk write.
After a crash, each transaction is on disk completely or not at all, and never without all earlier transactions. SQLite
has no checksums, so each event has a checksum.
"""

import asyncio
import json
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from zlib import crc32

from areal.base.errors import UserError, explain
from areal.storage.database import copy_store, new_identity, note_program, open_store, prepare, read_meta, write_meta
from areal.storage.disk import RETRY_SECONDS, DiskRetry, DiskShortageError, Shortage
from areal.storage.run_folder import ways_out

FORMAT_VERSION = 10
# A disk that takes longer for a transaction is silent. Actors that ask the master hear so before their request ends.
SILENT_SECONDS = 5.0
_MARK = 0x4A524E4C  # application_id: tells this kind of file from other SQLite files
_SCHEMA = """
    CREATE TABLE states (version INTEGER PRIMARY KEY, body TEXT NOT NULL, crc INTEGER NOT NULL);
    CREATE TABLE events (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, crc INTEGER NOT NULL);
    CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), body TEXT NOT NULL, crc INTEGER NOT NULL);
"""


class JournalError(Exception):
    """The journal could not be written to disk, and cannot be written any more."""


@dataclass(slots=True)
class JournalTransaction:
    """Changes for one transaction: first a snapshot, if any, which replaces all earlier events, then `events` as (kind,
    body), and `states` by version. kept_states: the number of the newest states that stay."""

    snapshot: str | None = None
    events: list[tuple[str, str]] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)
    kept_states: int = 0

    def after(self, earlier: Self) -> Self:
        """Return a transaction with the changes of `earlier`, which the disk refused, and then these changes."""
        snapshot, events = self.snapshot, self.events
        if snapshot is None:  # a newer snapshot stands for everything before
            snapshot, events = earlier.snapshot, earlier.events + events
        states, kept = earlier.states | self.states, self.kept_states or earlier.kept_states
        return replace(self, snapshot=snapshot, events=events, states=states, kept_states=kept)

    def write(self, connection: sqlite3.Connection) -> None:
        with connection:
            if self.snapshot is not None:
                connection.execute("DELETE FROM events")
                crc = event_checksum("snapshot", self.snapshot)
                connection.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)", (self.snapshot, crc))
            rows = ((kind, body, event_checksum(kind, body)) for kind, body in self.events)
            connection.executemany("INSERT INTO events (kind, body, crc) VALUES (?, ?, ?)", rows)
            if self.states:
                checked = ((version, body, event_checksum("state", body)) for version, body in self.states.items())
                connection.executemany("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", checked)
                # Later states are from before the run went back to a checkpoint.
                connection.execute("DELETE FROM states WHERE version > ?", (max(self.states),))
                newest = "SELECT version FROM states ORDER BY version DESC LIMIT ?"
                connection.execute(f"DELETE FROM states WHERE version NOT IN ({newest})", (self.kept_states,))


class Journal:
    """See the module. All methods must be called from one event loop; a thread of the journal writes the file.

    A transaction that a full disk refuses is repeated, together with later changes, until the disk takes the
    transaction.

    connection: usable from several threads; missing tables are created. lock: a descriptor that `close` closes. `size`:
    events since the last snapshot. `run`: the identity of the run, made with the file. `file`: for errors.
    """

    def __init__(self, connection: sqlite3.Connection, lock: int | None = None) -> None:
        prepare(connection, _MARK, FORMAT_VERSION, _SCHEMA)
        self._connection = connection
        self.run = read_meta(connection, "run")
        (_, _, file), *_ = connection.execute("PRAGMA database_list")
        self.file = Path(file)
        self._lock = lock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._pending = JournalTransaction()
        self._appended = self._durable = 0
        self._commit: asyncio.Future[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._disk_retry = DiskRetry(self.file.parent, "the master")
        (self.size,) = connection.execute("SELECT count(*) FROM events").fetchone()

    @classmethod
    def open(cls, path: Path, original: Path | None = None) -> Self:
        """Open the journal in the file, which is made if missing. original: the file that `path` is a copy of, for
        messages.

        Raises UserError if another process keeps using the file, or if the file is no journal of this format.
        """
        journal = open_store(path, "journal", cls, original)
        journal.file = original or path
        try:
            journal.run = journal.run or new_identity()
            write_meta(journal._connection, "run", journal.run)
            note_program(journal._connection)
        except sqlite3.Error:  # a full disk: the file is opened again
            journal.close()
            raise
        return journal

    def note(self, name: str, value: str) -> str:
        """Return the journal's note under this name, which is `value` if there was no note before."""
        noted = read_meta(self._connection, name) or value
        write_meta(self._connection, name, noted)
        return noted

    def read(self) -> tuple[dict[str, Any] | None, list[tuple[str, dict[str, Any]]]]:
        """Return the contents on disk: the last snapshot or None, and (kind, body) of each later event. Raises
        UserError if a part is missing or damaged."""
        try:
            snapshot = self._connection.execute("SELECT 'snapshot', body, crc FROM snapshot").fetchone()
            events = self._connection.execute("SELECT kind, body, crc, seq FROM events ORDER BY seq").fetchall()
        except sqlite3.DatabaseError as error:
            raise _damaged(self.file, str(error)) from error
        for expected, (*_, seq) in enumerate(events, 1):
            if seq != expected:
                raise _damaged(self.file, f"event {expected} is missing")
        state = snapshot and _body(self.file, "the snapshot", *snapshot)
        return state, [(kind, _body(self.file, f"event {seq}", kind, body, crc)) for kind, body, crc, seq in events]

    def append(self, kind: str, body: dict[str, Any]) -> None:
        """Append an event. Later changes of `body` have no effect. The event is on disk after the next `durable`."""
        self._pending.events.append((kind, json.dumps(body)))
        self._appended += 1
        self.size += 1

    def compact(self, snapshot: dict[str, Any]) -> None:
        """Replace everything so far by a snapshot of the resulting state, which is on disk after the next `durable`."""
        self._pending.snapshot = json.dumps(snapshot)
        self._pending.events.clear()
        self._appended += 1
        self.size = 0

    def keep(self, version: int, state: dict[str, Any], newest: int) -> None:
        """Keep the current state under its version. The state is on disk after the next `durable`, together with the
        events so far. newest: the number of the newest states to keep."""
        self._pending.states[version] = json.dumps(state)
        self._pending.kept_states = newest
        self._appended += 1

    def kept_versions(self) -> list[int]:
        """Return the versions with a kept state, ascending."""
        return [version for (version,) in self._connection.execute("SELECT version FROM states ORDER BY version")]

    def kept(self, version: int) -> dict[str, Any]:
        """Return the kept state of a version. Raises UserError if the state is damaged."""
        row = self._connection.execute("SELECT body, crc FROM states WHERE version = ?", (version,)).fetchone()
        state: dict[str, Any] = _body(self.file, f"the state of version {version}", "state", *row)
        return state

    def version_errors(self, name: str) -> AbstractContextManager[None]:
        """Raise UserError if a part `name` has a field or a kind that this version does not know, or lacks one."""
        return explain(
            (KeyError, TypeError, ValueError),
            f"The journal {self.file} was written by another version of this program ({name}: {{why}}): go on with the "
            f"run by that version.",
        )

    @property
    def shortage(self) -> Shortage | None:
        """The shortage that the journal waits for; None without a wait."""
        return self._disk_retry.shortage

    async def durable(self, wait_for_room: bool = True) -> None:
        """Return once everything appended before this call is on disk. Raises JournalError if the disk write fails, and
        on every later call.

        wait_for_room: False to raise DiskShortageError if the disk is full or silent. The changes are still written
        later.
        """
        target = self._appended
        while self._durable < target and self._failure is None:
            if self.shortage and not wait_for_room:
                raise DiskShortageError(str(self.shortage))
            commit = self._commit or self._start_commit()
            await asyncio.wait([commit], timeout=SILENT_SECONDS)  # cancelling a caller does not cancel the commit
        if self._failure is not None:
            raise JournalError(f"the journal cannot be written: {self._failure}") from self._failure

    def close(self) -> None:
        """Wait for a transaction in progress, and close the file. Events without an awaited `durable` may be lost."""
        if self._retry is not None:
            self._retry.cancel()
        self._executor.shutdown()
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)

    def _start_commit(self) -> asyncio.Future[None]:
        transaction, self._pending = self._pending, JournalTransaction()
        loop = asyncio.get_running_loop()
        self._commit = commit = loop.run_in_executor(self._executor, transaction.write, self._connection)
        silence = DiskShortageError("not answering")
        timer = loop.call_later(SILENT_SECONDS, self._disk_retry.must_wait, silence, "the journal")
        commit.add_done_callback(lambda _: timer.cancel())
        commit.add_done_callback(partial(self._committed, self._appended, transaction))
        return commit

    def _committed(self, up_to: int, transaction: JournalTransaction, commit: asyncio.Future[None]) -> None:
        self._commit = None
        error = commit.exception()
        if error is None:
            self._durable = up_to
            self._disk_retry.goes_on()
        elif self._disk_retry.must_wait(error, "the journal"):
            self._pending = self._pending.after(transaction)
            self._commit = pause = asyncio.get_running_loop().create_future()

            def try_again() -> None:
                self._start_commit()
                pause.set_result(None)

            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, try_again)
        else:
            self._failure = error


def event_checksum(kind: str, body: str) -> int:
    """The checksum of an event. kind: of the event, `snapshot` or `state`. body: the stored text."""
    return crc32(body.encode(), crc32(kind.encode()))


def _body(file: Path, name: str, kind: str, body: str, crc: int) -> Any:
    if crc != event_checksum(kind, body):
        raise _damaged(file, f"{name} ({kind}) does not have the checksum that it was written with")
    return json.loads(body)


def _damaged(file: Path, what: str) -> UserError:
    return UserError(f"The journal {file} is damaged ({what}): {ways_out(file.parent)}")


@contextmanager
def journal_copy(original: Path, folder: Path | None = None) -> Iterator[Journal]:
    """Open a copy of a journal, perhaps in use. folder: for a lasting copy. Raises UserError for a damaged journal."""
    with (
        TemporaryDirectory() as place,
        closing(Journal.open(copy_store(original, folder or Path(place)), original)) as journal,
    ):
        yield journal
