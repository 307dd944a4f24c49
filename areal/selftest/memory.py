"""How far a process's memory rises."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.005


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextmanager
def peak() -> Iterator[dict[str, float]]:
    """Measures the highest rise of this process's memory, in bytes, and its CPU seconds, by a thread that looks."""
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
