"""A simulated network: messages take a moment, and stay in order on each connection.

One `Wire` connects all processes. Each process has a `SimNetwork`, which is a `protocols.network.Network`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from protocols.codec import Frame
from protocols.network import Full, OnCrash, OnLost, Receive, Unreachable
from simulation.cluster.loop import ProcessLoop, Scheduler

# Least time between two messages on one connection.
SPACING = 1e-6

Watch = Callable[["SimNetwork", "SimNetwork", list[Frame], str], None]


class Wire:
    """All connections of the simulated cluster. A message takes `latency` seconds, and up to as much again.

    `watch` is called with every message that is sent, and its fate: empty if it arrives."""

    def __init__(self, scheduler: Scheduler, random: Random, latency: float) -> None:
        self.scheduler = scheduler
        self.random = random
        self.latency = latency
        self.watch: Watch | None = None
        self.doors: dict[str, SimDoor] = {}
        self._ports = count(40_000)
        self._routes = count(1)

    def open(self, door: SimDoor, address: str) -> str:
        """Listen at `address`, whose port may be `*`. Returns the real address."""
        host, _, port = address.rpartition(":")
        if port == "*":
            address = f"{host}:{next(self._ports)}"
        if address in self.doors:
            raise OSError(98, "Address already in use")
        self.doors[address] = door
        return address

    def call(self, caller: SimCaller) -> None:
        """Connect the caller to the door at its address."""
        self.scheduler.call_at(self.scheduler.now + self.delay(), self.connect, caller, self.doors[caller.address])

    def connect(self, caller: SimCaller, door: SimDoor) -> None:
        caller.route = b"%d" % next(self._routes)
        caller.door = door
        door.callers[caller.route] = caller
        caller.wake()

    def carry(self, source: SimNetwork, target: SimLink, way: Way, frames: list[Frame]) -> None:
        """Send a message to `target`. `way`: this direction of the connection."""
        fate = self.deliver(source, target, way, frames, self.scheduler.now + self.delay())
        if self.watch is not None:
            self.watch(source, target.network, frames, fate)

    def deliver(self, source: SimNetwork, target: SimLink, way: Way, frames: list[Frame], when: float) -> str:
        """Deliver a message at about `when`. Returns its fate."""
        way.last = when = max(when, way.last + SPACING)
        self.scheduler.call_at(when, target.receive, frames, loop=target.network.loop)
        return ""

    def delay(self) -> float:
        return self.latency + self.random.random() * self.latency


def no_loss() -> None:
    """What an end does that does not care whether its connection is lost."""


class SimNetwork:
    """The network of one process."""

    def __init__(self, wire: Wire, name: str, loop: ProcessLoop) -> None:
        self.wire = wire
        self.name = name
        self.loop = loop

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> tuple[SimDoor, str]:
        door = SimDoor(self, receive, on_crash)
        return door, self.wire.open(door, address)

    def publish(self, address: str, on_crash: OnCrash) -> tuple[SimDoor, str]:
        publication = SimPublication(self, no_receive, on_crash)
        return publication, self.wire.open(publication, address)

    def connect(self, address: str, receive: Receive, on_crash: OnCrash, on_lost: OnLost = no_loss) -> SimCaller:
        caller = SimCaller(self, address, receive, on_crash, on_lost)
        self.wire.call(caller)
        return caller

    subscribe = connect

    async def refuses(self, address: str) -> bool:
        return address not in self.wire.doors

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Way:
    """One direction of a connection. `last`: when its last message arrives."""

    last: float = 0.0


class SimLink:
    """A socket of one process."""

    def __init__(self, network: SimNetwork, receive: Receive, on_crash: OnCrash) -> None:
        self.network = network
        self.closed = False
        self._receive = receive
        self._on_crash = on_crash

    async def close(self) -> None:
        self.closed = True

    def receive(self, frames: list[Frame]) -> None:
        """Receive a message, in the process that owns the socket."""
        if self.closed:
            return
        try:
            self._receive(frames)
        except Exception as error:
            self.closed = True  # as with a real socket, whose only reader has ended
            self._on_crash(error)


class SimDoor(SimLink):
    """The bound side of a connection, like a ROUTER socket."""

    def __init__(self, network: SimNetwork, receive: Receive, on_crash: OnCrash) -> None:
        super().__init__(network, receive, on_crash)
        self.callers: dict[bytes, SimCaller] = {}

    def send(self, frames: list[Frame]) -> None:
        route, *message = frames
        caller = self.callers.get(bytes(route))
        if self.closed or caller is None:
            raise Unreachable(f"no connection {bytes(route)!r}")
        self.network.wire.carry(self.network, caller, caller.from_door, [bytes(frame) for frame in message])

    async def send_when_possible(self, frames: list[Frame]) -> None:
        self.send(frames)


class SimPublication(SimDoor):
    """Like a PUB socket: sends to all connected callers."""

    def send(self, frames: list[Frame]) -> None:
        if self.closed:
            raise Unreachable("closed")
        copies: list[Frame] = [bytes(frame) for frame in frames]
        scheduler = self.network.wire.scheduler
        scheduler.enter(None)  # a real network sends the copies in a thread that is no actor's
        for caller in list(self.callers.values()):
            self.network.wire.carry(self.network, caller, caller.from_door, copies)
        scheduler.enter(self.network.loop)


class SimCaller(SimLink):
    """The connecting side of a connection, like a DEALER or a SUB socket. `door`: None until it is connected."""

    def __init__(self, network: SimNetwork, address: str, receive: Receive, on_crash: OnCrash, on_lost: OnLost) -> None:
        super().__init__(network, receive, on_crash)
        self.on_lost = on_lost
        self.address = address
        self.door: SimDoor | None = None
        self.route = b""
        self.to_door = Way()
        self.from_door = Way()
        self._woken = asyncio.Event()

    def send(self, frames: list[Frame]) -> None:
        if self.closed:
            raise Unreachable("closed")
        if self.door is None:
            raise Full(self.address)
        network = self.network
        network.wire.carry(network, self.door, self.to_door, [self.route, *map(bytes, frames)])

    async def send_when_possible(self, frames: list[Frame]) -> None:
        while not self.closed:
            if self.door is not None:
                return self.send(frames)
            self._woken.clear()
            await self._woken.wait()

    async def close(self) -> None:
        self.closed = True
        self.wake()

    def wake(self) -> None:
        """Let what waits for a connection look again."""
        self._woken.set()


def no_receive(frames: list[Frame]) -> None:
    raise AssertionError("a publisher receives nothing")
