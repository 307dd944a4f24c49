"""Splits a version's files into chunks with checksums, and encodes chunks as differences from another version.

A version's *stamp* is a digest of its `Manifest`, which has a CRC-32 of every chunk. A receiver that knows the stamp of
a version can therefore take chunks from any sender, and detects corrupt chunks.
"""

import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from isal import isal_zlib as zlib  # as the standard library's, with CRC-32 ten and compression five times as fast

from areal.base.errors import explain

# A stream has at most 64 parts in flight and 16 unwritten parts: at most 80 MiB.
CHUNK_BYTES = 1 << 20
CHECKING_THREADS = min(8, os.cpu_count() or 1)
FASTEST = 1
# Free memory of chunks. Memory from the system is cleared first, which takes as long as reading a chunk.
_FREE: deque[bytearray] = deque(maxlen=64)

_INVALID: type[Exception] = zlib.error  # type: ignore[assignment]  # according to its stub, an instance

Data = bytes | memoryview


class TornWeights(Exception):
    """Weights that were read or received differ from the published weights."""


@dataclass(frozen=True, slots=True)
class FileSums:
    """Name and size in bytes of a file, and the CRC-32 of its chunks."""

    name: str
    size: int
    checksums: tuple[int, ...]

    @classmethod
    def of_parts(cls, name: str, parts: Iterable[memoryview]) -> "FileSums":
        """Return the sums of a file with the bytes of `parts`, of any size.

        >>> FileSums.of_parts("a", [memoryview(b"hello "), memoryview(b"world")])
        FileSums(name='a', size=11, checksums=(222957957,))"""
        checksums, size, last = [], 0, 0
        for part in parts:
            start = 0
            while start < len(part):
                stop = min(len(part), start + CHUNK_BYTES - size % CHUNK_BYTES)
                last = zlib.crc32(part[start:stop], last)
                size += stop - start
                start = stop
                if not size % CHUNK_BYTES:
                    checksums.append(last)
                    last = 0
        return cls(name, size, (*checksums, last) if size % CHUNK_BYTES else tuple(checksums))

    @property
    def is_sound(self) -> bool:
        plain = self.name not in ("", ".", "..") and "/" not in self.name and "\0" not in self.name
        return plain and len(self.checksums) == -(-self.size // CHUNK_BYTES)


class FileChunk(NamedTuple):
    """A part of a file: the file's number in the manifest, offset and size of the part in bytes, and its CRC-32."""

    file: int
    offset: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a version, by name, with checksums."""

    files: tuple[FileSums, ...]

    @classmethod
    def of(cls, folder: Path) -> "Manifest":
        """Return the manifest of the files in `folder`. Raises OSError."""
        with ThreadPoolExecutor(CHECKING_THREADS) as threads:  # CRC-32 is computed without the GIL
            return cls(tuple(_sums(path, threads) for path in sorted(folder.iterdir()) if path.is_file()))

    @property
    def stamp(self) -> str:
        """A digest of names, sizes and checksums."""
        described = repr([(file.name, file.size, file.checksums) for file in self.files])
        return blake2b(described.encode(), digest_size=16).hexdigest()

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)

    def chunks(self) -> list[FileChunk]:
        """Return all chunks, in the order of sending."""
        return [
            FileChunk(number, i * CHUNK_BYTES, min(CHUNK_BYTES, file.size - i * CHUNK_BYTES), checksum)
            for number, file in enumerate(self.files)
            for i, checksum in enumerate(file.checksums)
        ]

    def is_laid_out_like(self, manifest: "Manifest") -> bool:
        """Return whether both manifests have the same names and sizes of files: then their chunks can be compared."""
        return [(f.name, f.size) for f in self.files] == [(f.name, f.size) for f in manifest.files]


def _sums(path: Path, threads: ThreadPoolExecutor) -> FileSums:
    size = path.stat().st_size
    with path.open("rb") as file:
        descriptor = file.fileno()
        offsets = range(0, size, CHUNK_BYTES)
        sums = threads.map(lambda offset: zlib.crc32(_read(descriptor, CHUNK_BYTES, offset)), offsets)
        return FileSums(path.name, size, tuple(sums))


def _read(descriptor: int, size: int, offset: int) -> memoryview:
    """Return bytes of a file; fewer at the end."""
    try:
        memory = _FREE.pop()
    except IndexError:
        memory = bytearray(size)
    if len(memory) < size:
        memory = bytearray(size)
    data = np.frombuffer(memory, np.uint8, size)
    weakref.finalize(data, _FREE.append, memory).atexit = False
    return data.data[: os.preadv(descriptor, [data.data], offset)]


class HeldVersion:
    """The open files of a version, readable while they arrive, and after the removal of their folder.

    `ready`: the number of chunks that have arrived, counted from the first. `given_up`: True if no more will arrive.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, arriving: bool = False) -> None:
        """`arriving`: the files are created now, in an existing, empty folder. Raises OSError."""
        self.manifest = manifest
        self.given_up = False
        self._chunks = manifest.chunks()
        self.ready = 0 if arriving else len(self._chunks)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if arriving else os.O_RDONLY
        self._descriptors: list[int] = []
        # The files are closed when the last reader drops this object: a version may be removed while a stream sends it.
        weakref.finalize(self, _close, self._descriptors)
        for file in manifest.files:
            self._descriptors.append(os.open(folder / file.name, flags, 0o644))

    @property
    def chunks(self) -> int:
        return len(self._chunks)

    @property
    def complete(self) -> bool:
        return self.ready == self.chunks

    def read(self, number: int) -> memoryview:
        """Return a chunk that is ready. Raises TornWeights if the file has become shorter, and OSError."""
        chunk = self._chunks[number]
        data = _read(self._descriptors[chunk.file], chunk.size, chunk.offset)
        if len(data) != chunk.size:
            raise TornWeights(f"{self.manifest.files[chunk.file].name} has been cut short")
        return data

    def put(self, number: int, data: Data) -> None:
        """Write the next chunk. Raises TornWeights for a chunk out of order or with a wrong checksum, and OSError."""
        if number != self.ready or self.complete:
            raise TornWeights(f"chunk {number} came in place of chunk {self.ready} of {self.chunks}")
        chunk = self._chunks[number]
        if len(data) != chunk.size or zlib.crc32(data) != chunk.checksum:
            raise TornWeights(f"chunk {number} of {self.chunks} does not have the checksum it was published with")
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptors[chunk.file], data[written:], chunk.offset + written)
        self.ready += 1


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def difference(new: Data, old: Data) -> bytes | None:
    """Return the difference that turns `old` into `new`, of equal length, or None if it is not smaller than `new`.

    A difference has a bit for each element of two bytes (1: changed), followed by new XOR old of the changed elements,
    all compressed with zlib. Two bytes are a bf16 value, or half of an fp32 value, whose upper half seldom changes.
    """
    changes = _elements(new) ^ _elements(old)
    changed = changes != 0
    # Indexing by places is four times as fast as indexing by a mask.
    packed = zlib.compress(np.packbits(changed).tobytes() + changes[np.flatnonzero(changed)].tobytes(), FASTEST)
    return packed if len(packed) < len(new) else None


def apply(packed: Data, old: Data) -> memoryview:
    """Return the new chunk from its `difference` and `old`. Raises TornWeights if `packed` cannot be unpacked."""
    elements = _elements(old)
    mask_bytes = -(-len(elements) // 8)
    max_bytes = mask_bytes + len(old)
    with explain((_INVALID, ValueError), "a difference that cannot be unpacked: {why}", TornWeights):
        plain = zlib.decompressobj().decompress(packed, max_bytes)
        changed = np.unpackbits(np.frombuffer(plain[:mask_bytes], np.uint8), count=len(elements)).view(bool)
        new = elements.copy()
        new[np.flatnonzero(changed)] ^= np.frombuffer(plain[mask_bytes:], elements.dtype)
    return new.data.cast("B")


def _elements(data: Data) -> np.ndarray:
    return np.frombuffer(data, np.uint8 if len(data) % 2 else np.uint16)
