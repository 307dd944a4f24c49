"""The ledger of the master records the groups, bounds their age, and decides which groups are admitted and trained.

A group is the samples of one prompt, or a session of a user with the policy. areal/staleness/ledger_state.py has the
states of a group. With `filter_zero_signal`, a group that becomes ready without signal is discarded at once. No batch
waits for a session: the session is discarded as expired instead.

docs/staleness.md states the rules 1 to 3 and contains the proof.

* At most `(max_staleness + 1) * batch_size` groups are alive (admitted and neither trained, re-queued nor discarded).
* With `wait` and `requeue`, the steps before the deadlines have room for every alive group. Therefore every group
  trained at version i has i - s <= max_staleness, where s is the start version. `max_staleness` is the bound at the
  group's admission: the settings may change when a run is resumed.
* Every admitted prompt is alive, re-queued, trained once, or discarded for a recorded reason.

The ledger does no I/O and reads no clock: callers pass in the time. Only events change the ledger's state: a command
checks its arguments and emits events. Hence a replay of the journal rebuilds the state.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from areal.staleness.leases import Leases
from areal.staleness.ledger_state import (
    EXPIRED,
    START_VERSION_FELL,
    STRAGGLER,
    UNFINISHED,
    ZERO_SIGNAL,
    Admitted,
    Batch,
    BatchLogged,
    Checkpointed,
    Committed,
    Discarded,
    GroupState,
    LedgerError,
    LedgerGroup,
    LedgerSettings,
    LedgerState,
    Ready,
    Requeued,
    Started,
    StepRecord,
)


class ReportAnswer(StrEnum):
    """The effect of a report about a group. A report may be repeated, arrive late, or be overtaken by other reports."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    """The ledger knew the reported fact already, or the group is in a later state."""
    FILTERED = "filtered"
    """The report discarded the group: the group became ready without signal."""
    GONE = "gone"
    """The group was never admitted, is no longer alive, or belongs to another owner. The caller drops its data."""


@dataclass(frozen=True, slots=True)
class GroupPermit:
    """The right to start a group, of the row with the training index `row`. Every request of the group carries
    `min_version` or a later version (rule 2)."""

    group_id: str
    prompt_index: int
    row: int
    attempt: int
    min_version: int
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """No batch yet: `ready` groups are ready, `needed` are needed. `stragglers` have to finish first, by deadline."""

    version: int
    ready: int
    needed: int
    stragglers: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.stragglers) or "groups to be admitted"
        return f"step {self.version}: {self.ready} ready, {self.needed} needed, waiting for {names}"


@dataclass(frozen=True, slots=True)
class RunEnded:
    version: int


def schedulable(deadlines: Iterable[int], version: int, batch_size: int) -> bool:
    """True if the steps `version`, `version + 1`, ..., with `batch_size` slots each, can train all groups in time.

    In time means at a step not later than the deadline. The k-th earliest deadline d needs k slots in the steps up to
    and including d: k <= batch_size * (d - version + 1).

        >>> schedulable([7, 7, 8], version=7, batch_size=2), schedulable([7, 7, 7], version=7, batch_size=2)
        (True, False)
    """
    return all(k <= batch_size * (d - version + 1) for k, d in enumerate(sorted(deadlines), 1))


class Schedule:
    """Rule 3: the groups of the next batch, and the groups that have to finish before."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    @property
    def waiting(self) -> Waiting | None:
        """The wait of the next batch. None if the batch is logged or can be formed, or if the run has ended."""
        if self._state.version == self._state.settings.steps or self._state.steps.batch:
            return None
        waiting = self.waiting_for(self.choose())
        return None if waiting is None or self.may_abort(waiting) else waiting

    def choose(self) -> list[LedgerGroup]:
        """Up to B ready groups, earliest deadline first."""
        return self._state.groups.head(GroupState.READY, self._state.settings.batch_size)

    def waiting_for(self, chosen: list[LedgerGroup]) -> Waiting | None:
        """Return the obstacle to training `chosen` now; None: no obstacle."""
        groups, needed = self._state.groups, self._state.settings.batch_size
        if len(chosen) < needed:
            stragglers = [group for state in UNFINISHED for group in groups.head(state, needed - len(chosen))]
        else:
            stragglers = self.stragglers(chosen)
            if not stragglers:
                return None
        ready = groups.count(GroupState.READY)
        return Waiting(self._state.version, ready, needed, tuple(group.group_id for group in stragglers))

    def stragglers(self, chosen: list[LedgerGroup]) -> list[LedgerGroup]:
        """Return the unfinished groups of rows because of which rule 3 forbids training `chosen` now, earliest deadline
        first. Without these groups and the `overdue` sessions rule 3 holds."""
        return self._state.groups.head(GroupState.ADMITTED, self.in_excess(chosen)[0])

    def overdue(self) -> list[LedgerGroup]:
        """Return the open sessions that alone keep the next batch from being formed, earliest deadline first: as few as
        necessary, and none while the batch waits for groups of rows."""
        state, chosen = self._state, self.choose()
        if len(chosen) < (needed := state.settings.batch_size):
            if state.settings.sessions_alone:
                return []
            rows = len(chosen) + state.groups.count(GroupState.ADMITTED) + state.room.for_rows
            return state.groups.head(GroupState.OPEN, max(0, needed - rows))
        stragglers, sessions = self.in_excess(chosen)
        if stragglers and state.settings.on_straggler == "wait":
            return []
        return state.groups.head(GroupState.OPEN, sessions)

    def in_excess(self, chosen: list[LedgerGroup]) -> tuple[int, int]:
        """Return the numbers of unfinished groups of rows and of open sessions that have to go or to finish, earliest
        deadlines first, before rule 3 allows training `chosen`. At each deadline sessions go first.

        If n groups too many would be left behind at some deadline, at least n unfinished groups have a deadline as
        early, because ready groups alone always satisfy rule 3. Without a bound, sessions go at their deadline.
        """
        state, lines = self._state, self._state.groups.lines
        if not state.settings.bounds_groups:
            return 0, lines.due(state.version)[1]
        named = sessions = 0
        for deadline in lines.deadlines():
            due, due_sessions, due_ready = lines.due(deadline)
            left_behind = due + due_sessions - sessions + max(0, due_ready - len(chosen))
            excess = left_behind - max(0, state.settings.batch_size * (deadline - state.version))
            extra = max(0, min(excess, due_sessions - sessions))
            sessions, named = sessions + extra, max(named, excess - extra)
            if named > due:
                raise state.error(f"too many ready groups have deadline {deadline} or earlier for the steps left")
        return named, sessions

    def may_abort(self, waiting: Waiting) -> bool:
        """True if the groups that the batch waits for are re-queued instead of awaited."""
        return self._state.settings.on_straggler == "requeue" and waiting.ready >= waiting.needed

    def fits(self, groups: Iterable[LedgerGroup]) -> bool:
        """True if the steps after the logged batch can train all `groups`, none of them in the batch, in time."""
        state = self._state
        return schedulable((group.deadline for group in groups), state.batches_logged, state.settings.batch_size)

    def breaks(self, group: LedgerGroup, version: int) -> bool:
        """True if `version` is below the start version that the deadline has, and leaves some group without a step."""
        if not self._state.settings.bounds_groups or version + group.max_staleness >= group.deadline:
            return False
        rows = [replace(g, start_version=version) if g is group else g for g in self._state.groups.unbatched()]
        return not self.fits(rows)


