"""Virtual time: one scheduler for the whole simulated cluster, and a small event loop for each of its processes.

The scheduler runs one callback at a time, in an order that depends only on the calls made so far.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any
from weakref import ref

Call = Callable[..., Any]
Future = asyncio.Future
set_running_loop = asyncio._set_running_loop

# More callbacks than this at one instant count as a live-lock, which would otherwise hang the simulation. A cluster of
# this size never needs so many.
CALLBACKS_AN_INSTANT = 100_000
# How often to try to close a coroutine. One that awaits in a `finally` block needs several attempts, one for each of
# the nested blocks.
CLOSE_ATTEMPTS = 20


class EndlessCallbacks(Exception):
    """Callbacks schedule each other endlessly, so that virtual time does not advance."""


class ScheduledCall(list[Any]):
    """A scheduled callback: [callback, arguments, loop, context, when]. `when` is by the clock of its loop.

    `callback` is None once it is cancelled. `loop` is None for a callback of the simulation itself. `context` is None
    for a call from outside the process. A handle is a list because lists are created fastest.
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
    """Runs callbacks in order of time. Callbacks of the same time run in the order in which they were scheduled. Once a
    callback sets `stopped`, the scheduler stops."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self.ready: deque[ScheduledCall] = deque()
        self.timers: list[tuple[float, int, ScheduledCall]] = []
        self.serial = count()

    def call_at(self, when: float, callback: Call, *args: Any, loop: ProcessLoop | None = None) -> ScheduledCall:
        """Call `callback` at virtual time `when`: in the process of `loop`; without a `loop`, as the simulation
        itself."""
        handle = ScheduledCall((callback, args, loop, None, when))
        heappush(self.timers, (when, next(self.serial), handle))
        return handle

    def enter(self, loop: ProcessLoop | None) -> None:
        """Called before callbacks of another process; None: of the simulation itself."""
        set_running_loop(loop)

    def run(self, until: float) -> None:
        """Run until virtual time `until`, until `stopped` is set, or until no callback is left.

        Raises EndlessCallbacks.
        """
        ready, timers, current = self.ready, self.timers, None
        set_running_loop(None)
        try:
            while not self.stopped:
                budget = CALLBACKS_AN_INSTANT
                while ready:
                    callback, args, loop, _, _ = handle = ready.popleft()
                    if callback is None:
                        continue
                    if loop is not current:
                        current = loop
                        self.enter(loop)
                    if loop is None:
                        callback(*args)
                    else:
                        loop.step(handle)
                    if self.stopped:
                        return
                    budget -= 1
                    if not budget:
                        raise EndlessCallbacks(
                            f"{CALLBACKS_AN_INSTANT} callbacks at {self.now:.3f} s, the last {callback!r}"
                        )
                if not timers or timers[0][0] > until:
                    return
                when, _, handle = heappop(timers)
                if when > self.now:
                    self.now = when
                ready.append(handle)
        finally:
            set_running_loop(None)


class Task(asyncio.Task[Any]):
    """A task with a deterministic hash. Task groups cancel tasks in the order of a set, which would otherwise depend on
    memory addresses."""

    __slots__ = ("_serial",)
    _serial: int

    def __hash__(self) -> int:
        return self._serial


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process. It implements only the methods of a loop that asyncio needs. `latency`
    returns the seconds that a piece of work takes in an executor."""

    def __init__(self, scheduler: Scheduler, name: str, latency: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.name = name
        self.latency = latency
        self.on_exception: Callable[[ProcessLoop, dict[str, Any]], None] | None = None
        self._busy: dict[int, float] = {}
        self._serial = count(1)
        # The tasks of this loop. With thousands of processes, to search the tasks of all loops for them takes minutes.
        # A list, because adding to a WeakSet takes much longer. From `_crowded` on, the references that lead nowhere
        # are removed.
        self._tasks: list[ref[asyncio.Task[Any]]] = []
        self._crowded = 256

    def step(self, handle: ScheduledCall) -> None:
        """Run a callback of this process."""
        callback, args, _, context, _ = handle
        try:
            if context is None:
                callback(*args)
            else:
                context.run(callback, *args)
        except Exception as error:
            self.call_exception_handler({"message": f"{callback!r} raised", "exception": error})

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for reference in self._tasks if (task := reference()) is not None and not task.done()]

    def bury(self) -> None:
        """After the simulation: close the remaining tasks, without reporting errors."""
        self.on_exception = None
        for task in self.pending_tasks():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())

    # --- what asyncio asks of a loop

    def time(self) -> float:
        return self.scheduler.now

    def call_soon(self, callback: Call, *args: Any, context: Context | None = None) -> ScheduledCall:  # type: ignore[override]
        handle = ScheduledCall((callback, args, self, context or copy_context(), 0.0))
        self.scheduler.ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Call, *args: Any, context: Context | None = None) -> ScheduledCall:  # type: ignore[override]
        handle = ScheduledCall((callback, args, self, context or copy_context(), when))
        heappush(self.scheduler.timers, (when, next(self.scheduler.serial), handle))
        return handle

    def call_later(self, delay: float, callback: Call, *args: Any, context: Context | None = None) -> ScheduledCall:  # type: ignore[override]
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = Task.__new__(Task)
        task._serial = next(self._serial)  # before __init__, which puts the task into a set
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc]
        self._tasks.append(ref(task))
        if len(self._tasks) > self._crowded:
            self._tasks = [reference for reference in self._tasks if reference() is not None]
            self._crowded = 256 + 2 * len(self._tasks)
        return task

    def run_in_executor(self, executor: Any, func: Call, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` at one instant, halfway through its latency, and report the result at the end of the latency. An
        `executor` other than None counts as one thread: its pieces of work do not overlap."""
        future = self.create_future()
        takes = self.latency()
        begins = self.scheduler.now
        if executor is not None:
            begins = max(begins, self._busy.get(id(executor), 0.0))
            self._busy[id(executor)] = begins + takes
        self.scheduler.call_at(begins + takes / 2, self.work, begins + takes, future, func, args, loop=self)
        return future

    def work(self, until: float, future: asyncio.Future[Any], func: Call, args: tuple[Any, ...]) -> None:
        """Do a piece of work of an executor, and report its result at the time `until`."""
        set_running_loop(None)  # as in a thread of an executor, which has no running loop
        try:
            result, error = func(*args), None
        except Exception as raised:
            result, error = None, raised
        set_running_loop(self)
        self.scheduler.call_at(until, _resolve, future, result, error, loop=self)

    def add_signal_handler(self, sig: int, callback: Call, *args: Any) -> None:  # type: ignore[override]
        """Does nothing: nobody sends a signal."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.on_exception is not None:
            self.on_exception(self, context)

    get_debug = bool  # returns False. Called for every future, and this is the fastest implementation

    def _timer_handle_cancelled(self, handle: ScheduledCall) -> None:
        pass


@contextmanager
def undisturbed(finalizer: Callable[[Any], None]) -> Iterator[None]:
    """Set up this process for a simulation. Garbage collection, whose time is not deterministic, is off; `finalizer`
    gets the async generators that were not closed. Tasks are kept out of asyncio's list of all tasks, a slow set: each
    loop has a list of its own."""
    hooks, collects, tasks = sys.get_asyncgen_hooks(), gc.isenabled(), vars(asyncio.tasks)
    everywhere: Any = tasks["_all_tasks" if "_all_tasks" in tasks else "_scheduled_tasks"]  # the latter in Python 3.12
    sys.set_asyncgen_hooks(finalizer=finalizer)
    gc.disable()
    everywhere.add = lambda task: None
    try:
        yield
    finally:
        del everywhere.add
        sys.set_asyncgen_hooks(*hooks)
        if collects:
            gc.enable()


def _close(coroutine: Any) -> None:
    """Close a coroutine that will not go on, even if its `finally` blocks await or raise."""
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
