"""Files with a record in each line, JSON with a checksum: metrics, evaluations, events, changes of settings."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import structlog

from areal.storage.disk import rename, replace
from areal.storage.run_files import CHANGES, EVALUATIONS, EVENTS, METRICS, OLDER

log = structlog.get_logger()

# The required keys of each file's records, with types. Anybody may have made the folder: other records are damaged.
COMMON: dict[str, dict[str, Any]] = {
    METRICS: {"step": int},
    EVALUATIONS: {"version": int},
    EVENTS: {"time": int | float, "actor": str},
    CHANGES: {"step": int, "key": str},
}
COMMON |= {older: COMMON[file] for file, older in OLDER.items()}


def whole_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, and then cut the file after the last whole record. Damaged lines before are moved to
    NAME.damaged.jsonl, with a warning: any reader of JSON can then read the file."""
    end = number = 0
    damaged: list[int] = []
    for record, place, line in _records(path):
        yield record
        damaged += range(number + 1, line)
        end, number = place, line
    if path.exists() and path.stat().st_size > end:  # nothing is written where nothing has to be
        os.truncate(path, end)
    if damaged:
        _move_damaged(path, aside := path.with_suffix(f".damaged{path.suffix}"))
        log.warning(
            "damaged lines are left out", file=str(path), lines=damaged[:20], count=len(damaged), now=str(aside)
        )


def _move_damaged(path: Path, aside: Path) -> None:
    """Move the damaged lines. A crash in between leaves them in both files, and the next call appends them again."""
    rewritten = path.with_name(f"{path.name}.tmp")
    rewritten.unlink(missing_ok=True)
    with path.open("rb") as lines, rewritten.open("xb") as whole_lines, aside.open("ab") as moved:
        for line in lines:  # a long run has gigabytes
            (moved if record_of(line, path.name) is None else whole_lines).write(line)
        for file in (moved, whole_lines):
            file.flush()
            os.fsync(file.fileno())
    rename(rewritten, path)


def set_aside(path: Path, older: Path) -> None:
    """Move the records of a file to `older`, replacing its records. A crash in between leaves them in both files."""
    copy = older.with_name(f"{older.name}.tmp")
    shutil.copyfile(path, copy)
    rename(copy, older)
    replace(path, "")


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a file."""
    return (record for record, _, _ in _records(path))


def move_records(path: Path, to: Path, moved: Callable[[dict[str, Any]], bool]) -> None:
    """Move the records for which `moved` is true from `path` to `to`. An interrupted call is repeated."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    for record in whole_records(path):
        lines[moved(record)].append(line_of(record))
    if lines[True]:
        to.parent.mkdir(parents=True, exist_ok=True)
        replace(to, "".join(lines[True]))
        replace(path, "".join(lines[False]))


def metrics_up_to(path: Path, step: int) -> bytes:
    """Return the lines of a metrics.jsonl up to the record of `step`."""
    end = max((end for record, end, _ in _records(path) if record["step"] <= step), default=0)
    return path.read_bytes()[:end] if end else b""


def _records(path: Path, begin: int = 0) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the whole records of a file from offset `begin` on, each with the offset of its end and a line number."""
    if not path.exists():
        return
    end = begin
    with path.open("rb") as file:  # by line: a long run has gigabytes
        file.seek(begin)
        for number, line in enumerate(file, 1):
            end += len(line)
            if (record := record_of(line, path.name)) is not None:
                yield record, end, number


def line_of(record: Mapping[str, Any]) -> str:
    """Return a record, not empty, as a line of a file, with the checksum `crc`.

    >>> record_of(line_of({"step": 3}).encode())
    {'step': 3}"""
    text = json.dumps(record)
    return f'{text[:-1]}, "crc": {crc32(text.encode())}}}\n'


def record_of(line: bytes, file: str = "") -> dict[str, Any] | None:
    """Return the record in a line of the file `file`; None if the line is incomplete or damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # also a line of many brackets
        return None
    if not isinstance(record, dict) or not line.endswith(b"\n"):
        return None
    checksum = record.pop("crc", None)
    is_whole = checksum == crc32(json.dumps(record).encode())
    return record if is_whole and all(isinstance(record.get(k), t) for k, t in COMMON.get(file, {}).items()) else None


class NewRecords:
    """Reads the records of a file that is being written, each record once.

    An incomplete last line is left for a later call: a resumed master may write it again. Damaged lines are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the previous call."""
        if self._path.exists() and self._path.stat().st_size < self._place:
            self._place = 0  # a shorter file has replaced the file
        records = []
        for record, place, _ in _records(self._path, self._place):
            records.append(record)
            self._place = place
        return records


def flat(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record. Numbers of an object in the record are named NAME/KEY."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers |= {f"{name}/{key}": inner for key, inner in flat(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def new_steps(folder: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that returns the metrics of the steps since its last call, of a run that may begin later."""
    return NewRecords(folder / METRICS).read
