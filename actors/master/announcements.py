"""The master's events, in order. An event is published after the changes in the event are on disk."""

import asyncio
from collections import deque

import structlog

from actors.master.members import next_event
from actors.runtime.actor import Notifier
from areal.storage.journal import Journal
from protocols.bus import Publisher
from protocols.bus_errors import MalformedError
from protocols.membership_messages import MembersChanged
from protocols.messages import Message

# Membership changes within this time are published as one event.
GATHER_SECONDS = 0.05

log = structlog.get_logger()


class Announcements:
    """Events to publish. `publisher` is set before the first event is due."""

    publisher: Publisher

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._outbox: deque[Message] = deque()
        self._mail = Notifier()

    def send(self, event: Message) -> None:
        """Publish `event` after all earlier events, once the journal is on disk."""
        self._outbox.append(event)
        self._mail.notify()

    async def repeat(self) -> None:
        """Publish sent events, until cancelled."""
        while True:
            await self._mail.until(lambda: self._outbox)
            if isinstance(self._outbox[0], MembersChanged):
                await asyncio.sleep(GATHER_SECONDS)
            event = next_event(self._outbox)
            await self._journal.durable()
            try:
                self.publisher.publish(event)
            except MalformedError as error:  # subscribers see a gap in the numbers, and ask for a snapshot
                log.error("an event cannot be sent", kind=event.kind, error=str(error))
