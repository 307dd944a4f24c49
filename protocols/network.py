"""The wire below the bus: sockets that carry frames and confirm nothing. `ZmqNetwork` is the real one.

One task reads each socket (receiving is not cancel-safe) and hands frames on; waiters can be cancelled at any time.
The asyncio sockets of pyzmq are not used: a message that arrives while another call is inside libzmq is not announced
again, so whoever sends must wake the reader, and only `ZmqLink` sends.

With keys every link is encrypted, both ends prove who they are, and a peer without keys is not let in.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocols.codec import MAX_FRAME_BYTES, Frame
from protocols.security import ANSWERS, HANDSHAKE_MS, Doorkeeper, Generation, Keys, Refusals

# A flood must not starve the loop: after this many messages the reader lets other tasks run.
DRAIN = 256
HIGH_WATER_MARK = 10_000
# From this size on, handing a frame's memory over costs less than copying it.
SHARED_BYTES = 64 << 10
# libzmq's own limit is 1023 in a process: with keys, a link is three sockets.
MAX_SOCKETS = 16_384
# Between two attempts at one address with different keys.
OTHER_KEYS_SECONDS = 0.2

# Of an unknown key the doorkeeper tells.
HANDSHAKES_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "handshake given up or too slow",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "no handshake of ours",
}

Receive = Callable[[list[Frame]], None]
OnCrash = Callable[[BaseException], None]


class Unreachable(Exception):
    """Nobody is at the other end of that route, or the link is closed."""


class Full(Exception):
    """Nobody is connected (yet), or the queue has no room."""


class Link(Protocol):
    """One socket."""

    closed: bool

    def send(self, frames: list[Frame]) -> None:
        """The memory of `frames` must not change later. Raises Full, Unreachable; on a closed link Unreachable."""

    async def send_when_possible(self, frames: list[Frame]) -> None:
        """Waits for a connection and for room; returns without having sent where the link is closed meanwhile."""

    async def close(self) -> None:
        """Harmless on a closed link."""


class Network(Protocol):
    """What a bus needs of the wire. It belongs to one bus, which closes it.

    `receive` is called in the owner's event loop with the frames of each message; what it raises goes to `on_crash`.
    """

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> tuple[Link, str]:
        """A front door: received frames begin with the asker's route, and so must sent ones.

        "tcp://host:*" picks a port, "tcp://host:20000-20100" one of these, and "tcp://*:5555" listens on every
        interface; the real address is returned. Raises OSError (address in use).
        """

    def connect(self, address: str, receive: Receive, on_crash: OnCrash) -> Link:
        """A link to one front door; nothing is queued before it is connected."""

    def publish(self, address: str) -> tuple[Link, str]:
        """A link to all who subscribe there, and its real address. Raises OSError (address in use)."""

    def subscribe(self, address: str, receive: Receive, on_crash: OnCrash) -> Link:
        """A link that receives everything published at `address`."""

    def close(self) -> None:
        """Close whatever is still open."""


class ZmqNetwork:
    """ZeroMQ: a ROUTER for a front door, a DEALER for a link to one, PUB and SUB for events.

    keys: whose holders alone may talk with us; None: anybody may, and may read along.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._keys = keys
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._refusals = Refusals()
        self._doorkeeping: Watch | None = None

    @property
    def refused(self) -> Counter[str]:
        """How many peers were not let in, by reason."""
        return self._refusals.counts

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> tuple[ZmqLink, str]:
        socket = self._socket(zmq.ROUTER)
        socket.router_mandatory = True
        real, watch = self._listen(socket, address)
        return ZmqLink(socket, watch, receive, on_crash), real

    def connect(self, address: str, receive: Receive, on_crash: OnCrash) -> ZmqLink:
        socket = self._socket(zmq.DEALER)
        socket.immediate = True
        return ZmqLink(socket, self._reach(socket, address), receive, on_crash)

    def publish(self, address: str) -> tuple[ZmqOutlet, str]:
        socket = self._socket(zmq.PUB)
        real, watch = self._listen(socket, address)
        return ZmqOutlet(socket, watch), real

    def subscribe(self, address: str, receive: Receive, on_crash: OnCrash) -> ZmqLink:
        socket = self._socket(zmq.SUB)
        socket.subscribe(b"")
        return ZmqLink(socket, self._reach(socket, address), receive, on_crash)

    def close(self) -> None:
        if self._doorkeeping:
            self._doorkeeping.close()
        # A socket left open would hold up the interpreter's exit.
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> zmq.Socket:
        """A socket that never holds up the process's end and notices a silent peer."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(HIGH_WATER_MARK)
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.handshake_ivl = HANDSHAKE_MS
        socket.heartbeat_ivl = 2000
        socket.heartbeat_timeout = 6000
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 2000
        socket.ipv6 = True
        return socket

    def _listen(self, socket: zmq.Socket, address: str) -> tuple[str, Watch]:
        """The real address, and what counts those who fail to connect. Raises OSError."""
        if self._keys:
            self._keep_door(self._keys)
            self._keys.listen(socket)
        try:
            real = _bind(socket, address)
        except OSError:
            socket.close()
            raise

        def refused(event: zmq.Event) -> None:
            self._refusals.add(real, HANDSHAKES_FAILED[event])

        return real, Handshakes(socket, HANDSHAKES_FAILED, refused)

    def _reach(self, socket: zmq.Socket, address: str) -> Watch | None:
        """Connect, with keys by whichever of their generations the other end knows; what sees to that."""
        if self._keys is None:
            socket.connect(address)
            return None
        return Approach(socket, address, self._keys)

    def _keep_door(self, keys: Keys) -> None:
        if self._doorkeeping is None:
            door = self._context.socket(zmq.ROUTER)
            door.linger = 0
            door.bind(ANSWERS)
            self._doorkeeping = Watch(door, Doorkeeper(keys, self._refusals, door.send_multipart).asked)


class Watch:
    """Calls `handle` with each message of a socket of this process's own, until it is closed."""

    def __init__(self, socket: zmq.Socket, handle: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.call_soon(self._read)  # libzmq announces nothing to whom it has not yet told that there is nothing

    def close(self) -> None:
        """Harmless on a closed one."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        # Until nothing is left: what arrives meanwhile is not announced.
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._handle(frames)


class Handshakes(Watch):
    """Calls `tell` with each of these events of a socket."""

    def __init__(self, socket: zmq.Socket, events: Iterable[zmq.Event], tell: Callable[[zmq.Event], None]) -> None:
        self._watched = socket
        address = f"inproc://handshakes-{socket.fileno()}"
        socket.monitor(address, functools.reduce(operator.or_, events))
        monitor = socket.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.set_hwm(0)  # libzmq would stand still where it cannot tell
        monitor.connect(address)
        super().__init__(monitor, lambda frames: tell(parse_monitor_message(frames)["event"]))

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        super().close()


class Approach(Handshakes):
    """Connects a socket by one generation of the keys after the other, until the other end knows one."""

    def __init__(self, socket: zmq.Socket, address: str, keys: Keys) -> None:
        super().__init__(socket, [*HANDSHAKES_FAILED, zmq.Event.HANDSHAKE_SUCCEEDED], self._ended)
        self._address = address
        self._keys = keys
        self._timer: asyncio.TimerHandle | None = None
        self._connect(keys.generations[0])

    def close(self) -> None:
        self._wait()
        super().close()

    def _ended(self, event: zmq.Event) -> None:
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._wait()
        elif self._timer is None:
            self._timer = self._loop.call_later(OTHER_KEYS_SECONDS, self._try_next)

    def _wait(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _try_next(self) -> None:
        self._timer = None
        self._watched.disconnect(self._address)
        self._connect(_next_after(self._tried, self._keys.generations))

    def _connect(self, generation: Generation) -> None:
        self._tried = generation
        self._keys.connect(self._watched, generation)
        self._watched.connect(self._address)


def _next_after(tried: Generation, generations: Sequence[Generation]) -> Generation:
    """In turn; the newest where what was tried is not among them any more."""
    after = generations.index(tried) + 1 if tried in generations else 0
    return generations[after % len(generations)]


class ZmqOutlet:
    """A socket that only sends: a publisher's, which never has to wait. Closes `watch` with itself."""

    def __init__(self, socket: zmq.Socket, watch: Watch | None) -> None:
        self._socket = socket
        self._watch = watch

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def send(self, frames: list[Frame]) -> None:
        small = all(len(frame) < SHARED_BYTES for frame in frames)
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=small)
        except zmq.Again:
            raise Full("nobody is connected, or the queue is full") from None
        except zmq.ZMQError as error:
            raise Unreachable(zmq.strerror(error.errno)) from None

    async def send_when_possible(self, frames: list[Frame]) -> None:
        if not self.closed:
            self.send(frames)

    async def close(self) -> None:
        if self._watch:
            self._watch.close()
        self._socket.close()


