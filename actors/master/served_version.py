"""The version for users with `gateway.serve: evaluated`: the newest version with a good enough evaluation.

The generator that answers users holds the version until another generator holds a newer good version.
"""

import math

import structlog

from actors.master.members import Members
from actors.master.run_state import RunState
from protocols.evaluation_messages import EvaluationDone
from protocols.membership_messages import Member

log = structlog.get_logger()


class ServedVersion:
    """Decides which generator answers users, and enters the hold in `members`."""

    def __init__(self, state: RunState, members: Members) -> None:
        self._settings, self._state, self._members = state.config.gateway, state, members

    @property
    def server(self) -> Member | None:
        """The generator that answers users; None: any generator."""
        return next((m for m in self._members.with_role("generator", healthy=False) if m.serving), None)

    @property
    def version(self) -> int | None:
        """The version for users; None: the newest version, or none."""
        server = self.server
        return server.held.version if server and server.held else None

    def serves_at_once(self, version: int) -> bool:
        """True if users get the version before its evaluation: the first version."""
        return version == 0 and self._settings.serve == "evaluated"

    def offer(self, holder: Member, result: EvaluationDone) -> bool:
        """Have `holder` answer users from now on, if its version is good enough. Returns whether it is."""
        if not self._is_good_enough(result):
            return False
        server = self.server
        if server is not None and server.identity != holder.identity:  # released once its sequences have ended
            self._members.hold(server, server.held)
        self._members.hold(holder, holder.held, serving=True)
        return True

    def _is_good_enough(self, result: EvaluationDone) -> bool:
        """Compare the version with the last good version, whether users got the last good version or not."""
        least = -math.inf
        if self._settings.serve == "newest" or result.accuracy is None:
            return False
        for version, evaluation in sorted(self._state.results.evaluations.items()):
            if version < result.version and evaluation.accuracy is not None and evaluation.accuracy >= least:
                least = evaluation.accuracy - self._settings.accuracy_drop
        good = result.accuracy >= least
        log.info("served to users" if good else "not served to users", version=result.version, least=least)
        return good