class Ledger:
    """See the module. `state`: the groups, prompts and steps. `leases`: the owners of groups. `schedule`: the groups
    that are trained next. `row_of_prompt`: gives the training index
    of the row for a new prompt, by default the prompt's own index."""

    def __init__(self, state: LedgerState) -> None:
        self.state = state
        self.schedule = Schedule(state)
        self.leases = Leases(state)
        self.row_of_prompt: Callable[[int], int] = lambda prompt: prompt

    @property
    def version(self) -> int:
        """The policy version: the number of committed steps."""
        return self.state.version

    @property
    def ended(self) -> RunEnded | None:
        """Set once all steps are committed."""
        return RunEnded(self.version) if self.version == self.state.settings.steps else None

    @property
    def covered(self) -> int:
        """The steps from this version on can be redone; a checkpoint covers the earlier steps."""
        return min(self.state.steps.versions, default=self.version)

    def change_settings(self, settings: LedgerSettings) -> None:
        """Use `settings` from here on. Alive groups keep the bound of their admission. If more groups are alive than
        the new settings allow, no group is admitted until enough groups have left; groups without a step are not
        trained, unless a later change adds steps. Raises LedgerError for fewer steps than are trained.
        """
        self.state.emit(settings)

    def admit(self, owner: str, n: int, now: float, lease_seconds: float) -> list[GroupPermit]:
        """Admit up to n groups, as far as rule 1 leaves room: re-queued prompts first, then new prompts in order."""
        return [self._permit(owner, now + lease_seconds) for _ in range(min(n, self.state.room.for_rows))]

    def started(self, group_id: str, owner: str, version: int) -> ReportAnswer:
        """Report `version`, the lowest version that has sampled the first token of any of the group's samples.

        Report once every sample has begun. A later report of a lower version moves the deadline earlier. With `wait`
        and `requeue` the lower version is accepted only if all alive groups can still be trained before their
        deadlines; otherwise the attempt fails and the answer is GONE. Raises LedgerError for a version below the
        permit's `min_version` or above the current version.
        """
        group = self._owned(group_id, owner)
        if group is None:
            return ReportAnswer.GONE
        self._check_start(group, version)
        start = group.start_version
        if group.state not in UNFINISHED or (start is not None and version >= start):
            return ReportAnswer.UNCHANGED
        return self._accept_start(group, Started(group_id, version), version)

    def reuse(self, group_id: str, versions: Iterable[int]) -> int | None:
        """Ask which stored samples of earlier attempts may be in the group. `versions`: the oldest version of each.

        Returns the oldest version that may be in the group; None if the group, not `resumed`, finished or gone, may
        have none. A version below the version at admission becomes the start version: the lowest of `versions` with
        which all alive groups can still be trained before their deadlines.
        """
        group = self.state.groups.get(group_id)
        if group is None or not group.resumed or group.state is not GroupState.ADMITTED:
            return None
        for version in sorted(set(versions)):
            if version >= self._oldest_start(group):
                break
            if not self.schedule.breaks(group, version):
                self.state.emit(Started(group_id, version))
                return version
        return self._oldest_start(group)

    def ready(self, group_id: str, start_version: int, signal: bool = True) -> ReportAnswer:
        """Report that the trainer has spooled the group. `start_version`: the lowest version of the sampled tokens.
        `signal`: whether the rewards of the samples differ.

        On GONE and FILTERED the trainer drops the payload. On UNCHANGED the trainer keeps the stored payload (perhaps
        of a trained group that no checkpoint covers yet). Raises LedgerError under the same conditions as `started`.
        """
        group = self.state.groups.get(group_id)
        if group is None:
            return ReportAnswer.UNCHANGED if group_id in self.state.steps else ReportAnswer.GONE
        if group.state not in UNFINISHED:
            return ReportAnswer.UNCHANGED
        self._check_start(group, start_version)
        if self.state.settings.filter_zero_signal and not signal and not group.session:
            self.state.emit(Discarded(group_id, ZERO_SIGNAL))
            return ReportAnswer.FILTERED
        return self._accept_start(group, Ready(group_id, start_version), start_version)

    def failed(self, group_id: str, owner: str, reason: str, counts: bool = True) -> ReportAnswer:
        """Report that the group cannot be finished. `reason`: a category, by which groups are counted here and in
        `discard`. `counts`: whether the report is a failure of the prompt."""
        group = self._owned(group_id, owner)
        if group is None:
            return ReportAnswer.GONE
        if group.state not in UNFINISHED:
            return ReportAnswer.UNCHANGED
        if not counts:
            self.leases.give_back([group], reason)
        elif self.state.settings.on_failed_sample == "discard":
            self.state.emit(Discarded(group_id, reason))
        else:
            self._fail(group, reason)
        return ReportAnswer.ACCEPTED

    def discard(self, group_id: str, reason: str) -> ReportAnswer:
        """Discard the group; the prompt is not trained. Raises LedgerError for a group in a batch."""
        if self.state.groups.get(group_id) is None:
            return ReportAnswer.GONE
        self.state.emit(Discarded(group_id, reason))
        return ReportAnswer.ACCEPTED

    def next_batch(self, version: int) -> Batch | Waiting | RunEnded:
        """Return the batch to train at `version`. The first answer with a batch logs the batch, which never changes
        afterwards.

        For an earlier version, return the trained batch, for a restarted trainer to redo. Raises LedgerError for a
        later version, or for a version that a checkpoint covers.
        """
        if version != self.version:
            return self._committed(version).batch
        if ended := self.ended:
            return ended
        if self.state.steps.batch is None:
            for group in self.schedule.overdue():
                self.state.emit(Discarded(group.group_id, EXPIRED))
            chosen = self.schedule.choose()
            waiting = self.schedule.waiting_for(chosen)
            if waiting and not self.schedule.may_abort(waiting):
                return waiting
            for group_id in waiting.stragglers if waiting else ():
                self._fail(self.state.groups[group_id], STRAGGLER)
            self.state.emit(BatchLogged(version, tuple(group.group_id for group in chosen)))
            assert self.state.steps.batch is not None  # logged just now
        return self.state.steps.batch

    def commit(self, version: int) -> StepRecord:
        """Record that the batch of `version` is trained. A repeated call returns the same record.

        Raises LedgerError for a version without a logged batch, or for a version that a checkpoint covers.
        """
        if version == self.version:
            self.state.emit(Committed(version))
        return self._committed(version)

    def checkpointed(self, version: int) -> ReportAnswer:
        """Record that the steps before `version`, of a checkpoint, are never redone. The ledger forgets them."""
        if version <= self.version and not any(step < version for step in self.state.steps.versions):
            return ReportAnswer.UNCHANGED
        self.state.emit(Checkpointed(version))
        return ReportAnswer.ACCEPTED

    def _permit(self, owner: str, lease_expires: float) -> GroupPermit:
        group_id, prompt_index, attempt = self.state.prompts.next_permit()
        row = self.state.prompts.requeued[0].row if self.state.prompts.requeued else self.row_of_prompt(prompt_index)
        self.state.emit(Admitted(group_id, prompt_index, attempt, owner, self.version, lease_expires, row))
        group = self.state.groups[group_id]
        return GroupPermit(group_id, prompt_index, group.row, attempt, self.state.min_version(group), group.resumed)

    def _oldest_start(self, group: LedgerGroup) -> int:
        """The lowest start version that may be reported of the group."""
        low = self.state.min_version(group)
        return low if group.start_version is None else min(low, group.start_version)

    def _check_start(self, group: LedgerGroup, version: int) -> None:
        low = self._oldest_start(group)
        if not low <= version <= self.version:
            raise self.state.error(f"start version {version} is not between {low} and {self.version}", group.group_id)

    def _accept_start(self, group: LedgerGroup, event: Started | Ready, version: int) -> ReportAnswer:
        if self.schedule.breaks(group, version):
            self._fail(group, START_VERSION_FELL)
            return ReportAnswer.GONE
        self.state.emit(event)
        return ReportAnswer.ACCEPTED

    def _fail(self, group: LedgerGroup, reason: str) -> None:
        """Re-queue the prompt, or discard it after `max_attempts` failures. A session is discarded."""
        last = group.session or group.failures + 1 >= self.state.settings.max_attempts
        self.state.emit(Discarded(group.group_id, reason) if last else Requeued(group.group_id, reason, failed=True))

    def _owned(self, group_id: str, owner: str) -> LedgerGroup | None:
        group = self.state.groups.get(group_id)
        return group if group is not None and group.owner == owner else None

    def _committed(self, version: int) -> StepRecord:
        record = self.state.steps.get(version)
        if record is None:
            versions = self.state.steps.versions
            steps = f"{min(versions)} to {max(versions)}" if versions else "none"
            raise LedgerError(f"no record of step {version}: the version is {self.version}, steps kept: {steps}")
        return record
