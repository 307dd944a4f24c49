"""Measures how late the event loop of this process runs what is due, and the memory of this process and its machine."""

import asyncio

import psutil

from areal.devices import free_memory

TICK_SECONDS = 0.05

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
    """`loop_delay`: the longest delay since the last call, in seconds. `memory`: that of this process, in bytes.
    `free_memory`: what its machine has left. Empty if nothing is measured."""
    if _watch is None:
        return {}
    seconds, _watch.longest = _watch.longest, 0.0
    memory = float(psutil.Process().memory_info().rss)
    return {"loop_delay": seconds, "memory": memory, "free_memory": float(free_memory())}
