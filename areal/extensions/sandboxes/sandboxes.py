"""Sandboxes of tasks: a separate place for each sample, with files and running commands.

`sandbox_providers.py` has the kinds of sandboxes. A failing command is a result. Only a lost or silent sandbox raises
SandboxError: the sample then fails, without a score.
"""

import asyncio
import io
import math
import re
import tarfile
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from areal.base.errors import explain
from areal.extensions.programs.outside import SandboxError

# The most bytes that one call of `read` or `write` moves, of the output of a command, and of a folder that is copied. A
# file of a large stated size need not have room on a disk.
PART_BYTES, OUTPUT_BYTES, FOLDER_BYTES = 4 << 20, 1 << 20, 2 << 30
# The most files of a copied folder, and the time of a copy as a multiple of the time of a command.
FOLDER_FILES, COPY_TIMES = 100_000, 10
# The time that a sandbox may take to end.
END_SECONDS = 30.0
_READS = 'test -f "$1" && tail -c "+$2" "$1" | head -c "$3"'
_WRITES = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
_APPENDS = 'cat >> "$1"'
_PACKS = 'test ! -L "$1" && tar -cf "$2" -C "$1" .'
_EMPTIES = 'mkdir -p "$1" && cd "$1" && rm -rf ./* ./.[!.]* ./..?*'
_UNPACKS = 'mkdir -p "$2" && tar -xf "$1" -C "$2" && rm "$1"'


@dataclass(frozen=True)
class Ran:
    """The result of a command. status: the exit status; None: the command was ended at its deadline, with all that it
    had started. output: stdout and stderr in order of arrival; a long output is cut in the middle, with a mark."""

    status: int | None
    output: bytes

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace").strip()


@dataclass(frozen=True)
class Limits:
    """The most that a sandbox may use. memory: as for docker, such as 1g. disk: only for `bubble`, in its memory."""

    memory: str = "1g"
    cpus: float = 1.0
    processes: int = 256
    disk: str = "256m"
    network: str = "none"

    def changed(self, row: Mapping[str, Any]) -> "Limits":
        """Return these limits with the row's changes. A row may not set the network, nor exceed the larger of LARGEST
        and these limits. Raises SandboxError."""
        if not row.keys() <= vars(self).keys() - {"network"}:
            raise SandboxError(f"the row's limits are {', '.join(row)}: known are memory, cpus, processes and disk")
        for name, value in row.items():
            size = size_of if isinstance(getattr(LARGEST, name), str) else float
            with explain((TypeError, ValueError, OverflowError), f"the row's limit of {name} is no size", SandboxError):
                limit = max(size(getattr(LARGEST, name)), size(getattr(self, name)))
                fits = 0 < size(value) <= limit
            if not fits:
                raise SandboxError(f"the row's limit of {name} is above {getattr(LARGEST, name)}, or 0")
        return Limits(**{**vars(self), **row})


# The most that a row may take of the machine: a row's data may say anything.
LARGEST = Limits(memory="64g", cpus=64.0, processes=4096, disk="16g")


class Sandbox:
    """A sandbox. A call has a deadline, in seconds from when it has a core (`programs/slots.py`), and raises
    SandboxError if the sandbox is lost or silent. Paths are absolute. A provider implements `exec`, `close` and perhaps
    `start`; all other methods run the shell of the sandbox."""

    async def start(self, seconds: float) -> None:
        """Start the sandbox, unless it was started when made."""

    async def exec(self, *command: str, seconds: float, stdin: bytes = b"", most_bytes: int = OUTPUT_BYTES) -> Ran:
        """Run a command to its end, or to its deadline."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the sandbox, with all its processes. Raises nothing if the sandbox has already ended."""
        raise NotImplementedError

    async def read(self, path: str, seconds: float, *, start: int = 0, most_bytes: int = PART_BYTES) -> bytes | None:
        """Return a part of a file, or None if the file cannot be read."""
        size = str(most_bytes)
        ran = await self.shell(_READS, path, str(start + 1), size, seconds=seconds, most_bytes=most_bytes)
        return ran.output if ran.status == 0 else None

    async def write(self, path: str, content: bytes, seconds: float) -> bool:
        """Write a file, and its folders. Return whether that worked."""
        return await self._put(io.BytesIO(content), path, seconds)

    async def upload(self, folder: Path, path: str, seconds: float) -> bool:
        """Copy a folder of this machine with all its contents. Return whether that worked."""
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(_pack, folder, file)
            return await self.unpack(file, path, seconds)

    async def unpack(self, archive: IO[bytes], folder: str, seconds: float) -> bool:
        """Unpack an archive into a folder. Return whether that worked."""
        path = f"/tmp/{uuid.uuid4().hex}.tar"
        archive.seek(0)
        put = await self._put(archive, path, seconds)
        return put and (await self.shell(_UNPACKS, path, folder, seconds=seconds)).status == 0

    async def alive(self) -> bool:
        """Return whether the sandbox still answers."""
        try:
            return (await self.exec("true", seconds=END_SECONDS)).status == 0
        except SandboxError:
            return False

    async def shell(
        self, code: str, *arguments: str, seconds: float, stdin: bytes = b"", most_bytes: int = OUTPUT_BYTES
    ) -> Ran:
        """Run shell code with arguments."""
        return await self.exec("sh", "-c", code, "sh", *arguments, seconds=seconds, stdin=stdin, most_bytes=most_bytes)

    async def _put(self, content: IO[bytes], path: str, seconds: float) -> bool:
        part, code = content.read(PART_BYTES), _WRITES
        while (await self.shell(code, path, seconds=seconds, stdin=part)).status == 0:
            part, code = content.read(PART_BYTES), _APPENDS
            if not part:
                return True
        return False


