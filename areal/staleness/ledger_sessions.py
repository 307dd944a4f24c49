"""The sessions of users among the groups of the ledger: a session is opened, and an orphan gets another owner."""

from collections.abc import Callable, Iterable

from areal.staleness.ledger_state import GroupState, LedgerGroup, LedgerState, Opened, OwnerChanged, Started


class LedgerSessions:
    """See the module. fits_start: whether one more group with a start version can be trained in time."""

    def __init__(self, state: LedgerState, fits_start: Callable[[int], bool]) -> None:
        self._state = state
        self._fits_start = fits_start

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
