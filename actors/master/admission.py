"""Admission: the number of groups and sessions that may start now."""

from collections.abc import Callable

from actors.master.run_state import RunState
from areal.staleness.failures import Failures
from areal.staleness.ledger_state import GroupState


class Admission:
    """is_closed: True while nothing may start: after the end of the run, while the disk is full, and while a reward is
    absent. now: the master's clock."""

    def __init__(
        self, state: RunState, failures: Failures, is_closed: Callable[[], bool], now: Callable[[], float]
    ) -> None:
        self._state = state
        self._failures = failures
        self._is_closed = is_closed
        self._now = now

    def free_groups(self) -> int:
        """Number of groups of rows that may start now, 0 if admission is closed. The run-ahead limit does not count
        open sessions, which may never become ready."""
        if self._is_closed():
            return 0
        capacity, groups = self._state.ledger.state.room.for_rows, self._state.ledger.state.groups
        moving = len(groups) - groups.count(GroupState.OPEN)
        if self._failures.outage:
            alone = moving == groups.count(GroupState.READY)
            return min(capacity, int(alone and self._failures.may_try(self._now())))
        if self._state.config.run_ahead == "max":
            return capacity
        return min(capacity, max(0, self._state.run_ahead.limit - moving))

    def counts(self) -> dict[str, int]:
        """Numbers of groups."""
        groups = self._state.ledger.state.groups
        return {"alive": len(groups), "ready": groups.count(GroupState.READY), "capacity": self.free_groups()}

    def free_sessions(self) -> int:
        """Number of sessions that may open now."""
        return 0 if self._is_closed() or self._failures.outage else self._state.ledger.state.room.for_sessions
