"""Measures the delay of this process's event loop, and the memory of this process and its machine."""

import asyncio
import contextlib
import contextvars
import sys
import threading
import time
import traceback

import psutil
import structlog

from areal.base.text import place_in
from areal.devices import free_memory

TICK_SECONDS = 0.05
# The log says where the event loop stands once the loop has run nothing for this many seconds.
BLOCKED_SECONDS = 15
# With less free memory, the machine is short of memory.
ENOUGH_BYTES = 2 << 30

_watch: "_Watch | None" = None
log = structlog.get_logger()


class _Watch:
    """Schedules a callback every TICK_SECONDS and keeps the longest delay of a callback."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest = 0.0
        self._loop = loop
        self._schedule()
        self._still = 0
        run, thread = contextvars.copy_context().run, threading.get_ident()
        threading.Thread(target=run, args=(self._look, thread), name="event loop", daemon=True).start()

    def _schedule(self) -> None:
        self._due = self._loop.time() + TICK_SECONDS
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.longest = max(self.longest, self._loop.time() - self._due)
        self._still = 0
        self._schedule()

    def _look(self, thread: int) -> None:
        """Look at the event loop every second, from another thread. thread: id of the event loop's thread."""
        while not self._loop.is_closed():
            time.sleep(1.0)
            self._still += 1
            if self._still == BLOCKED_SECONDS:
                place = place_in(traceback.extract_stack(sys._current_frames()[thread]))
                log.warning(f"the event loop has stood still for {BLOCKED_SECONDS} s{place}")


def watch() -> None:
    """Begin to measure the running event loop. A process has one loop."""
    global _watch
    _watch = _Watch(asyncio.get_running_loop())


def numbers() -> dict[str, float]:
    """`loop_delay`: the longest delay since the last call, in seconds. `memory`: memory of this process, in bytes; with
    less than ENOUGH_BYTES left on the machine, memory of all processes below this process too. `free_memory`: memory
    left on the machine. Empty before `watch`."""
    if _watch is None:
        return {}
    seconds, _watch.longest = _watch.longest, 0.0
    free, process = free_memory(), psutil.Process()
    processes = [process] if free >= ENOUGH_BYTES else [process, *process.children(recursive=True)]
    return {"loop_delay": seconds, "memory": float(sum(map(_resident, processes))), "free_memory": float(free)}


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):  # the process has ended
        return int(process.memory_info().rss)
    return 0
