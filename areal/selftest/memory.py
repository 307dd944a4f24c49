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
    before, highest, done = resident(), 0, threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(LOOK_SECONDS):
            highest = max(highest, resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    started = time.process_time()
    found: dict[str, float] = {}
    try:
        yield found
    finally:
        seconds = time.process_time() - started
        done.set()
        watcher.join()
    found |= {"bytes": max(0, highest - before), "cpu_seconds": seconds}
