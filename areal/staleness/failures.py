"""Groups that fail: admission pauses while all of them do, and a run that nothing comes of ends.

A reward that is down makes every group fail, which is not the fault of the prompts. So a failure counts against its
prompt only if a group became ready since the failure before. After some failures in a row there is an *outage*: one
group at a time is tried, until one becomes ready.

Decisions only, without I/O; the caller hands in the time, in seconds.
"""

import re
from pathlib import Path

from areal.staleness.ledger_state import Counters

LEAST_IN_A_ROW = 8
TRY_SECONDS = 10.0
# So many prompts may be discarded for failures whatever their share is.
LEAST_DISCARDED = 20
# The run ends after more than this many batches' worth of groups were filtered in a row, without any other ready group.
FILTERED_LIMIT = 100
# The run ends after this many prompts in a row that are longer than data.max_prompt_tokens.
LONG_LIMIT = 1000
# While no sample at all has succeeded, the run ends after UNSCORED_LIMIT failures, or after UNSCORED_LEAST
# failures once UNSCORED_SECONDS have passed since the first one. A few early failures do not end it: the first
# samples to finish are the shortest and often the least typical.
UNSCORED_LIMIT = 20
UNSCORED_SECONDS = 30.0
UNSCORED_LEAST = 3
# What may differ between two failures that are the same: counts of bytes, addresses, process numbers.
NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
# So much of a reason is shown on the console.
SHOWN_CHARACTERS = 500


class Failures:
    """The failures of a run since it was started or resumed. `outage_seconds`: how long an outage may last.
    `max_share`: the largest share of the finished prompts that may be discarded for failures. `folder`: the run's.
    `earlier`: the counts of groups until now. Sentences returned say why the run has to end."""

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
        """Failures since the last group that became ready."""
        self._since = 0.0
        self._next_try = 0.0
        self.last: dict[str, str] = {}
        """The last reason, by cause."""
        self.firsts: dict[str, str] = {}
        """The first failure of each cause, in one line."""
        self.any_succeeded = False
        """True once a sample was finished and scored."""
        self._unsuccessful: list[float] = []  # times of failures before that
        self._long = self.filtered_in_a_row = 0
        self._steps: dict[tuple[int, str], str] = {}

    @property
    def outage(self) -> bool:
        return self.in_a_row >= self._limit

    def end_reason_after_ready(self, filtered: bool, mean: float) -> str | None:
        """Why the run ends after a group became ready or was `filtered`; None: it goes on. mean: of the rewards."""
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
        """A prompt was too long, which is no failure, unless all are."""
        self._long += 1
        if self._long < LONG_LIMIT:
            return None
        return f"{self._long} prompts in a row were too long, the last one: {reason}; raise it."

    def is_first(self, cause: str, reason: str, actor: str) -> bool:
        """True for the first failure of its cause in the run. It is kept in `firsts`. `actor`: who reports it."""
        if cause in self.firsts:
            return False
        # The traceback is with the actor that scores. That is the one that reports only where the policy is the judge.
        log = f"{cause}-* or " * (cause in ("reward", "scorer")) + actor.replace("/", "-") + ".jsonl"
        because = " ".join(reason.split())[:SHOWN_CHARACTERS]
        self.firsts[cause] = f"first failure ({cause}), at {actor}: {because}. More is in {self._folder}/logs/{log}"
        return True

    def sample_failed(self, reason: str, now: float) -> str | None:
        """A sample failed. If none has ever succeeded, the reward, the workflow or the data are probably wrong."""
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
        """A rank of `trainer`, which is another one after each restart, could not compute a step."""
        first = self._steps.setdefault((step, NUMBERS.sub("", reason)), trainer)
        if first == trainer:  # each of its ranks may say so
            return None
        return f"Step {step} failed twice alike: {' '.join(reason.split())}. The traceback is in {self._folder}/logs."

    def failed(self, cause: str, reason: str, now: float) -> None:
        """A group failed."""
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
        """What the outage is, in one sentence without its full stop."""
        reason = " ".join(next(reversed(self.last.values())).split())
        return f"all {self.in_a_row} groups of the last {now - self._since:.0f} s failed, the last because {reason}"

    def verdict(self, counters: Counters, now: float) -> str | None:
        """An outage lasts too long, or too many prompts fail. `counters`: of the groups until now."""
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
