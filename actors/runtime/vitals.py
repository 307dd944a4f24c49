"""Measures how late the event loop of this process runs what is due, and the memory of this process and its machine."""

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
# After so many seconds in which the event loop has run nothing that is due, the log says where it stands.
BLOCKED_SECONDS = 15
# With less memory left, the machine is short of it.
ENOUGH_BYTES = 2 << 30

_watch: "_Watch | None" = None
log = structlog.get_logger()


class _Watch:
    """Schedules a callback every TICK_SECONDS and keeps the longest delay of one."""

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
        """To be run in a thread of its own. thread: that of the event loop. A suspended process does not count on."""
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
    """`loop_delay`: the longest delay since the last call, in seconds. `memory`: that of this process, in bytes, and
    once its machine has less than ENOUGH_BYTES left, that of all processes which it has started. `free_memory`: what
    its machine has left. Empty if nothing is measured."""
    if _watch is None:
        return {}
    seconds, _watch.longest = _watch.longest, 0.0
    free, process = free_memory(), psutil.Process()
    processes = [process] if free >= ENOUGH_BYTES else [process, *process.children(recursive=True)]
    return {"loop_delay": seconds, "memory": float(sum(map(_resident, processes))), "free_memory": float(free)}


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):  # it has ended
        return int(process.memory_info().rss)
    return 0
