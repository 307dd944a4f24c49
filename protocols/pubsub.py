"""Events on PUB/SUB: a publisher numbers its events, and a subscriber may miss some events.

A subscriber that sees a gap in the numbers asks the publisher's actor for a snapshot.
"""

from collections.abc import Callable

from protocols.bus_errors import BusError
from protocols.codec import Frame, Header, decode_body, decode_header, encode
from protocols.messages import Message
from protocols.network import Link, Network, OnCrash


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
