"""The run as an actor sees it: the members and the newest published policy, kept up to date by events."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from actors.runtime.actor import Notifier
from protocols.addresses import host_of, reachable
from protocols.bus import Bus, Subscriber
from protocols.membership_messages import Member, MembersChanged, Policy, PolicyPublished, Shutdown, Snapshot
from protocols.messages import Message

T = TypeVar("T")


class Directory:
    """`members`: by identity. `changed`: notified after every change."""

    def __init__(self, policy: Policy, members: Iterable[Member] = ()) -> None:
        self.policy = policy
        self.members = {member.identity: member for member in members}
        self.changed = Notifier()
        self._with_role: dict[tuple[str, bool], list[Member]] = {}  # until the next change: every call asks for members

    def with_role(self, role: str, healthy: bool = True) -> list[Member]:
        key = (role, healthy)
        if key not in self._with_role:
            members = [m for m in self.members.values() if m.role == role and (m.state == "healthy" or not healthy)]
            self._with_role[key] = members
        return self._with_role[key]

    async def until(self, condition: Callable[[], T]) -> T:
        """The first true value of `condition`, a function of the members or the policy."""
        return await self.changed.until(condition)

    def take_policy(self, policy: Policy) -> None:
        """Keep this policy, unless a newer policy is known: an event may be late."""
        if policy.identity > self.policy.identity:
            self.policy = policy

    def update(self, changed: Mapping[str, Member], gone: Iterable[str]) -> list[Member]:
        """Returns the members that are gone now."""
        self._with_role.clear()
        self.members |= changed
        return [self.members.pop(identity) for identity in gone if identity in self.members]


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
