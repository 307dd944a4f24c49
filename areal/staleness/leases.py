"""The leases of the ledger: a lease gives a group to an actor until a time."""

from collections.abc import Collection, Iterable

from areal.staleness.ledger_state import (
    LEASE_EXPIRED,
    RELEASED,
    UNANSWERED,
    Discarded,
    LedgerGroup,
    LedgerState,
    OwnerChanged,
    Renewed,
    Requeued,
)


class Leases:
    """See the module. Callers pass in the time and the length of a lease, in seconds."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    def renew(self, owner: str, group_ids: Iterable[str], now: float, lease_seconds: float) -> list[str]:
        """Extend the leases of `owner`. Returns groups of another owner or none, which `owner` has to abort."""
        owned: list[LedgerGroup] = []
        lost: list[str] = []
        for group_id in group_ids:
            group = self._state.groups.get(group_id)
            if group is not None and group.owner == owner:
                owned.append(group)
            else:
                lost.append(group_id)
        self._extend(owned, now + lease_seconds)
        return lost

    def renew_all(self, now: float, lease_seconds: float) -> None:
        """Extend all leases. A restarted master does so first: no lease expires while the master is down."""
        self._extend(self._state.groups, now + lease_seconds)

    def expire(self, now: float) -> list[str]:
        """Re-queue the prompts of groups with an expired lease, which is no failure of the group. A session stays open
        without an owner. `release` does the same."""
        leased = self._state.groups.leased()
        silent = [group for group in leased if group.lease_expires is not None and group.lease_expires <= now]
        return self.give_back(silent, LEASE_EXPIRED)

    def release(self, owner: str) -> list[str]:
        """Re-queue the prompts of all groups leased by `owner`, a dead actor or an actor that has left."""
        return self.give_back(self._state.groups.leased(owner), RELEASED)

    def withdraw(self, owner: str, group_ids: Collection[str]) -> list[str]:
        """Re-queue the prompts of groups that were admitted for `owner`, if their permits never reached `owner`."""
        unknown = [group for group in self._state.groups.leased(owner) if group.group_id in group_ids]
        return self.give_back(unknown, UNANSWERED)

    def give_back(self, groups: list[LedgerGroup], reason: str) -> list[str]:
        """Re-queue the prompts of these groups. A session with a lost owner stays ownerless, else it is discarded."""
        orphans = [group.group_id for group in groups if group.session and reason in (LEASE_EXPIRED, RELEASED)]
        if orphans:
            self._state.emit(OwnerChanged(tuple(orphans), "", None))
        for group in groups:
            if group.session and group.group_id not in orphans:
                self._state.emit(Discarded(group.group_id, reason))
            elif not group.session:
                self._state.emit(Requeued(group.group_id, reason, failed=False))
        return [group.group_id for group in groups]

    def _extend(self, groups: Iterable[LedgerGroup], lease_expires: float) -> None:
        leased = tuple(group.group_id for group in groups if group.lease_expires is not None)
        if leased:
            self._state.emit(Renewed(leased, lease_expires))
