"""The spool keeps scored samples on the trainer's disk, from their arrival until a checkpoint covers the training step
of their group. It also keeps the calls of unfinished samples.

A group is stored as parts of one sample each. The frame of a sample is stored as it came."""

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self
from zlib import crc32

from areal.base.errors import UserError, explain
from areal.samples.trajectory import Group, Note, Trajectory, of_parts
from areal.storage.database import note_program, open_store, prepare, read_meta, write_meta
from areal.storage.run_folder import ways_on
from areal.storage.saved_calls import unpacked

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
_PART = "place, prompt_index, crc, note, row, frame"
_IF_ROOM = "WHERE (SELECT count(*) FROM parts WHERE id = ?) < ?"
_PUT = f"INSERT OR IGNORE INTO parts (id, {_PART}) SELECT ?, ?, ?, ?, ?, ?, ? {_IF_ROOM}"
_FINISHED = "DELETE FROM unfinished WHERE id = ? AND place = ?"
# Late calls replace no newer calls, which have a higher number, or else more tokens.
_PUT_CALLS = """
    INSERT INTO unfinished SELECT ?, ?, ?, ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM parts WHERE id = ? AND place = ?)
    ON CONFLICT DO UPDATE SET oldest = excluded.oldest, number = excluded.number, crc = excluded.crc,
    frame = excluded.frame WHERE (excluded.number, length(excluded.frame)) > (number, length(frame))
"""
_MOVE_CALLS = """
    UPDATE OR IGNORE unfinished SET id = ?1 WHERE id = ?2 AND place = ?3
    AND NOT EXISTS (SELECT 1 FROM parts WHERE id = ?1 AND place = ?3)
"""

# The fields of a note with sequences.
_SEQUENCES = "generators", "marks", "gave"

Changes = tuple[tuple[str, tuple[Any, ...]], ...]
"""Statements with their values, for one transaction."""


class SpoolPart(NamedTuple):
    """A group with a single sample, and the frame of the sample (`Trajectory.frame`)."""

    group: Group
    frame: bytes | memoryview


class StoredGroup(NamedTuple):
    """A group in the spool. places: of the stored parts, ascending; empty for an unknown or forgotten group. group: the
    whole group once all parts are stored."""

    places: tuple[int, ...]
    group: Group | None


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


class SpooledCalls:
    """The calls so far (areal.storage.saved_calls) of unfinished samples, in the file of the spool."""

    def __init__(self, file: SpoolFile) -> None:
        self._file = file

    def put(self, group_id: str, place: int, prompt_index: int, frame: bytes | memoryview, number: int = 0) -> None:
        """Store the calls so far of the sample at a place. They replace calls with a lower number, or with the same
        number and fewer tokens. They are not stored if the sample itself is stored, or if SpoolError is raised. Raises
        ValueError if the frame is not of calls."""
        oldest = min(int(call.sampled.versions.min()) for call in unpacked(frame))
        crc = _checksum("", place, prompt_index, f"{oldest}", "", frame)
        row = (group_id, place, prompt_index, oldest, number, crc, frame, group_id, place)
        self._file.store(((_PUT_CALLS, row),))

    def oldest_versions(self, prompt_index: int) -> dict[tuple[str, int], int]:
        """Return the oldest version in the stored calls of each unfinished sample of a prompt, by group and place."""
        rows = self._file.select("SELECT id, place, oldest FROM unfinished WHERE prompt_index = ?", prompt_index)
        return {(group_id, place): oldest for group_id, place, oldest in rows}

    def move(self, group_id: str, samples: Iterable[tuple[str, int]]) -> None:
        """Move calls of unfinished samples of the prompt's earlier groups to the free places of this group."""
        with self._file.transaction() as connection:
            connection.executemany(_MOVE_CALLS, [(group_id, *key) for key in samples])

    def calls(self, group_id: str, place: int) -> bytes:
        """Return the frame that `put` stored of a sample; empty if it is missing or damaged."""
        statement = "SELECT prompt_index, oldest, crc, frame FROM unfinished WHERE id = ? AND place = ?"
        for prompt_index, oldest, crc, frame in self._file.select(statement, group_id, place):
            if crc == _checksum("", place, prompt_index, f"{oldest}", "", frame):
                return bytes(frame)
        return b""

    def hold(self, group_id: str, holder: str) -> None:
        """Note the actor that alone may store more samples of a group."""
        self._file.store((("INSERT OR REPLACE INTO holders VALUES (?, ?)", (group_id, holder)),))

    def holder(self, group_id: str) -> str:
        """Return the actor that alone may store more samples of a group; empty: any actor may."""
        return next((name for (name,) in self._file.select("SELECT holder FROM holders WHERE id = ?", group_id)), "")


