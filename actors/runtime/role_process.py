"""One role on this machine, as a child process of the supervisor: its starts, its output, its deaths."""

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
# How long to read a dead child's output if a process that the child left behind still holds the pipe open.
LAST_WORDS_SECONDS = 1.0
# The time that an actor which is no member any more has to end.
FENCED_SECONDS = 15.0


@dataclass(slots=True)
class Deaths:
    """Counts the deaths of one child, for the pause before its restart and for the decision to give up.

    early: deaths in a row within STEADY_SECONDS of a start. in_vain: deaths in a row within SOUND_SECONDS of a start,
    without a trained step between them. progress: as given to `pause` at the last death.
    """

    early: int = 0
    in_vain: int = 0
    progress: int = 0

    def pause(self, lived: float, progress: int) -> float | None:
        """To be called after each death. Returns the seconds until the next start; None: do not start it again.

        lived: seconds since its start. progress: any number that grows with each trained step.
        """
        self.early = 1 if lived >= STEADY_SECONDS else min(self.early + 1, 100)  # beyond that, no pause is longer
        self.in_vain = 1 if lived >= SOUND_SECONDS or progress != self.progress else self.in_vain + 1
        self.progress = progress
        if self.in_vain >= DEATHS_IN_VAIN:
            return None
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self.early - 1), LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Child:
    """One role of this machine, over all its restarts: its current process, and the last lines of that one's output."""

    role: str
    index: int
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    pump: asyncio.Task[None] | None = None
    starts: int = 0
    failed: bool = False  # the run, as it has said at its end
    deaths: Deaths = field(default_factory=Deaths)
    began: float = 0.0  # when this process was started
    memory_kills: int = 0  # on this machine until then
    identity: str = ""  # as which this process is a member of the run, or was
    absent_since: float | None = None  # when it was first seen to be no member any more
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def running(self) -> asyncio.subprocess.Process | None:
        return self.process if self.process is not None and self.process.returncode is None else None

    def has_left(self, members: Mapping[str, float], now: float) -> bool:
        """To be called at each look with the members of the run, and the seconds for which each was silent. True once
        the process has been none for so long that it should have ended."""
        for identity, silent in members.items():
            # Who was last heard of before this process was started is one before it.
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
        """A sentence if this process, or one that it had started, may have been killed for lack of memory."""
        kills = memory_kills() - self.memory_kills
        return f". Since its start the kernel has killed {kills} for lack of memory: see `dmesg`" if kills else ""

    async def start(
        self, command: list[str], environment: Mapping[str, str], folder: Callable[[], Path | None]
    ) -> None:
        """Start a process. folder: the run's, once it is known; all output goes into a file there.

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
                # Some tasks of reasoning_gym give the same rows in two processes only with the same hash seed.
                env={**os.environ, SUPERVISED: str(os.getpid()), "PYTHONHASHSEED": "0", **environment},
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops the children in order
            )
        finally:
            os.close(writing)

    async def until_ended(self) -> int:
        """Wait until the process has ended, and kill the processes that it left behind. Returns its exit code."""
        process, pump = self.process, self.pump
        assert process is not None and pump is not None  # it was started
        code = await process.wait()
        kill_group(process)
        await asyncio.wait([pump], timeout=LAST_WORDS_SECONDS)
        pump.cancel()
        return code

    def kill(self, why: str, say: Callable[[str], None]) -> None:
        """Kill the process, if it runs, and its children. say: prints the reason."""
        if process := self.running:
            say(f"{self.name} is killed: {why}")
            kill_group(process)
            self.memory_kills = memory_kills()  # those of the kernel before are not why it dies

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
                # Python's tracker of semaphores warns once the process is dead: that says nothing of why.
                self.tail.extend(line for line in lines if "resource_tracker" not in line)
                if out is not None:
                    out.append(f"{text}\n" for text in lines)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[list[str]]:
    """The lines of an output, all that have come at a time: a child may print a gigabyte, and waits for who reads it.
    Lines of more than LONGEST_LINE_BYTES, such as those of a progress bar that returns to the start of its line, are
    cut."""
    begun = b""  # the last line, whose end has not come yet
    while data := await reader.read(READ_BYTES):
        *lines, begun = (begun + data).split(b"\n")
        if len(begun) > LONGEST_LINE_BYTES:
            lines, begun = [*lines, begun], b""
        yield [line.decode(errors="replace").rstrip() for line in lines]
    if begun:
        yield [begun.decode(errors="replace").rstrip()]


def how_it_ended(code: int) -> str:
    """How a process ended, by its exit code."""
    if code == LEFT:
        return "was told to leave by another program (SIGTERM)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
