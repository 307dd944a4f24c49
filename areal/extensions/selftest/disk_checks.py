"""The folders through which weights reach generators: the speed of writing, checking and copying."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from areal.extensions.selftest.findings import Finding, judged
from areal.weights.chunks import Manifest
from areal.weights.folders import atomic_folder, write_weights

SLOWEST = 50e6
"""Bytes a second, below which a folder counts as too slow: the weights of 1.5B parameters would take a minute."""
LEAST, MOST = 1 << 26, 1 << 30
"""Bounds of the bytes written. Within the bounds, as many bytes are written as the model's weights have."""
SHARED_MEMORY = 1 << 30
"""Bytes needed in /dev/shm by NCCL and vLLM on several GPUs."""
MEMORY = Path("/dev/shm")


def size_of(folder: Path) -> int:
    """Bytes of the files in `folder`."""
    return sum(file.stat().st_size for file in folder.iterdir())


def check_folder(name: str, folder: Path, size: int) -> Finding:
    """Write weights of `size` bytes, within LEAST and MOST, as the trainer publishes them; check the file as a
    generator does; and copy the file. The clock stops only when all bytes are on disk."""
    import torch

    size = min(MOST, max(LEAST, size))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".selftest-") as parent:
        version = Path(parent, "version")
        weights = {"weights": torch.randint(0, 256, (size,), dtype=torch.uint8)}
        started = time.perf_counter()
        with atomic_folder(version) as partial:
            file = write_weights(weights, partial)
        written = time.perf_counter()
        Manifest.of(version)
        checked = time.perf_counter()
        copy = Path(parent, "copy")
        shutil.copyfile(version / file.name, copy)
        with copy.open("rb") as plain:
            os.fsync(plain.fileno())
        copied = time.perf_counter()
    rates = [
        size / max(1e-9, end - begin) for begin, end in ((started, written), (written, checked), (checked, copied))
    ]
    return judged(
        name,
        min(rates[:2]) >= SLOWEST,
        f"{size / 1e9:.2g} GB: written in {written - started:.2f} s, {rates[0] / 1e9:.2f} GB/s; checked with "
        f"{rates[1] / 1e9:.2f}; plain copy {rates[2] / 1e9:.2f}",
        f"{folder} is slower than {SLOWEST / 1e6:.0f} MB/s, so each version of the weights would wait for it: set "
        f"weights.folder to a local disk or /dev/shm on one machine, or weights.transport=stream.",
        folder=str(folder),
        bytes=size,
        write_bytes_per_second=rates[0],
        check_bytes_per_second=rates[1],
        copy_bytes_per_second=rates[2],
    )


def check_memory_folder(size: int, *, gpus: bool) -> Finding:
    """Check /dev/shm, needed by NCCL on several GPUs. On one machine the folder may hold the weights."""
    if not MEMORY.is_dir():
        return Finding("/dev/shm", "skipped", "this machine has none")
    free, size = shutil.disk_usage(MEMORY).free, min(MOST, max(LEAST, size))
    if gpus and free < SHARED_MEMORY:
        return Finding(
            "/dev/shm",
            "FAILED",
            f"{free / 1e6:.0f} MB are free",
            "NCCL and vLLM need more on several GPUs: start the container with --shm-size 16g.",
        )
    if free < 3 * size:
        return Finding("/dev/shm", "skipped", f"{free / 1e6:.0f} MB are free, too few to measure")
    return check_folder("/dev/shm", MEMORY, size)
