"""Runs rewards in child processes, so that a reward cannot hang, crash or slow down the actor that calls it.

    async with RewardPool(["math"], RewardConfig(functions=["math"], workers=2)) as pool:
        score, parts = await pool.score("math", prompt, completion, row)

Each worker (`areal.rewards.worker`) does one job at a time. The timeout of a job starts when a worker receives the job,
not when the job is queued. A worker that exceeds the timeout, or has no more memory, is killed with its process group,
and replaced.

A running job stays with its worker until the worker has answered it or is dead. Cancelling a caller does not stop a
running job, so its answer cannot be taken for the answer to another job. If the reward is deterministic, concurrent
callers with the same request share one job, and its result is cached for later callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Self, TypeVar

import msgpack
import structlog

from areal.config import RewardConfig, UserError
from areal.rewards.result import Result, RewardError
from areal.rewards.worker import LENGTH
from areal.trajectory import Tokens

FailureKind = Literal["raised", "timeout", "died", "not_finite", "unknown", "quarantined", "no_worker"]
# Number of inputs for which lost workers are counted; far more than should ever cost a worker.
SUSPECTS = 4096

# Limit for the start of a worker, imports of its rewards included, on a busy machine (sympy, reasoning_gym: seconds).
START_SECONDS = 120.0
# How long to wait for a killed process to end. It ends at once, unless the kernel is waiting for a device.
KILL_SECONDS = 5.0
# Pause between two attempts to start a worker again.
RESTART_SECONDS = 1.0
# Errors on the pipes of a process that has ended.
_GONE = (asyncio.IncompleteReadError, ConnectionError)

log = structlog.get_logger()


class RewardFailed(RewardError):
    """A completion that could not be scored.

    kind: `raised` (the reward raised an exception, or its input cannot be passed to it), `timeout`, `died` (the worker
    process ended), `not_finite` (the reward returned no finite number), `unknown` (the pool does not serve this
    reward), `quarantined` (the completion has cost too many workers and is not tried again) or `no_worker` (the pool is
    closed, or cannot start any worker).
    """

    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


T = TypeVar("T")


class Recent(Generic[T]):
    """A cache, by key, of the `size` values that were put or read last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> T | None:
        if key in self._values:
            self._values[key] = self._values.pop(key)
        return self._values.get(key)

    def put(self, key: bytes, value: T) -> None:
        self._values.pop(key, None)
        self._values[key] = value
        if len(self._values) > self._size:
            del self._values[next(iter(self._values))]


