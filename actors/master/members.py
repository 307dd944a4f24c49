"""The directory of a run: the members, and a limit on their entries, which have to fit into a message.

The journal has the members (`RunState.members`), but not the heartbeats.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from actors.master.changes import Joined, Left, MemberChanged
from actors.master.heartbeats import Heartbeats
from actors.master.run_state import RunState
from areal.config.roles import is_role, role_of
from protocols.bus_errors import BusyError, RefusedError
from protocols.codec import MAX_BODY_BYTES
from protocols.membership_messages import Heartbeat, Join, Member, MembersChanged, Policy, Snapshot, actor_name
from protocols.messages import Message

# All members have to fit into a snapshot, and all changes of an event into the event. Both are one message.
MAX_MEMBERS = 4096
MAX_DIRECTORY_BYTES = MAX_BODY_BYTES * 3 // 4
# The number of former members whose reason of removal is kept.
REMOVED_KEPT = 64
# The limit of the members' numbers in a status, which is one message.
MAX_STATUS_BYTES = MAX_BODY_BYTES // 2


class Members:
    """The members of a run. Changes are journaled and handed to `publish`. `clock`: the master's, in seconds."""

    def __init__(self, state: RunState, publish: Callable[[Message], None], clock: Callable[[], float]) -> None:
        self._state = state
        self._publish = publish
        self.clock = clock
        self.heartbeats = Heartbeats(state.members, clock)
        self.starts = Counter[str]()  # joins since the master started, by role/index
        self.removed: dict[str, str] = {}  # the reason by former member, to tell the member; the newest
        self._entries = {identity: _entry(member) for identity, member in state.members.items()}
        self._size = sum(map(len, self._entries.values()))

    def with_role(self, role: str, healthy: bool = True) -> list[Member]:
        return [m for m in self._state.members.values() if m.role == role and (m.state == "healthy" or not healthy)]

    @property
    def holder(self) -> tuple[Member, Policy] | None:
        """The generator that holds a policy for an evaluation, and the policy; None if no generator does."""
        return self._state.results.holder(self._state.members.values())

    def snapshot(self, sequence: int, events: str) -> Snapshot:
        """The snapshot. A member is encoded once per change: thousands of actors may join at once."""
        entries: tuple[Any, ...] = tuple(self._entries.values())
        return Snapshot.model_construct(policy=self._state.policy, members=entries, sequence=sequence, events=events)

    def find_joined(self, join: Join, mark: str) -> Member | None:
        """The member that an earlier master created for the same Join, if any."""
        members, of_mark = self._state.members, f"#{mark}"
        return next((members[i] for i in members if i.endswith(of_mark) and members[i].role == join.role), None)

    def new_entry(self, join: Join, mark: str) -> Member:
        """The entry of an actor that wants to join. Raises RefusedError, and BusyError if the run is full."""
        if not is_role(join.role):
            raise RefusedError(f"there is no role {join.role!r}")
        if len(self._state.members) >= MAX_MEMBERS:
            raise BusyError(f"a run may have at most {MAX_MEMBERS} members")
        index = 0 if role_of(join.role).single else join.index
        if index is None:
            taken = {m.index for m in self.with_role(join.role, healthy=False)}
            index = next(i for i in range(len(taken) + 1) if i not in taken)
        identity = f"{join.role}/{index}#{mark}"
        return Member(identity=identity, role=join.role, index=index, address=join.address, state="starting")

    def add(self, member: Member) -> None:
        """Raises BusyError if the directory has no room for the member."""
        entry = self._fitting_entry(member)
        self.heartbeats.add(member.identity)
        self.starts[actor_name(member.identity)] += 1
        self._enter(Joined(member=member), entry)

    def update(self, member: Member, beat: Heartbeat) -> bool:
        """Enter a member's report of itself. Returns True if the report is new. Raises BusyError as `add` does."""
        if (beat.state, beat.serves) == (member.state, member.serves):
            return False
        updated = member.model_copy(update={"state": beat.state, "serves": beat.serves})
        self._enter(MemberChanged(member=updated), self._fitting_entry(updated))
        return True

    def hold(self, generator: Member, policy: Policy | None, serving: bool = False) -> None:
        """Have the generator load no policy newer than `policy`; None: any policy. serving: users get the policy."""
        holding = generator.model_copy(update={"held": policy, "serving": serving})
        self._enter(MemberChanged(member=holding), _entry(holding))

    def remove(self, identity: str, reason: str) -> None:
        self._state.emit(Left(identity=identity))
        self.removed[identity] = reason
        while len(self.removed) > REMOVED_KEPT:
            del self.removed[next(iter(self.removed))]
        self.heartbeats.remove(identity)
        self._size -= len(self._entries.pop(identity))
        self._publish(MembersChanged(gone=(identity,)))

    def _enter(self, change: Joined | MemberChanged, entry: bytes) -> None:
        member = change.member
        self._state.emit(change)
        self._size += len(entry) - len(self._entries.get(member.identity, b""))
        self._entries[member.identity] = entry
        self._publish(MembersChanged(changed=(member,)))

    def _fitting_entry(self, member: Member) -> bytes:
        """Raises BusyError if the directory has no room for the entry."""
        earlier, entry = self._entries.get(member.identity, b""), _entry(member)
        if self._size - len(earlier) + len(entry) > MAX_DIRECTORY_BYTES:
            raise BusyError(f"the directory of the run has no room for what {member.identity} tells of itself")
        return entry

    def activity(self, role: str) -> str:
        """The activity of the first member of the role."""
        return next(
            (self.heartbeats.last[m.identity].beat.activity for m in self.with_role(role, healthy=False)), "gone"
        )

    def status_rows(self) -> list[dict[str, Any]]:
        """The members, with activities and numbers up to MAX_STATUS_BYTES. silent: the seconds since this master heard
        from a member; None if it never did."""
        rows, size, now = [], 0, self.clock()
        for identity, member in self._state.members.items():
            last = self.heartbeats.last[identity]
            beat, silent = last.beat, None if last.restored else now - last.time
            size += len(beat.activity.encode()) + sum(len(name.encode()) + 11 for name in beat.stats)
            fits = size <= MAX_STATUS_BYTES
            details = {"activity": beat.activity if fits else "", "stats": beat.stats if fits else {}}
            rows.append({"identity": identity, "state": member.state, "silent": silent, **details})
        return rows


def next_event(outbox: deque[Message]) -> Message:
    """Take the first event out of `outbox`. A change of the directory absorbs the changes that directly follow, as many
    as a message holds: thousands of actors may join at once, and all of them get every event."""
    event = outbox.popleft()
    if not isinstance(event, MembersChanged):
        return event
    changed, gone = {m.identity: m for m in event.changed}, list(event.gone)
    size = _bytes_of_change(event)
    while outbox and isinstance(following := outbox[0], MembersChanged):
        size += _bytes_of_change(following)
        if size > MAX_DIRECTORY_BYTES:
            break
        outbox.popleft()
        changed |= {m.identity: m for m in following.changed}
        gone += following.gone
    return MembersChanged(changed=tuple(m for i, m in changed.items() if i not in gone), gone=tuple(gone))


def _entry(member: Member) -> bytes:
    """The entry of a member in a snapshot, as JSON. The entry in an event is shorter, in msgpack."""
    return member.model_dump_json().encode()


def _bytes_of_change(event: MembersChanged) -> int:
    return sum(len(_entry(member)) for member in event.changed) + sum(len(identity) + 5 for identity in event.gone)
