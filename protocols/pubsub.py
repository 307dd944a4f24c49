"""Events on PUB/SUB: a publisher numbers its events, and a subscriber takes what arrives, with gaps.

A subscriber that misses an event sees a gap in the numbers and asks the publisher's actor for a snapshot.
"""

from collections.abc import Callable

from protocols.bus_errors import BusError
from protocols.codec import Frame, Header, decode_body, decode_header, encode
from protocols.messages import Message
from protocols.network import Link, Network, OnCrash


class EventLink:
    """An end of the events of a publisher."""

    _link: Link

    @property
    def closed(self) -> bool:
        return self._link.closed

    async def close(self) -> None:
        await self._link.close()


class Publisher(EventLink):
    """Publishes events with sequence numbers after `first`. Subscribers may miss events and then ask for a snapshot."""

    def __init__(self, network: Network, address: str, sender: str, first: int, on_crash: OnCrash) -> None:
        self.sequence = first
        self._header = Header(kind="", sender=sender)
        self._link, self.address = network.publish(address, on_crash)

    def publish(self, event: Message) -> None:
        """Raises MalformedError if the event cannot be sent; to subscribers it is then like one that was lost."""
        self.sequence += 1
        header = self._header._replace(kind=event.kind, part=self.sequence)
        self._link.send(encode(header, event))


class Subscriber(EventLink):
    """Receives the events of one publisher. `on_event(sequence, event)` is called for each, in order, with gaps."""

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
