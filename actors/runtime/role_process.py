"""A role on this machine, as a child process of the supervisor: starts, output, deaths."""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from actors.runtime.logs import log_file
from areal.base.children import kill_group
from areal.base.processes import SUPERVISED
from areal.devices import memory_kills
from areal.storage.disk import Backlog
from protocols.membership_messages import actor_name

# Exit codes: see actors.runtime.supervisor.
END, FAILED, USER_ERROR, FENCED, ERROR, LEFT, RUN_FAILED = range(7)
TAIL_LINES = 40
LONGEST_LINE_BYTES = 1 << 16
READ_BYTES = 1 << 13  # fewer lines than a log takes at a time (Backlog.LINES)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0
SOUND_SECONDS = 600.0
DEATHS_IN_VAIN = 5
# How long to read a dead child's output while a process left behind by the child holds the pipe open.
LAST_WORDS_SECONDS = 1.0
# The time that a former member has to end.
FENCED_SECONDS = 15.0


@dataclass(slots=True)
class Deaths:
    """Counts the deaths of a child, for the pause before a restart and for the decision to give up.

    early: deaths in a row within STEADY_SECONDS of a start. in_vain: deaths in a row within SOUND_SECONDS of a start,
    without a trained step between them. progress: the argument of `pause` at the last death.

    >>> deaths = Deaths()
    >>> [deaths.pause(lived=1.0, progress=0) for _ in range(5)]
    [0.5, 1.0, 2.0, 4.0, None]
    """

    early: int = 0
    in_vain: int = 0
    progress: int = 0

    def pause(self, lived: float, progress: int) -> float | None:
        """Count a death. Returns the seconds until the next start; None: do not restart the child.

        lived: seconds since the start. progress: any number that grows with every trained step.
        """
        self.early = 1 if lived >= STEADY_SECONDS else min(self.early + 1, 100)  # more deaths make no longer pause
        self.in_vain = 1 if lived >= SOUND_SECONDS or progress != self.progress else self.in_vain + 1
        self.progress = progress
        if self.in_vain >= DEATHS_IN_VAIN:
            return None
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self.early - 1), LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Child:
    """A role on this machine, over all restarts: the current process, and the last lines of its output."""

    role: str
    index: int
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    pump: asyncio.Task[None] | None = None
    starts: int = 0
    failed: bool = False  # the run has failed, by the child's exit code
    deaths: Deaths = field(default_factory=Deaths)
    began: float = 0.0  # when the current process was started
    memory_kills: int = 0  # on this machine before the current process
    identity: str = ""  # identity of the current process as a member of the run, perhaps a former member
    absent_since: float | None = None  # since when the current process is no member any more
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def running(self) -> asyncio.subprocess.Process | None:
        return self.process if self.process is not None and self.process.returncode is None else None

    def has_left(self, members: Mapping[str, float], now: float) -> bool:
        """Look at the members of the run; `members` maps identities to seconds of silence. True once the process has
        been no member for so long that it should have ended."""
        for identity, silent in members.items():
            # A member silent since before the start of this process is an earlier process.
            if actor_name(identity) == self.name and silent < now - self.began:
                self.identity = identity
        if not self.identity or self.identity in members:
            self.absent_since = None
            return False
        self.absent_since = now if self.absent_since is None else self.absent_since
        return now - self.absent_since > FENCED_SECONDS

    @property
    def last_line(self) -> str:
        return self.tail[-1] if self.tail else f"{self.name} printed nothing"

    @property
    def killed_for_memory(self) -> str:
        """A sentence if the kernel may have killed this process, or a process below it, for lack of memory."""
        kills = memory_kills() - self.memory_kills
        return f". Since its start the kernel has killed {kills} for lack of memory: see `dmesg`" if kills else ""

    async def start(
        self, command: list[str], environment: Mapping[str, str], folder: Callable[[], Path | None]
    ) -> None:
        """Start a process. folder: returns the run folder, once known; a file there gets all output.

        Raises OSError, for instance if the machine has no process left."""
        self.starts += 1
        self.began, self.identity, self.absent_since = asyncio.get_running_loop().time(), "", None
        self.tail.clear()
        self.memory_kills = memory_kills()
        # With asyncio's own pipe, `wait` would also wait for processes that a dead child has left behind.
        reading, writing = os.pipe()
        self.pump = asyncio.create_task(self._pump(os.fdopen(reading, "rb"), folder), name=f"output of {self.name}")
        try:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                # Some tasks of reasoning_gym give two processes the same rows only with the same hash seed.
                env={**os.environ, SUPERVISED: str(os.getpid()), "PYTHONHASHSEED": "0", **environment},
                start_new_session=True,  # Ctrl-C reaches only the supervisor, who stops the children in order
            )
        finally:
            os.close(writing)

    async def until_ended(self) -> int:
        """Wait until the process has ended, and kill processes left behind. Returns the exit code."""
        process, pump = self.process, self.pump
        assert process is not None and pump is not None  # the process was started
        code = await process.wait()
        kill_group(process)
        await asyncio.wait([pump], timeout=LAST_WORDS_SECONDS)
        pump.cancel()
        return code

    def kill(self, why: str, say: Callable[[str], None]) -> None:
        """Kill a running process and its children. say: prints the reason."""
        if process := self.running:
            say(f"{self.name} is killed: {why}")
            kill_group(process)
            self.memory_kills = memory_kills()  # earlier kills by the kernel are not the cause

    async def _pump(self, pipe: IO[bytes], folder: Callable[[], Path | None]) -> None:
        """Read the output. `tail` gets the last lines, and the run folder, once there, gets all lines."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        with contextlib.closing(transport):
            out: Backlog | None = None
            async for lines in _lines(reader):
                if out is None and (run := folder()) is not None:
                    out = log_file(run / "logs" / f"{self.role}-{self.index}.out")
                    out.append(f"{text}\n" for text in self.tail)
                # Python's tracker of semaphores warns after the death of the process, without a hint of the cause.
                self.tail.extend(line for line in lines if "resource_tracker" not in line)
                if out is not None:
                    out.append(f"{text}\n" for text in lines)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[list[str]]:
    """The lines of an output in batches: a child may print a gigabyte, and waits for its reader. Lines longer than
    LONGEST_LINE_BYTES, such as a progress bar's, are cut."""
    begun = b""  # the last line, still without its end
    while data := await reader.read(READ_BYTES):
        *lines, begun = (begun + data).split(b"\n")
        if len(begun) > LONGEST_LINE_BYTES:
            lines, begun = [*lines, begun], b""
        yield [line.decode(errors="replace").rstrip() for line in lines]
    if begun:
        yield [begun.decode(errors="replace").rstrip()]


def how_it_ended(code: int) -> str:
    """The end of a process in words, by the exit code."""
    if code == LEFT:
        return "was told to leave by another program (SIGTERM)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