class ZmqLink(ZmqOutlet):
    """A socket and the one task that reads it, which hands every message to `receive`; what that raises is a crash."""

    def __init__(self, socket: zmq.Socket, watch: Watch | None, receive: Receive, on_crash: OnCrash) -> None:
        super().__init__(socket, watch)
        self._receive = receive
        self._on_crash = on_crash
        self._woken = asyncio.Event()
        self._writable = asyncio.Event()
        self._woken.set()
        self._descriptor = socket.fileno()
        asyncio.get_running_loop().add_reader(self._descriptor, self._woken.set)
        self._reader = asyncio.create_task(self._read(), name="link")
        self._reader.add_done_callback(self._ended)

    def send(self, frames: list[Frame]) -> None:
        try:
            super().send(frames)
        finally:
            self._woken.set()

    async def send_when_possible(self, frames: list[Frame]) -> None:
        while not self.closed:
            try:
                return self.send(frames)
            except Full:
                self._writable.clear()
                await self._writable.wait()

    async def close(self) -> None:
        if self.closed:
            return
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await super().close()
        self._writable.set()

    async def _read(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            for _ in range(DRAIN):
                try:
                    frames = self._receive_now()
                except zmq.Again:
                    break
                self._receive(frames)
            # Asking for the events also takes in what libzmq has not announced.
            events = self._socket.events
            if events & zmq.POLLOUT:
                self._writable.set()
            if events & zmq.POLLIN:
                self._woken.set()
            await asyncio.sleep(0)

    def _receive_now(self) -> list[Frame]:
        """The frames of a message, large ones as views. Raises zmq.Again where there is none.

        Asking each frame whether more follow is quicker than asking the socket, as `recv_multipart` does.
        """
        frames: list[Frame] = []
        while True:
            frame = self._socket.recv(zmq.DONTWAIT, copy=False)
            frames.append(frame.bytes if len(frame) < SHARED_BYTES else frame.buffer.toreadonly())
            if not frame.more:
                return frames

    def _ended(self, reader: asyncio.Task) -> None:
        if not reader.cancelled() and (error := reader.exception()):
            self._on_crash(error)


def _bind(socket: zmq.Socket, address: str) -> str:
    """The real address. Of a range, ports are tried from a random one on: many actors start at once. Raises OSError."""
    host, _, ports = address.rpartition(":")
    first, dash, last = ports.partition("-")
    numbers = range(int(first), int(last) + 1) if dash else [ports]
    start = random.randrange(len(numbers))
    for number in [*numbers[start:], *numbers[:start]]:
        try:
            socket.bind(f"{host}:{number}")
        except zmq.ZMQError as error:
            failed = OSError(error.errno, zmq.strerror(error.errno), address)
        else:
            return socket.last_endpoint.decode()
    raise failed
