"""Virtual time: one scheduler for a whole simulated cluster, and one lean event loop for each of its processes.

The scheduler runs one callback at a time, in an order that depends on nothing but the calls made so far. A process can
be killed between any two callbacks: what it had scheduled is dropped and never runs again, as after `kill -9`. A paused
one keeps its callbacks until it is resumed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NoReturn, TypeVarTuple
from weakref import WeakSet

Ts = TypeVarTuple("Ts")
Call = Callable[..., Any]
Future = asyncio.Future
_set_running_loop = asyncio._set_running_loop

# A live-lock would otherwise hang the simulation: no cluster this small has that much to do at one instant.
CALLBACKS_AN_INSTANT = 100_000
# A coroutine that waits in a `finally` block is not closed yet; none has more of these inside each other.
CLOSE_ATTEMPTS = 20


# States of a process. Not an enumeration: they are looked at for every callback.
RUNNING, PAUSED, DEAD = "running", "paused", "dead"


class Stuck(Exception):
    """Callbacks call each other for ever, and virtual time stands still."""


class Handle(list[Any]):
    """A callback that is due, or will be at a time of its loop: [callback, arguments, loop, context, when].

    `callback` is None once it is cancelled; `loop` is None for one of the world itself, `context` for what comes from
    outside the process. A list, since there are thousands and lists are made fastest.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[0] = None
        self[1] = ()

    def cancelled(self) -> bool:
        return self[0] is None

    def when(self) -> float:
        when: float = self[4]
        return when


