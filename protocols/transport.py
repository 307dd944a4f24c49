"""Requests, and streams with credit, on top of any `Network`. `protocols.bus` has the bus of an actor, and events.

A `RequestServer` receives the requests to an actor. A `Peer` is a separate link to one server, so that bulk data on one
link cannot delay control messages on another. A send confirms nothing; only an answer does. So a request is sent again
under the same id until an answer comes or its deadline passes, and a server answers a repeated request with the first
answer.

A sender's name proves nothing. Each bus shares a secret token with every server that it asks, over all connections to
the server. The answer to a request, its stream and the right to cancel belong to the token of the request. The master
recognizes a member by a digest of the token in the member's identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import AsyncGeneratorType
from typing import Generic, NamedTuple, TypeVar, cast

from protocols.bus_errors import (
    BusError,
    BusyError,
    ConnectionLostError,
    DeadlineError,
    MalformedError,
    ProtocolVersionError,
    StreamBrokenError,
    from_code,
    text_of,
)
from protocols.codec import (
    Frame,
    Header,
    decode_body,
    decode_header,
    encode,
    encode_body,
    encode_header,
    encode_refusal,
)
from protocols.messages import Cancel, Credit, Failure, KeepAlive, Message, StreamEnd
from protocols.network import Full, Network, OnCrash, Unreachable

RESEND_SECONDS = 3.0
# Pause before an actor that failed to answer, or cannot answer yet, is asked anew.
AGAIN_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 2.0
# Without even a keep-alive for this long, the stream's server is gone or its event loop is stuck.
STREAM_SILENCE_SECONDS = 6.5
STREAM_CREDIT = 64
MAX_ANSWERS_KEPT = 4096
# A snapshot of a thousand members is 200 kB, and every member asks for a snapshot.
MAX_ANSWER_BYTES_KEPT = 64 << 20
MAX_PENDING_PER_PEER = 4096
# Limit for all peers together, since a peer can send under any number of names.
MAX_PENDING = 16 * MAX_PENDING_PER_PEER

M = TypeVar("M", bound=Message, covariant=True)
T = TypeVar("T")


@dataclass(slots=True)
class Identity:
    """The identity of this actor, role/index#incarnation; the index is unknown until the master has answered."""

    name: str


class Request(NamedTuple, Generic[M]):
    """A request for a handler. `deadline`: in the loop's time. `sender`: the asker's name, as the asker says."""

    message: M
    sender: str
    deadline: float
    token: bytes

    @property
    def remaining(self) -> float:
        """Seconds until the asker gives up."""
        return self.deadline - asyncio.get_running_loop().time()

    @property
    def owner(self) -> str:
        """A key for things that an actor keeps for the asker, different for each asker, whatever the senders."""
        return f"{self.sender} {fingerprint(self.token)}"


def token_for(server: str, secret: bytes) -> bytes:
    """The token that the owner of `secret` shares with the server at an address. No server knows another's token."""
    return blake2b(server.encode(), key=secret, digest_size=16).digest()


def fingerprint(token: bytes) -> str:
    """The incarnation of a member that shares `token` with the master. The token cannot be found from it."""
    return blake2b(token, digest_size=8).hexdigest()


_Key = tuple[str, str, bytes]  # of a request: the sender, the id, and the token between sender and server
_Parts = AsyncGeneratorType[Message, None]
Handler = Callable[[Request[Message]], Awaitable[Message] | _Parts]


