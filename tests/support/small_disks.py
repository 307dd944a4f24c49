"""Disks that are full, and files that are damaged."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_small_disk(folder: Path, inodes: int) -> Iterator[None]:
    """A disk of 1 MiB is mounted at `folder`, where this user may mount one. Otherwise the test is skipped."""
    command = ["mount", "-t", "tmpfs", "-o", f"size=1m,nr_inodes={inodes}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(folder: Path) -> Path:
    """Fill the disk to its last byte. Returns the file that does."""
    with (folder / "hog").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size = 0
    return folder / "hog"


def use_up_inodes(folder: Path) -> list[Path]:
    """Returns the files that do."""
    files: list[Path] = []
    while True:
        try:
            (folder / f"inode{len(files)}").touch(exist_ok=False)
        except OSError:
            return files
        files.append(folder / f"inode{len(files)}")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
