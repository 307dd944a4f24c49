"""The loops of processes that have faults: they can be killed, paused, and their clocks may jump.

A process can be killed between any two callbacks; its scheduled callbacks are then dropped, as after `kill -9`. The
callbacks of a paused process are kept until it is resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from heapq import heapify
from itertools import count
from random import Random
from typing import Any

from simulation.cluster.loop import Call, ProcessLoop, ScheduledCall, Scheduler, set_running_loop

# States of a process. Not an enumeration, for speed: they are compared for every callback.
RUNNING, PAUSED, DEAD = "running", "paused", "dead"
# A process that looks once a second for whether it was suspended does not notice less.
LEAST_EXCUSED = 2.0
# How often a piece of work that may overlap with another one does.
OVERLAPS = 0.3


class WorldScheduler(Scheduler):
    """Also counts the callbacks of processes."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0

    def call_next(self, callback: Call) -> None:
        """Call `callback`, as the world itself, right after the callback that runs now."""
        self.ready.appendleft(ScheduledCall((callback, (), None, None, self.now)))


class FaultyLoop(ProcessLoop):
    """The loop of a process that has faults. `offset`: its clock is ahead of virtual time by so many seconds.

    `before_work` and `after_work` are called right before and after a piece of work in an executor; a fail-point may
    kill the process there. If `fuse` is not 0, it is counted down at each callback, and when it reaches 0, `on_fuse` is
    called instead of the callback. `excused`: the seconds by which pauses and jumps were longer than LEAST_EXCUSED.
    """

    scheduler: WorldScheduler

    def __init__(self, scheduler: WorldScheduler, name: str, offset: float, latency: Callable[[], float]) -> None:
        super().__init__(scheduler, name, latency)
        self.offset = offset
        self.state = RUNNING
        self.excused = 0.0
        self._paused_at = 0.0
        self.fuse = 0
        self.on_fuse: Callable[[], None] = self.kill
        self.before_work: Callable[[], None] | None = None
        self.after_work: Callable[[], None] | None = None
        self._begun: dict[int, tuple[float, asyncio.Future[Any], Call, tuple[Any, ...]]] = {}  # work of threads
        self._numbers = count()
        self._held: list[ScheduledCall] = []
        self._signals: dict[int, tuple[Call, tuple[Any, ...]]] = {}
        self._tasks_at_death: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"<FaultyLoop {self.name} {self.state}>"

    def step(self, handle: ScheduledCall) -> None:
        if self.state is RUNNING:
            self.scheduler.callbacks += 1
            if self.fuse:
                self.fuse -= 1
                if not self.fuse:
                    return self.on_fuse()
            super().step(handle)
        elif self.state is PAUSED:
            self._held.append(handle)

    def kill(self) -> None:
        """Kill the process: none of its callbacks runs any more."""
        if self.state is DEAD:
            return
        self.state = DEAD
        self._held.clear()
        self._begun.clear()
        # Kept until the end of the simulation, so that none of their `finally` blocks runs before.
        self._tasks_at_death = self.pending_tasks()
        for task in self._tasks_at_death:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def bury(self) -> None:
        self.kill()
        super().bury()
        self._tasks_at_death.clear()

    def pause(self) -> None:
        if self.state is RUNNING:
            self.state, self._paused_at = PAUSED, self.scheduler.now

    def resume(self) -> None:
        if self.state is PAUSED:
            self.state = RUNNING
            self.excused += max(0.0, self.scheduler.now - self._paused_at - LEAST_EXCUSED)
            self.scheduler.ready.extend(self._held)
            self._held.clear()

    def jump(self, seconds: float) -> None:
        """Set the clock of this process ahead. Its timers are due earlier; messages still arrive at the same time."""
        self.offset += seconds
        self.excused += max(0.0, seconds - LEAST_EXCUSED)
        timers = self.scheduler.timers
        timers[:] = [
            (when - seconds if handle[2] is self and handle[3] is not None else when, serial, handle)
            for when, serial, handle in timers
        ]
        heapify(timers)

    def send_signal(self, sign: int) -> bool:
        """Deliver a signal. Returns False if the process has no handler for it, which would kill a real process."""
        if sign not in self._signals:
            return False
        callback, args = self._signals[sign]
        self.call_soon(callback, *args)
        return True

    def time(self) -> float:
        return self.scheduler.now + self.offset

    def call_at(self, when: float, callback: Call, *args: Any, context: Context | None = None) -> ScheduledCall:  # type: ignore[override]
        handle = super().call_at(when - self.offset, callback, *args, context=context)
        handle[4] = when
        return handle

    def overlap(self, random: Random) -> None:
        """To be called within a piece of work. Sometimes another thread does a whole piece of work meanwhile."""
        if self._begun and random.random() < OVERLAPS:
            until, future, func, args = self._begun.pop(random.choice([*self._begun]))
            super().work(until, future, func, args)
            set_running_loop(None)  # as before, within a piece of work

    def run_in_executor(self, executor: Any, func: Call, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        if executor is not None:  # one thread, whose pieces of work do not overlap
            return super().run_in_executor(executor, func, *args)
        number, future, takes = next(self._numbers), self.create_future(), self.latency()
        self._begun[number] = self.scheduler.now + takes, future, func, args
        self.scheduler.call_at(self.scheduler.now + takes / 2, self._work_if_begun, number, loop=self)
        return future

    def _work_if_begun(self, number: int) -> None:
        if number in self._begun:  # else it was done while another thread worked
            self.work(*self._begun.pop(number))

    def work(self, until: float, future: asyncio.Future[Any], func: Call, args: tuple[Any, ...]) -> None:
        if self.before_work is not None:
            self.before_work()
            if self.state is DEAD:
                return
        super().work(until, future, func, args)
        if self.after_work is not None:
            self.after_work()

    def add_signal_handler(self, sig: int, callback: Call, *args: Any) -> None:  # type: ignore[override]
        self._signals[sig] = callback, args

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.state is not DEAD:
            super().call_exception_handler(context)
