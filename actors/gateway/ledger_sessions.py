"""The sessions of users among the groups of the ledger: a session is opened, and an orphan gets another owner."""

from collections.abc import Iterable

from areal.staleness.ledger import schedulable
from areal.staleness.ledger_state import GroupState, LedgerGroup, LedgerState, Opened, OwnerChanged, Started


class LedgerSessions:
    """See the module. state: of the ledger."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    def open(
        self, session: str, owner: str, now: float, lease_seconds: float, served: int | None = None
    ) -> LedgerGroup | None:
        """Open a session with this name; None if there is no room. served: the version that users get, if it is not the
        newest. `served` becomes the start version; None is returned if alive groups would then miss their deadlines."""
        state = self._state
        start = state.version if served is None else min(served, state.version)
        if not state.room.for_sessions or (start < state.version and not self._fits_start(start)):
            return None
        group_id = f"s{state.prompts.next_session}.0"
        state.emit(Opened(group_id, session, owner, state.version, now + lease_seconds))
        if start < state.version:
            state.emit(Started(group_id, start))
        return state.groups[group_id]

    def ownerless(self) -> list[str]:
        """Return the ids of the open sessions without an owner."""
        return [group.group_id for group in self._state.groups.head(GroupState.OPEN) if not group.owner]

    def adopt(self, group_ids: Iterable[str], owner: str, now: float, lease_seconds: float) -> list[LedgerGroup]:
        """Make `owner` the owner of the ownerless sessions among `group_ids`. Returns the adopted sessions."""
        ownerless = self.ownerless()
        orphans = tuple(group_id for group_id in group_ids if group_id in ownerless)
        if orphans:
            self._state.emit(OwnerChanged(orphans, owner, now + lease_seconds))
        return [self._state.groups[group_id] for group_id in orphans]

    def _fits_start(self, version: int) -> bool:
        """True if one more group with this start version can be trained in time."""
        state = self._state
        deadlines = [version + state.settings.max_staleness]
        if state.settings.bounds_groups:
            deadlines += [group.deadline for group in state.groups.unbatched()]
        return schedulable(deadlines, state.batches_logged, state.settings.batch_size)
