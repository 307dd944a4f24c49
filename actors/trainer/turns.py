"""The trainer's end of devices that it shares with generators: it has them in *turns*."""

import asyncio
from contextlib import suppress

import structlog

from actors.runtime.actor import HandlesRequests, handles, parked
from actors.runtime.directory import Directory
from actors.runtime.membership import Ask, Beat
from areal.base.errors import explain
from protocols.bus_errors import BusError, BusyError
from protocols.messages import Done, Member, TakeDevices, YieldDevices
from protocols.transport import Request, ask_until

log = structlog.get_logger()


class Turns(HandlesRequests):
    """shared: whether any generator uses the trainer's devices. If so, the first turn begins with the trainer."""

    def __init__(self, shared: bool, directory: Directory, ask: Ask, beat: Beat) -> None:
        self._directory = directory
        self._ask = ask
        self._beat = beat
        self.shared = self._mine = shared

    async def begin(self) -> None:
        """Have the devices, once all generators have left them."""
        self._mine = True
        await asyncio.gather(*map(self._ask_to_yield, self._directory.with_role("generator", healthy=False)))

    def end(self) -> None:
        self._mine = False
        self._directory.changed.notify()

    @handles(TakeDevices)
    async def give_devices(self, request: Request[TakeDevices]) -> Done:
        with explain(TimeoutError, "the trainer computes on these devices", BusyError):
            async with parked(request):
                await self._beat()  # fails if another trainer, to which the devices may belong, has this one's place
                # Only generators in the directory are asked to yield.
                await self._directory.until(lambda: not self._mine and request.sender in self._directory.members)
        return Done()

    async def _ask_to_yield(self, generator: Member) -> None:
        """Returns once the generator has yielded the devices or left the run."""

        def again(error: BusError) -> bool:
            log.info("a generator has not yielded its devices", generator=generator.identity, error=str(error))
            return generator.identity in self._directory.members

        with suppress(BusError):
            await ask_until(lambda: self._ask(generator.address, YieldDevices(), Done), again)
