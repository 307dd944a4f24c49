"""The peak memory of a process, and the free memory of a GPU."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.005
ASK_SECONDS, NEARLY = 0.2, 0.95
"""Seconds between questions about a GPU's free memory, and the share of the needed memory that is enough."""


def resident() -> int:
    """Return the bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextmanager
def peak() -> Iterator[dict[str, float]]:
    """Measure, by a thread that looks, the highest rise of this process's memory, in bytes, and its CPU seconds."""
    resident_at_start, highest, stop = resident(), 0, threading.Event()

    def look() -> None:
        nonlocal highest
        while not stop.wait(LOOK_SECONDS):
            highest = max(highest, resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    started = time.process_time()
    usage: dict[str, float] = {}
    try:
        yield usage
    finally:
        seconds = time.process_time() - started
        stop.set()
        watcher.join()
    usage |= {"bytes": max(0, highest - resident_at_start), "cpu_seconds": seconds}


def free_memory(device: Any) -> float | None:
    """Return the bytes of a GPU that no process has; None on a CPU, since all processes share its memory."""
    if device.type != "cuda":
        return None
    import torch

    return float(torch.cuda.mem_get_info(device)[0])


def reserved_memory(device: Any) -> float:
    """Return the bytes of a GPU reserved by torch for this process; 0 on a CPU."""
    import torch

    return float(torch.cuda.memory_reserved()) if device.type == "cuda" else 0.0


def wait_for(free: Callable[[], float | None], needed: float | None, seconds: float) -> float | None:
    """Wait until nearly `needed` bytes are free (None: do not wait). Returns the seconds, or None after `seconds`."""
    started = time.monotonic()
    while needed is not None and (free() or 0.0) < NEARLY * needed:
        if time.monotonic() - started > seconds:
            return None
        time.sleep(ASK_SECONDS)
    return time.monotonic() - started
