"""The run as an actor sees it: the members and the newest published policy."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from actors.runtime.actor import Notifier
from protocols.membership_messages import Member, Policy

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
