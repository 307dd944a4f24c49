"""ZeroMQ transport: requests, streams with credit, events.

A `Server` binds a ROUTER, a `Peer` connects a DEALER to one server, so that bulk on one link cannot delay control on
another. A send confirms nothing: only an answer counts, so a request is sent again under the same id until it is
answered or its deadline passes, and a server answers a repeated request with its first answer.

One task reads each socket (receiving is not cancel-safe) and hands frames on; waiters can be cancelled at any time.
The asyncio sockets of pyzmq are not used: a message that arrives while another call is inside libzmq is not announced
again, so whoever sends must wake the reader, and only `Link` sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from protocols.codec import MAX_FRAME_BYTES, Frame, Header, decode_body, decode_header, encode
from protocols.errors import (
    BusError,
    BusyError,
    DeadlineError,
    MalformedError,
    ProtocolVersionError,
    RefusedError,
    StreamBrokenError,
    from_code,
)
from protocols.messages import Cancel, Credit, Failure, KeepAlive, Message, StreamEnd

# A flood must not starve the loop: after this many messages the reader lets other tasks run.
DRAIN = 256
RESEND_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 2.0
# Three missed keep-alives: the stream's server is gone or its loop is stuck.
STREAM_SILENCE_SECONDS = 6.5
STREAM_CREDIT = 64
MAX_ANSWERS_KEPT = 4096
MAX_PENDING_PER_PEER = 4096
HIGH_WATER_MARK = 10_000


@dataclass(slots=True)
class Identity:
    """Who this actor is, role/index#incarnation; the index is known only once the master has answered."""

    name: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a handler sees it. `deadline` is in the loop's time."""

    message: Message
    sender: str
    deadline: float

    @property
    def remaining(self) -> float:
        """Seconds until the asker gives up."""
        return self.deadline - asyncio.get_running_loop().time()


Handler = Callable[[Request], Awaitable[Message] | AsyncIterator[Message]]
OnCrash = Callable[[BaseException], None]


def open_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A socket that never holds up the process's end and notices a silent peer."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(HIGH_WATER_MARK)
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.heartbeat_ivl = 2000
    socket.heartbeat_timeout = 6000
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    socket.ipv6 = True
    return socket


