"""A worker process of the reward pool: `python -m areal.rewards.worker PARENT_PID`. The pool holds a `WorkerProcess`.

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
import contextlib
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
from typing import Any, BinaryIO, Literal, Self

import msgpack

from areal.base.children import kill_group
from areal.base.errors import UserError
from areal.base.processes import die_with_parent
from areal.base.text import LIBRARIES, error_text, place_in
from areal.rewards.functions import Result, RewardError, RewardFunction, Traits
from areal.rewards.lookup import resolve

FailureKind = Literal["raised", "timeout", "died", "not_finite", "unknown", "quarantined", "no_worker"]

LENGTH = struct.Struct(">I")
# Limit for the start of a worker with its imports, on a busy machine (sympy, reasoning_gym: seconds).
START_SECONDS = 120.0
# The longest wait for the end of a killed process, which ends at once unless the kernel waits for a device.
KILL_SECONDS = 5.0
# Errors on the pipes of an ended process.
GONE = (asyncio.IncompleteReadError, ConnectionError)
MAX_REASON_CHARACTERS = 500
# A failed call of a worker with this share of its memory in use is taken to have failed for lack of memory.
FULL = 3 / 4
NOT_OF_THE_USER = (*LIBRARIES, f"{Path(__file__).parents[1]}/", "<frozen ")
_PID = os.getpid()
_printed: set[tuple[tuple[str, int | None], ...]] = set()


class RewardFailed(RewardError):
    """A completion that could not be scored.

    kind: `raised` (the reward raised an exception, or its input cannot be passed to it), `timeout`, `died` (the worker
    process ended), `not_finite` (the reward returned no finite number), `unknown` (the pool does not serve this
    reward), `quarantined` (the completion has cost too many workers and is not tried again) or `no_worker` (the pool is
    closed, or cannot start any worker).
    """

    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.kind = kind


class WorkerProcess:
    """A child process and its pipes. `traits`: of its rewards, by name."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None  # `start` asks for pipes
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self._killed = False
        self.traits: dict[str, Traits] = {}

    @classmethod
    async def start(cls, options: Mapping[str, Mapping[str, Any]], memory: int, concurrent: bool = False) -> Self:
        """Start a worker with the rewards named in `options` and at most `memory` bytes (0: no limit). concurrent:
        calls run at once (ConcurrentCalls), not in turn (`run`). Raises UserError or OSError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal.rewards.worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            # Have the worker import from the same folders as this process.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        worker = cls(process)
        try:
            worker.send(msgpack.packb([options, memory, concurrent]))
            await worker._expect_ready(", ".join(options))
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.returncode is None

    async def run(self, request: bytes, timeout: float) -> list[Result]:
        """Return the results of a job, which may take at most `timeout` seconds. Raises RewardFailed; after the kinds
        `timeout` and `died`, and after a lack of memory, the worker is dead."""
        self.send(request)
        try:
            async with asyncio.timeout(timeout):
                kind, value = await self.receive()
        except TimeoutError:
            await self.kill()
            raise RewardFailed(f"no score within {timeout:g} s", "timeout") from None
        except GONE:
            code = await self.kill()
            raise RewardFailed(f"the worker process ended while scoring ({ending_of(code)})", "died") from None
        return await self.results(kind, value)

    async def results(self, kind: Any, value: Any) -> list[Result]:
        """Return the results in an answer. Raises RewardFailed; a worker out of memory is killed."""
        if kind == "memory":  # a leaking reward would fail in each later call
            await self.kill()
            kind, value = "raised", f"{value} (the worker has come to reward.memory_gib, and is replaced)"
        if kind != "score":
            raise RewardFailed(value, kind)
        return [Result(*pair) for pair in value]

    async def kill(self) -> int | None:
        """Kill the process and its process group. Return the exit code, if known."""
        if not self._killed:
            self._killed = True
            kill_group(self._process)
            self._requests.close()
        # A process outside the group may keep the pipes open, and asyncio waits until all pipes are closed.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._process.wait()
        return self._process.returncode

    async def _expect_ready(self, names: str) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                kind, answer = await self.receive()
        except TimeoutError:
            raise UserError(
                f"reward {names} was not imported within {START_SECONDS:g} s: move slow work out of the import"
            ) from None
        except GONE:
            code = await self.kill()
            raise UserError(
                f"reward {names} ended its process while it was imported ({ending_of(code)}): see the output above"
            ) from None
        if kind != "ready":
            raise UserError(answer)
        self.traits = {name: Traits(*traits) for name, traits in answer.items()}

    def send(self, message: bytes) -> None:
        self._requests.write(LENGTH.pack(len(message)) + message)

    async def receive(self) -> list[Any]:
        head = await self._answers.readexactly(LENGTH.size)
        return msgpack.unpackb(await self._answers.readexactly(*LENGTH.unpack(head)))


def ending_of(code: int | None) -> str:
    if code is None:
        return "it cannot be killed"
    hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
    return f"signal {-code}{hint}" if code < 0 else f"exit code {code}"


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