class RequestServer:
    """Answers the requests to an actor, each with one message or with a stream.

    `handle` returns an awaitable of the answer, or an async generator of a stream's parts. A `BusError` of `handle` is
    sent back as a typed error. Any other exception is a bug of the actor and also goes to `on_crash`.
    """

    def __init__(self, network: Network, address: str, identity: Identity, handle: Handler, on_crash: OnCrash) -> None:
        self.identity = identity
        self._handle = handle
        self._on_crash = on_crash
        self._link, self.address = network.bind(address, self._receive, on_crash)
        self._calls: dict[_Key, _Call] = {}
        self._pending: dict[tuple[str, bytes], int] = {}
        self._answers: OrderedDict[_Key, list[Frame]] = OrderedDict()
        self._answer_bytes = 0

    async def close(self) -> None:
        """Cancel the open requests and close the socket."""
        await self._link.close()
        tasks = [call.task for call in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _receive(self, frames: list[Frame]) -> None:
        route, *frames = frames
        try:
            header = decode_header(frames)
        except ProtocolVersionError as error:
            # A header of another version cannot be read, so the answer names no request.
            self._send_frames(route, encode_refusal(self.identity.name, _failure(error)))
            return
        except MalformedError:
            return
        if not (header.token and (header.id or header.reply_to)):
            return
        key = (header.sender, header.reply_to or header.id, header.token)
        if header.reply_to:
            self._control(key, header, frames)
        elif key in self._answers:
            self._send_frames(route, self._answers[key])
        elif key in self._calls:
            self._calls[key].route = route
        else:
            self._start(key, route, header, frames)

    def _control(self, key: _Key, header: Header, frames: list[Frame]) -> None:
        call = self._calls.get(key)
        if call is None:
            return
        if header.kind == Cancel.kind:
            call.task.cancel()
        elif header.kind == Credit.kind:
            with contextlib.suppress(MalformedError):
                call.grant(cast(Credit, decode_body(header.kind, frames)).parts)

    def _start(self, key: _Key, route: Frame, header: Header, frames: list[Frame]) -> None:
        sender, asker = header.sender, (header.sender, header.token)
        open_already = self._pending.get(asker, 0)
        try:
            message = decode_body(header.kind, frames)
            if open_already >= MAX_PENDING_PER_PEER:
                raise BusyError(f"{MAX_PENDING_PER_PEER} requests of {sender} are open already")
            if len(self._calls) >= MAX_PENDING:
                raise BusyError(f"{MAX_PENDING} requests are open already")
        except BusError as error:
            self._send(route, _failure(error), header.id)
            return
        loop = asyncio.get_running_loop()
        request = Request(message, sender, loop.time() + header.remaining_ms / 1000, header.token)
        self._calls[key] = call = _Call(route, header.id)
        self._pending[asker] = open_already + 1
        call.task = loop.create_task(self._answer(key, call, request), name=header.kind)
        # Not in the task: a task that is cancelled before its first step never runs.
        call.task.add_done_callback(partial(self._forget, key))

    def _forget(self, key: _Key, task: asyncio.Task[None]) -> None:
        call = self._calls.pop(key)
        if task.cancelled():  # a late repeat must not start the request again
            self._keep(key, self._encode(_failure(StreamBrokenError("cancelled")), call.id))
        asker = key[0], key[2]
        self._pending[asker] -= 1
        if not self._pending[asker]:
            del self._pending[asker]

    async def _answer(self, key: _Key, call: _Call, request: Request[Message]) -> None:
        crash: Exception | None = None
        try:
            result = self._handle(request)
            if isinstance(result, AsyncGeneratorType):
                answer = await self._stream(call, result)
            else:
                answer = await result
            frames = self._encode(answer, call.id, call.sent)
        except BusError as error:
            frames = self._encode(_failure(error), call.id)
        except Exception as error:  # a bug in the handler: the asker gets an error, the actor decides
            crash = error
            text = f"{self.identity.name} failed: {type(error).__name__}: {error}"
            frames = self._encode(_failure(BusError(text)), call.id)
        self._keep(key, frames)
        self._send_frames(call.route, frames)
        if crash:
            self._on_crash(crash)

    def _keep(self, key: _Key, frames: list[Frame]) -> None:
        """Keep the answer for repeats of the request."""
        self._answers[key] = frames
        self._answer_bytes += _size(frames)
        while len(self._answers) > MAX_ANSWERS_KEPT or self._answer_bytes > MAX_ANSWER_BYTES_KEPT:
            self._answer_bytes -= _size(self._answers.popitem(last=False)[1])

    async def _stream(self, call: _Call, parts: _Parts) -> Message:
        """Send the parts. Returns the message that ends the stream."""
        self._keep_alive_later(call)
        try:
            async with contextlib.aclosing(parts):
                async for part in parts:
                    if not call.room:
                        await call.wait_for_room()
                    call.room -= 1
                    if error := self._send(call.route, part, call.id, call.sent):
                        raise StreamBrokenError(f"part {call.sent} could not be sent: {error}")
                    call.sent += 1
        finally:
            call.keep_alive.cancel()
        return StreamEnd()

    def _keep_alive_later(self, call: _Call) -> None:
        call.keep_alive = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._keep_alive, call)

    def _keep_alive(self, call: _Call) -> None:
        if call.sent != call.sent_at_keep_alive:  # parts were sent since: no keep-alive is needed
            call.sent_at_keep_alive = call.sent
            self._keep_alive_later(call)
        elif isinstance(self._send(call.route, KeepAlive(), call.id, call.sent), Unreachable):
            call.task.cancel()  # the asker is gone and would never grant credit again
        else:
            self._keep_alive_later(call)

    def _encode(self, message: Message, reply_to: str = "", part: int = 0) -> list[Frame]:
        return encode(Header(message.kind, self.identity.name, reply_to=reply_to, part=part), message)

    def _send(self, route: Frame, message: Message, reply_to: str = "", part: int = 0) -> Full | Unreachable | None:
        return self._send_frames(route, self._encode(message, reply_to, part))

    def _send_frames(self, route: Frame, frames: list[Frame]) -> Full | Unreachable | None:
        """Send the frames. Returns the error if the asker is gone or its queue is full; the asker may ask again."""
        try:
            self._link.send([route, *frames])
        except (Full, Unreachable) as error:
            return error
        return None