class Link:
    """A socket and the one task that reads it, which hands every message to `handle`; what that raises is a crash."""

    def __init__(self, socket: zmq.Socket, handle: Callable[[list[bytes]], None], on_crash: OnCrash) -> None:
        self.socket = socket
        self._handle = handle
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
        return self.socket.closed

    def send(self, frames: list[Frame]) -> None:
        """Raises zmq.Again where nobody is connected or the queue is full, zmq.ZMQError where it is closed."""
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT)
        finally:
            self._woken.set()

    async def send_when_possible(self, frames: list[Frame]) -> None:
        """Waits for a connection and for room; returns without having sent where the link is closed meanwhile."""
        while not self.closed:
            try:
                return self.send(frames)
            except zmq.Again:
                self._writable.clear()
                await self._writable.wait()

    async def close(self) -> None:
        if self.closed:
            return
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self.socket.close()
        self._writable.set()

    async def _read(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            for _ in range(DRAIN):
                try:
                    frames = self.socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                self._handle(frames)
            # Asking for the events also takes in what libzmq has not announced.
            events = self.socket.events
            if events & zmq.POLLOUT:
                self._writable.set()
            if events & zmq.POLLIN:
                self._woken.set()
            await asyncio.sleep(0)

    def _ended(self, reader: asyncio.Task) -> None:
        if not reader.cancelled() and (error := reader.exception()):
            self._on_crash(error)


class Server:
    """The front door of an actor: answers requests with one message or with a stream.

    `handle` returns an awaitable of the answer, or an async generator of a stream's parts. A `BusError` it raises goes
    back as its typed error; any other exception is the actor's own bug and goes to `on_crash`.
    """

    def __init__(self, context: zmq.Context, identity: Identity, run: str, handle: Handler, on_crash: OnCrash) -> None:
        self.identity = identity
        self.run = run
        self.counts: Counter[str] = Counter()
        self._handle = handle
        self._on_crash = on_crash
        socket = open_socket(context, zmq.ROUTER)
        socket.router_mandatory = True
        self._link = Link(socket, self._receive, on_crash)
        self._calls: dict[tuple[str, str], _Call] = {}
        self._pending: Counter[str] = Counter()
        self._answers: OrderedDict[tuple[str, str], list[Frame]] = OrderedDict()

    def bind(self, address: str) -> str:
        """Returns the address with its real port. Raises zmq.ZMQError (address in use)."""
        self._link.socket.bind(address)
        return self._link.socket.last_endpoint.decode()

    async def close(self) -> None:
        """Cancel what is being answered and close the socket."""
        await self._link.close()
        tasks = [call.task for call in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _receive(self, frames: list[bytes]) -> None:
        route, *frames = frames
        try:
            header = decode_header(frames)
        except ProtocolVersionError as error:
            self.counts[error.code] += 1
            # Its header cannot be read as ours, so the answer names no request.
            self._send(route, Header(kind=Failure.kind, run=self.run, sender=self.identity.name), _failure(error))
            return
        except MalformedError as error:
            self.counts[error.code] += 1
            return
        if not (header.id or header.reply_to):
            self.counts[MalformedError.code] += 1
            return
        key = (header.sender, header.reply_to or header.id)
        if header.reply_to:
            self._control(key, header, frames)
        elif key in self._answers:
            self.counts["repeated"] += 1
            self._send_frames(route, self._answers[key])
        elif key in self._calls:
            self.counts["repeated"] += 1
            self._calls[key].route = route
        else:
            self._start(key, route, header, frames)

    def _control(self, key: tuple[str, str], header: Header, frames: list[bytes]) -> None:
        call = self._calls.get(key)
        if call is None:
            return
        if header.kind == Cancel.kind:
            call.task.cancel()
        elif header.kind == Credit.kind:
            try:
                call.grant(decode_body(header.kind, frames).parts)
            except MalformedError as error:
                self.counts[error.code] += 1

    def _start(self, key: tuple[str, str], route: bytes, header: Header, frames: list[bytes]) -> None:
        reply = Header(kind="", run=self.run, sender=self.identity.name, reply_to=header.id)
        try:
            if header.run and self.run and header.run != self.run:
                raise RefusedError(f"this is run {self.run!r}, not {header.run!r}")
            message = decode_body(header.kind, frames)
            if self._pending[header.sender] >= MAX_PENDING_PER_PEER:
                raise BusyError(f"{MAX_PENDING_PER_PEER} requests of {header.sender} are open already")
        except BusError as error:
            self.counts[error.code] += 1
            self._send(route, reply, _failure(error))
            return
        loop = asyncio.get_running_loop()
        request = Request(message, header.sender, loop.time() + header.remaining_ms / 1000)
        call = _Call(route)
        self._calls[key] = call
        self._pending[header.sender] += 1
        call.task = asyncio.create_task(self._answer(key, call, reply, request), name=header.kind)
        # Not in the task itself: one that is cancelled before its first step never runs at all.
        call.task.add_done_callback(lambda _: self._forget(key))

    def _forget(self, key: tuple[str, str]) -> None:
        del self._calls[key]
        self._pending[key[0]] -= 1
        if not self._pending[key[0]]:
            del self._pending[key[0]]

    async def _answer(self, key: tuple[str, str], call: _Call, reply: Header, request: Request) -> None:
        crash = None
        try:
            frames = self._encode(*await self._result(call, reply, request))
        except BusError as error:
            frames = self._encode(reply, _failure(error))
        except Exception as error:  # the handler's own bug: the asker hears of it, the actor decides
            crash = error
            text = f"{self.identity.name} failed: {type(error).__name__}: {error}"
            frames = self._encode(reply, _failure(BusError(text)))
        self._answers[key] = frames
        if len(self._answers) > MAX_ANSWERS_KEPT:
            self._answers.popitem(last=False)
        self._send_frames(call.route, frames)
        if crash:
            self._on_crash(crash)

    async def _result(self, call: _Call, reply: Header, request: Request) -> tuple[Header, Message]:
        result = self._handle(request)
        if isinstance(result, AsyncIterator):
            await self._stream(call, reply, result)
            return reply.model_copy(update={"part": call.sent}), StreamEnd()
        return reply, await result

    async def _stream(self, call: _Call, reply: Header, parts: AsyncIterator[Message]) -> None:
        keep_alive = asyncio.create_task(self._keep_alive(call, reply), name="keep_alive")
        try:
            async with contextlib.aclosing(parts):
                async for part in parts:
                    await call.spend()
                    header = reply.model_copy(update={"part": call.sent})
                    if error := self._send(call.route, header, part):
                        raise StreamBrokenError(f"part {call.sent} was not taken: {zmq.strerror(error)}")
                    call.sent += 1
        finally:
            keep_alive.cancel()

    async def _keep_alive(self, call: _Call, reply: Header) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._send(call.route, reply, KeepAlive()) == zmq.EHOSTUNREACH:
                call.task.cancel()  # the asker is gone: it would never grant credit again

    def _encode(self, header: Header, message: Message) -> list[Frame]:
        return encode(header.model_copy(update={"kind": message.kind}), message)

    def _send(self, route: bytes, header: Header, message: Message) -> int:
        return self._send_frames(route, self._encode(header, message))

    def _send_frames(self, route: bytes, frames: list[Frame]) -> int:
        """0, or why not: the asker is gone (EHOSTUNREACH) or full (EAGAIN); it asks again if it still wants to know."""
        try:
            self._link.send([route, *frames])
        except zmq.ZMQError as error:
            self.counts["unreachable" if error.errno == zmq.EHOSTUNREACH else "full"] += 1
            return error.errno
        return 0


class _Call:
    """One request being answered; `room` is the credit left of a stream."""

    def __init__(self, route: bytes) -> None:
        self.route = route
        self.task: asyncio.Task = None  # type: ignore[assignment]  # set right after creation
        self.sent = 0
        self.room = STREAM_CREDIT
        self._granted = asyncio.Event()

    def grant(self, parts: int) -> None:
        self.room += parts
        self._granted.set()

    async def spend(self) -> None:
        while not self.room:
            self._granted.clear()
            await self._granted.wait()
        self.room -= 1


class Peer:
    """A link to one server. Every request has a deadline; a lost one is sent again under its id.

    Whoever waits on a link that is closed gets a DeadlineError or, in a stream, a StreamBrokenError at once.
    """

    _ids = itertools.count()

    def __init__(self, context: zmq.Context, identity: Identity, run: str, address: str, on_crash: OnCrash) -> None:
        self.identity = identity
        self.run = run
        self.address = address
        self.counts: Counter[str] = Counter()
        socket = open_socket(context, zmq.DEALER)
        socket.immediate = True
        socket.connect(address)
        self._link = Link(socket, self._receive, on_crash)
        self._waiting: dict[str, asyncio.Future | asyncio.Queue] = {}

    async def close(self) -> None:
        await self._link.close()
        for waiter in self._waiting.values():
            self._tell_closed(waiter)

    async def ask(self, message: Message, timeout: float) -> Message:
        """The answer. Raises DeadlineError after `timeout` seconds, or the typed error the peer answered with."""
        loop = asyncio.get_running_loop()
        sender, id, deadline = self.identity.name, f"{next(self._ids)}", loop.time() + timeout
        with self._wait_for(id, loop.create_future()) as answer:
            try:
                async with asyncio.timeout_at(deadline):
                    for attempt in itertools.count():
                        await self._send(message, deadline, sender=sender, id=id, attempt=attempt)
                        await asyncio.wait({answer}, timeout=RESEND_SECONDS)
                        if answer.done():
                            return _raise_failure(answer.result()[1])
            except TimeoutError:
                raise DeadlineError(f"no answer to {message.kind!r} from {self.address} within {timeout:g} s") from None
        raise AssertionError("unreachable")

    async def stream(self, message: Message, timeout: float) -> AsyncIterator[Message]:
        """The parts of a stream that must end within `timeout` seconds.

        Raises StreamBrokenError where a part is missing or the server falls silent, DeadlineError at the deadline.
        """
        loop = asyncio.get_running_loop()
        sender, id, deadline = self.identity.name, f"{next(self._ids)}", loop.time() + timeout
        complete = False
        with self._wait_for(id, asyncio.Queue()) as parts:
            try:
                await self._send_within(message, deadline, sender=sender, id=id)
                expected, taken = 0, 0
                while True:
                    header, part = await self._next_part(parts, message, deadline)
                    if isinstance(part, KeepAlive):
                        continue
                    if isinstance(part, Failure):
                        complete = True
                        _raise_failure(part)
                    if header.part != expected:
                        raise StreamBrokenError(f"part {expected} of {message.kind!r} from {self.address} was lost")
                    if isinstance(part, StreamEnd):
                        complete = True
                        return
                    yield part
                    expected, taken = expected + 1, taken + 1
                    if taken >= STREAM_CREDIT // 2:
                        self._send_now(Credit(parts=taken), sender=sender, reply_to=id)
                        taken = 0
            finally:
                if not complete:
                    self._send_now(Cancel(), sender=sender, reply_to=id)

    async def _send_within(self, message: Message, deadline: float, **fields: Any) -> None:
        try:
            async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + STREAM_SILENCE_SECONDS)):
                await self._send(message, deadline, **fields)
        except TimeoutError:
            raise StreamBrokenError(f"{self.address} cannot be reached") from None

    async def _next_part(self, parts: asyncio.Queue, message: Message, deadline: float) -> tuple[Header, Message]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + STREAM_SILENCE_SECONDS)):
                return await parts.get()
        except TimeoutError:
            if loop.time() >= deadline:
                raise DeadlineError(f"{message.kind!r} from {self.address} did not end in time") from None
            raise StreamBrokenError(f"{self.address} fell silent in the middle of {message.kind!r}") from None

    @contextlib.contextmanager
    def _wait_for(self, id: str, waiter: Any) -> Iterator[Any]:
        self._waiting[id] = waiter
        if self._link.closed:
            self._tell_closed(waiter)
        try:
            yield waiter
        finally:
            del self._waiting[id]

    def _frames(self, message: Message, **fields: Any) -> list[Frame]:
        return encode(Header(kind=message.kind, run=self.run, **fields), message)

    async def _send(self, message: Message, deadline: float, **fields: Any) -> None:
        remaining = max(0, int((deadline - asyncio.get_running_loop().time()) * 1000))
        await self._link.send_when_possible(self._frames(message, remaining_ms=remaining, **fields))

    def _send_now(self, message: Message, **fields: Any) -> None:
        # Never waits: it is called while a stream is closed. What is lost here was lost with the connection, and a
        # server drops the streams of an asker it can no longer reach.
        with contextlib.suppress(zmq.ZMQError):
            self._link.send(self._frames(message, **fields))

    def _receive(self, frames: list[bytes]) -> None:
        try:
            header = decode_header(frames)
            message = decode_body(header.kind, frames)
        except ProtocolVersionError as error:
            self._fail_all(error)
            return
        except MalformedError as error:
            self.counts[error.code] += 1
            return
        if not header.reply_to and isinstance(message, Failure):
            self._fail_all(from_code(message.code, message.text))
            return
        waiter = self._waiting.get(header.reply_to)
        if waiter is None:
            self.counts["unmatched"] += 1
        else:
            _deliver(waiter, header, message)

    def _fail_all(self, error: BusError) -> None:
        # The peer does not speak our protocol: nobody who waits for it will get an answer.
        self.counts[error.code] += 1
        for waiter in self._waiting.values():
            _deliver(waiter, _NOT_SENT, _failure(error))

    def _tell_closed(self, waiter: asyncio.Future | asyncio.Queue) -> None:
        error = StreamBrokenError if isinstance(waiter, asyncio.Queue) else DeadlineError
        _deliver(waiter, _NOT_SENT, _failure(error(f"the link to {self.address} was closed")))


