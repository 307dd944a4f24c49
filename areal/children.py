"""Child processes that lead a group of their own, which ends as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import Any


def kill_group(process: subprocess.Popen[Any] | asyncio.subprocess.Process) -> None:
    """Kill a child, if it has not ended meanwhile, and the processes that it has left behind in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def finish(*command: str, stdin: bytes = b"", seconds: float, most_bytes: int = 0) -> tuple[int | None, bytes]:
    """Run a program to its end. Returns its exit status, or None if it was killed after `seconds`, and the first
    `most_bytes` of what it printed."""
    pipe, nothing, printed = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL, bytearray()
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
                printed += part[: most_bytes - len(printed)]
            return await process.wait(), bytes(printed)
    except TimeoutError:
        return None, bytes(printed)
    finally:
        kill_group(process)
