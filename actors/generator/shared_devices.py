"""The devices of an engine that the trainer may use in turns.

With `colocate` the engine sleeps while the trainer computes. Without `colocate` only the engine's start waits for the
trainer.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.generator.engine import Engine
from actors.runtime.actor import CONTROL_SECONDS, HandlesRequests, handles
from actors.runtime.directory import Directory
from actors.runtime.membership import Ask, Spawn
from actors.runtime.works import Works
from areal.config import Config
from areal.devices import shares_devices
from protocols.messages import Done
from protocols.training_messages import TakeDevices, YieldDevices
from protocols.transport import Request, ask_until

# How long the trainer may keep a request for the devices before it refuses it.
TAKE_SECONDS = 20.0

T = TypeVar("T")


class SharedDevices(HandlesRequests):
    """Answer the trainer's requests for the devices, also while the engine starts."""

    def __init__(self, config: Config, directory: Directory, ask: Ask, spawn: Spawn, works: Works) -> None:
        self._config = config
        self._directory = directory
        self._ask = ask
        self._spawn = spawn
        self._works = works
        self._yields = 0  # requests to yield the devices
        self._busy = asyncio.Lock()  # held while the engine starts, falls asleep and wakes
        self._engine: Engine | None = None  # until it has started
        self._asleep = False

    async def start(self, start: Callable[[], Awaitable[Engine]]) -> Engine:
        """Start the engine, once the trainer has left the devices."""

        async def start_engine() -> Engine:
            self._engine = engine = await start()
            return engine

        return await self._take(start_engine)

    @handles(YieldDevices)
    async def yield_devices(self, request: Request[YieldDevices]) -> Done:
        self._yields += 1
        await asyncio.shield(self._spawn(self._sleep(), "sleep"))  # also if the trainer no longer waits for the answer
        return Done()

    async def _sleep(self) -> None:
        async with self._busy:
            if self._engine is not None and self._config.colocate and not self._asleep:
                self._asleep = True
                with self._works.working("falling asleep", "sleep"):
                    await self._engine.sleep()
                self._spawn(self._take(functools.partial(self._wake, self._engine)), "wake")

    async def _wake(self, engine: Engine) -> None:
        with self._works.working("waking", "wake"):
            await engine.wake()
        self._asleep = False

    async def _take(self, use: Callable[[], Awaitable[T]]) -> T:
        """Call `use` once a trainer on shared devices has left the devices."""

        async def ask_trainer() -> None:
            trainer = (await self._directory.until(lambda: self._directory.with_role("trainer", False)))[0]
            await self._ask(trainer.address, TakeDevices(), Done, TAKE_SECONDS + CONTROL_SECONDS)

        while True:
            yields = self._yields
            if self._config.steps and shares_devices(self._config):
                with self._works.waiting():
                    await ask_until(ask_trainer)  # the trainer computes, has died, or has been replaced
            async with self._busy:
                if yields == self._yields:  # otherwise the trainer has taken the devices again since it answered
                    return await use()
