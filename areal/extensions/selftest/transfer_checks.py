"""The check of `weights.transport: direct`: the trainer sends its weights straight into the engine.

In a run the calls of vLLM's weight transfer go over the bus. Here the self-test carries them, one order for each call,
from the trainer's process to the generator's.
"""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from areal.base import extensions
from areal.generation.engine_weights import FINISH, LoadTimes
from areal.generation.generation_engine import GenerationEngine

VERSION = 2
"""The version of the sent weights. Version 1 was loaded from a folder."""
HOST = "127.0.0.1"


class Sending:
    """The trainer's end: sends the weights in `folder` to an engine of `workers` processes, in a thread."""

    def __init__(self, backend: str, workers: int, folder: Path) -> None:
        self._calls: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._acknowledgements: SimpleQueue[None] = SimpleQueue()
        sender = extensions.need("direct", "engine_sender", "the check of weights.transport=direct").load()
        self._sender = sender(backend, HOST, workers, self._call)
        self._transfer = ThreadPoolExecutor(max_workers=1).submit(self._sender.send, folder)
        self._transfer.add_done_callback(lambda _: self._calls.put(None))

    def next_call(self) -> dict[str, Any]:
        """Return the next `call` with its `info`, or the `bytes` sent. Raises the errors of the transfer."""
        if (call := self._calls.get()) is not None:
            return call
        size = self._transfer.result()
        self._sender.close()
        return {"bytes": size}

    def acknowledge(self) -> None:
        """Note that the engine has made the last call."""
        self._acknowledgements.put(None)

    def _call(self, call: str, info: dict[str, Any]) -> None:
        self._calls.put({"call": call, "info": info})
        self._acknowledgements.get()


class Receiving:
    """The generator's end: `engine` receives version 2."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._orders: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._acknowledgements: asyncio.Queue[None] = asyncio.Queue()
        self._received = asyncio.create_task(engine.receive(VERSION, self._calls()))

    async def follow(self, call: str, info: dict[str, Any]) -> None:
        """Make a call for the trainer. Raises the engine's errors."""
        self._orders.put_nowait((call, info))
        acknowledgement = asyncio.create_task(self._acknowledgements.get())
        await asyncio.wait([acknowledgement, self._received], return_when=asyncio.FIRST_COMPLETED)
        if not acknowledgement.done():
            acknowledgement.cancel()
            self._received.result()

    async def times(self) -> LoadTimes:
        """Return the times of the transfer, after the last call."""
        return await self._received

    async def _calls(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        while True:
            call, info = await self._orders.get()
            yield call, info
            self._acknowledgements.put_nowait(None)
            if call == FINISH:
                return
