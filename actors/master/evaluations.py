"""Decides on evaluations: the version, the generator, and when to give up. No I/O.

A version that is due while the run goes on is *held*: one generator loads no newer version until the evaluation is
over. A generator holds version 0 from the start. The last version needs no hold, since no newer version comes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog

from actors.master.changes import Evaluated, EvaluationDropped
from actors.master.members import Members
from actors.master.run_state import RunState
from actors.master.served_version import ServedVersion
from protocols.evaluation_messages import EvaluationDone
from protocols.membership_messages import Member, Policy

# The evaluator obeys `evaluator.timeout_seconds`. The master then waits for the evaluator's report for this time.
GRACE_SECONDS = 60.0

log = structlog.get_logger()


class DueEvaluation(NamedTuple):
    """`holder`: the only generator with the version; None: all generators have the version."""

    version: int
    holder: Member | None


class Evaluations:
    """Decides on evaluations. `state` journals the decisions, and `members` gets the holds."""

    def __init__(self, state: RunState, members: Members) -> None:
        self._config, self._state, self._members, self._clock = state.config, state, members, members.clock
        self._held_since = self._evaluator_seen = self._clock()
        self.served = ServedVersion(state, members)
        self._rows_at_loss: tuple[int, int] | None = None  # (version, scored rows) when an evaluator was lost

    @property
    def due(self) -> DueEvaluation | None:
        if hold := self._members.holder:
            return DueEvaluation(hold[1].version, hold[0])
        version = self._state.policy.version
        return DueEvaluation(version, None) if version == self._config.steps and not self.is_over(version) else None

    @property
    def ready(self) -> DueEvaluation | None:
        """The evaluation that is due, unless the generator is not ready."""
        due = self.due
        return due if due and (due.holder is None or due.holder.state == "healthy") else None

    def is_over(self, version: int) -> bool:
        """True if the evaluation of the first or the last version is over, with or without a result."""
        return self._state.results.is_over(version) or not self._config.evaluates

    def hold_version_0(self, fresh: Member | None = None) -> None:
        """Have one generator hold version 0 until the evaluation is over, while the run goes on. The generator must
        still have version 0: `fresh`, which has just joined, or any generator before a newer version is published."""
        if self._state.ledger.version == self._config.steps or self.is_over(0) or self._members.holder:
            return
        generators = [m for m in self._members.with_role("generator", healthy=False) if m.state != "draining"]
        if self._state.policy.version:
            generators = [fresh] if fresh else []
        if generators:
            holder = min(generators, key=lambda m: (m.state != "healthy", m.index))
            self._hold(holder, Policy(lineage=0, version=0, folder=self._config.model))

    def plan(self, policy: Policy) -> None:
        """Have every `evaluator.every`-th version evaluated while the run continues. The generators take turns in
        holding the version. Call this before `policy` is published: members must know the hold before a newer version
        exists."""
        every, version = self._config.evaluator.every, policy.version
        if not every or not self._config.evaluates or version % every or version == self._config.steps:
            return
        if self._state.results.is_over(version):
            return  # the run has gone back to this version
        healthy = self._members.with_role("generator")
        generators = sorted((m for m in healthy if m.held is None), key=lambda m: m.index)
        if due := self.due:
            self._drop(version, f"version {due.version} is still being evaluated")
        elif not generators or not self._members.with_role("evaluator"):
            self._drop(version, "there is no healthy generator or evaluator")
        else:
            self._hold(generators[version // every % len(generators)], policy)

    def _hold(self, generator: Member, policy: Policy) -> None:
        self._held_since = self._clock()
        self._members.hold(generator, policy, serving=self.served.serves_at_once(policy.version))

    def begin_attempt(self) -> None:
        """An evaluator has begun the evaluation that is due."""
        self._held_since = self._clock()

    def keep_scores(self, version: int, rows: Mapping[int, tuple[Sequence[float], int]]) -> bool:
        """Keep the scores of rows without scores. Returns False if there are no such rows."""
        earlier, due = self._state.results.row_scores(version), self.due
        fresh = {row: rows[row] for row in rows if row not in earlier}
        if not fresh or due is None or due.version != version:
            return False
        self._state.emit(self._state.results.rows_scored(version, fresh))
        return True

    def finish(self, result: EvaluationDone) -> bool:
        """End the evaluation with a result. Returns False if the version is not due, or not due any more."""
        due = self.due
        if due is None or due.version != result.version:
            return False
        self._state.emit(Evaluated(evaluation=result))
        if not (due.holder and self.served.offer(due.holder, result)):
            self._release(due)
        return True

    def give_up(self, due: DueEvaluation, reason: str) -> None:
        """End the evaluation without a result. The holder loads the newest version."""
        self._drop(due.version, reason)
        self._release(due)

    def abandon(self, reason: str) -> None:
        """Give up the evaluation of a version in between, if a generator holds such a version. Never give up version 0,
        since results are compared with version 0, nor a version that has become the last version."""
        if (due := self.due) and due.holder and due.version:
            if due.version == self._config.steps:
                self._release(due)
            else:
                self.give_up(due, reason)

    def close(self) -> None:
        """The run has reached its end."""
        if not self.is_over(0):
            self._drop(0, "the generator that held it was lost, and no other one came in time")

    def _release(self, due: DueEvaluation) -> None:
        if due.holder:
            self._members.hold(due.holder, None)

    def _drop(self, version: int, reason: str) -> None:
        self._state.emit(EvaluationDropped(version=version, reason=reason))
        log.warning("not evaluated", version=version, reason=reason)

    def lose_member(self, member: Member) -> None:
        """Call before a member is removed. The loss of the holder loses its version, except that another generator may
        still have version 0. The next evaluator goes on with the evaluation, but no generator is held for evaluators
        that are lost again and again before they score another row."""
        due = self.due
        if due is None or due.holder is None:
            return
        if member.identity == due.holder.identity:
            self.abandon(f"{member.identity} is gone")
            if not due.version:
                self._release(due)
        elif member.role == "evaluator":
            previous = self._rows_at_loss
            self._rows_at_loss = due.version, len(self._state.results.row_scores(due.version))
            if previous == self._rows_at_loss:
                self.abandon(f"{member.identity} is gone, like the one before, and none of them has scored another row")

    def watch(self) -> None:
        """Give up an evaluation that takes too long or has no evaluator, and release generators that have served users.
        Call every second."""
        for generator in self._members.with_role("generator", healthy=False):
            over = generator.held and not generator.serving and self.is_over(generator.held.version)
            if over and not self._members.heartbeats.answers_users(generator):
                self._members.hold(generator, None)
        now, limit, patience = self._clock(), self._config.evaluator.timeout_seconds, self._config.master.lost_seconds
        if self._members.with_role("evaluator", healthy=False):
            self._evaluator_seen = now
        if now - self._evaluator_seen > patience:
            self.abandon(f"there has been no evaluator for {patience:g} s")
        elif limit and now - self._held_since > limit + GRACE_SECONDS:
            self.abandon(f"it took longer than evaluator.timeout_seconds ({limit:g} s)")
