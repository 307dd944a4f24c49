"""The trainer's end of devices that it shares with generators: the trainer has the devices in *turns*.

Before a step the trainer asks the generators to yield, and after the step it lets them continue. With `colocate` the
memory of the side without the turn is empty.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress

import structlog

from actors.runtime.actor import HandlesRequests, handles, parked
from actors.runtime.membership import Membership
from actors.trainer.learner import Learner
from areal.base.errors import explain
from areal.devices import shares_devices
from protocols.bus_errors import BusError, BusyError
from protocols.membership_messages import Member
from protocols.messages import Done
from protocols.training_messages import TakeDevices, YieldDevices
from protocols.transport import Request, ask_until

Timed = Callable[[str], AbstractContextManager[None]]
"""Marks a block as a phase of a step."""

log = structlog.get_logger()


class Turns(HandlesRequests):
    """`shared`: whether any generator uses the trainer's devices. If so, the first turn begins with the trainer."""

    def __init__(self, member: Membership) -> None:
        self._member, self._directory = member, member.directory
        self._colocate = member.config.colocate
        self.shared = self._mine = shares_devices(member.config)

    async def begin(self, timed: Timed) -> None:
        """Have the devices, once all generators have left them."""
        if self.shared:
            with timed("trainer_wait"):
                self._member.activity = "waiting for the generators to leave the devices"
                self._mine = True
                generators = self._directory.with_role("generator", healthy=False)
                await asyncio.gather(*map(self._ask_to_yield, generators))

    async def end(self, learner: Learner, timed: Timed) -> None:
        if self._colocate:
            with timed("offload"):
                await learner.offload()
        self._mine = False
        self._directory.changed.notify()

    @asynccontextmanager
    async def turn(self, learner: Learner, timed: Timed) -> AsyncIterator[None]:
        """Have the devices for the time of this block, if shared."""
        await self.begin(timed)
        if self._colocate:
            with timed("offload"):
                await learner.reload()
        yield
        await self.end(learner, timed)

    @handles(TakeDevices)
    async def give_devices(self, request: Request[TakeDevices]) -> Done:
        with explain(TimeoutError, "the trainer computes on these devices", BusyError):
            async with parked(request):
                await self._member.beat()  # fails if another trainer, which may have the devices, has taken this place
                # Only generators in the directory are asked to yield.
                await self._directory.until(lambda: not self._mine and request.sender in self._directory.members)
        return Done()

    async def _ask_to_yield(self, generator: Member) -> None:
        """Return once the generator has yielded the devices or left the run."""

        def again(error: BusError) -> bool:
            log.info("a generator has not yielded its devices", generator=generator.identity, error=str(error))
            return generator.identity in self._directory.members

        with suppress(BusError):
            await ask_until(lambda: self._member.ask(generator.address, YieldDevices(), Done), again)
