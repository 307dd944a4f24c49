"""Virtual time: one scheduler for the whole simulated cluster, and a small event loop for each of its processes.

The scheduler runs one callback at a time, in an order that depends only on the calls made so far. A process can be
killed between any two callbacks; its scheduled callbacks are then dropped, as after `kill -9`. The callbacks of a
paused process are kept until it is resumed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NoReturn, TypeVarTuple
from weakref import ref

Ts = TypeVarTuple("Ts")
Call = Callable[..., Any]
Future = asyncio.Future
_set_running_loop = asyncio._set_running_loop

# More callbacks than this at one instant count as a live-lock, which would otherwise hang the simulation. A cluster of
# this size never needs so many.
CALLBACKS_AN_INSTANT = 100_000
# How often to try to close a coroutine. One that awaits in a `finally` block needs several attempts, one for each of
# the nested blocks.
CLOSE_ATTEMPTS = 20


# States of a process. Not an enumeration, for speed: they are compared for every callback.
RUNNING, PAUSED, DEAD = "running", "paused", "dead"


class Stuck(Exception):
    """Callbacks schedule each other endlessly, so that virtual time does not advance."""


class Handle(list[Any]):
    """A scheduled callback: [callback, arguments, loop, context, when]. `when` is by the clock of its loop.

    `callback` is None once it is cancelled. `loop` is None for a callback of the world itself. `context` is None for a
    call from outside the process. A handle is a list because lists are created fastest.
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
    """Runs callbacks in order of time. Callbacks of the same time run in the order in which they were scheduled.

    If a callback sets `changed`, `on_change` is called after it. If it sets `stopped`, the scheduler stops.
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
        """Call `callback` at virtual time `when`: in the process of `loop`, if that is alive then; without a `loop`, as
        the world itself."""
        handle = Handle((callback, args, loop, None, when))
        heappush(self.timers, (when, next(self.serial), handle))
        return handle

    def reschedule(self, loop: ProcessLoop, earlier: float) -> None:
        """Make the timers of a process due `earlier` seconds earlier, because its clock has jumped ahead. Messages to
        the process still arrive at the same time."""
        moved = [
            (when - earlier if handle[2] is loop and handle[3] is not None else when, serial, handle)
            for when, serial, handle in self.timers
        ]
        heapify(moved)
        self.timers[:] = moved

    def enter(self, loop: ProcessLoop | None) -> None:
        """Called before callbacks of another process; None: of the world itself."""
        _set_running_loop(loop)

    def run(self, until: float) -> None:
        """Run until virtual time `until`, until `stopped` is set, or until no callback is left. Raises Stuck."""
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
    """A task with a deterministic hash. Task groups cancel tasks in the order of a set, which would otherwise depend on
    memory addresses."""

    __slots__ = ("_serial",)
    _serial: int

    def __hash__(self) -> int:
        return self._serial


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process. It implements only the methods of a loop that asyncio needs.

    `latency` returns the seconds that a piece of work takes in an executor. `before_work` and `after_work` are called
    right before and after such work; a fail-point may kill the process there. If `fuse` is not 0, it is counted down at
    each callback, and when it reaches 0, `on_fuse` is called instead of the callback.
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
        # The tasks of this loop. With thousands of processes, to search the tasks of all loops for them takes minutes.
        # A list, because adding to a WeakSet takes much longer. From `_crowded` on, the references that lead nowhere
        # are removed.
        self._tasks: list[ref[asyncio.Task[Any]]] = []
        self._crowded = 256
        self._tasks_at_death: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"<ProcessLoop {self.name} {self.state}>"

    # --- life and death

    def kill(self) -> None:
        """Kill the process: none of its callbacks runs any more."""
        if self.state is DEAD:
            return
        self.state = DEAD
        self.held.clear()
        # Kept until the end of the simulation, so that none of their `finally` blocks runs before.
        self._tasks_at_death = self.pending_tasks()
        for task in self._tasks_at_death:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for reference in self._tasks if (task := reference()) is not None and not task.done()]

    def bury(self) -> None:
        """After the simulation: close the remaining tasks, without reporting errors."""
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
        """Set the clock of this process ahead."""
        self.offset += seconds
        self.scheduler.reschedule(self, seconds)

    def send_signal(self, sign: int) -> bool:
        """Deliver a signal. Returns False if the process has no handler for it, which would kill a real process."""
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
        self._tasks.append(ref(task))
        if len(self._tasks) > self._crowded:
            self._tasks = [reference for reference in self._tasks if reference() is not None]
            self._crowded = 256 + 2 * len(self._tasks)
        return task

    def run_in_executor(self, executor: Any, func: Call, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` at one instant, halfway through its latency, and report the result at the end of the latency. An
        `executor` other than None counts as one thread: its pieces of work do not overlap."""
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
        _set_running_loop(None)  # as in a thread of an executor, which has no running loop
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

    get_debug = bool  # returns False. Called for every future, and this is the fastest implementation

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.state is DEAD

    def _timer_handle_cancelled(self, handle: Handle) -> None:
        pass

    def run_forever(self) -> NoReturn:
        raise NotImplementedError("the scheduler runs the callbacks of all loops")


def _close(coroutine: Any) -> None:
    """Close a coroutine of a dead process, even if its `finally` blocks await or raise."""
    for _ in range(CLOSE_ATTEMPTS):
        try:
            coroutine.close()
            return
        except (Exception, asyncio.CancelledError, BaseExceptionGroup):  # raised by a task group while it closes
            pass


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
