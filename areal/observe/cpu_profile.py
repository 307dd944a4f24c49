"""The CPU profile of a process: which functions its CPU time goes to. The process samples itself, without any rights.

A thread looks at all threads of Python, and adds the CPU time that each has used since the last look to the stack of
functions in which it is now. C code counts for the function that called it. NATIVE has what threads use that Python
does not know, such as those of OpenMP and ZeroMQ. The file has a line for each stack, outermost function first, and its
microseconds: the raw format of py-spy, which speedscope and flame graphs read.
"""

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import structlog

from areal.config import Config
from areal.storage.disk import replace

# The folder in a run folder, and the environment variable by which a child process learns the beginning of its file.
FOLDER, VARIABLE, SUFFIX = "profile", "AREAL_PROFILE", ".raw"
LOOK_SECONDS = 0.025
# A thread gives way to a look after so long. What ends in a wait before that counts for the wait: the event loop.
SWITCH_SECONDS = 0.0005
WRITE_SECONDS = 10.0
# Of so many stacks the callers are recorded; of others the innermost function alone.
MOST_STACKS = 5000
NATIVE = "(threads without Python)"


class CpuProfile:
    """The profile of this process since now. `stacks`: CPU seconds of each."""

    def __init__(self) -> None:
        self.stacks: defaultdict[str, float] = defaultdict(float)
        self._begin_seconds = time.process_time()
        self._seconds = {thread: seconds for thread, seconds, _ in _threads()}

    def look(self) -> None:
        """Take a sample."""
        for thread, seconds, frame in _threads():
            before = self._seconds.get(thread, 0.0)
            self._seconds[thread] = seconds
            if seconds != before:  # less if another thread has got the number of one that has ended
                stack = _stack(frame)
                known = stack in self.stacks or len(self.stacks) < MOST_STACKS
                self.stacks[stack if known else stack.rpartition(";")[2]] += seconds - before * (seconds > before)

    def dump(self) -> str:
        """The text of the file."""
        native = time.process_time() - self._begin_seconds - sum(self.stacks.values())
        stacks = {**self.stacks, NATIVE: max(0.0, native)}
        return "".join(f"{stack} {seconds * 1e6:.0f}\n" for stack, seconds in stacks.items())


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
    sys.setswitchinterval(SWITCH_SECONDS)
    threading.Thread(target=_sample, args=[Path(file + SUFFIX)], daemon=True, name="profile").start()


def _sample(file: Path) -> None:
    profile, last_write = CpuProfile(), time.monotonic()
    while True:
        time.sleep(LOOK_SECONDS)
        profile.look()
        if time.monotonic() - last_write >= WRITE_SECONDS:
            last_write = time.monotonic()
            try:
                file.parent.mkdir(exist_ok=True)
                replace(file, profile.dump())
            except OSError as error:  # such as a full disk: no run fails for its profile
                structlog.get_logger().warning("the profile was not written", file=str(file), error=str(error))


def _threads() -> Iterator[tuple[int, float, FrameType]]:
    """Each thread of Python: its number in the kernel, its CPU seconds so far, and the frame in which it is."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if (number := thread.native_id) and (frame := frames.get(thread.ident or 0)):
            try:
                seconds = time.clock_gettime((~number << 3) | 6)  # the CPU clock that Linux has for each thread
            except OSError:  # it has ended just now
                continue
            yield number, seconds, frame


def _stack(frame: FrameType | None) -> str:
    functions = []
    while frame is not None:
        code = frame.f_code
        functions.append(f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})")
        frame = frame.f_back
    return ";".join(reversed(functions))
