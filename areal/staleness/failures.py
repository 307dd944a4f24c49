"""Groups that fail: admission pauses while all of them do, and the run ends if that does not stop.

A reward that is down makes every group fail, which is not the fault of the prompts. So a failure counts against its
prompt only if a group became ready since the failure before. After some failures in a row there is an *outage*: one
group at a time is tried, until one becomes ready.

Decisions only, without I/O; the caller hands in the time, in seconds.
"""

from __future__ import annotations

from collections import Counter

LEAST_IN_A_ROW = 8
TRY_SECONDS = 10.0
# So many prompts may be discarded for failures whatever their share is.
LEAST_DISCARDED = 20


class Failures:
    """The failures of a run. `outage_seconds`: how long an outage may last. `max_share`: the largest share of the
    finished prompts that may be discarded for failures."""

    def __init__(self, batch_size: int, outage_seconds: float, max_share: float) -> None:
        self._limit = max(LEAST_IN_A_ROW, batch_size)
        self._outage_seconds = outage_seconds
        self._max_share = max_share
        self.in_a_row = 0
        """Failures since the last group that became ready."""
        self._since = 0.0
        self._next_try = 0.0
        self.last: dict[str, str] = {}
        """The last reason, by cause."""

    @property
    def outage(self) -> bool:
        return self.in_a_row >= self._limit

    def ready(self) -> None:
        """A group became ready."""
        self.in_a_row = 0

    def failed(self, cause: str, reason: str, now: float) -> None:
        """A group failed."""
        if not self.in_a_row:
            self._since = now
        self.in_a_row += 1
        self.last[cause] = reason
        if self.outage:
            self._next_try = now + TRY_SECONDS

    def may_try(self, now: float) -> bool:
        """True if a group may start during an outage, while no other group runs."""
        return now >= self._next_try

    def story(self, now: float) -> str:
        """What the outage is, in one sentence without its full stop."""
        reason = " ".join(next(reversed(self.last.values())).split())
        return f"all {self.in_a_row} groups of the last {now - self._since:.0f} s failed, the last because {reason}"

    def verdict(self, discarded: Counter[str], trained: int, now: float) -> str | None:
        """Why the run has to end, or None. `discarded`: groups by cause; `trained`: groups."""
        if self.outage and now - self._since > self._outage_seconds:
            return f"{self.story(now)}; that has lasted longer than outage_seconds ({self._outage_seconds:g} s)"
        lost = {cause: discarded[cause] for cause in self.last if discarded[cause]}
        failed = sum(lost.values())
        if failed <= LEAST_DISCARDED or failed <= self._max_share * (trained + discarded.total()):
            return None
        cause = max(lost, key=lambda cause: lost[cause])
        return (
            f"{failed} of {trained + discarded.total()} prompts were discarded because their groups failed, more than "
            f"max_failed_share ({self._max_share:g}) allows; the last one with the cause {cause!r}: {self.last[cause]}"
        )
