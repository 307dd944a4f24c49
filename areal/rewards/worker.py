"""One worker process of the reward pool: `python -m areal.rewards.worker PARENT_PID`.

A message is a four-byte length, followed by msgpack. The first message on stdin is `[{name: options}, bytes of
memory]`. The worker answers it with `["ready", {name: [takes tokens, deterministic]}]` or `["refused", reason]`. It
answers each further request, `[name, prompt, completion, row, tokens]`, with `["score", [score, parts]]` or `["raised"
| "not_finite" | "memory", reason]`; after `memory`, of which it has no more, it should be replaced. The worker exits at
the end of stdin.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import resource
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from areal.config import UserError
from areal.processes import die_with_parent
from areal.rewards.functions import RewardFunction, resolve
from areal.rewards.result import RewardError, as_result

LENGTH = struct.Struct(">I")
MAX_REASON_CHARACTERS = 500
# A worker whose call fails while it has this share of its memory in use is taken to have failed for lack of more.
FULL = 7 / 8


def main() -> None:
    """Serves until stdin ends or the parent dies."""
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    requests, answers = _own_pipes()
    if (first := receive(requests)) is None:
        return
    options, memory = first
    if memory:
        # RLIMIT_DATA, not the address space: libraries reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        rewards = {name: resolve(name, keywords) for name, keywords in options.items()}
    except UserError as error:
        send(answers, ["refused", str(error)])
        return
    send(answers, ["ready", {name: [reward.takes_tokens, reward.deterministic] for name, reward in rewards.items()}])
    with asyncio.Runner() as runner:
        while (request := receive(requests)) is not None:
            name, *arguments = request
            kind, value = answer(runner, rewards[name], arguments)
            if kind != "score" and memory and _bytes_in_use() > FULL * memory:
                kind = "memory"  # whatever the reward has made of the MemoryError
            send(answers, [kind, value])


def answer(runner: asyncio.Runner, reward: RewardFunction, arguments: list[Any]) -> list[Any]:
    """The answer to one request."""
    try:
        value = reward(*arguments)
        if inspect.isawaitable(value):
            value = runner.run(_awaited(value))
    except RewardError as error:
        return ["raised", str(error)[:MAX_REASON_CHARACTERS]]
    except (Exception, SystemExit) as error:  # the user's function runs here and may raise anything
        traceback.print_exc()
        kind = "memory" if isinstance(error, MemoryError) else "raised"
        return [kind, f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]]
    try:
        return ["score", as_result(value)]
    except RewardError as error:
        return ["not_finite", str(error)]


def send(pipe: BinaryIO, message: list[Any]) -> None:
    data = msgpack.packb(message, unicode_errors="replace")
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> list[Any] | None:
    """The next message; None at the end of the input."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = pipe.read(length)
    return msgpack.unpackb(data, strict_map_key=False) if len(data) == length else None


def _bytes_in_use() -> int:
    """What RLIMIT_DATA counts, and the stack."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool, detached from stdin and stdout. Output that a reward function prints goes to stderr."""
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)  # nothing has replaced it yet
    sys.stdout.reconfigure(line_buffering=True)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main()
