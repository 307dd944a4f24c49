"""The CPU profile of a process: which functions its CPU time goes to. The process samples itself, without any rights.

A thread looks at all threads of Python, and adds the CPU time that each has used since the last look to the function in
which it is now. C code counts for the function that called it. NATIVE has what threads use that Python does not know,
such as those of OpenMP and ZeroMQ. The file has cProfile's format, with samples in place of calls, so that
`python -m pstats FILE` and other viewers open it.
"""

from __future__ import annotations

import marshal
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

import structlog

from areal.config import Config

# The folder in a run folder, and the environment variable by which a child process learns the beginning of its file.
FOLDER, VARIABLE, SUFFIX = "profile", "AREAL_PROFILE", ".pstats"
LOOK_SECONDS = 0.01
WRITE_SECONDS = 5.0

Function = tuple[str, int, str]
"""File, first line, name."""

NATIVE: Function = ("~", 0, "(threads without Python)")


class CpuProfile:
    """The profile of this process since now."""

    def __init__(self) -> None:
        # Samples, seconds in the function itself, seconds in it and what it calls; of functions, and of their callers.
        self._functions: defaultdict[Function, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._callers: defaultdict[Function, defaultdict[Function, list[float]]]
        self._callers = defaultdict(lambda: defaultdict(lambda: [0, 0.0, 0.0]))
        self._begin_seconds = time.process_time()
        self._seconds = {thread: seconds for thread, seconds, _ in _threads()}

    def look(self) -> None:
        """Take a sample."""
        for thread, seconds, frame in _threads():
            before = self._seconds.get(thread, 0.0)
            self._seconds[thread] = seconds
            if seconds != before:  # less if another thread has got the number of one that has ended
                self._add(_stack(frame), seconds - before if seconds > before else seconds)

    def _add(self, stack: list[Function], seconds: float) -> None:
        pairs = dict.fromkeys(zip(stack, stack[1:], strict=False))  # once, also of a function that calls itself
        rows = [(function, self._functions[function]) for function in dict.fromkeys(stack)]
        rows += [(function, self._callers[function][caller]) for function, caller in pairs]
        for function, figures in rows:
            figures[0] += 1
            figures[1] += seconds if function == stack[0] else 0.0
            figures[2] += seconds

    def dump(self) -> bytes:
        """The content of the file."""
        native = time.process_time() - self._begin_seconds - sum(seconds for _, seconds, _ in self._functions.values())
        figures = {**self._functions, NATIVE: [1, max(0.0, native), max(0.0, native)]}
        callers = {
            function: {caller: (n, n, *seconds) for caller, (n, *seconds) in self._callers[function].items()}
            for function in figures
        }
        return marshal.dumps(
            {function: (n, n, *seconds, callers[function]) for function, (n, *seconds) in figures.items()}
        )


def begin(config: Config, name: str) -> None:
    """Profile this process from now on, if the run is configured so. The file is written anew all WRITE_SECONDS, in
    place of one of an earlier process of this name."""
    if config.observe.profile:
        os.environ[VARIABLE] = str(config.folder / FOLDER / name)
        _begin(os.environ[VARIABLE])


def begin_as_child(name: str) -> None:
    """Profile this process if that which has started it is profiled, as its part `name`."""
    if beginning := os.environ.get(VARIABLE):
        _begin(f"{beginning}-{name}")


def _begin(file: str) -> None:
    threading.Thread(target=_sample, args=[Path(file + SUFFIX)], daemon=True, name="profile").start()


def _sample(file: Path) -> None:
    profile, last_write = CpuProfile(), time.monotonic()
    while True:
        time.sleep(LOOK_SECONDS)
        profile.look()
        if time.monotonic() - last_write >= WRITE_SECONDS:
            last_write = time.monotonic()
            try:
                _write(file, profile.dump())
            except OSError as error:  # such as a full disk: no run fails for its profile
                structlog.get_logger().warning("the profile was not written", file=str(file), error=str(error))


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, file)


def _threads() -> list[tuple[int, float, FrameType]]:
    """Each thread of Python: its number in the kernel, its CPU seconds so far, and the frame in which it is."""
    frames, threads = sys._current_frames(), []
    for thread in threading.enumerate():
        if (number := thread.native_id) and (frame := frames.get(thread.ident or 0)):
            try:
                seconds = time.clock_gettime((~number << 3) | 6)  # the CPU clock that Linux has for each thread
            except OSError:  # it has ended just now
                continue
            threads.append((number, seconds, frame))
    return threads


def _stack(frame: FrameType | None) -> list[Function]:
    stack = []
    while frame is not None:
        code = frame.f_code
        stack.append((code.co_filename, code.co_firstlineno, code.co_qualname))
        frame = frame.f_back
    return stack