class _Call:
    """An open request. For a stream: the number of parts `sent`, the value of `sent` when the last keep-alive was due
    (`sent_at_keep_alive`), and the credit left (`room`)."""

    __slots__ = ("_granted", "id", "keep_alive", "room", "route", "sent", "sent_at_keep_alive", "task")

    def __init__(self, route: Frame, id: str) -> None:
        self.route = route
        self.id = id
        self.task: asyncio.Task[None]
        self.keep_alive: asyncio.TimerHandle
        self.sent = self.sent_at_keep_alive = 0
        self.room = STREAM_CREDIT
        self._granted: asyncio.Event | None = None

    def grant(self, parts: int) -> None:
        # An asker could grant more than it was sent, and a long queue for the asker would grow here.
        self.room = min(self.room + parts, STREAM_CREDIT)
        if self._granted:
            self._granted.set()

    async def wait_for_room(self) -> None:
        self._granted = asyncio.Event()
        await self._granted.wait()


class Peer:
    """A link to one server. Every request has a deadline; a lost request is sent again under its id. `token`: the
    server recognizes the asker by the token.

    If the link is closed, waiting requests and streams fail at once. Streams also fail without a connection.
    """

    def __init__(
        self, network: Network, identity: Identity, ids: Iterator[int], address: str, on_crash: OnCrash, token: bytes
    ) -> None:
        self.token = token
        self.identity = identity
        self.address = address
        self._ids = ids
        self._link = network.connect(address, self._receive, on_crash, self._lose_streams)
        self._waiting: dict[str, _Inbox] = {}

    async def close(self) -> None:
        await self._link.close()
        for inbox in self._waiting.values():
            self._tell_closed(inbox)

    async def ask(self, message: Message, timeout: float) -> Message:
        """The answer to `message`. Raises DeadlineError after `timeout` seconds, or the error that the peer sent."""
        loop = asyncio.get_running_loop()
        sender, id, deadline = self.identity.name, f"{next(self._ids)}", loop.time() + timeout
        body = encode_body(message)
        inbox = self._open(id, DeadlineError)
        try:
            for attempt in itertools.count():
                head = self._head(message, sender, id, deadline, attempt)
                if not await self._send([head, *body], deadline, inbox):
                    break
                until = min(deadline, loop.time() + RESEND_SECONDS)
                if arrived := inbox.take() or await inbox.wait(until):
                    return _raise_failure(arrived[1])
                if until == deadline:
                    break
        finally:
            del self._waiting[id]
        raise DeadlineError(f"no answer to {message.kind!r} from {self.address} within {timeout:g} s")

    async def stream(self, message: Message, timeout: float) -> AsyncGenerator[Message, None]:
        """The parts of a stream that must end within `timeout` seconds.

        Raises StreamBrokenError if a part is missing or the server stops responding, DeadlineError at the deadline.
        """
        loop = asyncio.get_running_loop()
        sender, id, deadline = self.identity.name, f"{next(self._ids)}", loop.time() + timeout
        body = encode_body(message)
        inbox = self._open(id, StreamBrokenError)
        complete = False
        try:
            until = min(deadline, loop.time() + STREAM_SILENCE_SECONDS)
            if not await self._send([self._head(message, sender, id, deadline), *body], until, inbox):
                raise ConnectionLostError(f"{self.address} cannot be reached")
            expected, taken = 0, 0
            while True:
                header, part = inbox.take() or await self._next_part(inbox, message, deadline)
                if isinstance(part, Failure):
                    complete = True
                    _raise_failure(part)
                if header.part != expected:  # also in a keep-alive: the lost part may have been the last for long
                    raise StreamBrokenError(f"part {expected} of {message.kind!r} from {self.address} was lost")
                if isinstance(part, KeepAlive):
                    continue
                if isinstance(part, StreamEnd):
                    complete = True
                    return
                yield part
                expected, taken = expected + 1, taken + 1
                if taken >= STREAM_CREDIT // 2:
                    self._send_now(Credit(parts=taken), sender, id)
                    taken = 0
        finally:
            del self._waiting[id]
            if not complete:
                self._send_now(Cancel(), sender, id)

    async def _next_part(self, inbox: _Inbox, message: Message, deadline: float) -> _Arrived:
        until = min(deadline, asyncio.get_running_loop().time() + STREAM_SILENCE_SECONDS)
        if arrived := await inbox.wait(until):
            return arrived
        if until == deadline:
            raise DeadlineError(f"{message.kind!r} from {self.address} did not end in time")
        raise StreamBrokenError(f"{self.address} stopped responding in the middle of {message.kind!r}")

    def _open(self, id: str, closed: type[BusError]) -> _Inbox:
        self._waiting[id] = inbox = _Inbox(closed)
        if self._link.closed:
            self._tell_closed(inbox)
        return inbox

    def _head(self, message: Message, sender: str, id: str, deadline: float, attempt: int = 0) -> bytes:
        remaining = max(0, int((deadline - asyncio.get_running_loop().time()) * 1000))
        return encode_header(
            Header(message.kind, sender, id, remaining_ms=remaining, attempt=attempt, token=self.token)
        )

    async def _send(self, frames: list[Frame], until: float, inbox: _Inbox) -> bool:
        """Send the frames. Returns False at `until`. Returns True on a closed link, too: the inbox gets the error."""
        try:
            self._link.send(frames)
        except Unreachable:
            pass
        except Full:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until) as inbox.sending:
                    await self._link.send_when_possible(frames)
                    return True
            return False
        finally:
            inbox.sending = None
        return True

    def _send_now(self, message: Message, sender: str, reply_to: str) -> None:
        # No wait: a stream may be closing. The message is lost only with the connection, and a server drops the streams
        # of an unreachable asker.
        with contextlib.suppress(Full, Unreachable):
            self._link.send(encode(Header(message.kind, sender, reply_to=reply_to, token=self.token), message))

    def _receive(self, frames: list[Frame]) -> None:
        try:
            header = decode_header(frames)
            message = decode_body(header.kind, frames)
        except ProtocolVersionError as error:
            self._fail_all(error)
            return
        except MalformedError:
            return
        if not header.reply_to and isinstance(message, Failure):
            self._fail_all(from_code(message.code, message.text))
            return
        if inbox := self._waiting.get(header.reply_to):
            inbox.put((header, message))

    def _fail_all(self, error: BusError) -> None:
        # The peer uses another protocol version, so no waiting request will get an answer.
        for inbox in self._waiting.values():
            inbox.put((_NOT_SENT, _failure(error)))

    def _lose_streams(self) -> None:
        error = _failure(ConnectionLostError(f"the connection to {self.address} was lost"))
        for inbox in self._waiting.values():
            if inbox.closed is StreamBrokenError:
                inbox.put((_NOT_SENT, error))
                if (sending := inbox.sending) and not sending.expired():
                    sending.reschedule(0.0)

    def _tell_closed(self, inbox: _Inbox) -> None:
        inbox.put((_NOT_SENT, _failure(inbox.closed(f"the link to {self.address} was closed"))))


