"""A disk that takes no write for a while: full, out of quota or inodes, or read-only.

Every writer of a run repeats a refused write until the disk takes the write: `DiskRetry` waits and logs the wait,
`append` leaves no part of a line behind, and `Reserve` has the room in which a run can end on a full disk.
"""

import asyncio
import errno
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import structlog

from areal.base.errors import UserError

T = TypeVar("T")

RETRY_SECONDS = 1.0
RESERVE_BYTES = 16 << 20
# The newest STEPS_LOOKED_AT steps, at least LEAST_STEPS, say whether the disk will be full within STEPS_TO_COME steps.
STEPS_LOOKED_AT, LEAST_STEPS, STEPS_TO_COME = 20, 5, 50
CAUSES = {errno.ENOSPC: "full", errno.EDQUOT: "out of quota", errno.EROFS: "read-only"}
# Behind these codes SQLite hides the error of the system.
SYSTEM_ERRORS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)

log = structlog.get_logger()


class DiskShortageError(Exception):
    """A disk takes no writes for now."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The disk of a folder takes no writes for now. cause: full, read-only, ... free: bytes. waits: the writer."""

    folder: str
    cause: str
    free: int
    waits: str

    @property
    def disk(self) -> str:
        return f"the disk of {self.folder} is {self.cause} ({mebibytes(self.free)} free)"

    def __str__(self) -> str:
        return f"{self.waits}: {self.disk}"


def shortage(error: BaseException | None, folder: Path | None = None) -> str | None:
    """Return the shortage because of which a disk refused a write with `error`, in a word or two; None if another
    failure raised `error`. folder: of the write, for errors that hide the error of the system."""
    if error is None:
        return None
    if isinstance(error, DiskShortageError):
        return str(error)
    number = getattr(error, "errno", None)
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else None
        if folder and code in SYSTEM_ERRORS:
            number = getattr(refusal(folder), "errno", None)
    elif found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors has the number in its text alone
        number = int(found[1])
    if cause := CAUSES.get(number or 0):
        return f"{cause}{_inodes(folder)}"
    return shortage(error.__cause__, folder)


