"""Measures how late the event loop of this process runs what is due, and the memory of this process and its machine."""

import asyncio
import contextlib

import psutil

from areal.devices import free_memory

TICK_SECONDS = 0.05
# With less memory left, the machine is short of it.
ENOUGH_BYTES = 2 << 30

_watch: "_Watch | None" = None


class _Watch:
    """Schedules a callback every TICK_SECONDS and keeps the longest delay of one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest = 0.0
        self._loop = loop
        self._schedule()

    def _schedule(self) -> None:
        self._due = self._loop.time() + TICK_SECONDS
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.longest = max(self.longest, self._loop.time() - self._due)
        self._schedule()


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