def size_of(text: str) -> int:
    """Return a size such as docker's `2g`, in bytes. Raises SandboxError.

    >>> size_of("512m")
    536870912
    """
    match = re.fullmatch(r"(\d+)([kmg]?)b?", str(text).lower())
    if not match:
        raise SandboxError(f"{text!r} is no size: write 512m or 2g")
    return int(match[1]) << 10 * " kmg".index(match[2] or " ")


async def copy_folder(source: Sandbox, target: Sandbox, folder: str, seconds: float) -> bool:
    """Replace a folder of `target` by the folder of `source`, where any program may be the policy's. Return False if
    the policy left no folder, one too large or too slow to copy, or a false archive. Raises SandboxError."""
    archive = f"/tmp/{uuid.uuid4().hex}.tar"
    with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as clean:
        try:
            async with asyncio.timeout(COPY_TIMES * seconds):
                if (await source.shell(_PACKS, folder, archive, seconds=seconds)).status != 0:
                    return False
                part = None
                while part is None or len(part) == PART_BYTES:  # a shorter part is the last, even if more would follow
                    part = await source.read(archive, seconds, start=packed.tell()) or b""
                    packed.write(part)
                    if packed.tell() > FOLDER_BYTES:
                        return False
            packed.seek(0)
            await asyncio.to_thread(clean_archive, packed, clean, COPY_TIMES * seconds)
        except (tarfile.TarError, ValueError, LookupError, ArithmeticError, RecursionError, OSError):
            return False  # a TimeoutError is an OSError
        emptied = await target.shell(_EMPTIES, folder, seconds=seconds)
        return emptied.status == 0 and await target.unpack(clean, folder, seconds)


def clean_archive(source: IO[bytes], target: IO[bytes], seconds: float = math.inf) -> None:
    """Copy the files, folders and symbolic links of an archive, without owners. Members that would be unpacked outside
    the folder are left out. seconds: time limit. Raises TarError, ValueError, KeyError."""
    links: set[PurePosixPath] = set()
    end = time.monotonic() + seconds
    with tarfile.open(fileobj=source, mode="r:") as old, tarfile.open(fileobj=target, mode="w:") as new:
        for number, member in enumerate(old):
            if number >= FOLDER_FILES or time.monotonic() > end or member.issparse():
                raise ValueError("the folder has too many files, or files with holes")
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts or links & {name, *name.parents}:
                continue
            plain = tarfile.TarInfo(str(name))
            plain.mode, plain.mtime = member.mode & 0o777, member.mtime
            content = old.extractfile(member) if member.isreg() or member.islnk() else None
            if content is not None:
                plain.size = content.seek(0, io.SEEK_END)
                content.seek(0)
            elif member.issym():
                links.add(name)
                plain.type, plain.linkname = tarfile.SYMTYPE, member.linkname
            elif member.isdir():
                plain.type = tarfile.DIRTYPE
            else:
                continue
            if target.tell() + plain.size > FOLDER_BYTES:
                raise ValueError("the folder is too large")
            new.addfile(plain, content)


def _pack(folder: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w:") as archive:
        archive.add(folder, ".")
