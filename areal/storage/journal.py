"""The journal persists the master's changes before the master replies. It is an SQLite file with one writer.

    append(kind, body) ──▶ buffer ──one transaction──▶ events on disk ──▶ durable() returns
    compact(snapshot)  ──▶ the same way; its transaction also deletes everything before it

Everything that is appended while a transaction is being written goes into the next transaction, so callers of `durable`
share the cost of a disk write. After a crash, each transaction is on disk completely or not at all, and a transaction
is only there if all earlier ones are.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

from areal.storage.database import open_store, prepare

FORMAT_VERSION = 4
_MARK = 0x4A524E4C  # application_id: tells this kind of file from other SQLite files
_SCHEMA = """
    CREATE TABLE events (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL);
    CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), body TEXT NOT NULL);
"""


class JournalError(Exception):
    """The journal could not be written to disk. It cannot be written any more after that."""


class Journal:
    """See the module. All methods must be called from one event loop; a thread of the journal's own writes the file.

    connection: usable from several threads; the journal's tables are created unless it has them. lock: a descriptor
    that `close` closes. `size`: the number of events since the last snapshot.
    """

    def __init__(self, connection: sqlite3.Connection, lock: int | None = None) -> None:
        prepare(connection, _MARK, FORMAT_VERSION, _SCHEMA)
        self._connection = connection
        self._lock = lock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._snapshot: str | None = None  # to be written, and then the events
        self._events: list[tuple[str, str]] = []
        self._appended = self._durable = 0
        self._commit: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        (self.size,) = connection.execute("SELECT count(*) FROM events").fetchone()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the journal in the file, which is made if it is missing.

        Raises UserError if another process keeps using it, or if it is not a journal of this format.
        """
        return open_store(path, "journal", cls)

    def read(self) -> tuple[dict[str, Any] | None, list[tuple[str, dict[str, Any]]]]:
        """Return what is on disk: the last snapshot or None, and (kind, body) of each event since then."""
        snapshot = self._connection.execute("SELECT body FROM snapshot").fetchone()
        events = self._connection.execute("SELECT kind, body FROM events ORDER BY seq").fetchall()
        return snapshot and json.loads(snapshot[0]), [(kind, json.loads(body)) for kind, body in events]

    def append(self, kind: str, body: dict[str, Any]) -> None:
        """Append an event. Later changes of `body` have no effect. The event is on disk after the next `durable`."""
        self._events.append((kind, json.dumps(body)))
        self._appended += 1
        self.size += 1

    def compact(self, snapshot: dict[str, Any]) -> None:
        """Replace everything so far by a snapshot of the resulting state. It is on disk after the next `durable`."""
        self._snapshot = json.dumps(snapshot)
        self._events.clear()
        self._appended += 1
        self.size = 0

    async def durable(self) -> None:
        """Return once everything that was appended before this call is on disk. Raises JournalError if the disk write
        fails, and on every call after that."""
        target = self._appended
        while self._durable < target and self._failure is None:
            commit = self._commit or self._start_commit()
            await asyncio.wait([commit])  # cancelling a caller here does not cancel the commit
        if self._failure is not None:
            raise JournalError(f"the journal cannot be written: {self._failure}") from self._failure

    def close(self) -> None:
        """Wait for a transaction that is being written, and close the file. Events that no `durable` was awaited for
        may be lost."""
        self._executor.shutdown()
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)

    def _start_commit(self) -> asyncio.Future[None]:
        snapshot, events = self._snapshot, self._events
        self._snapshot, self._events = None, []
        loop = asyncio.get_running_loop()
        self._commit = commit = loop.run_in_executor(self._executor, self._write, snapshot, events)
        commit.add_done_callback(partial(self._committed, self._appended))
        return commit

    def _write(self, snapshot: str | None, events: list[tuple[str, str]]) -> None:
        with self._connection:
            if snapshot is not None:
                self._connection.execute("DELETE FROM events")
                self._connection.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?)", (snapshot,))
            self._connection.executemany("INSERT INTO events (kind, body) VALUES (?, ?)", events)

    def _committed(self, up_to: int, commit: asyncio.Future[None]) -> None:
        self._commit = None
        self._failure = commit.exception()
        if self._failure is None:
            self._durable = up_to
