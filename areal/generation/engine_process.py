"""The connection to vLLM's engine process: calls and their answers, outputs, and the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core_client import AsyncMPClient

T = TypeVar("T")

# Time for the engine process to exit. An exit takes 3 s on a busy core. A process killed earlier leaks a semaphore.
CLOSE_SECONDS = 10


class EngineError(Exception):
    """The engine cannot go on: it did not start, died, was closed, handed over its sequences, or has torn weights."""


class EngineProcess:
    """One vLLM engine process, which is killed when this process ends.

    core: vLLM's client of the process. deliver: called with each message of the process. end: called with the first
    error whenever an error is reported.
    """

    def __init__(
        self, core: AsyncMPClient, deliver: Callable[[EngineCoreOutputs], None], end: Callable[[EngineError], None]
    ) -> None:
        """Call from the event loop that will use the engine."""
        self.core = core
        self.error: EngineError | None = None
        self._deliver, self._end = deliver, end
        self._pump = asyncio.create_task(self._deliver_outputs(), name="engine outputs")

    async def call(self, call: Awaitable[T]) -> T:
        """Await an answer of the process. Raises EngineError if the process dies: vLLM itself would never answer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait({answer, self._pump}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        self.raise_if_failed()
        try:
            return answer.result()
        except EngineDeadError as error:
            raise self.fail(_death(error)) from error

    async def call_workers(self, method: str, *args: Any) -> str | None:
        """Call a method of all workers that returns the reason of a failure, or None. Returns the first reason."""
        call = self.core.call_utility_all_async("collective_rpc", method, None, args, None)
        return next((answer for answers in await self.call(call) for answer in answers if answer), None)

    async def send(self, request: EngineCoreRequest) -> None:
        """Send a request, which the process does not answer. Raises EngineError if the process is dead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self.core.add_request_async(request)
        except EngineDeadError as error:
            raise self.fail(_death(error)) from error

    def fail(self, error: EngineError) -> EngineError:
        """End the engine with `error`, unless an earlier error has ended the engine. Returns the first error."""
        self.error = first = self.error or error
        self._end(first)
        return first

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    async def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Stop the process, or kill it after `patience` seconds."""
        self.fail(EngineError("The engine was closed."))
        self._pump.cancel()
        await asyncio.wait({self._pump})
        await asyncio.to_thread(self.core.shutdown, patience)

    async def _deliver_outputs(self) -> None:
        while True:
            try:
                outputs = await self.core.get_output_async()
            except Exception as error:  # any end of vLLM's receiving task ends the engine
                self.fail(_death(error))
                return
            try:
                self._deliver(outputs)
            except Exception as error:  # otherwise every sequence would wait for ever
                self.fail(EngineError(f"The vLLM engine sent a message that cannot be used: {error!r}"))
                return


def _death(error: Exception) -> EngineError:
    return EngineError(f"The vLLM engine process died; its own log, above, says why ({type(error).__name__}).")
