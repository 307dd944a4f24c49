"""Groups that fail: admission pauses while all groups fail, and a run without results ends.

A broken reward makes every group fail, and the prompts are not at fault. Hence a failure counts against its prompt only
if a group became ready after the previous failure. After some failures in a row an *outage* begins: one group at a time
is tried, until a group becomes ready.

Decisions only, without I/O; the caller hands in the time, in seconds.
"""

import re
from pathlib import Path

from areal.staleness.ledger_state import Counters

LEAST_IN_A_ROW = 8
TRY_SECONDS = 10.0
# The number of prompts that may be discarded for failures whatever their share is.
LEAST_DISCARDED = 20
# The run ends after more than this many batches' worth of groups were filtered in a row, without any other ready group.
FILTERED_LIMIT = 100
# The run ends after this many prompts in a row above data.max_prompt_tokens.
LONG_LIMIT = 1000
# Before the first success, the run ends after UNSCORED_LIMIT failures, or after UNSCORED_LEAST failures once
# UNSCORED_SECONDS have passed since the first failure. A few early failures do not end the run: the first samples to
# finish are the shortest and often the least typical.
UNSCORED_LIMIT = 20
UNSCORED_SECONDS = 30.0
UNSCORED_LEAST = 3
# Two failures are the same although they differ in counts of bytes, addresses or process numbers.
NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
# The characters of a reason that the console shows.
SHOWN_CHARACTERS = 500


class Failures:
    """The failures of a run since its start or resumption. `outage_seconds`: how long an outage may last. `max_share`:
    the largest share of the finished prompts that may be discarded for failures. `folder`: of the run. `earlier`: the
    counts of groups until now. A sentence that a method returns is the reason to end the run."""

    def __init__(
        self, batch_size: int, outage_seconds: float, max_share: float, folder: Path, earlier: Counters
    ) -> None:
        self._batch_size = batch_size
        self._limit = max(LEAST_IN_A_ROW, batch_size)
        self._outage_seconds = outage_seconds
        self._max_share = max_share
        self._folder = folder
        self._discarded_earlier, self._trained_earlier = earlier.discarded.copy(), earlier.trained
        self.in_a_row = 0
        """Failures since the last ready group."""
        self._since = 0.0
        self._next_try = 0.0
        self.last: dict[str, str] = {}
        """The last reason, by cause."""
        self.firsts: dict[str, str] = {}
        """The first failure of each cause, in one line."""
        self.any_succeeded = False
        """True once a sample was finished and scored."""
        self._unsuccessful: list[float] = []  # times of failures before the first success
        self._long = self.filtered_in_a_row = 0
        self._steps: dict[tuple[int, str], str] = {}

    @property
    def outage(self) -> bool:
        return self.in_a_row >= self._limit

    def end_reason_after_ready(self, filtered: bool, mean: float) -> str | None:
        """Note a group that became ready or was `filtered`. mean: the mean reward of the group's samples."""
        self.in_a_row = self._long = 0
        self.any_succeeded = True
        self.filtered_in_a_row = self.filtered_in_a_row + 1 if filtered else 0
        if self.filtered_in_a_row <= FILTERED_LIMIT * self._batch_size:
            return None
        return (
            f"filter_zero_signal has discarded {self.filtered_in_a_row} groups in a row, so no batch can be formed: in "
            f"each group all samples had the same reward ({mean:.3f} on average). Use prompts that are neither always "
            f"nor never solved, or a larger group_size, or resume with --resume {self._folder} "
            f"filter_zero_signal=false."
        )

    def too_long(self, reason: str) -> str | None:
        """Note a prompt that was too long: no failure, unless all prompts are too long."""
        self._long += 1
        if self._long < LONG_LIMIT:
            return None
        return f"{self._long} prompts in a row were too long, the last one: {reason}; raise it."

    def is_first(self, cause: str, reason: str, actor: str) -> bool:
        """True for the first failure with this cause, which is stored in `firsts`. `actor`: reports the failure."""
        if cause in self.firsts:
            return False
        # The actor that scores has the traceback. The reporting actor itself scores only if the policy is the judge.
        log = f"{cause}-* or " * (cause in ("reward", "scorer")) + actor.replace("/", "-") + ".jsonl"
        because = " ".join(reason.split())[:SHOWN_CHARACTERS]
        self.firsts[cause] = f"first failure ({cause}), at {actor}: {because}. More is in {self._folder}/logs/{log}"
        return True

    def sample_failed(self, reason: str, now: float) -> str | None:
        """Note a failed sample. Before the first success, the reward, the workflow or the data are probably wrong."""
        if self.any_succeeded:
            return None
        self._unsuccessful.append(now)
        failed, seconds = len(self._unsuccessful), now - self._unsuccessful[0]
        if failed < UNSCORED_LIMIT and (failed < UNSCORED_LEAST or seconds < UNSCORED_SECONDS):
            return None
        because = " ".join(reason.split())
        return (
            f"No sample has succeeded, and {failed} have failed. The last failure: {because}. Correct that and start "
            f"again. More is in {self._folder}/logs."
        )

    def step_failed(self, step: int, reason: str, trainer: str) -> str | None:
        """Note that a rank of `trainer` could not compute a step. After a restart `trainer` has another identity."""
        first = self._steps.setdefault((step, NUMBERS.sub("", reason)), trainer)
        if first == trainer:  # several ranks may report the same failure
            return None
        return f"Step {step} failed twice alike: {' '.join(reason.split())}. The traceback is in {self._folder}/logs."

    def failed(self, cause: str, reason: str, now: float) -> None:
        """Note a failed group."""
        self._long = 0
        if not self.in_a_row:
            self._since = now
        self.in_a_row += 1
        self.last[cause] = reason
        if self.outage:
            self._next_try = now + TRY_SECONDS

    def may_try(self, now: float) -> bool:
        """True if a group may start during an outage, while no other group runs."""
        return now >= self._next_try

    def describe_outage(self, now: float) -> str:
        """Describe the outage in one sentence without a full stop."""
        reason = " ".join(next(reversed(self.last.values())).split())
        return f"all {self.in_a_row} groups of the last {now - self._since:.0f} s failed, the last because {reason}"

    def verdict(self, counters: Counters, now: float) -> str | None:
        """End the run if an outage lasts too long, or if too many prompts fail. `counters`: of the groups until now."""
        if self.outage and now - self._since > self._outage_seconds:
            return f"{self.describe_outage(now)}; that lasts longer than outage_seconds ({self._outage_seconds:g} s)."
        discarded = counters.discarded - self._discarded_earlier
        trained = counters.trained - self._trained_earlier
        lost = {cause: discarded[cause] for cause in self.last if discarded[cause]}
        failed = sum(lost.values())
        if failed <= LEAST_DISCARDED or failed <= self._max_share * (trained + discarded.total()):
            return None
        cause = max(lost, key=lambda cause: lost[cause])
        return (
            f"{failed} of {trained + discarded.total()} prompts were discarded because their groups failed, more than "
            f"max_failed_share ({self._max_share:g}) allows; the last one with the cause {cause!r}: {self.last[cause]}."
        )
