"""The book that the oracle keeps of a run, from the events in the journal. It shares no code with the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from areal.staleness.ledger_state import (
    BY_USERS,
    EXPIRED,
    LOST_WITH_THE_SPOOL,
    ROLLED_BACK,
    START_VERSION_FELL,
    ZERO_SIGNAL,
)

# Why a session may be discarded that its gateway, or the run, gives up.
GIVEN_UP = (EXPIRED, "deleted", "opted out", "failed", START_VERSION_FELL, ROLLED_BACK, LOST_WITH_THE_SPOOL)
# Why a group may fail, by its rollout manager: what may be tried again, as `on_failed_sample` says, and what may not.
RETRIED = ("prompt", "reward", "scorer", "sandbox", "workflow", "trainer")
HOPELESS = ("row", "long")


class Violation(Exception):
    """An invariant is violated. `about`: the groups, actors or versions concerned, as they are named in the trace."""

    def __init__(self, what: str, *about: str) -> None:
        super().__init__(what)
        self.what = what
        self.about = about


@dataclass(slots=True)
class Row:
    """An alive group. `started_at`: its start version; None until the master is told. `admitted`: the virtual time, and
    `leased`: the time by the master's clock when its lease was last renewed, as far as the oracle saw. `granted`: its
    owner may have its permit. `session`: the name of the session that it is, whose `owner` is empty once it is left."""

    prompt: int
    owner: str
    version: int
    session: str = ""
    started_at: int | None = None
    ready: bool = False
    admitted: float = 0.0
    leased: float = 0.0
    granted: bool = True


# What is again as it was if the run goes back.
GOES_BACK = (
    "version",
    "rows",
    "prompt_of",
    "row_of",
    "bounds",
    "masks",
    "waiting",
    "failures",
    "trained",
    "discarded",
    "batches",
    "prompts",
    "sessions",
    "session_of",
)


@dataclass(slots=True)
class Book:
    """The state of the run after a list of journal events. Raises Violation if an event breaks an invariant."""

    batch_size: int
    bounds_groups: bool
    steps: int = 0
    earlier_ends: set[int] = field(default_factory=set)
    """Numbers of steps that the run was to have until it was resumed with another number."""
    max_staleness: int = 0
    max_attempts: int = 0
    on_failed_sample: str = ""
    version: int = 0
    lineage: int = -1
    trainer: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    prompt_of: dict[str, int] = field(default_factory=dict)
    """The prompt of each group that was ever admitted."""
    row_of: dict[int, int] = field(default_factory=dict)
    """The training index of the row of each prompt that was ever admitted."""
    bounds: dict[str, int] = field(default_factory=dict)
    """Of every group that was ever admitted: `max_staleness` at that time."""
    masks: dict[int, int] = field(default_factory=dict)
    """The oldest version in the loss with `mask`, of each batch."""
    waiting: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    """How often each prompt has failed."""
    failed_in_a_row: bool = False
    """True from a failure until a group becomes ready. Until then no other failure counts against its prompt."""
    trained: dict[int, int] = field(default_factory=dict)
    discarded: dict[int, str] = field(default_factory=dict)
    batches: dict[int, tuple[str, ...]] = field(default_factory=dict)
    policies: dict[tuple[int, int], str] = field(default_factory=dict)
    checkpoint: int = 0
    covered: int = 0
    """The version of the checkpoint before: the steps from there on may be redone."""
    prompts: int = 0
    sessions: int = 0
    """The number of sessions that were opened; the n-th has the prompt -1 - n."""
    max_sessions: int = 0
    session_of: dict[str, str] = field(default_factory=dict)
    """The name of the session that a group is, of each that was ever opened."""
    members: set[str] = field(default_factory=set)
    holds: dict[str, int] = field(default_factory=dict)
    held_lineages: dict[str, int] = field(default_factory=dict)
    """The lineages of the held policies."""
    evaluated: dict[int, bool] = field(default_factory=dict)
    """By version: True if there is a result, False if only a reason why there is none."""
    serves_evaluated: bool = False
    """Whether a generator keeps what is evaluated, for users."""
    row_scores: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    """The scores that are kept until there is a result, by version and row."""
    pasts: dict[int, Book] = field(default_factory=dict)
    """As this was at each version."""
    lost_version_0: bool = False
    """True if a generator was lost that held version 0. If no new one comes in time, version 0 has no result."""

    @property
    def policy(self) -> tuple[int, int]:
        return max(self.policies, default=(0, 0))

    def size(self, group_id: str, group_size: int) -> int:
        """The number of samples of a group, in a run with so many for each row."""
        return 1 if group_id in self.session_of else group_size

    def is_taken(self, group_id: str) -> bool:
        """Whether the group is ready, in a batch or trained."""
        row = self.rows.get(group_id)
        return self.prompt_of[group_id] in self.trained or bool(row and row.ready)

    @property
    def payloads(self) -> set[str]:
        """The groups whose payloads the trainer needs: those that are ready, and those of the steps that may be
        redone."""
        redone = (self.batches[version] for version in range(self.covered, self.version))
        return {group for group, row in self.rows.items() if row.ready}.union(*redone)

    def add(self, kind: str, body: dict[str, Any]) -> None:
        handler = getattr(self, f"_{kind}", None)
        if handler is not None:
            handler(**body)

    def check_members(self) -> None:
        """Check what depends on who is a member of the run, and on who trains it."""
        owned = {group: row for group, row in self.rows.items() if not row.ready and (row.owner or not row.session)}
        ownerless = [group for group, row in owned.items() if row.owner not in self.members]
        self._hold(not ownerless, f"{ownerless} are leased by members that have left", *ownerless)
        for identity, version in self.holds.items():
            dead = version and self.held_lineages[identity] < self.lineage
            self._hold(not dead, f"{identity} holds version {version} of a dead lineage", identity)

    def deadline(self, group_id: str) -> int:
        """The last version that may train a group."""
        row = self.rows[group_id]
        return (row.version if row.started_at is None else row.started_at) + self.bounds[group_id]

    @property
    def sessions_alone(self) -> bool:
        return self.max_sessions >= (self.max_staleness + 1) * self.batch_size

    @property
    def rooms(self) -> tuple[int, int]:
        """How many groups of rows, and how many sessions, may be admitted now."""
        limit = min(self.max_staleness + 1, self.steps - self.version) * self.batch_size
        most_sessions = limit if self.sessions_alone else max(0, min(self.max_sessions, limit - self.batch_size))
        alive, sessions = len(self.rows), sum(bool(row.session) for row in self.rows.values())
        rows = min(limit - alive, limit - most_sessions - (alive - sessions))
        return max(0, rows), max(0, min(limit - alive, most_sessions - sessions))

    def is_due(self, group_id: str) -> bool:
        """Whether no batch could be formed now if this open session stayed, although it could be otherwise."""
        ready = sorted((group for group, row in self.rows.items() if row.ready), key=self.deadline)
        if len(ready) < self.batch_size:
            working = sum(not row.ready and not row.session for row in self.rows.values())
            return not self.sessions_alone and len(ready) + working + self.rooms[0] < self.batch_size
        if not self.bounds_groups:
            return self.deadline(group_id) <= self.version
        deadlines = [self.deadline(group) for group in self.rows if group not in ready[: self.batch_size]]
        ends = [end for end in deadlines if end >= self.deadline(group_id)]
        return any(
            sum(deadline <= end for deadline in deadlines) > max(0, self.batch_size * (end - self.version))
            for end in ends
        )

    def _master_started(self) -> None:
        self.failed_in_a_row = False

    def _ledger_settings(
        self, steps: int, max_staleness: int, max_attempts: int, on_failed_sample: str, max_sessions: int, **_: Any
    ) -> None:
        self._hold(steps >= self.version, f"the run is to end at step {steps}, but is at version {self.version}")
        if self.steps not in (0, steps):
            self.earlier_ends.add(self.steps)
            self.evaluated = {
                version: result for version, result in self.evaluated.items() if result or version != steps
            }
        self.steps, self.max_staleness = steps, max_staleness
        self.max_attempts, self.on_failed_sample = max_attempts, on_failed_sample
        self.max_sessions = max_sessions

    def _admitted(self, group_id: str, prompt_index: int, owner: str, version: int, row: int, **_: Any) -> None:
        self._hold(group_id not in self.prompt_of, f"{group_id} is admitted a second time", group_id)
        self._hold(
            prompt_index not in self.trained, f"prompt {prompt_index} is admitted again after training", group_id
        )
        self._hold(
            prompt_index not in self.discarded, f"prompt {prompt_index} is admitted after it was discarded", group_id
        )
        alive = [row.prompt for row in self.rows.values()]
        self._hold(prompt_index not in alive, f"prompt {prompt_index} is alive twice", group_id)
        limit = min(self.max_staleness + 1, self.steps - self.version) * self.batch_size
        self._hold(len(alive) < limit, f"{len(alive) + 1} groups are alive, but at most {limit} may be", group_id)
        self._hold(self.rooms[0] > 0, f"{group_id} is admitted where sessions have their place", group_id)
        self._hold(
            version == self.version, f"{group_id} is admitted at version {version}, not {self.version}", group_id
        )
        self._hold(
            prompt_index in self.waiting or prompt_index == self.prompts,
            f"prompt {prompt_index} is admitted, but it is neither re-queued nor the next one, {self.prompts}",
            group_id,
        )
        chosen = self.row_of.setdefault(prompt_index, row)
        self._hold(chosen == row, f"prompt {prompt_index} is of row {chosen}, but {group_id} of {row}", group_id)
        self.prompts = max(self.prompts, prompt_index + 1)
        self.waiting.discard(prompt_index)
        self.prompt_of[group_id] = prompt_index
        self.bounds[group_id] = self.max_staleness
        self.rows[group_id] = Row(prompt_index, owner, version)

    def _opened(self, group_id: str, session: str, owner: str, version: int, **_: Any) -> None:
        self._hold(group_id not in self.prompt_of, f"{group_id} is opened a second time", group_id)
        self._hold(self.rooms[1] > 0, f"{group_id} is opened, but {self.max_sessions} sessions may be alive", group_id)
        self._hold(version == self.version, f"{group_id} is opened at version {version}, not {self.version}", group_id)
        again = [name for name, row in self.rows.items() if row.session == session and not row.ready]
        self._hold(not again, f"{group_id} is opened for {session}, which is open as {again}", group_id)
        number = -1 - self.sessions
        self.sessions += 1
        self.prompt_of[group_id], self.bounds[group_id] = number, self.max_staleness
        self.rows[group_id], self.session_of[group_id] = Row(number, owner, version, session), session

    def _owner_changed(self, group_ids: Sequence[str], owner: str, lease_expires: float | None) -> None:
        for group_id in group_ids:
            row = self._row(group_id)
            taken = bool(owner and row.owner)
            self._hold(bool(row.session) and not row.ready, f"{group_id} gets another owner, but is not open", group_id)
            self._hold(not taken, f"{group_id} is given to {owner}, but is held by {row.owner}", group_id)
            self._hold(bool(owner) == (lease_expires is not None), f"{group_id} has a lease without an owner", group_id)
            row.owner = owner

    def _started(self, group_id: str, version: int) -> None:
        row = self._row(group_id)
        row.started_at = version

    def _ready(self, group_id: str, start_version: int) -> None:
        row = self._row(group_id)
        self.failed_in_a_row = False
        self._hold(not row.ready, f"{group_id} is ready twice", group_id)
        row.ready, row.started_at = (
            True,
            start_version if row.started_at is None or row.session else min(start_version, row.started_at),
        )

    def _requeued(self, group_id: str, reason: str, failed: bool) -> None:
        row = self._row(group_id)
        self._hold(bool(reason), f"{group_id} is re-queued without a reason", group_id)
        self._hold(not row.ready, f"{group_id} is re-queued, although it is ready", group_id)
        self._hold(not row.session, f"{group_id} is re-queued, although it is a session", group_id)
        if reason in RETRIED:
            counts = not self.failed_in_a_row
            self._hold(failed == counts, f"{group_id} failed ({reason}): counted {failed}, not {counts}", group_id)
            self.failed_in_a_row = True
        self.failures[row.prompt] += failed
        tried, limit = self.failures[row.prompt], self.max_attempts
        self._hold(
            tried < limit, f"{group_id} is re-queued after {tried} failures, at most {limit} are allowed", group_id
        )
        self.waiting.add(self.rows.pop(group_id).prompt)

    def _discarded(self, group_id: str, reason: str) -> None:
        row = self._row(group_id)
        prompt = row.prompt
        self._hold(bool(reason), f"{group_id} is discarded without a reason", group_id)
        if row.session:
            self._hold(reason in GIVEN_UP, f"the session {group_id} is discarded for {reason}", group_id)
            lost = row.ready and reason not in ("deleted", LOST_WITH_THE_SPOOL)
            self._hold(not lost, f"the session {group_id} is discarded ({reason}), although it is ready", group_id)
            self.discarded[prompt] = reason
            del self.rows[group_id]
            return
        if reason not in (ZERO_SIGNAL, *HOPELESS):
            at_once = reason in RETRIED and self.on_failed_sample == "discard"
            tried, limit = self.failures[prompt] + 1, self.max_attempts
            enough = at_once or tried >= limit
            self._hold(enough, f"{group_id} is discarded after {tried} failures ({reason}), not {limit}", group_id)
        self.failed_in_a_row = reason in RETRIED or reason == "row"
        self.discarded[prompt] = reason
        del self.rows[group_id]

    def _batch_logged(self, version: int, group_ids: Sequence[str]) -> None:
        self._hold(
            version == self.version, f"a batch of version {version} is logged at version {self.version}", *group_ids
        )
        self._hold(version not in self.batches, f"the batch of version {version} is logged twice", *group_ids)
        self._hold(
            len(set(group_ids)) == self.batch_size,
            f"a batch has {len(set(group_ids))} groups, not {self.batch_size}",
            *group_ids,
        )
        for group_id in group_ids:
            row = self._row(group_id)
            self._hold(row.ready and row.started_at is not None, f"{group_id} is in a batch, but not ready", group_id)
            age = version - (row.started_at or 0)
            fresh = not self.bounds_groups or age <= self.bounds[group_id]
            self._hold(fresh, f"{group_id} is {age} versions old at version {version}", group_id)
        late = max(map(self.deadline, group_ids))
        leftovers = [name for name, row in self.rows.items() if row.ready and name not in group_ids]
        if overtaken := [name for name in leftovers if self.deadline(name) < late]:
            raise Violation(f"{overtaken} have earlier deadlines than the batch of version {version}", *overtaken)
        self.batches[version] = tuple(group_ids)
        self.masks[version] = max(0, version - self.max_staleness)

    def _committed(self, version: int) -> None:
        self._hold(version == self.version, f"version {version} is committed at version {self.version}", f"{version}")
        for group_id in self.batches[version]:
            prompt = self.rows.pop(group_id).prompt
            self._hold(prompt not in self.trained, f"prompt {prompt} is trained twice", group_id)
            self.trained[prompt] = version
        late = self.policy[1] < version
        self._hold(not late, f"version {version + 1} is committed, but the newest published policy is {self.policy}")
        self.version += 1

    def _checkpoint_saved(self, version: int, folder: str) -> None:
        self._hold(
            self.checkpoint < version <= self.version,
            f"a checkpoint of version {version} is saved after one of {self.checkpoint}, at version {self.version}",
            folder,
        )
        self.checkpoint = version

    def _stepped(self, **_: Any) -> None:
        self.pasts[self.version] = deepcopy(replace(self, pasts={}))

    def _rolled_back(self, version: int, spooled: Collection[str]) -> None:
        """The run goes back to a version: what was not decided then is open again."""
        past, now = deepcopy(self.pasts[version]), self.discarded
        for name in GOES_BACK:
            setattr(self, name, getattr(past, name))
        for group, row in list(self.rows.items()):
            deleted = now.get(row.prompt) in BY_USERS
            if not row.ready or group not in spooled or deleted:
                del self.rows[group]
                if row.session:
                    lost = LOST_WITH_THE_SPOOL if row.ready else ROLLED_BACK
                    self.discarded[row.prompt] = "deleted" if deleted else lost
                else:
                    self.waiting.add(row.prompt)
        self.checkpoint = self.covered = version
        self.policies = {identity: folder for identity, folder in self.policies.items() if identity[1] <= version}
        self.evaluated = {
            **{evaluated: result for evaluated, result in self.evaluated.items() if evaluated <= version},
            **{held: False for held in self.holds.values() if 0 < held < version},
        }
        self.lost_version_0 = self.lost_version_0 or (0 in self.holds.values() and 0 not in self.evaluated)
        self.row_scores = {scored: rows for scored, rows in self.row_scores.items() if scored <= version}
        self.pasts = {earlier: book for earlier, book in self.pasts.items() if earlier <= version}
        self.members, self.holds, self.held_lineages, self.trainer = set(), {}, {}, ""

    def _checkpointed(self, version: int) -> None:
        self._hold(version <= self.checkpoint, f"steps before {version} are forgotten, which no checkpoint before has")
        self.covered = version

    def _lineage_opened(self, lineage: int, trainer: str) -> None:
        self._hold(lineage == self.lineage + 1, f"lineage {lineage} follows {self.lineage}", trainer)
        self.lineage, self.trainer = lineage, trainer

    def _published(self, policy: dict[str, Any]) -> None:
        identity, folder = (policy["lineage"], policy["version"]), policy["folder"]
        self._hold(identity not in self.policies, f"policy {identity} is published twice", folder)
        self._hold(
            policy["lineage"] == self.lineage, f"policy {identity} is published in lineage {self.lineage}", folder
        )
        self._hold(
            policy["version"] == self.version, f"policy {identity} is published at version {self.version}", folder
        )
        self.policies[identity] = folder

    def _member_changed(self, member: dict[str, Any]) -> None:
        identity, held = member["identity"], member["held"]
        hold = self.holds.pop(identity, None)
        if held is not None and self.evaluated.get(held["version"]):
            self._hold(self.serves_evaluated, f"{identity} holds {held['version']} after its evaluation", identity)
        elif held is not None:
            version = held["version"]
            self._hold(
                version in (hold, self.version, 0), f"{identity} begins to hold the old version {version}", identity
            )
            self._hold(not self.holds, f"{identity} holds a version at the same time as {self.holds}", identity)
            self.holds[identity], self.held_lineages[identity] = version, held["lineage"]
        elif hold == 0 and hold not in self.evaluated:
            self.lost_version_0 = True
        elif hold is not None:
            self._hold(
                hold in self.evaluated or hold == self.steps,
                f"the hold of {identity} ends, but version {hold} is neither evaluated nor abandoned",
                identity,
            )

    def _joined(self, member: dict[str, Any]) -> None:
        self.members.add(member["identity"])

    def _left(self, identity: str) -> None:
        self._hold(identity not in self.holds, f"{identity} leaves, but its hold has not ended", identity)
        self.members.discard(identity)

    def _rows_scored(self, version: int, rows: list[Any], **_: Any) -> None:
        self._hold(version not in self.evaluated, f"rows of version {version} are kept after its evaluation")
        row_scores = self.row_scores.setdefault(version, {})
        for row, _tokens, *scores in rows:
            self._hold(row not in row_scores, f"row {row} is scored twice at version {version}")
            row_scores[row] = scores

    def _evaluated(self, evaluation: dict[str, Any]) -> None:
        self._conclude(evaluation["version"], True)

    def _evaluation_dropped(self, version: int, reason: str) -> None:
        self._hold(bool(reason), f"the evaluation of version {version} is abandoned without a reason")
        self._conclude(version, False)

    def _conclude(self, version: int, result: bool) -> None:
        self._hold(version not in self.evaluated, f"the evaluation of version {version} ends twice")
        self.evaluated[version] = result

    def _row(self, group_id: str) -> Row:
        self._hold(group_id in self.rows, f"there is an event for {group_id}, which is not alive", group_id)
        return self.rows[group_id]

    def _hold(self, fact: bool, otherwise: str, *about: str) -> None:
        if not fact:
            raise Violation(otherwise, *about)