class Publisher:
    """Events with sequence numbers. Subscribers may miss any of them: the truth is in the snapshot."""

    def __init__(self, context: zmq.Context, identity: Identity, run: str) -> None:
        self.sequence = 0
        self._header = Header(kind="", run=run, sender=identity.name)
        self._socket = open_socket(context, zmq.PUB)

    def bind(self, address: str) -> str:
        """Returns the address with its real port."""
        self._socket.bind(address)
        return self._socket.last_endpoint.decode()

    def publish(self, event: Message) -> None:
        self.sequence += 1
        header = self._header.model_copy(update={"kind": event.kind, "part": self.sequence})
        self._socket.send_multipart(encode(header, event), zmq.DONTWAIT)

    async def close(self) -> None:
        self._socket.close()


class Subscriber:
    """Events of one publisher. `on_event(sequence, event)` is called for each, in order, possibly with gaps."""

    def __init__(
        self, context: zmq.Context, run: str, address: str, on_event: Callable[[int, Message], None], on_crash: OnCrash
    ) -> None:
        self.run = run
        self.counts: Counter[str] = Counter()
        self._on_event = on_event
        socket = open_socket(context, zmq.SUB)
        socket.connect(address)
        socket.subscribe(b"")
        self._link = Link(socket, self._receive, on_crash)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            header = decode_header(frames)
            event = decode_body(header.kind, frames)
        except BusError as error:
            self.counts[error.code] += 1
            return
        if header.run and self.run and header.run != self.run:
            self.counts["foreign"] += 1  # another run's master has taken over the address
            return
        self._on_event(header.part, event)

    async def close(self) -> None:
        await self._link.close()


