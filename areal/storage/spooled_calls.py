"""The calls so far of unfinished samples, in the spool of the trainer: a new attempt at a sample begins with them."""

from collections.abc import Iterable

from areal.storage.saved_calls import unpacked
from areal.storage.spool_file import SpoolFile, checksum

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


class SpooledCalls:
    """The calls so far (areal.storage.saved_calls) of unfinished samples, in the file of the spool."""

    def __init__(self, file: SpoolFile) -> None:
        self._file = file

    def put(self, group_id: str, place: int, prompt_index: int, frame: bytes | memoryview, number: int = 0) -> None:
        """Store the calls so far of the sample at a place. They replace calls with a lower number, or with the same
        number and fewer tokens. They are not stored if the sample itself is stored, or if SpoolError is raised. Raises
        ValueError if the frame is not of calls."""
        oldest = min(int(call.sampled.versions.min()) for call in unpacked(frame))
        crc = checksum("", place, prompt_index, f"{oldest}", "", frame)
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
            if crc == checksum("", place, prompt_index, f"{oldest}", "", frame):
                return bytes(frame)
        return b""

    def hold(self, group_id: str, holder: str) -> None:
        """Note the actor that alone may store more samples of a group."""
        self._file.store((("INSERT OR REPLACE INTO holders VALUES (?, ?)", (group_id, holder)),))

    def holder(self, group_id: str) -> str:
        """Return the actor that alone may store more samples of a group; empty: any actor may."""
        return next((name for (name,) in self._file.select("SELECT holder FROM holders WHERE id = ?", group_id)), "")
