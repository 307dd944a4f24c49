"""Calls of async rewards, which run at once in a single worker process.

The deadline of a call starts when the worker has begun the call. A late call is cancelled in the worker, and all other
calls go on. A worker that does not take the cancellation, because a call blocks the event loop, is killed.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack

from areal.rewards.functions import Result
from areal.rewards.worker import GONE, RewardFailed, WorkerProcess

# How long a worker may take to cancel a call.
CANCEL_SECONDS = 5.0


class WorkerLost(Exception):
    """The worker has ended with several calls in progress, or before it answered the cancellation of this call."""


class _AsyncCall:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.answer: asyncio.Future[tuple[str, Any]] = loop.create_future()


class ConcurrentCalls:
    """See the module. start: starts a worker. limit: the most calls at once; further calls wait."""

    def __init__(self, start: Callable[[], Awaitable[WorkerProcess]], limit: int) -> None:
        self._start = start
        self._places = asyncio.Semaphore(limit)
        self._starting = asyncio.Lock()
        self._worker: WorkerProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, _AsyncCall] = {}

    async def run(self, request: bytes, timeout: float) -> list[Result]:
        """Return the results of a call, which may take `timeout` seconds. Cancelling `run` cancels the call. Raises
        RewardFailed, WorkerLost, and UserError or OSError if no worker can be started."""
        async with self._places:
            worker = await self.living()
            number, call = next(self._numbers), _AsyncCall()
            self._calls[number] = call
            worker.send(msgpack.packb([number, request]))
            try:
                begun_or_lost: list[asyncio.Future[Any]] = [call.begun, call.answer]
                await asyncio.wait(begun_or_lost, return_when=asyncio.FIRST_COMPLETED)
                done, _ = await asyncio.wait([call.answer], timeout=timeout)
                if not done:
                    await self._cancel(worker, number, call)
                    raise RewardFailed(f"no score within {timeout:g} s", "timeout")
                return await worker.results(*call.answer.result())
            finally:
                del self._calls[number]
                if not call.answer.done() and worker.alive:
                    worker.send(msgpack.packb([number, None]))

    async def close(self) -> None:
        """Kill the worker. The calls in it are lost."""
        if self._worker is not None:
            await self._worker.kill()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def living(self) -> WorkerProcess:
        """Return the worker, which is started if necessary. Raises UserError or OSError."""
        async with self._starting:
            if self._worker is None or not self._worker.alive:
                await self.close()
                self._worker = await self._start()
                self._reading = asyncio.create_task(self._read(self._worker))
            return self._worker

    async def _read(self, worker: WorkerProcess) -> None:
        """Give the answers of a worker to the waiting calls, until the worker ends."""
        calls = self._calls
        try:
            while True:
                number, kind, value = await worker.receive()
                if (call := calls.get(number)) is None:  # the call was cancelled
                    continue
                if kind == "begun":
                    call.begun.set_result(None)
                else:
                    call.answer.set_result((kind, value))
        except GONE:
            await worker.kill()
        finally:
            for call in calls.values():
                if not call.answer.done():
                    call.answer.set_exception(WorkerLost())

    async def _cancel(self, worker: WorkerProcess, number: int, call: _AsyncCall) -> None:
        """Cancel a call. Raises WorkerLost if the worker does not cancel in time."""
        worker.send(msgpack.packb([number, None]))
        done, _ = await asyncio.wait([call.answer], timeout=CANCEL_SECONDS)
        if not done:
            await worker.kill()
            raise WorkerLost
        call.answer.result()