class Scheduler:
    """Runs what is due, in order of time, and at one time in order of the calls.

    A callback may set `changed`; `on_change` is then called after it, and `stopped`, which ends the run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.callbacks = 0
        self.stopped = False
        self.changed = False
        self.on_change: Callable[[], None] = lambda: None
        self.ready: deque[Handle] = deque()
        self.timers: list[tuple[float, int, Handle]] = []
        self.serial = count()

    def call_at(self, when: float, callback: Call, *args: Any, loop: ProcessLoop | None = None) -> Handle:
        """Call at virtual time `when`: inside the process of `loop`, if it lives by then, or as the world itself."""
        handle = Handle((callback, args, loop, None, when))
        heappush(self.timers, (when, next(self.serial), handle))
        return handle

    def reschedule(self, loop: ProcessLoop, earlier: float) -> None:
        """The clock of a process has jumped ahead: its own timers are due earlier. Messages to it are not."""
        moved = [
            (when - earlier if handle[2] is loop and handle[3] is not None else when, serial, handle)
            for when, serial, handle in self.timers
        ]
        heapify(moved)
        self.timers[:] = moved

    def enter(self, loop: ProcessLoop | None) -> None:
        """The callbacks that follow are of this process, or of the world itself."""
        _set_running_loop(loop)

    def run(self, until: float) -> None:
        """Run until virtual time `until`, `stopped` is set, or nothing is left to do. Raises Stuck."""
        ready, timers, current = self.ready, self.timers, None
        _set_running_loop(None)
        try:
            while not self.stopped:
                budget = CALLBACKS_AN_INSTANT
                while ready:
                    callback, args, loop, context, _ = handle = ready.popleft()
                    if callback is None:
                        continue
                    if loop is not current:
                        current = loop
                        self.enter(loop)
                    if loop is None:
                        callback(*args)
                    elif loop.state is RUNNING:
                        self.callbacks += 1
                        if loop.fuse:
                            loop.fuse -= 1
                            if not loop.fuse:
                                loop.on_fuse()
                                continue
                        try:
                            if context is None:
                                callback(*args)
                            else:
                                context.run(callback, *args)
                        except Exception as error:
                            loop.call_exception_handler({"message": f"{callback!r} raised", "exception": error})
                    elif loop.state is PAUSED:
                        loop.held.append(handle)
                    if self.changed:
                        self.changed = False
                        self.on_change()
                    if self.stopped:
                        return
                    budget -= 1
                    if not budget:
                        raise Stuck(f"{CALLBACKS_AN_INSTANT} callbacks at {self.now:.3f} s, the last {callback!r}")
                if not timers or timers[0][0] > until:
                    return
                when, _, handle = heappop(timers)
                if when > self.now:
                    self.now = when
                ready.append(handle)
        finally:
            _set_running_loop(None)


class Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address: task groups cancel in the order of a set."""

    __slots__ = ("_serial",)
    _serial: int

    def __hash__(self) -> int:
        return self._serial


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process: what asyncio needs of a loop, and no more.

    `latency` gives the seconds that a piece of work takes in an executor; `before_work` and `after_work` are called in
    the executor around it (a fail-point may kill the process there). After `fuse` more callbacks, unless that is 0,
    `on_fuse` is called in place of one.
    """

    def __init__(self, scheduler: Scheduler, name: str, offset: float, latency: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self._ready, self._timers, self._order = scheduler.ready, scheduler.timers, scheduler.serial
        self.name = name
        self.offset = offset
        self.latency = latency
        self.state = RUNNING
        self.fuse = 0
        self.on_fuse: Callable[[], None] = self.kill
        self.held: list[Handle] = []
        self.signals: dict[int, tuple[Call, tuple[Any, ...]]] = {}
        self.on_exception: Callable[[ProcessLoop, dict[str, Any]], None] | None = None
        self.before_work: Callable[[], None] | None = None
        self.after_work: Callable[[], None] | None = None
        self._busy: dict[int, float] = {}
        self._serial = count(1)
        # Its own: to find them among those of all loops takes minutes where there are thousands of processes.
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._tasks_at_death: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"<ProcessLoop {self.name} {self.state}>"

    # --- life and death

    def kill(self) -> None:
        """Nothing of this process runs any more."""
        if self.state is DEAD:
            return
        self.state = DEAD
        self.held.clear()
        # Kept until the end, so that no `finally` block of theirs runs while others live.
        self._tasks_at_death = self.pending_tasks()
        for task in self._tasks_at_death:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        return sorted((task for task in self._tasks if not task.done()), key=hash)

    def bury(self) -> None:
        """After the simulation: close what is left, without a sound."""
        self.kill()
        for task in self._tasks_at_death:
            _close(task.get_coro())
        self._tasks_at_death.clear()
        self.on_exception = None

    def pause(self) -> None:
        if self.state is RUNNING:
            self.state = PAUSED

    def resume(self) -> None:
        if self.state is PAUSED:
            self.state = RUNNING
            for handle in self.held:
                self._ready.append(handle)
            self.held.clear()

    def jump(self, seconds: float) -> None:
        """The clock of this process jumps ahead."""
        self.offset += seconds
        self.scheduler.reschedule(self, seconds)

    def send_signal(self, sign: int) -> bool:
        """False where the process has no handler for it, which would kill a real one."""
        if sign not in self.signals:
            return False
        callback, args = self.signals[sign]
        self.call_soon(callback, *args)
        return True

    # --- what asyncio asks of a loop

    def time(self) -> float:
        return self.scheduler.now + self.offset

    def call_soon(self, callback: Call, *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle((callback, args, self, context or copy_context(), 0.0))
        if self.state is not DEAD:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Call, *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle((callback, args, self, context or copy_context(), when))
        if self.state is not DEAD:
            heappush(self._timers, (when - self.offset, next(self._order), handle))
        return handle

    def call_later(self, delay: float, callback: Call, *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        return self.call_at(self.scheduler.now + self.offset + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = Task.__new__(Task)
        task._serial = next(self._serial)  # before __init__, which puts the task into a set
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc]
        if self.state is DEAD:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.add(task)
        return task

    def run_in_executor(self, executor: Any, func: Call, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """The work happens at one instant, its caller hears of it at a later one. An executor of its own is one
        thread: its work does not overlap."""
        future = self.create_future()
        if self.state is DEAD:
            return future
        takes = self.latency()
        begins = self.scheduler.now
        if executor is not None:
            begins = max(begins, self._busy.get(id(executor), 0.0))
            self._busy[id(executor)] = begins + takes
        self.scheduler.call_at(begins + takes / 2, self._work, begins + takes, future, func, args, loop=self)
        return future

    def _work(self, until: float, future: asyncio.Future[Any], func: Call, args: tuple[Any, ...]) -> None:
        if self.before_work is not None:
            self.before_work()
            if self.state is DEAD:
                return
        _set_running_loop(None)  # a thread has none
        try:
            result, error = func(*args), None
        except Exception as raised:
            result, error = None, raised
        _set_running_loop(self)
        if self.after_work is not None:
            self.after_work()
        self.scheduler.call_at(until, _resolve, future, result, error, loop=self)

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        self.signals[sig] = (callback, args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.signals.pop(sig, None) is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.on_exception is not None and self.state is not DEAD:
            self.on_exception(self, context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    get_debug = bool  # False: asked for every future, and this is the fastest way to say it

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.state is DEAD

    def _timer_handle_cancelled(self, handle: Handle) -> None:
        pass

    def run_forever(self) -> NoReturn:
        raise NotImplementedError("the scheduler runs the callbacks of all loops")


def _close(coroutine: Any) -> None:
    """Whatever its `finally` blocks do, or wait for, in a process that is dead."""
    for _ in range(CLOSE_ATTEMPTS):
        try:
            coroutine.close()
            return
        except (Exception, asyncio.CancelledError, BaseExceptionGroup):  # a task group's, of what closes it
            pass


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
