"""A simulated network, on which messages can arrive late, twice, in another order, or not at all.

One `Wire` connects all processes. Each process has a `SimNetwork`, which is a `protocols.network.Network`. A connection
keeps messages in order unless the weather reorders them. The connections of a process that dies break: at once if only
the process dies, since its kernel closes them, and after `SILENT_DEATH_SECONDS` if the whole machine dies. No
connection is made across a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any
from zlib import crc32

from actors.simulation.loop import DEAD, ProcessLoop, Scheduler
from protocols.codec import Frame
from protocols.network import Full, OnCrash, Receive, Unreachable

# Time after which the heartbeats of ZMTP give up a silent peer.
SILENT_DEATH_SECONDS = 6.0
RECONNECT_SECONDS = 0.2
# Least time between two messages on one connection.
SPACING = 1e-6

Watch = Callable[["SimNetwork", "SimNetwork", list[Frame], str], None]


@dataclass(frozen=True, slots=True)
class Weather:
    """The current faults of the network. Probabilities are per message, latencies in seconds."""

    latency: float = 0.002
    jitter: float = 0.002
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    delay: float = 0.0
    """Probability of a delay of up to `delay_seconds`. Later messages on the same connection are delayed with it."""
    delay_seconds: float = 1.0

    calm: bool = field(init=False)
    """True if every message arrives once and in order."""

    def __post_init__(self) -> None:
        stormy = self.loss or self.duplication or self.reordering or self.delay
        object.__setattr__(self, "calm", not stormy)


class Wire:
    """All connections of the simulated cluster. `watch` is called with every message that is sent, and its fate."""

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        self.scheduler = scheduler
        self.random = random
        self.weather = Weather()
        self.digest = 0
        self.sent = 0
        self.watch: Watch | None = None
        self._cut: set[tuple[str, str]] = set()
        self._doors: dict[str, _Door] = {}
        self._waiting: dict[str, list[_Caller]] = {}
        self._ports = count(40_000)
        self._routes = count(1)

    # --- faults

    def cut(self, source: str, target: str) -> None:
        """Drop messages from `source` to `target` until `heal`. Their connections break after SILENT_DEATH_SECONDS."""
        self._cut.add((source, target))
        self.scheduler.call_at(self.scheduler.now + SILENT_DEATH_SECONDS, self._give_up, source, target)

    def _give_up(self, source: str, target: str) -> None:
        if (source, target) in self._cut:
            self.reset(source, target)

    def heal(self) -> None:
        """End all partitions."""
        self._cut.clear()
        for address in list(self._waiting):
            self._connect_waiting(address)

    def is_cut(self, source: SimNetwork, target: SimNetwork) -> bool:
        return (source.name, target.name) in self._cut

    def reset(self, one: str, other: str) -> None:
        """Break every connection between two processes. Messages in transit are lost."""
        for door in self._doors.values():
            for caller in list(door.callers.values()):
                if {door.network.name, caller.network.name} == {one, other}:
                    caller.epoch += 1
                    self._separate(caller)

    # --- connections

    def open(self, door: _Door, address: str) -> str:
        host, _, port = address.rpartition(":")
        if port == "*":
            address = f"{host}:{next(self._ports)}"
        if address in self._doors:
            raise OSError(98, "Address already in use")
        self._doors[address] = door
        self._connect_waiting(address)
        return address

    def shut(self, door: _Door, silently: bool = False) -> None:
        """Disconnect a door whose socket was closed, or whose process died. `silently`: its peers notice only after
        SILENT_DEATH_SECONDS."""
        self._doors.pop(door.address, None)
        for caller in list(door.callers.values()):
            self._later(silently, self._separate_from, caller, door)

    def leave(self, caller: _Caller, silently: bool = False) -> None:
        """Disconnect a caller whose socket was closed, or whose process died. `silently`: as for `shut`."""
        waiting = self._waiting.get(caller.address, [])
        if caller in waiting:
            waiting.remove(caller)
        if caller.door is not None:
            self._later(silently, caller.door.callers.pop, caller.route, None)

    def call(self, caller: _Caller) -> None:
        """Connect the caller once its address is bound and not cut off."""
        door = self._doors.get(caller.address)
        if door is None or not self._reach_each_other(door.network, caller.network):
            waiting = self._waiting.setdefault(caller.address, [])
            if caller not in waiting:
                waiting.append(caller)
            return
        self.scheduler.call_at(self.scheduler.now + self._latency(), self._connect, caller, door)

    def _connect(self, caller: _Caller, door: _Door) -> None:
        if caller.closed or caller.door is not None or not caller.network.lives:
            return
        if door.closed or not door.network.lives:
            self.call(caller)
            return
        caller.route = b"%d" % next(self._routes)
        caller.door = door
        door.callers[caller.route] = caller
        caller.connected()

    def _reach_each_other(self, one: SimNetwork, other: SimNetwork) -> bool:
        return not (self.is_cut(one, other) or self.is_cut(other, one))

    def _connect_waiting(self, address: str) -> None:
        for caller in self._waiting.pop(address, []):
            when = self.scheduler.now + self.random.random() * RECONNECT_SECONDS
            self.scheduler.call_at(when, self.call, caller)

    def _later(self, silently: bool, callback: Callable[..., object], *args: Any) -> None:
        delay = SILENT_DEATH_SECONDS if silently else self.weather.latency
        self.scheduler.call_at(self.scheduler.now + delay, callback, *args)

    def _separate_from(self, caller: _Caller, door: _Door) -> None:
        if caller.door is door:
            self._separate(caller)

    def _separate(self, caller: _Caller) -> None:
        if caller.door is not None:
            caller.door.callers.pop(caller.route, None)
            caller.door = None
        if not caller.closed and caller.network.lives:
            self.call(caller)

    # --- messages

    def carry(self, source: SimNetwork, target: _Link, way: _Way, frames: list[Frame]) -> None:
        """Send a message to `target`, subject to weather and partitions. `way`: this direction of the connection."""
        self.sent += 1
        scheduler, weather = self.scheduler, self.weather
        when = scheduler.now + weather.latency + self.random.random() * weather.jitter
        digest = self.digest ^ hash(when) & 0xFFFFFFFF
        for frame in frames:
            digest = crc32(frame, digest)
        self.digest = digest
        if weather.calm and not self._cut:
            fate, when = "", max(when, way.last + SPACING)
            way.last = when
            scheduler.call_at(when, target.deliver, frames, way.caller.epoch, way.caller, loop=target.network.loop)
        else:
            fate = self._carry_through(weather, source, target, way, frames, when)
        if self.watch is not None:
            self.watch(source, target.network, frames, fate)

    def _carry_through(
        self, weather: Weather, source: SimNetwork, target: _Link, way: _Way, frames: list[Frame], when: float
    ) -> str:
        """Send a message in bad weather or during a partition. Returns its fate; empty if it arrives normally."""
        chance, fate = self.random.random, ""
        if self._cut and self.is_cut(source, target.network):
            return "cut off"
        if chance() < weather.loss:
            return "lost"
        if chance() < weather.delay:
            when += chance() * weather.delay_seconds
            fate = "delayed"
        if chance() < weather.reordering:
            when += chance() * 10 * weather.latency
            fate = "out of order"
        else:
            when = way.last = max(when, way.last + SPACING)
        arrival = target.deliver, frames, way.caller.epoch, way.caller
        self.scheduler.call_at(when, *arrival, loop=target.network.loop)
        if chance() < weather.duplication:
            again = when + chance() * 2 * weather.delay_seconds
            self.scheduler.call_at(again, *arrival, loop=target.network.loop)
            fate = "duplicated"
        return fate

    def _latency(self) -> float:
        return self.weather.latency + self.random.random() * self.weather.jitter


class SimNetwork:
    """The network of one process. `on_answer` is called after the process has sent an answer or a part of a stream,
    `on_publish` after it has published an event."""

    def __init__(self, wire: Wire, name: str, loop: ProcessLoop) -> None:
        self.wire = wire
        self.name = name
        self.loop = loop
        self.on_answer: Callable[[], None] | None = None
        self.on_publish: Callable[[list[Frame]], None] | None = None
        self._links: list[_Link] = []

    @property
    def lives(self) -> bool:
        return self.loop.state is not DEAD

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> tuple[_Door, str]:
        door = _Door(self, receive, on_crash)
        door.address = self.wire.open(door, address)
        self._links.append(door)
        return door, door.address

    def connect(self, address: str, receive: Receive, on_crash: OnCrash) -> _Caller:
        caller = _Caller(self, address, receive, on_crash)
        self._links.append(caller)
        self.wire.call(caller)
        return caller

    def publish(self, address: str, on_crash: OnCrash) -> tuple[_Publication, str]:
        publication = _Publication(self, _no_receive, on_crash)
        publication.address = self.wire.open(publication, address)
        self._links.append(publication)
        return publication, publication.address

    subscribe = connect

    def close(self) -> None:
        self._forget(silently=False)

    def die(self, silently: bool) -> None:
        """Close all sockets, because the process died. `silently`: its machine died with it."""
        self._forget(silently)

    def _forget(self, silently: bool) -> None:
        links, self._links = self._links, []
        for link in links:
            link.shut(silently)


@dataclass(slots=True)
class _Way:
    """One direction of a connection. `last`: when its last message arrives."""

    caller: _Caller
    last: float = 0.0


class _Link:
    """A socket of one process."""

    def __init__(self, network: SimNetwork, receive: Receive, on_crash: OnCrash) -> None:
        self.network = network
        self.closed = False
        self._receive = receive
        self._on_crash = on_crash

    async def close(self) -> None:
        self.shut(silently=False)

    def shut(self, silently: bool) -> None:
        raise NotImplementedError

    def deliver(self, frames: list[Frame], epoch: int, caller: _Caller) -> None:
        """Receive a message, in the process that owns the socket. It is lost if its connection was reset meanwhile."""
        if self.closed or epoch != caller.epoch:
            return
        try:
            self._receive(frames)
        except Exception as error:
            self.closed = True  # as with a real socket, whose only reader has ended
            self._on_crash(error)


class _Door(_Link):
    """The bound side of a connection, like a ROUTER socket."""

    address: str

    def __init__(self, network: SimNetwork, receive: Receive, on_crash: OnCrash) -> None:
        super().__init__(network, receive, on_crash)
        self.callers: dict[bytes, _Caller] = {}

    def send(self, frames: list[Frame]) -> None:
        route, *rest = frames
        caller = self.callers.get(bytes(route))
        if self.closed or caller is None:
            raise Unreachable(f"no connection {bytes(route)!r}")
        network = self.network
        if not network.lives:
            return
        network.wire.carry(network, caller, caller.from_door, [bytes(frame) for frame in rest])
        if network.on_answer is not None:
            network.on_answer()

    async def send_when_possible(self, frames: list[Frame]) -> None:
        self.send(frames)

    def shut(self, silently: bool) -> None:
        if not self.closed:
            self.closed = True
            self.network.wire.shut(self, silently)


class _Publication(_Door):
    """Like a PUB socket: sends to all connected callers."""

    def send(self, frames: list[Frame]) -> None:
        if self.closed:
            raise Unreachable("closed")
        network = self.network
        if not network.lives:
            return
        copies: list[Frame] = [bytes(frame) for frame in frames]
        for caller in list(self.callers.values()):
            network.wire.carry(network, caller, caller.from_door, copies)
        if network.on_publish is not None:
            network.on_publish(copies)


class _Caller(_Link):
    """The connecting side of a connection, like a DEALER or a SUB socket."""

    def __init__(self, network: SimNetwork, address: str, receive: Receive, on_crash: OnCrash) -> None:
        super().__init__(network, receive, on_crash)
        self.address = address
        self.door: _Door | None = None
        self.route = b""
        self.epoch = 0
        self.to_door = _Way(self)
        self.from_door = _Way(self)
        self._waiters: list[asyncio.Future[None]] = []

    def send(self, frames: list[Frame]) -> None:
        if self.closed:
            raise Unreachable("closed")
        if self.door is None:
            raise Full(self.address)
        network = self.network
        if network.lives:
            network.wire.carry(network, self.door, self.to_door, [self.route, *map(bytes, frames)])

    async def send_when_possible(self, frames: list[Frame]) -> None:
        while not self.closed:
            if self.door is not None:
                return self.send(frames)
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def connected(self) -> None:
        self._wake()

    def shut(self, silently: bool) -> None:
        if not self.closed:
            self.closed = True
            self.network.wire.leave(self, silently)
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _no_receive(frames: list[Frame]) -> None:
    raise AssertionError("a publisher receives nothing")


def _no_crash(error: BaseException) -> None:
    raise error