class Spool:
    """See the module. Every method may be called from any thread. Changes are on disk when the method returns.

    connection, lock: `connection` and `file_lock` of SpoolFile. `unfinished`: the calls of unfinished samples. All
    methods raise SpoolError if the disk fails.
    """

    def __init__(self, connection: sqlite3.Connection, lock: int | None = None) -> None:
        self._file = SpoolFile(connection, lock)
        self.unfinished = SpooledCalls(self._file)
        self._recent: dict[str, dict[int, tuple[int, Group]]] = {}  # checksums and parts of incomplete groups

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the spool in the file, which is made if it is missing. Raises UserError if the file is no spool, or if
        another process, such as another trainer of the run, keeps using the file."""
        spool = open_store(path, "spool", cls, otherwise=ways_on(path.parent))
        try:
            note_program(spool._file.connection)
        except sqlite3.Error:  # a full disk: the file is opened again
            spool.close()
            raise
        return spool

    def assign(self, run: str) -> None:
        """Make this the spool of a run. Raises UserError if the spool is of another run."""
        with self._file.transaction() as connection:
            if read_meta(connection, "run") not in ("", run):
                raise UserError(f"{self._file.path} is the spool of another run: move it away, or put back this run's.")
            write_meta(connection, "run", run)

    def put_all(self, parts: Mapping[int, SpoolPart], size: int) -> StoredGroup:
        """Store parts of a group by place, all parts or none. A part is left out if its place is taken, or if the group
        has `size` parts. Return the stored group, without these places if another thread forgot the group meanwhile. No
        part is stored if SpoolError is raised. Raises SpoolDamage as `get` does."""
        changes: Changes = ()
        recent = {}
        for place, (part, frame) in parts.items():
            note = json.dumps(part.notes[0]._asdict() if part.notes else {})
            crc = _checksum(part.id, place, part.prompt_index, note, part.row, frame)
            row = (part.id, place, part.prompt_index, crc, note, part.row, frame, part.id, size)
            changes += ((_PUT, row), (_FINISHED, (part.id, place)))
            recent[place] = crc, part
        self._file.store(changes)
        with self._file.lock:
            self._recent[part.id] = recent | self._recent.get(part.id, {})
        return self.complete(part.id, size)

    def complete(self, group_id: str, size: int) -> StoredGroup:
        """Return the stored group, complete with `size` parts. Parts still in memory are not read from disk."""
        with self._file.lock:
            stored = self._file.select("SELECT place, crc FROM parts WHERE id = ? ORDER BY place", group_id)
            places = tuple(place for place, _ in stored)
            if not stored:
                self._recent.pop(group_id, None)  # forgotten between `store` and here
            if len(stored) < size:
                return StoredGroup(places, None)
            recent = self._recent.pop(group_id, {})
            parts = [recent[place][1] for place, crc in stored if place in recent and recent[place][0] == crc]
            return StoredGroup(places, of_parts(parts) if len(parts) == len(stored) else self._group(group_id))

    def samples(self, prompt_index: int) -> dict[tuple[str, int], Trajectory]:
        """Return the stored samples of a prompt, by group id and place."""
        rows = self._file.select(f"SELECT id, {_PART} FROM parts WHERE prompt_index = ?", prompt_index)
        return {(group_id, row[0]): self._unpacked(group_id, *row).trajectories[0] for group_id, *row in rows}

    def move(self, group_id: str, samples: Iterable[tuple[str, int]], size: int) -> None:
        """Move samples of earlier groups of the prompt to this group, at the same places, until the group has `size`
        parts. A missing sample, or a sample with a taken place, is left out."""
        with self._file.transaction() as connection:
            for earlier, place in samples:
                key = (earlier, place)
                row = connection.execute(f"SELECT {_PART} FROM parts WHERE id = ? AND place = ?", key).fetchone()
                if row is not None:
                    _, prompt_index, _, *stored = row
                    crc = _checksum(group_id, place, prompt_index, *stored)
                    connection.execute(
                        f"UPDATE OR IGNORE parts SET id = ?, crc = ? {_IF_ROOM} AND id = ? AND place = ?",
                        (group_id, crc, group_id, size, *key),
                    )

    def get(self, ids: Sequence[str]) -> list[Group]:
        """Return the groups in the order of `ids`. Raises SpoolDamage if a group is missing or damaged."""
        groups = {group_id: group for group_id in ids if (group := self._group(group_id)) is not None}
        if missing := [group_id for group_id in ids if group_id not in groups]:
            names = ", ".join(missing)
            lost = f" These groups, which are to be trained, are not in the spool: {names}"
            raise self._file.damage("is not whole:", lost)
        return [groups[group_id] for group_id in ids]

    def ids(self) -> list[str]:
        """Return the ids of all groups in order of arrival; groups without a finished sample come last."""
        with self._file.lock:  # nothing is stored between the two statements
            rows = self._file.select("SELECT id FROM parts GROUP BY id ORDER BY min(seq)")
            begun = "SELECT id FROM unfinished UNION SELECT id FROM holders"
            rows += self._file.select(f"SELECT id FROM ({begun}) WHERE id NOT IN (SELECT id FROM parts)")
        return [group_id for (group_id,) in rows]

    def forget(self, ids: Iterable[str]) -> None:
        """Remove groups. Unknown ids are ignored."""
        ids = list(ids)
        rows = [(group_id,) for group_id in ids]
        with self._file.transaction() as connection:
            for table in ("parts", "unfinished", "holders"):
                connection.executemany(f"DELETE FROM {table} WHERE id = ?", rows)
            for group_id in ids:
                self._recent.pop(group_id, None)

    def scrub(self) -> None:
        """Remove forgotten data from the files: SQLite's log would keep the data until the log is full."""
        with self._file.transaction() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file, after any call in another thread."""
        self._file.close()

    def _group(self, group_id: str) -> Group | None:
        """Return the stored parts of a group, as a group; None without parts."""
        rows = self._file.select(f"SELECT {_PART} FROM parts WHERE id = ? ORDER BY place", group_id)
        return of_parts([self._unpacked(group_id, *row) for row in rows]) if rows else None

    def _unpacked(
        self, group_id: str, place: int, prompt_index: int, crc: int, note: str, row: str, frame: bytes
    ) -> Group:
        if crc != _checksum(group_id, place, prompt_index, note, row, frame):
            problem = f"group {group_id} does not have the checksum that it was stored with"
            raise self._file.damage(f"is damaged ({problem}):")
        fields = json.loads(note)
        message = (
            f"The spool {self._file.path} was written by another version of this program (group {group_id}: {{why}}): "
            f"go on with the run by that version."
        )
        with explain((TypeError, ValueError), message, SpoolDamage):
            notes = (Note(**fields | {name: tuple(fields.get(name, ())) for name in _SEQUENCES}),)
            return Group(group_id, prompt_index, (Trajectory.of_frame(frame),), row, notes)


def _checksum(group_id: str, place: int, prompt_index: int, note: str, row: str, frame: bytes | memoryview) -> int:
    return crc32(f"{group_id} {prompt_index} {note} {row}".encode(), crc32(frame, place))
