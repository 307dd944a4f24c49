"""Reward functions in child processes, so that none of them can hang, crash or slow the actor that asks.

    async with RewardPool(["math"], workers=2, timeout_seconds=10.0) as pool:
        score = await pool.score("math", prompt, completion, row)

Each worker (`areal.reward_worker`) does one job at a time. Its deadline counts from the moment the job is handed to it,
not from when it was queued; a worker that misses it is killed, with everything it started, and replaced.

A job belongs to its worker until it is answered or the worker is dead. A caller who is cancelled only stops listening,
so no answer can reach another job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import msgpack
import structlog

from areal.config import UserError
from areal.reward_worker import LENGTH

FailureKind = Literal["raised", "timeout", "died", "not_finite", "unknown"]

# Imports of a reward on a busy machine (sympy, reasoning_gym: seconds).
START_SECONDS = 120.0
# A killed process is gone at once, unless the kernel is waiting for a device.
KILL_SECONDS = 5.0
RESTART_SECONDS = 1.0
# How a process that ended shows on its pipes.
_GONE = (asyncio.IncompleteReadError, ConnectionError)

log = structlog.get_logger()


class RewardFailed(Exception):
    """A completion that could not be scored.

    kind: `raised` (the function did), `timeout`, `died` (its process did), `not_finite` (it returned no finite
    number) or `unknown` (no such function here).
    """

    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


class RewardPool:
    """`workers` processes that each hold all `functions` (names as `areal.rewards.resolve` takes them)."""

    def __init__(self, functions: Sequence[str], workers: int, timeout_seconds: float) -> None:
        self._functions = list(functions)
        self._count = workers
        self._timeout = timeout_seconds
        self._jobs: asyncio.Queue[tuple[bytes, asyncio.Future[float]]] = asyncio.Queue()
        self._unanswered: set[asyncio.Future[float]] = set()
        self._serving: list[asyncio.Task[None]] = []
        self._starting = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        """Starts the workers. Raises UserError where a function cannot be resolved or a worker does not start."""
        starting = [asyncio.create_task(_Worker.start(self._functions)) for _ in range(self._count)]
        try:
            workers = await asyncio.gather(*starting)
        except BaseException:
            await _discard(starting)
            raise
        self._serving = [asyncio.create_task(self._serve(worker)) for worker in workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kills the workers. What is not scored yet fails."""
        self._closed = True
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._fail_all("the reward pool was closed")

    async def score(self, name: str, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """The finite score that function `name` gives. Raises RewardFailed."""
        if name not in self._functions:
            raise RewardFailed(f"reward {name!r} is not served here, only {', '.join(self._functions)}", "unknown")
        if self._closed:
            raise RewardFailed("the reward pool was closed", "died")
        request = msgpack.packb([name, prompt, completion, row])
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        self._jobs.put_nowait((request, answer))
        try:
            return await answer
        finally:
            self._unanswered.discard(answer)

    async def _serve(self, worker: _Worker) -> None:
        """Jobs of the queue, one after the other, on one worker and its successors."""
        try:
            while True:
                worker = await self._living(worker)
                request, answer = await self._jobs.get()
                if answer.done():
                    continue
                worker = await self._living(worker)
                try:
                    score = await worker.run(request, self._timeout)
                except RewardFailed as failure:
                    _settle(answer, failure)
                else:
                    _settle(answer, score)
        finally:
            await worker.kill()

    async def _living(self, worker: _Worker) -> _Worker:
        """The worker, or one in its place. While none at all can be started, every job fails."""
        if worker.alive:
            return worker
        await worker.kill()
        self._starting += 1
        try:
            while True:
                try:
                    return await _Worker.start(self._functions)
                except (UserError, OSError) as error:
                    log.error("a reward worker cannot be started again", error=str(error))
                    if self._starting == self._count:
                        self._fail_all(f"no reward worker can be started again: {error}")
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            self._starting -= 1

    def _fail_all(self, reason: str) -> None:
        for answer in self._unanswered:
            _settle(answer, RewardFailed(reason, "died"))


class _Worker:
    """A child process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._killed = False

    @classmethod
    async def start(cls, functions: Sequence[str]) -> Self:
        """A worker that has resolved the functions. Raises UserError or OSError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal.reward_worker", str(os.getpid()), *functions),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            # What is importable here is importable there.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        worker = cls(process)
        try:
            await worker._expect_ready(", ".join(functions))
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.returncode is None

    async def run(self, request: bytes, timeout: float) -> float:
        """The score of one job, given at most `timeout` seconds. Raises RewardFailed; after `timeout` and `died` the
        worker is no longer alive."""
        self._process.stdin.write(LENGTH.pack(len(request)) + request)
        try:
            async with asyncio.timeout(timeout):
                kind, value = await self._receive()
        except TimeoutError:
            await self.kill()
            raise RewardFailed(f"no score within {timeout:g} s", "timeout") from None
        except _GONE:
            code = await self.kill()
            raise RewardFailed(f"the worker process ended while scoring ({_ending(code)})", "died") from None
        if kind != "score":
            raise RewardFailed(value, kind)
        return value

    async def kill(self) -> int | None:
        """End the process and whatever it started in its group. The exit code, where it is known."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.stdin.close()
        # A process that left the group may hold the pipes open, which asyncio waits for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._process.wait()
        return self._process.returncode

    async def _expect_ready(self, names: str) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                kind, reason = await self._receive()
        except TimeoutError:
            raise UserError(
                f"reward {names} was not imported within {START_SECONDS:g} s: move slow work out of the import"
            ) from None
        except _GONE:
            code = await self.kill()
            raise UserError(
                f"reward {names} ended its process while it was imported ({_ending(code)}): see the output above"
            ) from None
        if kind != "ready":
            raise UserError(reason)

    async def _receive(self) -> list[Any]:
        head = await self._process.stdout.readexactly(LENGTH.size)
        return msgpack.unpackb(await self._process.stdout.readexactly(*LENGTH.unpack(head)))


def _settle(answer: asyncio.Future[float], outcome: float | RewardFailed) -> None:
    if answer.done():  # its caller was cancelled
        return
    if isinstance(outcome, RewardFailed):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _ending(code: int | None) -> str:
    if code is None:
        return "it cannot be killed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _discard(starting: Sequence[asyncio.Task[_Worker]]) -> None:
    for task in starting:
        task.cancel()
    for worker in await asyncio.gather(*starting, return_exceptions=True):
        if isinstance(worker, _Worker):
            await worker.kill()