def refusal(folder: Path, size: int = 4096) -> OSError | None:
    """Return the error with which the disk refuses a file of `size` bytes in `folder`; None without an error."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe.") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _inodes(folder: Path | None) -> str:
    with suppress(OSError):
        if folder and (found := os.statvfs(folder)).f_files and not found.f_favail and found.f_bavail:
            return " (it has no inodes left)"
    return ""


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that this user may still write into `folder`."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder, perhaps in place of a file. A crash of the machine does not undo the renaming."""
    os.replace(path, target)
    for folder in {target.parent, path.parent}:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def append(path: Path, text: str, durable: bool = True) -> None:
    """Append whole lines to a file. durable: they survive a crash of the machine. Raises OSError, adding nothing."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        data = memoryview(text.encode(errors="replace"))
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


class Backlog:
    """Appends lines to a file that may lose some: the newest LINES of the lines that the disk refuses are kept until
    the disk takes them. limit: the file is renamed to `older` before it exceeds so many bytes."""

    LINES = 10_000

    def __init__(self, path: Path, older: Path, limit: int) -> None:
        self._path, self._older, self._limit = path, older, limit
        self._lines: deque[str] = deque(maxlen=self.LINES)
        self._lock = threading.Lock()

    def append(self, lines: Iterable[str]) -> None:
        """Append lines, each with a line end."""
        with self._lock, suppress(OSError):
            self._lines.extend(lines)
            text = "".join(self._lines)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            size = self._path.stat().st_size if self._path.exists() else 0
            if size and size + len(text) > self._limit:
                self._path.replace(self._older)
            append(self._path, text, durable=False)
            self._lines.clear()


def leaves(path: Path, folder: Path) -> bool:
    """Whether links lead from `path`, a path in `folder`, out of the folder."""
    return not path.resolve().is_relative_to(folder.resolve())


def within(path: Path, folder: Path) -> Path:
    """Return `path`, a path in `folder`. Raises UserError if a link leads out of the folder."""
    if leaves(path, folder):
        raise UserError(f"{path} is a link to {path.resolve()}: remove the link, nothing is read or written by it.")
    return path


def replace(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file. After a crash the file has either the old content or the new content. A link with this name is
    replaced, and nothing is written through the link. mode: of a new file."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    rename(temporary, path)


def running_out(free: Sequence[float]) -> str | None:
    """Return a warning of a disk that will soon be full, else None. free: the free bytes after each of the newest
    steps. The room has to suffice for two steps as large as the largest, and for STEPS_TO_COME average steps."""
    free = free[-STEPS_LOOKED_AT:]
    if len(free) < LEAST_STEPS:
        return None
    # Room that came back later, as by the removal of a file, was not used up by a step.
    largest = max(earlier - max(free[step:]) for step, earlier in enumerate(free[:-1], 1))
    each = (free[0] - free[-1]) / (len(free) - 1)
    if free[-1] < 2 * largest:
        why = f"and one step took {_gib(largest)}"
    elif free[-1] < STEPS_TO_COME * each:
        why = f"{_gib(each)} less with each step, for about {free[-1] / each:.0f} steps"
    else:
        return None
    return (
        f"The disk of the run folder has {_gib(free[-1])} left, {why}: free some room there, or lower "
        f"trainer.checkpoints_kept or observe.rollouts_gib."
    )


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.3g} GiB"


def mebibytes(size: float) -> str:
    return f"{size / (1 << 20):.1f} MiB"


class DiskRetry:
    """Repeats refused writes until the disk takes them, and logs the begin and the end of a wait. folder: the place of
    writes that name no folder. writer: the name of the actor. logs: False if another process logs. `refusals`: by the
    disks of this process, since its start.

    A repeated write has to leave the same on disk, whatever part of the write was done before the failure.
    """

    refusals: ClassVar[int] = 0

    def __init__(self, folder: Path, writer: str, logs: bool = True) -> None:
        self._logs = logs
        self._folder = folder
        self._writer = writer
        self._waiting: dict[object, str] = {}  # the subjects of the writes
        self._refused: tuple[str, str, int] = ("", "", 0)  # folder, cause, free bytes
        self._since = 0.0

    @property
    def shortage(self) -> Shortage | None:
        """The wait of the writes; None without a wait."""
        waiting = list(self._waiting.values())  # another thread may change the dictionary
        if not waiting:
            return None
        return Shortage(*self._refused, f"{self._writer} waits to write {', '.join(dict.fromkeys(waiting))}")

    async def write(self, write: Callable[[], Awaitable[T]], what: str, folder: Path | None = None) -> T:
        """Repeat `write` while the disk refuses; return its result. what: the subject, for messages. Raises others."""
        mark = object()
        try:
            while True:
                try:
                    result = await write()
                except Exception as error:
                    if not self.must_wait(error, what, mark, folder):
                        raise
                else:
                    self.goes_on(mark)
                    return result
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._waiting.pop(mark, None)

    def write_in_thread(self, write: Callable[[], T], what: str, folder: Path | None = None) -> T:
        """`write` for a thread without an event loop."""

        async def attempt() -> T:
            return write()

        return asyncio.run(self.write(attempt, what, folder))

    def must_wait(self, error: BaseException, what: str, mark: object = None, folder: Path | None = None) -> bool:
        """Whether a failed write is to be repeated. mark: tells apart writes that wait at the same time."""
        folder = folder or self._folder
        cause = shortage(error, folder)
        if cause is None:
            return False
        DiskRetry.refusals += 1
        begins = not self._waiting
        self._refused = str(self._folder if _same_disk(folder, self._folder) else folder), cause, _free_or_none(folder)
        self._waiting[mark] = what
        if begins:
            self._since = time.monotonic()
            if self._logs:
                log.warning(str(self.shortage))
        return True

    def goes_on(self, mark: object = None) -> None:
        """Note that the write is on disk."""
        if self._waiting.pop(mark, None) and not self._waiting and self._logs:
            seconds = time.monotonic() - self._since
            log.warning(f"{self._writer} goes on: the disk of {self._refused[0]} refused writes for {seconds:.0f} s")


def _same_disk(folder: Path, usual: Path) -> bool:
    with suppress(OSError):
        return folder.stat().st_dev == usual.stat().st_dev
    return False


def _free_or_none(folder: Path) -> int:
    with suppress(OSError):
        return free_bytes(folder)
    return 0


class Reserve:
    """A file in `folder` that takes up room. `free` gives the room back, and a run can end on a full disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "reserve"
        with suppress(OSError), self._path.open("ab") as file:  # a run also begins without room for the reserve
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def free(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
