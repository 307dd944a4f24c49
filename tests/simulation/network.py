"""The simulated network with faults: messages can arrive late, twice, in another order, or not at all.

A connection keeps messages in order unless the weather reorders them. The connections of a process that dies break: at
once if only the process dies, since its kernel closes them, and after `SILENT_DEATH_SECONDS` if the whole machine dies.
No connection is made across a partition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

from protocols.codec import Frame
from protocols.network import OnCrash, OnLost, Receive
from simulation.cluster.loop import Scheduler
from simulation.cluster.network import (
    SPACING,
    SimCaller,
    SimDoor,
    SimLink,
    SimNetwork,
    SimPublication,
    Way,
    Wire,
    no_loss,
    no_receive,
)
from simulation.loop import DEAD, FaultyLoop

# Time after which the heartbeats of ZMTP give up a silent peer.
SILENT_DEATH_SECONDS = 6.0
RECONNECT_SECONDS = 0.2
# Time between two attempts to connect to an address at which nobody listens.
REFUSED_SECONDS = 2.0


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


class FaultyWire(Wire):
    """All connections of the simulated cluster. They have the faults of `weather`, and break and are made again.
    `digest`: a hash of all messages and of when they were sent."""

    doors: dict[str, Any]  # FaultyDoor, FaultyPublication

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        super().__init__(scheduler, random, 0.0)
        self.weather = Weather()
        self.digest = 0
        self._cut: set[tuple[str, str]] = set()
        self._waiting: dict[str, list[Any]] = {}
        self.silent: set[str] = set()  # addresses on machines that are lost

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

    def reset(self, first: str, second: str) -> None:
        """Break every connection between two processes. Messages in transit are lost."""
        for door in self.doors.values():
            for caller in list(door.callers.values()):
                if {door.network.name, caller.network.name} == {first, second}:
                    caller.lose()
                    self._separate(caller)

    # --- connections

    def open(self, door: SimDoor, address: str) -> str:
        bound = super().open(door, address)
        self.silent.discard(bound)
        self._connect_waiting(bound)
        return bound

    def call(self, caller: SimCaller) -> None:
        """Connect the caller once its address is bound and not cut off."""
        door = self.doors.get(caller.address)
        if door is not None and not (
            self.is_cut(door.network, caller.network) or self.is_cut(caller.network, door.network)
        ):
            super().call(caller)
        elif caller not in (waiting := self._waiting.setdefault(caller.address, [])):
            waiting.append(caller)
            self.scheduler.call_at(self.scheduler.now + self.weather.latency, self._refuse, caller)

    def _refuse(self, caller: Any) -> None:
        """Refuse one connection after another, where a machine runs on which nobody listens at the address."""
        if caller.address not in self.doors and caller in self._waiting.get(caller.address, []):
            if caller.address not in self.silent:
                self._tell_lost(caller)
            self.scheduler.call_at(self.scheduler.now + REFUSED_SECONDS, self._refuse, caller)

    def _tell_lost(self, caller: Any) -> None:
        if caller.on_lost is not no_loss:
            self.scheduler.call_at(self.scheduler.now, caller.on_lost, loop=caller.network.loop)

    def connect(self, caller: Any, door: Any) -> None:
        if caller.closed or caller.door is not None or not caller.network.lives:
            return
        if door.closed or not door.network.lives:
            return self.call(caller)
        super().connect(caller, door)

    def shut_door(self, door: SimDoor, address: str, silently: bool) -> None:
        """The socket was closed, or its process died. `silently`: its peers notice only after SILENT_DEATH_SECONDS."""
        self.doors.pop(address, None)
        if silently:
            self.silent.add(address)
        for caller in list(door.callers.values()):
            self._later(silently, self._separate_from, caller, door)

    def leave(self, caller: SimCaller, silently: bool) -> None:
        """The socket was closed, or its process died. `silently`: as for `shut_door`."""
        waiting = self._waiting.get(caller.address, [])
        if caller in waiting:
            waiting.remove(caller)
        if caller.door is not None:
            self._later(silently, caller.door.callers.pop, caller.route, None)

    def _connect_waiting(self, address: str) -> None:
        for caller in self._waiting.pop(address, []):
            when = self.scheduler.now + self.random.random() * RECONNECT_SECONDS
            self.scheduler.call_at(when, self.call, caller)

    def _later(self, silently: bool, callback: Callable[..., object], *args: Any) -> None:
        delay = SILENT_DEATH_SECONDS if silently else self.weather.latency
        self.scheduler.call_at(self.scheduler.now + delay, callback, *args)

    def _separate_from(self, caller: Any, door: SimDoor) -> None:
        if caller.door is door:
            self._separate(caller)

    def _separate(self, caller: Any) -> None:
        if caller.door is not None:
            caller.door.callers.pop(caller.route, None)
            caller.door = None
        if not caller.closed and caller.network.lives:
            self._tell_lost(caller)
            self.call(caller)

    # --- messages

    def carry(self, source: Any, target: SimLink, way: Way, frames: list[Frame]) -> None:
        if source.lives:
            super().carry(source, target, way, frames)

    def delay(self) -> float:
        return self.weather.latency + self.random.random() * self.weather.jitter

    def deliver(self, source: SimNetwork, target: SimLink, way: Any, frames: list[Frame], when: float) -> str:
        """Deliver a message, subject to weather and partitions."""
        self.digest = self.digest ^ hash(when) & 0xFFFFFFFF
        for frame in frames:
            self.digest = crc32(frame, self.digest)
        arrival = way.arrive, target, frames
        if self.weather.calm and not self._cut:
            when = way.last = max(when, way.last + SPACING)
            self.scheduler.call_at(when, *arrival, loop=target.network.loop)
            return ""
        weather, chance, fate = self.weather, self.random.random, ""
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
        self.scheduler.call_at(when, *arrival, loop=target.network.loop)
        if chance() < weather.duplication:
            again = when + chance() * 2 * weather.delay_seconds
            self.scheduler.call_at(again, *arrival, loop=target.network.loop)
            fate = "duplicated"
        return fate


class FaultyNetwork(SimNetwork):
    """The network of one process that may die. `on_answer` is called after the process has sent an answer or a part of
    a stream, `on_publish` after it has published an event."""

    wire: FaultyWire
    loop: FaultyLoop

    def __init__(self, wire: FaultyWire, name: str, loop: FaultyLoop) -> None:
        super().__init__(wire, name, loop)
        self.on_answer: Callable[[], None] | None = None
        self.on_publish: Callable[[list[Frame]], None] | None = None
        self._links: list[FaultyDoor | FaultyPublication | FaultyCaller] = []

    @property
    def lives(self) -> bool:
        return self.loop.state is not DEAD

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> tuple[SimDoor, str]:
        return self._opened(FaultyDoor(self, receive, on_crash), address)

    def publish(self, address: str, on_crash: OnCrash) -> tuple[SimDoor, str]:
        return self._opened(FaultyPublication(self, no_receive, on_crash), address)

    def connect(self, address: str, receive: Receive, on_crash: OnCrash, on_lost: OnLost = no_loss) -> SimCaller:
        caller = FaultyCaller(self, address, receive, on_crash, on_lost)
        self._links.append(caller)
        self.wire.call(caller)
        return caller

    subscribe = connect

    async def refuses(self, address: str) -> bool:
        return address not in self.wire.doors and address not in self.wire.silent

    def _opened(self, door: FaultyDoor | FaultyPublication, address: str) -> tuple[SimDoor, str]:
        door.address = self.wire.open(door, address)
        self._links.append(door)
        return door, door.address

    def close(self) -> None:
        self.die(silently=False)

    def die(self, silently: bool) -> None:
        """Close all sockets, as when the process died. `silently`: its machine died with it."""
        links, self._links = self._links, []
        for link in links:
            link.shut(silently)


@dataclass(slots=True)
class FaultyWay(Way):
    """One direction of a connection. `broken`: what is in transit is lost."""

    broken: bool = False

    def arrive(self, target: SimLink, frames: list[Frame]) -> None:
        if not self.broken:
            target.receive(frames)


class FaultyDoor(SimDoor):
    network: FaultyNetwork
    address: str

    def send(self, frames: list[Frame]) -> None:
        super().send(frames)
        if self.network.on_answer is not None:
            self.network.on_answer()

    async def close(self) -> None:
        self.shut(silently=False)

    def shut(self, silently: bool) -> None:
        if not self.closed:
            self.closed = True
            self.network.wire.shut_door(self, self.address, silently)


class FaultyPublication(FaultyDoor, SimPublication):
    def send(self, frames: list[Frame]) -> None:
        SimPublication.send(self, frames)
        if self.network.on_publish is not None and self.network.lives:
            self.network.on_publish(frames)


class FaultyCaller(SimCaller):
    network: FaultyNetwork
    to_door: FaultyWay
    from_door: FaultyWay

    def __init__(
        self, network: FaultyNetwork, address: str, receive: Receive, on_crash: OnCrash, on_lost: OnLost
    ) -> None:
        super().__init__(network, address, receive, on_crash, on_lost)
        self.to_door, self.from_door = FaultyWay(), FaultyWay()

    def lose(self) -> None:
        """Lose what is in transit."""
        self.to_door.broken = self.from_door.broken = True
        self.to_door, self.from_door = FaultyWay(self.to_door.last), FaultyWay(self.from_door.last)

    async def close(self) -> None:
        self.shut(silently=False)

    def shut(self, silently: bool) -> None:
        if not self.closed:
            self.closed = True
            self.network.wire.leave(self, silently)
            self.wake()