class Quarantine:
    """Refuses inputs (by digest) on which at least `limit` workers were lost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._losses = Recent[int](SUSPECTS)

    def __bool__(self) -> bool:
        """True if a worker was lost at all."""
        return bool(self._losses)

    def lost(self, key: bytes) -> None:
        """Counts a worker that died or timed out on this input."""
        self._losses.put(key, (self._losses.get(key) or 0) + 1)

    def check(self, key: bytes) -> None:
        """Raises RewardFailed if the input is refused."""
        if (losses := self._losses.get(key) or 0) >= self._limit:
            raise RewardFailed(f"workers died or timed out on this completion ({losses}): it is refused", "quarantined")


def digest(*values: Any) -> bytes:
    """A digest of msgpack values; equal values have equal digests."""
    return hashlib.blake2b(msgpack.packb(values), digest_size=16).digest()


@dataclass(eq=False, slots=True)
class _Job:
    """`key`: the digest of the request. `callers`: how many callers wait for the answer."""

    request: bytes
    key: bytes
    deterministic: bool
    answer: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    callers: int = 0


class RewardPool:
    """`config.workers` processes. Each holds all rewards in `names`, resolved by `areal.rewards.functions.resolve`."""

    def __init__(self, names: Sequence[str], config: RewardConfig) -> None:
        self._config = config
        self._options = {name: config.options.get(name, {}) for name in names}
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._unanswered: set[_Job] = set()
        self._shared: dict[bytes, _Job] = {}  # unanswered jobs of deterministic rewards
        self._results = Recent[Result](config.cache_size)
        self._quarantine = Quarantine(config.quarantine_after)
        self._serving: list[asyncio.Task[None]] = []
        self._starting = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        """Starts the workers. Raises UserError if a reward cannot be resolved or a worker does not start."""
        starting = [asyncio.create_task(self._start_worker()) for _ in range(self._config.workers)]
        try:
            workers = await asyncio.gather(*starting)
        except BaseException:
            await _discard(starting)
            raise
        self._traits = workers[0].traits
        self._serving = [asyncio.create_task(self._serve(worker)) for worker in workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kills the workers. Jobs without a result fail."""
        self._closed = True
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._fail_all("the reward pool was closed")

    async def score(
        self, name: str, prompt: str, completion: str, row: Mapping[str, Any], tokens: Tokens | None = None
    ) -> Result:
        """The result of reward `name`. `tokens`: the ids of the completion's tokens. Raises RewardFailed."""
        if name not in self._options:
            raise RewardFailed(f"reward {name!r} is not served here, only {', '.join(self._options)}", "unknown")
        if self._closed:
            raise RewardFailed("the reward pool was closed", "no_worker")
        takes_tokens, deterministic = self._traits[name]
        if takes_tokens and tokens is None:
            raise RewardFailed("it takes tokens: the workflow must call session.score(completion, tokens)", "raised")
        request = name, prompt, completion, row, [*map(int, tokens)] if takes_tokens and tokens is not None else None
        try:
            key = digest(*request)
        except (TypeError, ValueError) as error:  # an array, or a value that is nested too deeply
            raise RewardFailed(f"the row cannot be passed to a worker: {error}", "raised") from None
        if cached := self._results.get(key):
            return cached
        self._quarantine.check(key)
        job = self._shared.get(key) or self._queue(_Job(msgpack.packb(request), key, deterministic))
        job.callers += 1
        try:
            return await asyncio.shield(job.answer)
        finally:
            job.callers -= 1
            if not job.callers:
                self._drop(job)

    def _queue(self, job: _Job) -> _Job:
        self._unanswered.add(job)
        if job.deterministic:
            self._shared[job.key] = job
        self._jobs.put_nowait(job)
        return job

    def _drop(self, job: _Job) -> None:
        job.answer.cancel()
        self._unanswered.discard(job)
        if job.deterministic:
            del self._shared[job.key]

    async def _serve(self, worker: _Worker) -> None:
        """Runs jobs of the queue one after another on `worker`, which is replaced when it dies."""
        try:
            while True:
                worker = await self._living(worker)
                job = await self._jobs.get()
                if job.answer.done():
                    continue
                worker = await self._living(worker)
                _settle(job.answer, await self._run(worker, job))
        finally:
            await worker.kill()

    async def _run(self, worker: _Worker, job: _Job) -> Result | RewardFailed:
        try:
            self._quarantine.check(job.key)  # workers may have been lost on it since it was queued
            result = await worker.run(job.request, self._config.timeout_seconds)
        except RewardFailed as failure:
            if failure.kind in ("timeout", "died"):
                self._quarantine.lost(job.key)
            return failure
        if job.deterministic:
            self._results.put(job.key, result)
        return result

    def _start_worker(self) -> Coroutine[Any, Any, _Worker]:
        gib = self._config.memory_gib
        return _Worker.start(self._options, int(gib * 2**30) if gib else 0)

    async def _living(self, worker: _Worker) -> _Worker:
        """`worker` if it is alive, else a new one. While no worker at all can be started, every job fails."""
        if worker.alive:
            return worker
        await worker.kill()
        self._starting += 1
        try:
            while True:
                try:
                    return await self._start_worker()
                except (UserError, OSError) as error:
                    log.error("a reward worker cannot be started again", error=str(error))
                    if self._starting == self._config.workers:
                        self._fail_all(f"no reward worker can be started again: {error}")
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            self._starting -= 1

    def _fail_all(self, reason: str) -> None:
        for job in self._unanswered:
            _settle(job.answer, RewardFailed(reason, "no_worker"))


class _Worker:
    """A child process and its pipes. `traits`: whether each reward takes tokens, and whether it is deterministic."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None  # `start` asks for pipes
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self._killed = False
        self.traits: dict[str, list[bool]] = {}

    @classmethod
    async def start(cls, options: Mapping[str, Mapping[str, Any]], memory: int) -> Self:
        """Start a worker with the rewards named in `options` and at most `memory` bytes (0: no limit). Raises UserError
        or OSError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal.rewards.worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            # The worker can import what this process can import.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        worker = cls(process)
        try:
            worker._send(msgpack.packb([options, memory]))
            await worker._expect_ready(", ".join(options))
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.returncode is None

    async def run(self, request: bytes, timeout: float) -> Result:
        """The result of one job, which may take at most `timeout` seconds. Raises RewardFailed; after the kinds
        `timeout` and `died`, and if it has no more memory, the worker is dead."""
        self._send(request)
        try:
            async with asyncio.timeout(timeout):
                kind, value = await self._receive()
        except TimeoutError:
            await self.kill()
            raise RewardFailed(f"no score within {timeout:g} s", "timeout") from None
        except _GONE:
            code = await self.kill()
            raise RewardFailed(f"the worker process ended while scoring ({_ending(code)})", "died") from None
        if kind == "memory":  # a reward that leaks would fail in each later call
            await self.kill()
            kind, value = "raised", f"{value} (the worker has come to reward.memory_gib, and is replaced)"
        if kind != "score":
            raise RewardFailed(value, kind)
        return Result(*value)

    async def kill(self) -> int | None:
        """Kill the process and its process group. Returns the exit code, if it is known."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._requests.close()
        # A process that left the group may keep the pipes open, and asyncio waits until they are closed.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._process.wait()
        return self._process.returncode

    async def _expect_ready(self, names: str) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                kind, answer = await self._receive()
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
            raise UserError(answer)
        self.traits = answer

    def _send(self, message: bytes) -> None:
        self._requests.write(LENGTH.pack(len(message)) + message)

    async def _receive(self) -> list[Any]:
        head = await self._answers.readexactly(LENGTH.size)
        return msgpack.unpackb(await self._answers.readexactly(*LENGTH.unpack(head)))


def _settle(answer: asyncio.Future[Result], outcome: Result | RewardFailed) -> None:
    if answer.done():  # its callers were cancelled
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
