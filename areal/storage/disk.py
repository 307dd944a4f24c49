"""A disk that takes no write for a while: it is full, its quota or its inodes are used up, or it is read-only.

Every writer of a run repeats what the disk has refused until the disk takes it: `DiskRetry` waits and says so, `append`
leaves no part of a line behind, and `Reserve` has the room in which a run can be ended on a full disk.
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
# A disk is said to fill by what the newest steps have written, STEPS_LOOKED_AT of them and at least LEAST_STEPS.
STEPS_LOOKED_AT, LEAST_STEPS, STEPS_TO_COME = 20, 5, 50
CAUSES = {errno.ENOSPC: "full", errno.EDQUOT: "out of quota", errno.EROFS: "read-only"}
# SQLite hides which error the system has reported behind these.
SYSTEM_ERRORS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)

log = structlog.get_logger()


class DiskShortageError(Exception):
    """A disk takes no writes for now."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The disk of a folder takes no writes for now. cause: full, read-only, ... free: bytes. waits: whose writes."""

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
    """What keeps a disk from taking a write that has raised `error`, in a word or two; None if something else has gone
    wrong. folder: where it was written, for errors that do not say what the system has reported."""
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
    elif found := re.search(r"\(os error (\d+)\)", str(error)):  # of safetensors, which has it in its text alone
        number = int(found[1])
    if cause := CAUSES.get(number or 0):
        return f"{cause}{_inodes(folder)}"
    return shortage(error.__cause__, folder)


def refusal(folder: Path, size: int = 4096) -> OSError | None:
    """The error with which the disk refuses a file of `size` bytes in `folder`; None if it takes one."""
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
    """What this user may still write into `folder`."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder, or put a file in the place of another one. A crash of the machine does not undo it."""
    os.replace(path, target)
    for folder in {target.parent, path.parent}:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def append(path: Path, text: str, durable: bool = True) -> None:
    """Append whole lines to a file. durable: as a crash of the machine needs it. Raises OSError, and adds nothing."""
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
    """Appends lines to a file that may lose some: those that the disk refuses are kept, the newest LINES of them, until
    it takes them. limit: before the file has more bytes, it is renamed to `older`."""

    LINES = 10_000

    def __init__(self, path: Path, older: Path, limit: int) -> None:
        self._path, self._older, self._limit = path, older, limit
        self._lines: deque[str] = deque(maxlen=self.LINES)
        self._lock = threading.Lock()

    def append(self, lines: Iterable[str]) -> None:
        """lines: each with its end."""
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
    """Whether a path in `folder` is, through links, one outside of it."""
    return not path.resolve().is_relative_to(folder.resolve())


def within(path: Path, folder: Path) -> Path:
    """`path`, which is in `folder`. Raises UserError if a link leads out of it."""
    if leaves(path, folder):
        raise UserError(f"{path} is a link to {path.resolve()}: remove the link, nothing is read or written by it.")
    return path


def replace(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file so that after a crash it has either the old content or the new one. A link of its name is replaced,
    and nothing is written through it. mode: of a new file."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    rename(temporary, path)


def running_out(free: Sequence[float]) -> str | None:
    """What is said of a disk that will soon be full; None if it will not. free: its free bytes after each of the newest
    steps. Two more steps have to fit that take as much as the largest one, and STEPS_TO_COME as all of them do."""
    free = free[-STEPS_LOOKED_AT:]
    if len(free) < LEAST_STEPS:
        return None
    # What came back later, such as a file that was removed again, was taken by no step.
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
    """Repeats writes that the disk refuses, until it takes them, and logs when that begins and ends. folder: where
    writes go that name no other. writer: who writes. logs: False if another process does. `refusals`: of the disks of
    this process, since its start.

    A write has to leave the same on disk when it is repeated, whatever part of it was done before it failed.
    """

    refusals: ClassVar[int] = 0

    def __init__(self, folder: Path, writer: str, logs: bool = True) -> None:
        self._logs = logs
        self._folder = folder
        self._writer = writer
        self._waiting: dict[object, str] = {}  # what is to be written
        self._refused: tuple[str, str, int] = ("", "", 0)  # the folder, why, and the bytes that it had left
        self._since = 0.0

    @property
    def shortage(self) -> Shortage | None:
        """Why writes wait; None if none does."""
        waiting = list(self._waiting.values())  # another thread may change it
        if not waiting:
            return None
        return Shortage(*self._refused, f"{self._writer} waits to write {', '.join(dict.fromkeys(waiting))}")

    async def write(self, write: Callable[[], Awaitable[T]], what: str, folder: Path | None = None) -> T:
        """Return what `write` returns. what: is written, into folder. Raises what `write` raises for other reasons."""
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
        """The same in a thread that has no event loop."""

        async def attempt() -> T:
            return write()

        return asyncio.run(self.write(attempt, what, folder))

    def must_wait(self, error: BaseException, what: str, mark: object = None, folder: Path | None = None) -> bool:
        """Whether a write that has failed is to be repeated. mark: tells it from others that wait at the same time."""
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
        """The write is on disk."""
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
    """A file in `folder` that takes room on the disk. `free` gives it back, so that a run can end on a full disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "reserve"
        with suppress(OSError), self._path.open("ab") as file:  # the run begins also where there is no room for it
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def free(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
