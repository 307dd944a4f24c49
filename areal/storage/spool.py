"""The spool keeps scored samples on the trainer's disk, from their arrival until a checkpoint covers the training step
of their group. It also keeps the calls of unfinished samples (areal.storage.spooled_calls).

A group is stored as parts of one sample each. The frame of a sample is stored as it came."""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from areal.base.errors import UserError, explain
from areal.samples.trajectory import Group, Note, Trajectory, of_parts
from areal.storage.database import note_program, open_store, read_meta, write_meta
from areal.storage.run_folder import ways_on
from areal.storage.spool_file import Changes, SpoolDamage, SpoolFile, checksum
from areal.storage.spooled_calls import SpooledCalls

_PART = "place, prompt_index, crc, note, row, frame"
_IF_ROOM = "WHERE (SELECT count(*) FROM parts WHERE id = ?) < ?"
_PUT = f"INSERT OR IGNORE INTO parts (id, {_PART}) SELECT ?, ?, ?, ?, ?, ?, ? {_IF_ROOM}"
_FINISHED = "DELETE FROM unfinished WHERE id = ? AND place = ?"
# The fields of a note with sequences.
_SEQUENCES = "generators", "marks", "gave"


class SpoolPart(NamedTuple):
    """A group with a single sample, and the frame of the sample (`Trajectory.frame`)."""

    group: Group
    frame: bytes | memoryview


class StoredGroup(NamedTuple):
    """A group in the spool. places: of the stored parts, ascending; empty for an unknown or forgotten group. group: the
    whole group once all parts are stored."""

    places: tuple[int, ...]
    group: Group | None


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
            crc = checksum(part.id, place, part.prompt_index, note, part.row, frame)
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
                    crc = checksum(group_id, place, prompt_index, *stored)
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
        if crc != checksum(group_id, place, prompt_index, note, row, frame):
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
