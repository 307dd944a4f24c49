"""The network below the bus: sockets that carry frames without confirmation. `ZmqNetwork` is the real network.

Requests are asynchronous REQ/REP: a ROUTER answers any number of DEALERs, each with any number of open requests. Events
are PUB/SUB: an XPUB sends every event to all SUBs. A SUB gets no event from before its subscription arrived, and an
XPUB drops events for a full queue. So events have numbers, and a subscriber that sees a gap asks for a snapshot.

One task reads a socket (receiving is not cancel-safe) and passes the frames on; tasks that wait for frames can be
cancelled at any time. The asyncio sockets of pyzmq are not used: libzmq never announces a message that arrives during
another call into libzmq. So every send has to wake the reader, and only `ZmqLink` sends.

Every link is encrypted, and both ends prove that they hold the run's keys. `keep_door` answers libzmq's question about
every peer; without an answer nobody is admitted. pyzmq's `zmq.auth.asyncio` is not used: it tells a refused peer the
reason, after which the peer's libzmq never connects again, not even after a rotation of the keys.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol, cast

import zmq

from protocols.codec import MAX_FRAME_BYTES, Frame
from protocols.security import (
    ANSWERS,
    HANDSHAKE_MS,
    HANDSHAKES_FAILED,
    Approach,
    Handshakes,
    Keys,
    Refusals,
    Watch,
    keep_door,
)

# After this many messages the reader lets other tasks run, because a flood would block the event loop.
DRAIN = 256
HIGH_WATER_MARK = 10_000
# From this size on, sharing memory with libzmq costs less than copying a frame.
SHARED_BYTES = 64 << 10
# Flags as plain numbers: the operators of pyzmq's enums cost more than a send.
NOW, MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
# Sockets of a process. libzmq's default limit is 1023, and a link takes three sockets.
MAX_SOCKETS = 16_384
# Subscribers only subscribe, and handshakes take a few hundred bytes.
MAX_SUBSCRIPTION_BYTES = 1024

Receive = Callable[[list[Frame]], None]
OnCrash = Callable[[BaseException], None]
OnLost = Callable[[], None]


class Unreachable(Exception):
    """No peer is at the other end of the route, or the link is closed."""


class Full(Exception):
    """No peer is connected (yet), or the queue has no room."""


class Link(Protocol):
    """One socket."""

    @property
    def closed(self) -> bool:
        """True once the link is closed. A closed link cannot be opened again."""

    def send(self, frames: list[Frame]) -> None:
        """Send without waiting. `frames` must not change later. Raises Full, Unreachable (also if closed)."""

    async def send_when_possible(self, frames: list[Frame]) -> None:
        """Wait for a connection and for room, then send. Returns without sending if the link is closed meanwhile."""

    async def close(self) -> None:
        """Close the link; does nothing on a closed link."""


class Network(Protocol):
    """The network of one bus. The bus closes its network.

    `receive` is called in the owner's event loop with the frames of each message; `on_crash` gets exceptions.
    """

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> tuple[Link, str]:
        """The socket of a server: received frames begin with the asker's route, and so must sent frames.

        "tcp://host:*" picks a port, "tcp://host:20000-20100" a port of the range, and "tcp://*:5555" listens on every
        interface; the real address is returned. Raises OSError (address in use).
        """

    def connect(self, address: str, receive: Receive, on_crash: OnCrash, on_lost: OnLost) -> Link:
        """A link to one server; nothing is queued before the connection. `on_lost` is called when a connection breaks
        or the server refuses a connection. The link goes on trying."""

    def publish(self, address: str, on_crash: OnCrash) -> tuple[Link, str]:
        """A link to all subscribers of `address`, and its real address. Raises OSError (address in use)."""

    def subscribe(self, address: str, receive: Receive, on_crash: OnCrash) -> Link:
        """A link that receives all messages published at `address`."""

    async def refuses(self, address: str) -> bool:
        """True if the machine at `address` says that nobody listens there; False if the machine does not answer."""

    def close(self) -> None:
        """Close all open links."""


class ZmqNetwork:
    """ZeroMQ with CURVE. Only holders of `keys` may connect."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._refusals = Refusals()
        self._doorkeeping: Watch | None = None

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> "tuple[ZmqLink, str]":
        socket = self._socket(zmq.ROUTER)
        socket.router_mandatory = True
        real, watch = self._listen(socket, address)
        return ZmqLink(socket, watch, receive, on_crash), real

    def connect(self, address: str, receive: Receive, on_crash: OnCrash, on_lost: OnLost) -> "ZmqLink":
        socket = self._socket(zmq.DEALER)
        socket.immediate = True
        return ZmqLink(socket, Approach(socket, address, self._keys, on_lost), receive, on_crash)

    def publish(self, address: str, on_crash: OnCrash) -> "tuple[ZmqLink, str]":
        socket = self._socket(zmq.XPUB)
        socket.maxmsgsize = MAX_SUBSCRIPTION_BYTES
        real, watch = self._listen(socket, address)
        return ZmqLink(socket, watch, lambda subscription: None, on_crash), real

    def subscribe(self, address: str, receive: Receive, on_crash: OnCrash) -> "ZmqLink":
        socket = self._socket(zmq.SUB)
        socket.subscribe(b"")
        return ZmqLink(socket, Approach(socket, address, self._keys, lambda: None), receive, on_crash)

    async def refuses(self, address: str) -> bool:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            async with asyncio.timeout(HANDSHAKE_MS / 1000):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError as error:  # TimeoutError is an OSError
            return isinstance(error, ConnectionRefusedError)
        writer.close()
        return False

    def close(self) -> None:
        if self._doorkeeping:
            self._doorkeeping.close()
        # A socket left open would hold up the interpreter's exit.
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that never delays the exit of the process and notices a silent peer."""
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

    def _listen(self, socket: zmq.Socket[bytes], address: str) -> "tuple[str, Watch]":
        """Bind the socket. Returns the real address and a watch that counts failed handshakes. Raises OSError."""
        self._keep_door()
        self._keys.listen(socket)
        try:
            real = _bind(socket, address)
        except OSError:
            socket.close()
            raise

        def refused(event: zmq.Event) -> None:
            self._refusals.add(real, HANDSHAKES_FAILED[event])

        return real, Handshakes(socket, HANDSHAKES_FAILED, refused)

    def _keep_door(self) -> None:
        if self._doorkeeping is None:
            door = self._context.socket(zmq.ROUTER)
            door.linger = 0
            door.bind(ANSWERS)
            self._doorkeeping = Watch(
                door, lambda frames: door.send_multipart(keep_door(frames, self._keys, self._refusals))
            )


class ZmqLink:
    """A socket, and the task that reads it and passes every message to `receive`. `on_crash` gets exceptions."""

    def __init__(self, socket: zmq.Socket[bytes], watch: Watch, receive: Receive, on_crash: OnCrash) -> None:
        self._socket = socket
        self._watch = watch
        self._receive = receive
        self._on_crash = on_crash
        self._woken = asyncio.Event()
        self._writable = asyncio.Event()
        self._woken.set()
        self._descriptor = socket.fileno()
        asyncio.get_running_loop().add_reader(self._descriptor, self._woken.set)
        self._reader = asyncio.create_task(self._read(), name="link")
        self._reader.add_done_callback(self._ended)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def send(self, frames: list[Frame]) -> None:
        *first, last = frames
        try:
            for frame in first:
                self._socket.send(frame, MORE, copy=len(frame) < SHARED_BYTES)
            self._socket.send(last, NOW, copy=len(last) < SHARED_BYTES)
        except zmq.Again:
            raise Full("no peer is connected, or the queue is full") from None
        except zmq.ZMQError as error:
            raise Unreachable(error.strerror) from None
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
        self._watch.close()
        self._socket.close()
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
            # Reading the events also finds messages that libzmq has not announced.
            events: Any = self._socket.getsockopt(zmq.EVENTS)
            if events & WRITABLE:
                self._writable.set()
            if events & READABLE:
                self._woken.set()
            await asyncio.sleep(0)

    def _receive_now(self) -> list[Frame]:
        """The frames of a message, large frames as views. Raises zmq.Again without a message.

        Asking a frame whether more follow is faster than asking the socket, as `recv_multipart` does.
        """
        frames: list[Frame] = []
        while True:
            frame = self._socket.recv(NOW, copy=False)
            frames.append(frame.bytes if len(frame) < SHARED_BYTES else frame.buffer.toreadonly())
            if not frame.more:
                return frames

    def _ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()):
            self._on_crash(error)


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind the socket; returns the real address. A range is tried from a random port on. Raises OSError."""
    host, _, ports = address.rpartition(":")
    first, dash, last = ports.partition("-")
    numbers = range(int(first), int(last) + 1) if dash else [ports]
    start = random.randrange(len(numbers))
    for number in [*numbers[start:], *numbers[:start]]:
        try:
            socket.bind(f"{host}:{number}")
        except zmq.ZMQError as error:
            failed = OSError(error.errno, zmq.strerror(cast(int, error.errno)), address)
        else:
            return cast(bytes, socket.last_endpoint).decode()
    raise failed