class ZmqBus:
    """One actor's connection to the others: its front door, its links, its events."""

    def __init__(self, identity: str, run: str = "") -> None:
        self.identity = Identity(identity)
        self.run = run
        self.server: Server | None = None
        self._context = zmq.Context()
        self._peers: dict[str, Peer] = {}
        self._others: list[Publisher | Subscriber] = []
        self._on_crash: OnCrash = _tell_loop

    def serve(self, address: str, handle: Handler, on_crash: OnCrash) -> str:
        """Open the front door; returns the bound address. `on_crash` also hears of an event handler that fails."""
        self._on_crash = on_crash
        self.server = Server(self._context, self.identity, self.run, handle, on_crash)
        return self.server.bind(address)

    def peer(self, address: str) -> Peer:
        """The link to the server at `address`, made on first use."""
        if address not in self._peers:
            self._peers[address] = Peer(self._context, self.identity, self.run, address, self._on_crash)
        return self._peers[address]

    async def forget(self, address: str) -> None:
        """Close the link to a server that has left."""
        if peer := self._peers.pop(address, None):
            await peer.close()

    def publisher(self, address: str) -> tuple[Publisher, str]:
        publisher = Publisher(self._context, self.identity, self.run)
        self._others.append(publisher)
        return publisher, publisher.bind(address)

    def subscribe(self, address: str, on_event: Callable[[int, Message], None]) -> None:
        self._others.append(Subscriber(self._context, self.run, address, on_event, self._on_crash))

    async def close(self) -> None:
        """Close every socket; a socket left open would hold up the interpreter's exit."""
        for part in (*self._others, *self._peers.values(), *([self.server] if self.server else [])):
            await part.close()
        self._context.destroy(linger=0)


# Stands for a message that came from nobody.
_NOT_SENT = Header(kind=Failure.kind, sender="")


def _deliver(waiter: asyncio.Future | asyncio.Queue, header: Header, message: Message) -> None:
    if isinstance(waiter, asyncio.Queue):
        waiter.put_nowait((header, message))
    elif not waiter.done():
        waiter.set_result((header, message))


def _tell_loop(error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "a link failed", "exception": error})


def _failure(error: BusError) -> Failure:
    text = str(error).encode(errors="replace").decode()  # a path in it may not be Unicode
    return Failure(code=error.code, text=text[:4096])


def _raise_failure(message: Message) -> Message:
    if isinstance(message, Failure):
        raise from_code(message.code, message.text)
    return message
