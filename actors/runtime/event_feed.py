"""The master's events, as an actor follows them."""

from collections.abc import Callable, Iterable

from actors.runtime.directory import Directory
from protocols.addresses import host_of, reachable
from protocols.membership_messages import Member, MembersChanged, PolicyPublished, Shutdown, Snapshot
from protocols.messages import Message
from protocols.pubsub import Subscriber
from protocols.transport import Bus


class EventFeed:
    """Follows the master's events from a snapshot on, and keeps `directory`. `sequence`: number of the last known
    event. on_end: called when the run has ended."""

    def __init__(self, bus: Bus, master: str, snapshot: Snapshot, on_end: Callable[[Shutdown], None]) -> None:
        self.directory = Directory(snapshot.policy)
        self.sequence = 0
        self._bus = bus
        self._master = master
        self._on_end = on_end
        self._subscriber = self._subscribe(snapshot)

    async def take(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot."""
        if self._subscriber.address != reachable(snapshot.events, host_of(self._master)):
            await self._subscriber.close()
            self._subscriber = self._subscribe(snapshot)
        if snapshot.sequence >= self.sequence:
            self.sequence = snapshot.sequence
            self.directory.take_policy(snapshot.policy)
            listed = {member.identity: member for member in snapshot.members}
            self._update(listed, [identity for identity in self.directory.members if identity not in listed])
            self.directory.changed.notify()

    def _subscribe(self, snapshot: Snapshot) -> Subscriber:
        return self._bus.subscribe(reachable(snapshot.events, host_of(self._master)), self._on_event)

    def _on_event(self, sequence: int, event: Message) -> None:
        if sequence <= self.sequence:
            return
        match event:
            case PolicyPublished():
                self.directory.take_policy(event.policy)
            case MembersChanged():
                self._update({m.identity: m for m in event.changed}, event.gone)
            case Shutdown():
                self._on_end(event)
        if sequence == self.sequence + 1:  # after a gap, only a snapshot has the lost changes
            self.sequence = sequence
        self.directory.changed.notify()

    def _update(self, changed: dict[str, Member], gone: Iterable[str]) -> None:
        for member in self.directory.update(changed, gone):
            self._bus.forget(member.address)
