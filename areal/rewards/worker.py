"""A worker process of the reward pool: `python -m areal.rewards.worker PARENT_PID`.

A message is a four-byte length, followed by msgpack. The first message on stdin is `[{name: options}, bytes of memory,
concurrent]`. The worker answers `["ready", {name: traits}]` (areal.rewards.functions.Traits) or `["refused", reason]`.
To each further request, `[name, prompt, completions, row, tokens]`, the worker answers `["score", results]`, with a
`[score, parts]` for each completion, or `["raised" | "not_finite" | "memory", reason]`. After `memory`, out of memory,
the worker should be replaced. The worker exits at the end of stdin.

A concurrent worker takes numbered requests, `[number, request as bytes]`, and begins a request before earlier requests
have ended. The answers are `[number, "begun", None]` and then `[number, kind, value]`. `[number, None]` cancels a call,
and the answer is then that the call raised.
"""

import asyncio
import functools
import inspect
import io
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from areal.base.errors import UserError
from areal.base.processes import die_with_parent
from areal.base.text import LIBRARIES, error_text, place_in
from areal.rewards.functions import RewardFunction
from areal.rewards.lookup import resolve
from areal.rewards.result import Result, RewardError

LENGTH = struct.Struct(">I")
MAX_REASON_CHARACTERS = 500
# A failed call of a worker with this share of its memory in use is taken to have failed for lack of memory.
FULL = 3 / 4
NOT_OF_THE_USER = (*LIBRARIES, f"{Path(__file__).parents[1]}/", "<frozen ")
_PID = os.getpid()
_printed: set[tuple[tuple[str, int | None], ...]] = set()


def main() -> None:
    """Serve until stdin ends or the parent dies."""
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    requests, answers = _own_pipes()
    if (first := receive(requests)) is None:
        return
    options, memory, concurrent = first
    if memory:
        # RLIMIT_DATA, not the address space: libraries reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        rewards = {name: resolve(name, keywords) for name, keywords in options.items()}
    except UserError as error:
        send(answers, ["refused", str(error)])
        return
    traits = {name: [r.takes_tokens, r.deterministic, r.concurrent, r.groups] for name, r in rewards.items()}
    send(answers, ["ready", traits])
    if concurrent:
        return asyncio.run(_serve_concurrently(requests, answers, rewards, memory))
    with asyncio.Runner() as runner:
        while (request := receive(requests)) is not None:
            name, *arguments = request
            call = functools.partial(_value, runner, rewards[name], arguments)
            send(answers, answer(call, functools.partial(rewards[name].results, completions=arguments[1]), memory))


def answer(score: Callable[[], Any], results: Callable[[Any], list[Result]], memory: int) -> list[Any]:
    """Return the answer to a request. score: calls the reward. results: checks its value. memory: limit, or 0."""
    kind, value = _judged(score, results)
    if kind != "score" and memory and _bytes_in_use() > FULL * memory:
        kind = "memory"  # whatever the reward has made of the MemoryError
    return [kind, value]


def _judged(score: Callable[[], Any], results: Callable[[Any], list[Result]]) -> list[Any]:
    try:
        value = score()
    except RewardError as error:
        return ["raised", str(error)[:MAX_REASON_CHARACTERS]]
    except BaseException as error:  # the user's function runs here and may raise anything
        # The reason has the user's line that raised. All frames are printed once for each place: while a service is
        # down, all calls raise the same error.
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_OF_THE_USER)]
        place = tuple((frame.filename, frame.lineno) for frame in frames)
        if len(frames) > 1 and place not in _printed:
            _printed.add(place)
            print("".join(traceback.format_list(frames)) + error_text(error), file=sys.stderr, flush=True)
        kind = "memory" if isinstance(error, MemoryError) else "raised"
        return [kind, (error_text(error) + place_in(frames))[:MAX_REASON_CHARACTERS]]
    try:
        return ["score", results(value)]
    except RewardError as error:
        return ["not_finite", str(error)]


def _value(runner: asyncio.Runner, reward: RewardFunction, arguments: list[Any]) -> Any:
    value = reward.call(*arguments)
    return runner.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _serve_concurrently(
    requests: BinaryIO, answers: BinaryIO, rewards: Mapping[str, RewardFunction], memory: int
) -> None:
    calls: dict[int, asyncio.Task[Any]] = {}

    async def scored(reward: RewardFunction, arguments: list[Any], number: int) -> Any:
        send(answers, [number, "begun", None])
        return await reward.call(*arguments)

    def end(number: int, results: Callable[[Any], list[Result]], call: asyncio.Task[Any]) -> None:
        del calls[number]
        result = ["raised", "it was cancelled"] if call.cancelled() else answer(call.result, results, memory)
        send(answers, [number, *result])

    while (message := await asyncio.to_thread(receive, requests)) is not None:
        number, request = message
        if request is not None:
            name, *arguments = msgpack.unpackb(request, strict_map_key=False)
            calls[number] = call = asyncio.create_task(scored(rewards[name], arguments, number))
            results = functools.partial(rewards[name].results, completions=arguments[1])
            call.add_done_callback(functools.partial(end, number, results))
        elif number in calls:
            calls[number].cancel()


def send(pipe: BinaryIO, message: list[Any]) -> None:
    if os.getpid() != _PID:  # a forked child of a reward: its answer would be taken for the answer to another call
        os._exit(1)
    data = msgpack.packb(message, unicode_errors="replace")
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> list[Any] | None:
    """Return the next message; None at the end of the input."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = pipe.read(length)
    return msgpack.unpackb(data, strict_map_key=False) if len(data) == length else None


def _bytes_in_use() -> int:
    """Return the bytes that RLIMIT_DATA counts, and the stack."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes to the pool, detached from stdin and stdout. Text that a reward prints goes to stderr."""
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)  # nothing has replaced stdout yet
    sys.stdout.reconfigure(line_buffering=True)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main()
