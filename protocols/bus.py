"""The bus: an actor's connection to all other actors, by requests (`protocols.transport`) and by events on PUB/SUB.

A publisher numbers its events, and a subscriber may miss some events. A subscriber that sees a gap in the numbers asks
the publisher's actor for a snapshot.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Self

from protocols.bus_errors import BusError
from protocols.codec import Frame, Header, decode_body, decode_header, encode
from protocols.messages import Message
from protocols.network import Link, Network, OnCrash
from protocols.transport import Handler, Identity, Peer, RequestServer, token_for


class EventLink:
    """A publisher's or a subscriber's end of a link."""

    _link: Link

    @property
    def closed(self) -> bool:
        return self._link.closed

    async def close(self) -> None:
        await self._link.close()


class Publisher(EventLink):
    """Publishes events with sequence numbers after `first`."""

    def __init__(self, network: Network, address: str, sender: str, first: int, on_crash: OnCrash) -> None:
        self.sequence = first
        self._header = Header(kind="", sender=sender)
        self._link, self.address = network.publish(address, on_crash)

    def publish(self, event: Message) -> None:
        """Publish an event. Raises MalformedError if sending fails; subscribers then see a gap in the numbers."""
        self.sequence += 1
        header = self._header._replace(kind=event.kind, part=self.sequence)
        self._link.send(encode(header, event))


class Subscriber(EventLink):
    """Receives the events of one publisher. `on_event(sequence, event)` is called for each received event, in order."""

    def __init__(
        self, network: Network, address: str, on_event: Callable[[int, Message], None], on_crash: OnCrash
    ) -> None:
        self.address = address
        self._on_event = on_event
        self._link = network.subscribe(address, self._receive, on_crash)

    def _receive(self, frames: list[Frame]) -> None:
        try:
            header = decode_header(frames)
            event = decode_body(header.kind, frames)
        except BusError:
            return
        self._on_event(header.part, event)


class Bus:
    """The connection of one actor to all other actors: server, links, events. `close`, or the end of an `async with`,
    closes `network` too.

    secret: the source of the tokens; random by default.
    """

    def __init__(self, identity: str, network: Network, secret: bytes = b"") -> None:
        self.identity = Identity(identity)
        self.server: RequestServer | None = None
        self.network = network
        self._secret = secret or secrets.token_bytes(32)
        self._ids = itertools.count()
        self._peers: dict[str, Peer] = {}
        self._event_links: list[EventLink] = []
        self._closing: dict[asyncio.Task[None], None] = {}
        self._on_crash: OnCrash = _tell_loop

    def serve(self, address: str, handle: Handler, on_crash: OnCrash) -> str:
        """Open the server; returns the bound address. `on_crash` also gets the exceptions of event handlers.

        Raises OSError (address in use).
        """
        self._on_crash = on_crash
        self.server = RequestServer(self.network, address, self.identity, handle, on_crash)
        return self.server.address

    def peer(self, address: str) -> Peer:
        """The link to the server at `address`, made on first use."""
        if address not in self._peers:
            token = token_for(address, self._secret)
            self._peers[address] = Peer(self.network, self.identity, self._ids, address, self._on_crash, token)
        return self._peers[address]

    def forget(self, address: str) -> None:
        """Close the link to a server that has left. Requests waiting on the link fail."""
        if peer := self._peers.pop(address, None):
            closing = asyncio.create_task(peer.close(), name=f"forget {address}")
            self._closing[closing] = None
            closing.add_done_callback(self._closing.pop)

    def publisher(self, address: str, first: int = 0) -> Publisher:
        """A publisher whose first event has the number `first + 1`. `address` of the publisher is the real address.

        Raises OSError (address in use).
        """
        publisher = Publisher(self.network, address, self.identity.name, first, self._on_crash)
        self._event_links.append(publisher)
        return publisher

    def subscribe(self, address: str, on_event: Callable[[int, Message], None]) -> Subscriber:
        """Call `on_event(sequence, event)` for every event published at `address`, until the subscriber is closed."""
        self._event_links = [end for end in self._event_links if not end.closed]
        subscriber = Subscriber(self.network, address, on_event, self._on_crash)
        self._event_links.append(subscriber)
        return subscriber

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel open requests at the server, fail waiting requests to peers, and close the network."""
        parts: list[EventLink | Peer | RequestServer] = [*self._event_links, *self._peers.values()]
        for part in [*parts, self.server] if self.server else parts:
            await part.close()
        await asyncio.gather(*self._closing)
        self.network.close()


def _tell_loop(error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "a link failed", "exception": error})