_Arrived = tuple[Header, Message]


class _Inbox:
    """The messages that have arrived for one request. `closed`: the error for the request if the link is closed.
    `sending`: the time limit of a request that waits for a connection."""

    __slots__ = ("_arrived", "_woken", "closed", "sending")

    def __init__(self, closed: type[BusError]) -> None:
        self.closed = closed
        self.sending: asyncio.Timeout | None = None
        self._arrived: deque[_Arrived] = deque()
        self._woken: asyncio.Future[None] | None = None

    def put(self, arrived: _Arrived) -> None:
        self._arrived.append(arrived)
        self._wake()

    def take(self) -> _Arrived | None:
        return self._arrived.popleft() if self._arrived else None

    async def wait(self, until: float) -> _Arrived | None:
        """The next message; None if nothing has arrived at `until`, by the loop's time."""
        loop = asyncio.get_running_loop()
        self._woken = loop.create_future()
        timer = loop.call_at(until, self._wake)  # half the CPU time of asyncio.timeout_at, for each part of a stream
        try:
            await self._woken
        finally:
            timer.cancel()
            self._woken = None
        return self.take()

    def _wake(self) -> None:
        if self._woken and not self._woken.done():
            self._woken.set_result(None)


async def ask_until(
    ask: Callable[[], Awaitable[T]],
    again: Callable[[BusError], bool] = lambda error: True,
    *,
    pause: float | None = None,
    seconds: float = math.inf,
) -> T:
    """The result of `ask`. After a BusError with a true `again`, `ask` is called anew in `pause` seconds (default:
    AGAIN_SECONDS). Raises the last error if `again` is false, or no call would begin within `seconds`."""
    loop, pause = asyncio.get_running_loop(), AGAIN_SECONDS if pause is None else pause
    deadline = loop.time() + seconds
    while True:
        try:
            return await ask()
        except BusError as error:
            if not again(error) or loop.time() + pause > deadline:
                raise
        await asyncio.sleep(pause)


# The header of a failure that did not come from a peer.
_NOT_SENT = Header(kind=Failure.kind, sender="")


def _size(frames: list[Frame]) -> int:
    return sum(map(len, frames))


def _failure(error: BusError) -> Failure:
    return Failure(code=error.code, text=text_of(error))


def _raise_failure(message: Message) -> Message:
    if isinstance(message, Failure):
        raise from_code(message.code, message.text)
    return message
