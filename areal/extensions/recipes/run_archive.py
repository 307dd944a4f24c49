"""The record of a run as one file: written by `areal export-record`, opened by `areal audit` and `areal replay`.

    SHA256SUMS, record.json, run/config.yaml, run/metrics.jsonl, run/rollouts/..., run/models/..., run/checkpoints/...

`zstd -d FILE | tar x` unpacks a record, and `sha256sum -c SHA256SUMS` compares it. A skippable frame of zstd at the end
has the SHA-256 of all earlier bytes. A record may come from a stranger, so it may have only regular files with plain
names and endings that no program runs, listed in SHA256SUMS, within BYTES and FILES.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from areal.base.errors import UserError
from areal.storage.disk import replace

SUMS, FACTS = "SHA256SUMS", "record.json"
BYTES, PACKED_BYTES, FILES = 2 << 30, 512 << 20, 10_000
"""The largest size of a record, unpacked and packed, and its largest number of files."""
_NAME = re.compile(
    r"(?:record|audit)\.json|run/(?:[\w+-][\w.+-]{0,80}/){0,4}[\w+-][\w.+-]{0,80}\.(?:db|jsonl?|parquet|safetensors|txt|yaml)"
)
_BLOCK, _CHUNK = tarfile.BLOCKSIZE, 1 << 20
_FRAME = b"\x50\x2a\x4d\x18\x20\x00\x00\x00"  # a frame of zstd with 32 bytes, skipped by tools
_LEVEL = 9


def write_archive(path: Path, facts: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write a record. facts: the content of record.json. files: contents, by their names in the record."""
    contents = {FACTS: json.dumps(facts, indent=2).encode() + b"\n", **files}
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in {SUMS: sums.encode(), **contents}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    packed = compressed(buffer.getvalue())
    replace(path, packed + _FRAME + hashlib.sha256(packed).digest())


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpack a record into an empty folder. Returns its facts. Raises UserError if the record has changed since it was
    written, or has forbidden content."""
    import pyarrow as pa

    _check_digest(path)
    try:
        with pa.input_stream(str(path), "zstd") as stream:
            _unpack(path, stream, folder)
        facts: dict[str, Any] = json.loads((folder / FACTS).read_bytes())
    except (OSError, ValueError, tarfile.HeaderError) as error:  # from Arrow, JSON, and a block without a header
        raise _refusal(path, f"it cannot be unpacked, {error}") from error
    return facts


def _check_digest(path: Path) -> None:
    if not path.is_file() or path.stat().st_size > PACKED_BYTES:
        raise _refusal(path, f"it is no file of at most {PACKED_BYTES >> 20} MiB")
    digest, remaining = hashlib.sha256(), path.stat().st_size - len(_FRAME) - 32
    with path.open("rb") as file:
        while remaining > 0 and (chunk := file.read(min(remaining, _CHUNK))):
            digest.update(chunk)
            remaining -= len(chunk)
        end = file.read()
    if end[: len(_FRAME)] != _FRAME:
        raise _refusal(path, "it does not end as `areal export-record` ends one")
    if end[len(_FRAME) :] != digest.digest():
        raise _refusal(path, "a byte of it has changed since it was written")


def _unpack(path: Path, stream: IO[bytes], folder: Path) -> None:
    expected = {SUMS: ""}
    for name, size in _members(path, stream):
        target = folder / name
        if name not in expected or not (_NAME.fullmatch(name) or name == SUMS):
            raise _refusal(path, f"it has {name!r}, which no record has or {SUMS} does not list")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, listed = _write(path, stream, size, target), expected.pop(name)
        if name == SUMS and size < _CHUNK:
            expected = {line[66:]: line[:64] for line in target.read_text().splitlines()}
        elif digest != listed:
            raise _refusal(path, f"{name} differs from the file that {SUMS} lists")
    if expected:
        raise _refusal(path, f"it lacks {', '.join(expected)}")


def _members(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, int]]:
    """Yield name and size of each file. The caller reads the content before it asks for the next file."""
    total = 0
    for number in range(FILES + 1):
        block = _read(path, stream, _BLOCK)
        if not block.strip(b"\0"):
            return
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        total += member.size
        if member.type != tarfile.REGTYPE:
            raise _refusal(path, f"{member.name!r} is no regular file")
        if total > BYTES or number == FILES or member.size < 0:
            raise _refusal(path, f"it has more than {BYTES >> 30} GiB or {FILES} files")
        yield member.name, member.size


def _read(path: Path, stream: IO[bytes], size: int) -> bytes:
    if len(content := stream.read(size)) < size:
        raise _refusal(path, "it ends too early")
    return content


def _write(path: Path, stream: IO[bytes], size: int, target: Path) -> str:
    """Write the next bytes into a new file, and skip the rest of their last block. Returns their digest."""
    digest = hashlib.sha256()
    with target.open("xb") as file:
        for begin in range(0, size, _CHUNK):
            chunk = _read(path, stream, min(_CHUNK, size - begin))
            digest.update(chunk)
            file.write(chunk)
    _read(path, stream, -size % _BLOCK)
    return digest.hexdigest()


def compressed(content: bytes) -> bytes:
    import pyarrow as pa  # takes time

    return pa.Codec("zstd", _LEVEL).compress(content, asbytes=True)


def _refusal(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not opened as the record of a run: {why}. Get it again from who made it.")
