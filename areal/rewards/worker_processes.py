"""The worker processes of the reward pool (areal.rewards.worker), from the side of the pool."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgpack

from areal.base.children import kill_group
from areal.base.errors import UserError
from areal.rewards.functions import Traits
from areal.rewards.result import Result, RewardError
from areal.rewards.worker import LENGTH

FailureKind = Literal["raised", "timeout", "died", "not_finite", "unknown", "quarantined", "no_worker"]

# Limit for the start of a worker with its imports, on a busy machine (sympy, reasoning_gym: seconds).
START_SECONDS = 120.0
# The longest wait for the end of a killed process, which ends at once unless the kernel waits for a device.
KILL_SECONDS = 5.0
# Errors on the pipes of an ended process.
GONE = (asyncio.IncompleteReadError, ConnectionError)


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
