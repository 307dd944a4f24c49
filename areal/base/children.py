"""Child processes. Each child leads its own process group, and the whole group is ended together."""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import Any


def kill_group(process: subprocess.Popen[Any] | asyncio.subprocess.Process) -> None:
    """Kill the child, unless it has ended, and the processes left behind in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Output:
    """The output of a program: all bytes, or the first and the last bytes, `most_bytes` together, around a mark."""

    def __init__(self, most_bytes: int) -> None:
        self._last_bytes = most_bytes // 2
        self._first_bytes = most_bytes - self._last_bytes
        self._first, self._last = bytearray(), bytearray()
        self.missing = 0
        """The number of bytes that are left out."""

    def add(self, part: bytes) -> None:
        room = self._first_bytes - len(self._first)
        self._first += part[:room]
        self._last += part[room:]
        excess = max(0, len(self._last) - self._last_bytes)
        del self._last[:excess]
        self.missing += excess

    def __bytes__(self) -> bytes:
        mark = f"\n[{self.missing} bytes are left out here]\n".encode() if self.missing else b""
        return bytes(self._first + mark + self._last)


async def finish(*command: str, stdin: bytes = b"", seconds: float, most_bytes: int = 0) -> tuple[int | None, bytes]:
    """Run a program. Return its exit status (None: killed after `seconds`) and its `Output` as bytes."""
    pipe, nothing, printed = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL, Output(most_bytes)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe if stdin else nothing,
        stdout=pipe if most_bytes else nothing,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            if process.stdin and not process.stdin.is_closing():  # the program may have ended
                process.stdin.write(stdin)
                process.stdin.close()
            while process.stdout and (part := await process.stdout.read(65536)):
                printed.add(part)
            return await process.wait(), bytes(printed)
    except TimeoutError:
        return None, bytes(printed)
    finally:
        kill_group(process)
