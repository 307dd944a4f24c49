"""The wire below the bus: sockets that carry frames and confirm nothing. `ZmqNetwork` is the real one.

One task reads each socket (receiving is not cancel-safe) and hands frames on; waiters can be cancelled at any time.
The asyncio sockets of pyzmq are not used: a message that arrives while another call is inside libzmq is not announced
again, so whoever sends must wake the reader, and only `ZmqLink` sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

import zmq

from protocols.codec import MAX_FRAME_BYTES, Frame

# A flood must not starve the loop: after this many messages the reader lets other tasks run.
DRAIN = 256
HIGH_WATER_MARK = 10_000
# From this size on, handing a frame's memory over costs less than copying it.
SHARED_BYTES = 64 << 10

Receive = Callable[[list[Frame]], None]
OnCrash = Callable[[BaseException], None]


class Unreachable(Exception):
    """Nobody is at the other end of that route, or the link is closed."""


class Full(Exception):
    """Nobody is connected (yet), or the queue has no room."""


class Link(Protocol):
    """One socket."""

    @property
    def closed(self) -> bool:
        """For good."""

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

        "tcp://host:*" picks a port; the real address is returned. Raises OSError (address in use).
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
    """ZeroMQ: a ROUTER for a front door, a DEALER for a link to one, PUB and SUB for events."""

    def __init__(self) -> None:
        self._context = zmq.Context()

    def bind(self, address: str, receive: Receive, on_crash: OnCrash) -> tuple[ZmqLink, str]:
        socket = self._socket(zmq.ROUTER)
        socket.router_mandatory = True
        real = _bind(socket, address)
        return ZmqLink(socket, receive, on_crash), real

    def connect(self, address: str, receive: Receive, on_crash: OnCrash) -> ZmqLink:
        socket = self._socket(zmq.DEALER)
        socket.immediate = True
        socket.connect(address)
        return ZmqLink(socket, receive, on_crash)

    def publish(self, address: str) -> tuple[ZmqOutlet, str]:
        socket = self._socket(zmq.PUB)
        real = _bind(socket, address)
        return ZmqOutlet(socket), real

    def subscribe(self, address: str, receive: Receive, on_crash: OnCrash) -> ZmqLink:
        socket = self._socket(zmq.SUB)
        socket.connect(address)
        socket.subscribe(b"")
        return ZmqLink(socket, receive, on_crash)

    def close(self) -> None:
        # A socket left open would hold up the interpreter's exit.
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that never holds up the process's end and notices a silent peer."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(HIGH_WATER_MARK)
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.heartbeat_ivl = 2000
        socket.heartbeat_timeout = 6000
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 2000
        socket.ipv6 = True
        return socket


class ZmqOutlet:
    """A socket that only sends: a publisher's, which never has to wait."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

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
            raise Unreachable(error.strerror) from None

    async def send_when_possible(self, frames: list[Frame]) -> None:
        if not self.closed:
            self.send(frames)

    async def close(self) -> None:
        self._socket.close()


class ZmqLink(ZmqOutlet):
    """A socket and the one task that reads it, which hands every message to `receive`; what that raises is a crash."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Receive, on_crash: OnCrash) -> None:
        super().__init__(socket)
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
            # Asking for the events also takes in what libzmq has not announced.
            events: Any = self._socket.events
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

    def _ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()):
            self._on_crash(error)


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise OSError(error.errno, error.strerror, address) from None
    return cast(bytes, socket.last_endpoint).decode()
