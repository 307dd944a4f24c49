"""The ledger records the groups, bounds their age, and decides which are admitted and trained. The master owns it.

A group is admitted, becomes ready, enters a batch and is trained. It may also leave earlier:

    prompt ──admit──▶ ADMITTED ──ready──▶ READY ──next_batch──▶ BATCHED ──commit──▶ gone (trained)
       ▲                 │                  │
       └──── requeue ────┴─── discard ──────┴──▶ gone (discarded, for a recorded reason)

    user ──open──▶ OPEN ──ready──▶ READY, or discarded

With `filter_zero_signal`, a group that becomes ready without signal is discarded at once. An OPEN group is a session of
a user with the policy, a group of one sample without a row, which is ready once its reward has come. Nothing waits for
it: where a batch would, it is discarded as expired. If its owner is lost, another one may adopt it.

These transitions cannot happen:

* A BATCHED group never leaves except by being trained.
* A READY group holds no lease, and is re-queued only if the run has gone back to a checkpoint and its payload is lost.
* A group that is gone never comes back. Its prompt can come back, in a group with a new id; a session cannot.

`Ledger.validate` checks these invariants. docs/staleness.md states the rules 1 to 3 and contains the proof.

* At most `(max_staleness + 1) * batch_size` groups are alive (admitted and neither trained, re-queued nor discarded).
* With `wait` and `requeue`, the steps that are left before the deadlines have room for every alive group. Therefore
  every group trained at version i has i - s <= max_staleness, where s is its start version. This is the bound at its
  admission: the settings may change when a run is resumed.
* Every admitted prompt is alive, re-queued, trained once, or discarded for a recorded reason.

The ledger does no I/O and reads no clock: callers pass in the time. A command checks its arguments, hands its events to
the journal, and then applies them. Only `Ledger.apply` changes state, so replaying the journal rebuilds the ledger.
"""

import re
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self, cast, get_args

# Events kept for `story`: the last few transitions of every group of a large run (512 groups per batch, eta 8).
STORY_EVENTS = 10_000

LEASE_EXPIRED = "lease expired"
RELEASED = "released by its owner"
UNANSWERED = "its permit was not answered"
STRAGGLER = "straggler"
START_VERSION_FELL = "start version fell"
ZERO_SIGNAL = "zero signal"
ROLLED_BACK = "the run went back to a checkpoint"
LOST_WITH_THE_SPOOL = "lost with the spool"
EXPIRED = "expired"


class GroupState(StrEnum):
    ADMITTED = "admitted"
    OPEN = "open"
    READY = "ready"
    BATCHED = "batched"


UNFINISHED = (GroupState.ADMITTED, GroupState.OPEN)


class ReportAnswer(StrEnum):
    """What a report about a group changed. A report may be repeated, arrive late, or be overtaken by others."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    """The ledger knew this already, or the group is in a later state."""
    FILTERED = "filtered"
    """The report discarded the group, which became ready without signal."""
    GONE = "gone"
    """The group was never admitted, is no longer alive, or belongs to another owner. The caller drops its data."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """The settings that the ledger needs.

    As an event: these settings hold from here on. What happened earlier is judged by the settings of that time.
    max_sessions: the most sessions that are alive; as many as all groups: sessions alone are trained, and no rows.
    """

    batch_size: int
    max_staleness: int
    on_straggler: Literal["wait", "requeue", "mask", "admission_only"]
    steps: int
    max_attempts: int
    on_failed_sample: Literal["requeue", "discard"]
    filter_zero_signal: bool = False
    max_sessions: int = 0

    @classmethod
    def of(cls, config: Any) -> "LedgerSettings":
        """Those of a configuration, which has them by the same names."""
        return cls(**{name: getattr(config, name) for name in cls.__slots__})

    @property
    def bounds_groups(self) -> bool:
        """True if rule 3 applies: no group is trained after its deadline."""
        return self.on_straggler in ("wait", "requeue")

    @property
    def sessions_alone(self) -> bool:
        return self.max_sessions >= self.batch_size * (self.max_staleness + 1)


def oldest_in_loss(on_straggler: str, max_staleness: int, version: int) -> int | None:
    """The oldest version whose tokens are in the loss of the batch trained at `version`; None: all tokens are."""
    return max(0, version - max_staleness) if on_straggler == "mask" else None


# ------------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Admitted:
    group_id: str
    prompt_index: int
    attempt: int
    owner: str
    version: int
    lease_expires: float
    row: int
    """The training index of the row that was chosen for the prompt."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A session with the name `session` was admitted."""

    group_id: str
    session: str
    owner: str
    version: int
    lease_expires: float


@dataclass(frozen=True, slots=True)
class OwnerChanged:
    """Sessions have another owner; "": they were left by theirs, and have no lease."""

    group_ids: tuple[str, ...]
    owner: str
    lease_expires: float | None


@dataclass(frozen=True, slots=True)
class Renewed:
    group_ids: tuple[str, ...]
    lease_expires: float


@dataclass(frozen=True, slots=True)
class Started:
    group_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Ready:
    group_id: str
    start_version: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """The group left, and its prompt waits for a new group. `failed`: this counts towards `max_attempts`."""

    group_id: str
    reason: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Discarded:
    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class BatchLogged:
    version: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    version: int


@dataclass(frozen=True, slots=True)
class Checkpointed:
    version: int


Event = (
    LedgerSettings
    | Admitted
    | Opened
    | OwnerChanged
    | Renewed
    | Started
    | Ready
    | Requeued
    | Discarded
    | BatchLogged
    | Committed
    | Checkpointed
)

_KINDS: dict[type, str] = {
    event: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event.__name__).lower() for event in get_args(Event)
}
_EVENTS: dict[str, type] = {kind: event for event, kind in _KINDS.items()}


def event_record(event: Event) -> tuple[str, dict[str, Any]]:
    """Return the event as a kind (its class name in snake case) and a body fit for JSON."""
    return _KINDS[type(event)], _fields(event)


def event_of(kind: str, body: dict[str, Any]) -> Event | None:
    """Return the event of a record, which may have been through JSON; None if it is no event of the ledger."""
    return cast(Event, _EVENTS[kind](**_with_tuples(body))) if kind in _EVENTS else None


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def _with_tuples(body: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in body.items()}


# ----------------------------------------------------------------------------------------------------------- answers


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
class LedgerGroup:
    """A row of the ledger. `attempt` counts the earlier admissions of the prompt, `failures` those that failed.
    `max_staleness`: the bound at its admission, which holds for it whatever the settings become. `resumed`: the lease
    of the attempt before was lost, and the samples that are stored of it may be in this one. `row`: the training index
    of the row that was chosen for the prompt, the same for all attempts. `session`: the name of the session that it is;
    empty for a group of a row. The n-th session has the prompt index -1 - n, and that as its row."""

    group_id: str
    prompt_index: int
    row: int
    attempt: int
    failures: int
    owner: str
    lease_expires: float | None
    admission_version: int
    max_staleness: int
    start_version: int | None = None
    state: GroupState = GroupState.ADMITTED
    resumed: bool = False
    session: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups trained at `version`, in order. With `mask`, tokens of versions below `min_token_version` stay out of
    the loss; otherwise `min_token_version` is None."""

    version: int
    group_ids: tuple[str, ...]
    min_token_version: int | None


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


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step. `staleness` has i - s of each group and `prompts` its prompt index, in the batch's order."""

    batch: Batch
    staleness: tuple[int, ...]
    prompts: tuple[int, ...]

    @property
    def mean_staleness(self) -> float:
        return sum(self.staleness) / len(self.staleness)

    @property
    def max_staleness(self) -> int:
        return max(self.staleness)

    @property
    def staleness_histogram(self) -> list[int]:
        """The number of groups with staleness 0, 1, ... up to the highest in the batch."""
        return [self.staleness.count(age) for age in range(self.max_staleness + 1)]


@dataclass(slots=True)
class Counters:
    """Numbers of groups since the run began, `discarded` and `requeued` by reason: for reports, not for decisions."""

    admitted: int = 0
    trained: int = 0
    sessions_trained: int = 0
    discarded: Counter[str] = field(default_factory=Counter)
    requeued: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt of a row that waits to be admitted. Its next group has the number `attempt`, the first has number 0."""

    prompt_index: int
    row: int
    attempt: int = 0
    failures: int = 0
    resumed: bool = False


QueuePosition = tuple[int, int, str]
"""Deadline, prompt index (without a session's sign) and id of a group. Of one deadline the lower index is first."""


class LedgerError(Exception):
    """Raised for a command or event that no correct actor sends. The message ends with the group's story."""


def schedulable(deadlines: Iterable[int], version: int, batch_size: int) -> bool:
    """True if the steps `version`, `version + 1`, ..., with `batch_size` slots each, can train all groups in time.

    In time means at a step not later than the deadline. The k-th earliest deadline d needs k slots in the steps up to
    and including d: k <= batch_size * (d - version + 1).
    """
    return all(k <= batch_size * (d - version + 1) for k, d in enumerate(sorted(deadlines), 1))


class LedgerState:
    """The groups, prompts, batch and steps. They change only by `apply`.

    The memory in use is bounded by the alive groups and the re-queued prompts (together at most `(max_staleness + 1) *
    batch_size`), and by the group ids of the steps since the last checkpoint, which a restarted trainer has to redo.
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.version = 0
        self.counters = Counters()
        self._groups: dict[str, LedgerGroup] = {}  # in order of admission
        self._lines: dict[GroupState, list[QueuePosition]] = {state: [] for state in (*UNFINISHED, GroupState.READY)}
        self._requeued: deque[QueuedPrompt] = deque()
        self._next_prompt = self._next_session = 0
        self._sessions = 0  # that are alive
        self._batch: Batch | None = None  # logged for `version`, not committed
        self._steps: dict[int, StepRecord] = {}  # committed, not covered by a checkpoint
        self._redoable: set[str] = set()  # the groups of `_steps`
        self._story: deque[Event] = deque(maxlen=STORY_EVENTS)

    @classmethod
    def load(cls, dump: dict[str, Any]) -> Self:
        """Return the state that `dump` was made from. The dump may have been through JSON. The story starts empty."""
        ledger = cls(LedgerSettings(**dump["settings"]))
        ledger.version = dump["version"]
        ledger._next_prompt, ledger._next_session = dump["next_prompt"], dump["next_session"]
        ledger.counters = Counters(
            **dump["counters"] | {name: Counter(dump["counters"][name]) for name in ("discarded", "requeued")}
        )
        for row in dump["groups"]:
            ledger._put(LedgerGroup(**row | {"state": GroupState(row["state"])}))
            ledger._sessions += bool(row["session"])
        for prompt in dump["requeued"]:
            ledger._requeued.append(QueuedPrompt(**prompt))
        ledger._batch = None if dump["batch"] is None else Batch(**_with_tuples(dump["batch"]))
        for step in dump["steps"]:
            ledger._keep_step(
                StepRecord(Batch(**_with_tuples(step["batch"])), tuple(step["staleness"]), tuple(step["prompts"]))
            )
        return ledger

    def dump(self) -> dict[str, Any]:
        """Return all state except the story, fit for JSON. `load` restores it without the events so far."""
        return {
            "settings": _fields(self.settings),
            "version": self.version,
            "next_prompt": self._next_prompt,
            "next_session": self._next_session,
            "counters": _fields(self.counters)
            | {"discarded": dict(self.counters.discarded), "requeued": dict(self.counters.requeued)},
            "groups": [_fields(group) for group in self._groups.values()],
            "requeued": [_fields(prompt) for prompt in self._requeued],
            "batch": None if self._batch is None else _fields(self._batch),
            "steps": [_fields(step) | {"batch": _fields(step.batch)} for step in self._steps.values()],
        }

    @property
    def alive(self) -> int:
        """The number of groups that are admitted and neither trained, re-queued nor discarded."""
        return len(self._groups)

    @property
    def batches_logged(self) -> int:
        """The number of steps whose batches are fixed, the last of which may not be committed yet."""
        return self.version + (self._batch is not None)

    @property
    def capacity(self) -> int:
        """The number of groups of rows that may be admitted now: limited by rule 1, the steps left, and sessions."""
        limit = self._most_alive() - self._most_sessions()
        return max(0, min(self._most_alive() - self.alive, limit - self.alive + self._sessions))

    @property
    def session_capacity(self) -> int:
        """The number of sessions that may be opened now."""
        return max(0, min(self._most_alive() - self.alive, self._most_sessions() - self._sessions))

    @property
    def open_sessions(self) -> int:
        """The number of sessions that are alive and not ready yet."""
        return len(self._lines[GroupState.OPEN])

    @property
    def next_prompt(self) -> int:
        """The index of the first prompt of a row of which no group was admitted yet."""
        return self._next_prompt

    @property
    def next_session(self) -> int:
        """The number of sessions that were opened."""
        return self._next_session

    def group(self, group_id: str) -> LedgerGroup | None:
        """The row of an alive group, else None."""
        return self._groups.get(group_id)

    def deadline(self, group: LedgerGroup) -> int:
        """The last version that may train this group: its start version + the bound at its admission. The version at
        admission replaces the start version until that is known."""
        start = group.admission_version if group.start_version is None else group.start_version
        return start + group.max_staleness

    def story(self, group_id: str) -> list[Event]:
        """The recent events of a group, oldest first, without renewals of its lease."""
        return [event for event in self._story if group_id in _groups_of(event)]

    def _most_alive(self) -> int:
        """The limit of rule 1, and at most what the steps left can train. It uses the version, never counters."""
        settings = self.settings
        return settings.batch_size * min(settings.max_staleness + 1, settings.steps - self.version)

    def _most_sessions(self) -> int:
        """The limit on sessions. Beside them rows have room for a batch at least, unless there are only sessions."""
        if self.settings.sessions_alone:
            return self._most_alive()
        return max(0, min(self.settings.max_sessions, self._most_alive() - self.settings.batch_size))

    def _most_admitted(self) -> int:
        """How many groups can be alive that were admitted under these bounds, perhaps by other settings than now."""
        bound = max((group.max_staleness for group in self._groups.values()), default=0)
        return self.settings.batch_size * (bound + 1)

    def _min_version(self, group: LedgerGroup) -> int:
        """The lowest version that may sample the group (rule 2). `admission_only`, as in the paper, has no rule 2."""
        return 0 if self.settings.on_straggler == "admission_only" else group.admission_version

    def _fits(self, groups: Iterable[LedgerGroup]) -> bool:
        """True if the steps after the logged batch can train all `groups`, which are outside it, in time."""
        return schedulable(map(self.deadline, groups), self.batches_logged, self.settings.batch_size)

    def _fits_start(self, version: int) -> bool:
        """True if another group that starts with this version can be trained in time."""
        deadlines = [version + self.settings.max_staleness]
        if self.settings.bounds_groups:
            deadlines += map(self.deadline, self._unbatched())
        return schedulable(deadlines, self.batches_logged, self.settings.batch_size)

    def _leased(self) -> list[LedgerGroup]:
        return [group for group in self._groups.values() if group.lease_expires is not None]

    def _unbatched(self) -> list[LedgerGroup]:
        return [group for group in self._groups.values() if group.state is not GroupState.BATCHED]

    def apply(self, event: Event) -> None:
        """Make one transition. Raises LedgerError, without changing anything, if the event does not fit the state."""
        self._check(event)
        match event:
            case LedgerSettings():
                self.settings = event
            case Admitted():
                self._apply_admitted(event)
            case Opened():
                self._apply_opened(event)
            case OwnerChanged(group_ids, owner, lease_expires):
                for group_id in group_ids:
                    self._update(group_id, owner=owner, lease_expires=lease_expires)
            case Renewed(group_ids, lease_expires):
                for group_id in group_ids:
                    self._update(group_id, lease_expires=lease_expires)
            case Started(group_id, version):
                self._update(group_id, start_version=version)
            case Ready(group_id, version):
                group = self._groups[group_id]
                reported = None if group.session else group.start_version  # users may have got a newer version
                start = version if reported is None else min(reported, version)
                self._update(group_id, state=GroupState.READY, start_version=start, lease_expires=None)
            case Requeued(group_id, reason, failed):
                group = self._drop(group_id)
                lost = reason in (LEASE_EXPIRED, RELEASED) or (reason == UNANSWERED and group.resumed)
                self._requeued.append(
                    QueuedPrompt(
                        group.prompt_index, group.row, group.attempt + 1, group.failures + failed, resumed=lost
                    )
                )
                self.counters.requeued[reason] += 1
            case Discarded(group_id, reason):
                self._drop(group_id)
                self.counters.discarded[reason] += 1
            case BatchLogged():
                self._apply_batch_logged(event)
            case Committed():
                self._apply_committed()
            case Checkpointed(version):
                for step in [step for step in self._steps if step < version]:
                    self._redoable.difference_update(self._steps.pop(step).batch.group_ids)
        if not isinstance(event, Renewed):
            self._story.append(event)

    def _apply_admitted(self, event: Admitted) -> None:
        if self._requeued:
            prompt = self._requeued.popleft()
        else:
            prompt = QueuedPrompt(event.prompt_index, event.row)
            self._next_prompt += 1
        group = LedgerGroup(
            group_id=event.group_id,
            prompt_index=event.prompt_index,
            row=prompt.row,
            attempt=event.attempt,
            failures=prompt.failures,
            owner=event.owner,
            lease_expires=event.lease_expires,
            admission_version=event.version,
            max_staleness=self.settings.max_staleness,
            resumed=prompt.resumed,
        )
        self._put(group)
        self.counters.admitted += 1

    def _apply_opened(self, event: Opened) -> None:
        number = -1 - self._next_session
        self._put(
            LedgerGroup(
                group_id=event.group_id,
                prompt_index=number,
                row=number,
                attempt=0,
                failures=0,
                owner=event.owner,
                lease_expires=event.lease_expires,
                admission_version=event.version,
                max_staleness=self.settings.max_staleness,
                state=GroupState.OPEN,
                session=event.session,
            )
        )
        self._next_session += 1
        self._sessions += 1
        self.counters.admitted += 1

    def _apply_batch_logged(self, event: BatchLogged) -> None:
        min_token_version = oldest_in_loss(self.settings.on_straggler, self.settings.max_staleness, event.version)
        self._batch = Batch(event.version, tuple(event.group_ids), min_token_version)
        for group_id in event.group_ids:
            self._update(group_id, state=GroupState.BATCHED)

    def _apply_committed(self) -> None:
        assert self._batch is not None  # checked
        rows = [self._drop(group_id) for group_id in self._batch.group_ids]
        starts = [row.start_version for row in rows if row.start_version is not None]
        staleness = tuple(self.version - start for start in starts)
        self._keep_step(StepRecord(self._batch, staleness, tuple(row.prompt_index for row in rows)))
        self.counters.trained += len(rows)
        self.counters.sessions_trained += sum(bool(row.session) for row in rows)
        self.version += 1
        self._batch = None

    def _update(self, group_id: str, **changes: Any) -> None:
        group = self._groups[group_id]
        self._leave_line(group)
        self._put(replace(group, **changes))

    def _put(self, group: LedgerGroup) -> None:
        self._groups[group.group_id] = group
        if group.state in self._lines:
            insort(self._lines[group.state], self._position_of(group))

    def _drop(self, group_id: str) -> LedgerGroup:
        group = self._groups.pop(group_id)
        self._sessions -= bool(group.session)
        self._leave_line(group)
        return group

    def _leave_line(self, group: LedgerGroup) -> None:
        if group.state in self._lines:
            line = self._lines[group.state]
            del line[bisect_left(line, self._position_of(group))]

    def _position_of(self, group: LedgerGroup) -> QueuePosition:
        return self.deadline(group), abs(group.prompt_index), group.group_id

    def _keep_step(self, record: StepRecord) -> None:
        self._steps[record.batch.version] = record
        self._redoable.update(record.batch.group_ids)

    def _check(self, event: Event) -> None:
        match event:
            case LedgerSettings(batch_size, steps=steps):
                fits = batch_size == self.settings.batch_size and steps >= self.version
            case Admitted():
                fits = self._next_permit() == (event.group_id, event.prompt_index, event.attempt)
                fits = fits and event.version == self.version and self.capacity > 0
            case Opened(group_id, session, version=version):
                fits = group_id == f"s{self._next_session}.0" and bool(session)
                fits = fits and version == self.version and self.session_capacity > 0
            case OwnerChanged(group_ids):
                fits = self._all_in(group_ids, GroupState.OPEN)
            case Renewed() | Started() | Ready():
                fits = self._all_in(_groups_of(event), *UNFINISHED)
            case Requeued(group_id):
                fits = self._all_in((group_id,), GroupState.ADMITTED, GroupState.READY)
                fits = fits and not self._groups[group_id].session
            case Discarded(group_id):
                fits = self._all_in((group_id,), *UNFINISHED, GroupState.READY)
            case BatchLogged(version, group_ids):
                fits = version == self.version and self._batch is None and self._all_in(group_ids, GroupState.READY)
            case Committed(version):
                fits = version == self.version < self.settings.steps and self._batch is not None
            case Checkpointed(version):
                fits = version <= self.version
        if not fits:
            raise self._error(f"{event} does not fit the state at version {self.version}", *_groups_of(event))

    def _next_permit(self) -> tuple[str, int, int]:
        prompt, attempt = self._next_prompt, 0
        if self._requeued:
            prompt, attempt = self._requeued[0].prompt_index, self._requeued[0].attempt
        return f"g{prompt}.{attempt}", prompt, attempt

    def _all_in(self, group_ids: Iterable[str], *states: GroupState) -> bool:
        rows = [self._groups.get(group_id) for group_id in group_ids]
        return bool(rows) and all(row is not None and row.state in states for row in rows)

    def _error(self, problem: str, *group_ids: str) -> LedgerError:
        stories = [f"  {event}" for group_id in group_ids for event in self.story(group_id)]
        return LedgerError("\n".join([problem, *stories]))

    def validate(self) -> None:
        """Raise LedgerError if an invariant of the state machine is broken."""
        rows = self._groups.values()
        prompts = [row.prompt_index for row in rows] + [prompt.prompt_index for prompt in self._requeued]
        gone = self.counters.trained + self.counters.discarded.total()
        batched = [row.group_id for row in rows if row.state is GroupState.BATCHED]
        invariants = {
            "alive groups are within capacity": self.alive <= max(self._most_alive(), self._most_admitted()),
            "a prompt is alive or re-queued at most once": len(prompts) == len(set(prompts)),
            "no prompt is lost": self._next_prompt + self._next_session == len(prompts) + gone,
            "sessions are counted": self._sessions == sum(bool(row.session) for row in rows),
            "the batch equals the batched groups": set(batched) == set(self._batch.group_ids if self._batch else ()),
            "rows are consistent": all(map(self._is_sound, rows)),
            "the sorted lines match the rows": all(map(self._is_in_line, self._lines)),
            "every group fits before its deadline": not self.settings.bounds_groups or self._fits(self._unbatched()),
        }
        broken = [name for name, holds in invariants.items() if not holds]
        if broken:
            raise self._error(f"broken at version {self.version}: {'; '.join(broken)}", *self._groups)

    def _is_in_line(self, state: GroupState) -> bool:
        return self._lines[state] == sorted(self._position_of(r) for r in self._groups.values() if r.state is state)

    def _is_sound(self, row: LedgerGroup) -> bool:
        """True if exactly the unfinished groups have a lease, finished ones a start version, and versions are valid."""
        in_progress = row.state in UNFINISHED
        if (in_progress and row.owner != "") != (row.lease_expires is not None):
            return False
        if row.session == "" and row.state is GroupState.OPEN or row.session and row.state is GroupState.ADMITTED:
            return False
        if row.start_version is None:
            return in_progress
        return (
            row.resumed or row.session != "" or self._min_version(row) <= row.start_version
        ) and row.start_version <= self.version


class Ledger(LedgerState):
    """See the module. `journal` receives each event before it is applied; if `journal` raises, nothing has changed.
    `choose` returns the training index of the row for a new prompt, by default that of the prompt itself."""

    def __init__(self, settings: LedgerSettings, journal: Callable[[Event], None] | None = None) -> None:
        super().__init__(settings)
        self.journal = journal
        self.row_of_prompt: Callable[[int], int] = lambda prompt: prompt

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def ready_count(self) -> int:
        """The number of groups that are ready and not yet in a batch."""
        return len(self._lines[GroupState.READY])

    @property
    def covered(self) -> int:
        """The steps from this version on can be redone: no checkpoint is known to make that needless."""
        return min(self._steps, default=self.version)

    @property
    def ended(self) -> RunEnded | None:
        """Set once all steps are committed."""
        return RunEnded(self.version) if self.version == self.settings.steps else None

    @property
    def waiting(self) -> Waiting | None:
        """What the next batch waits for. None if it is logged, if it can be formed, or if the run has ended."""
        if self.ended or self._batch:
            return None
        waiting = self._waiting(self._choose())
        return None if waiting is None or self._may_abort(waiting) else waiting

    def alive_of(self, owner: str) -> list[str]:
        """The ids of the groups that `owner` holds leases of, in order of admission."""
        return [group.group_id for group in self._leased() if group.owner == owner]

    def session_groups(self, name: str) -> list[LedgerGroup]:
        """The sessions of this name that are alive, the last one last: it alone may be open."""
        return [group for group in self._groups.values() if group.session == name]

    def left_sessions(self) -> list[str]:
        """The ids of the open sessions that have no owner."""
        open_ids = [group_id for _, _, group_id in self._lines[GroupState.OPEN]]
        return [group_id for group_id in open_ids if not self._groups[group_id].owner]

    def open_prompts(self) -> list[int]:
        """The indices of the admitted prompts that are neither trained nor discarded: alive ones and re-queued ones."""
        rows: list[LedgerGroup | QueuedPrompt] = [*self._groups.values(), *self._requeued]
        return sorted(row.prompt_index for row in rows)

    def needs_payload(self, group_id: str) -> bool:
        """True if the trainer has to keep what it has of the group: it is alive, not in a checkpoint, or may go on."""
        if group_id in self._redoable or group_id in self._groups:
            return True
        unfinished: list[LedgerGroup | QueuedPrompt] = [*self._leased(), *self._requeued]
        return any(row.resumed and group_id.startswith(f"g{row.prompt_index}.") for row in unfinished)

    # ----------------------------------------------------------------------------------------------------- commands

    def change_settings(self, settings: LedgerSettings) -> None:
        """From here on, `settings` hold. Groups that are alive keep the bound of their admission. If more are alive
        than the new settings allow, none is admitted until enough of them have left; those for which there is no step
        any more are not trained, unless a later change adds steps. Raises LedgerError for fewer steps than are trained.
        """
        self._emit(settings)

    def admit(self, owner: str, n: int, now: float, lease_seconds: float) -> list[GroupPermit]:
        """Admit up to n groups, as many as `capacity` allows: re-queued prompts first, then new ones in order."""
        return [self._permit(owner, now + lease_seconds) for _ in range(min(n, self.capacity))]

    def open_session(
        self, session: str, owner: str, now: float, lease_seconds: float, served: int | None = None
    ) -> LedgerGroup | None:
        """Open a session with this name, if `session_capacity` allows it. served: the version that users get, if it is
        not the newest. It is the start version, if all alive groups can still be trained before their deadlines."""
        start = self.version if served is None else min(served, self.version)
        if not self.session_capacity or (start < self.version and not self._fits_start(start)):
            return None
        group_id = f"s{self._next_session}.0"
        self._emit(Opened(group_id, session, owner, self.version, now + lease_seconds))
        if start < self.version:
            self._emit(Started(group_id, start))
        return self._groups[group_id]

    def adopt(self, group_ids: Iterable[str], owner: str, now: float, lease_seconds: float) -> list[LedgerGroup]:
        """Give those of these sessions to `owner` that their owner has left. Returns them."""
        orphans = tuple(group_id for group_id in group_ids if group_id in self.left_sessions())
        if orphans:
            self._emit(OwnerChanged(orphans, owner, now + lease_seconds))
        return [self._groups[group_id] for group_id in orphans]

    def renew(self, owner: str, group_ids: Iterable[str], now: float, lease_seconds: float) -> list[str]:
        """Extend the leases of `owner`. Returns the groups that it no longer owns; the owner has to abort them."""
        owned: list[str] = []
        lost: list[str] = []
        for group_id in group_ids:
            (owned if self._owned(group_id, owner) else lost).append(group_id)
        self._renew(owned, now + lease_seconds)
        return lost

    def renew_all(self, now: float, lease_seconds: float) -> None:
        """Extend all leases. The master does this after its restart, so that its downtime lets no lease expire."""
        self._renew(self._groups, now + lease_seconds)

    def started(self, group_id: str, owner: str, version: int) -> ReportAnswer:
        """Report `version`, the lowest version that has sampled the first token of any of the group's samples.

        Report it once every sample has begun. A later report of a lower version moves the deadline earlier. With `wait`
        and `requeue` it is accepted only if all alive groups can still be trained before their deadlines; otherwise
        this attempt fails and the answer is GONE.
        Raises LedgerError for a version below the permit's `min_version` or above the current one.
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
        """Ask which stored samples of earlier attempts may be in the group. `versions`: the oldest version in each.

        Returns the oldest version that may be in it; None if the group may have none, as it is not `resumed`, is
        finished or gone. If that is below the version at its admission, it becomes the start version: the lowest of
        `versions` with which all alive groups can still be trained before their deadlines.
        """
        group = self._groups.get(group_id)
        if group is None or not group.resumed or group.state is not GroupState.ADMITTED:
            return None
        for version in sorted(set(versions)):
            if version >= self._oldest_start(group):
                break
            if not self._breaks_schedule(group, version):
                self._emit(Started(group_id, version))
                return version
        return self._oldest_start(group)

    def ready(self, group_id: str, start_version: int, signal: bool = True) -> ReportAnswer:
        """Report that the trainer has spooled the group. `start_version`: the lowest version of its sampled tokens.
        `signal`: whether the rewards of its samples differ.

        On GONE and FILTERED the trainer drops the payload. On UNCHANGED it keeps the payload that it has (this can also
        be a trained group that no checkpoint covers yet). Raises LedgerError under the same conditions as `started`.
        """
        group = self._groups.get(group_id)
        if group is None:
            return ReportAnswer.UNCHANGED if group_id in self._redoable else ReportAnswer.GONE
        if group.state not in UNFINISHED:
            return ReportAnswer.UNCHANGED
        self._check_start(group, start_version)
        if self.settings.filter_zero_signal and not signal and not group.session:
            self._emit(Discarded(group_id, ZERO_SIGNAL))
            return ReportAnswer.FILTERED
        return self._accept_start(group, Ready(group_id, start_version), start_version)

    def failed(self, group_id: str, owner: str, reason: str, counts: bool = True) -> ReportAnswer:
        """Report that the group cannot be finished. `reason` is one of a few categories; groups are counted by reason,
        here and in `discard`. `counts`: whether this counts as a failure of the prompt."""
        group = self._owned(group_id, owner)
        if group is None:
            return ReportAnswer.GONE
        if group.state not in UNFINISHED:
            return ReportAnswer.UNCHANGED
        if not counts:
            self._return_leases([group], reason)
        elif self.settings.on_failed_sample == "discard":
            self._emit(Discarded(group_id, reason))
        else:
            self._fail(group, reason)
        return ReportAnswer.ACCEPTED

    def discard(self, group_id: str, reason: str) -> ReportAnswer:
        """Discard the group; its prompt is not trained. A logged batch never changes: LedgerError for its groups."""
        if group_id not in self._groups:
            return ReportAnswer.GONE
        self._emit(Discarded(group_id, reason))
        return ReportAnswer.ACCEPTED

    def expire(self, now: float) -> list[str]:
        """Re-queue the prompts of groups whose lease has expired. This does not count as a failure of the group.
        Sessions stay open without an owner, here and in `release`."""
        silent = [g for g in self._leased() if g.lease_expires is not None and g.lease_expires <= now]
        return self._return_leases(silent, LEASE_EXPIRED)

    def release(self, owner: str) -> list[str]:
        """Re-queue the prompts of all groups leased by `owner`, which has left or is known to be dead."""
        return self._return_leases([self._groups[group_id] for group_id in self.alive_of(owner)], RELEASED)

    def withdraw(self, owner: str, group_ids: Collection[str]) -> list[str]:
        """Re-queue the prompts of groups that were admitted for `owner`, which was not given the permits."""
        unknown = [group for group in self._leased() if group.owner == owner and group.group_id in group_ids]
        return self._return_leases(unknown, UNANSWERED)

    def next_batch(self, version: int) -> Batch | Waiting | RunEnded:
        """Return the batch to train at `version`. The first answer with a batch logs it; it never changes afterwards.

        For an earlier version, return the batch that was trained then, so that a restarted trainer can redo it. Raises
        LedgerError for a later version, or one that a checkpoint covers.
        """
        if version != self.version:
            return self._committed(version).batch
        if ended := self.ended:
            return ended
        if self._batch is None:
            for group in self._overdue():
                self._emit(Discarded(group.group_id, EXPIRED))
            chosen = self._choose()
            waiting = self._waiting(chosen)
            if waiting and not self._may_abort(waiting):
                return waiting
            for group_id in waiting.stragglers if waiting else ():
                self._fail(self._groups[group_id], STRAGGLER)
            self._emit(BatchLogged(version, tuple(group.group_id for group in chosen)))
            assert self._batch is not None  # logged just now
        return self._batch

    def commit(self, version: int) -> StepRecord:
        """Record that the batch of `version` is trained. A repeated call returns the same record.

        Raises LedgerError for a version whose batch is not logged, or that a checkpoint covers.
        """
        if version == self.version:
            self._emit(Committed(version))
        return self._committed(version)

    def checkpointed(self, version: int) -> ReportAnswer:
        """Record that the steps before `version`, of a checkpoint, are never redone. The ledger forgets them."""
        if version <= self.version and not any(step < version for step in self._steps):
            return ReportAnswer.UNCHANGED
        self._emit(Checkpointed(version))
        return ReportAnswer.ACCEPTED

    # ---------------------------------------------------------------------------------------------------- decisions

    def _choose(self) -> list[LedgerGroup]:
        """Up to B ready groups, earliest deadline first."""
        return self._head(GroupState.READY, self.settings.batch_size)

    def _head(self, state: GroupState, n: int) -> list[LedgerGroup]:
        return [self._groups[group_id] for _, _, group_id in self._lines[state][:n]]

    def _waiting(self, chosen: list[LedgerGroup]) -> Waiting | None:
        needed = self.settings.batch_size
        if len(chosen) < needed:
            stragglers = [group for state in UNFINISHED for group in self._head(state, needed - len(chosen))]
        else:
            stragglers = self._stragglers(chosen)
            if not stragglers:
                return None
        return Waiting(self.version, self.ready_count, needed, tuple(group.group_id for group in stragglers))

    def _stragglers(self, chosen: list[LedgerGroup]) -> list[LedgerGroup]:
        """The unfinished groups of rows because of which rule 3 forbids training `chosen` now, earliest deadline first.
        Without these groups and the sessions that are `_overdue` rule 3 holds."""
        return self._head(GroupState.ADMITTED, self._in_excess(chosen)[0])

    def _overdue(self) -> list[LedgerGroup]:
        """The open sessions without which the next batch can be formed, and with which it cannot, earliest deadline
        first: as few as necessary, and none as long as the batch waits for groups of rows."""
        chosen = self._choose()
        if len(chosen) < (needed := self.settings.batch_size):
            if self.settings.sessions_alone:
                return []
            rows = len(chosen) + len(self._lines[GroupState.ADMITTED]) + self.capacity
            return self._head(GroupState.OPEN, max(0, needed - rows))
        stragglers, sessions = self._in_excess(chosen)
        return [] if stragglers and self.settings.on_straggler == "wait" else self._head(GroupState.OPEN, sessions)

    def _in_excess(self, chosen: list[LedgerGroup]) -> tuple[int, int]:
        """How many unfinished groups of rows, and how many open sessions, those with the earliest deadlines, have to go
        or to finish so that rule 3 allows training `chosen` now. At each deadline sessions go first.

        If n groups too many would be left behind at some deadline, at least n unfinished groups have a deadline that
        early, because ready groups alone always satisfy rule 3. Without a bound, sessions go at their deadline.
        """
        if not self.settings.bounds_groups:
            return 0, bisect_left(self._lines[GroupState.OPEN], (self.version + 1,))
        named = sessions = 0
        for deadline in self._deadlines():
            due, due_sessions, due_ready = (bisect_left(line, (deadline + 1,)) for line in self._lines.values())
            left_behind = due + due_sessions - sessions + max(0, due_ready - len(chosen))
            excess = left_behind - max(0, self.settings.batch_size * (deadline - self.version))
            extra = max(0, min(excess, due_sessions - sessions))
            sessions, named = sessions + extra, max(named, excess - extra)
            if named > due:
                raise self._error(f"too many ready groups have deadline {deadline} or earlier for the steps left")
        return named, sessions

    def _deadlines(self) -> list[int]:
        """The distinct deadlines of groups outside a batch, ascending. There are few, even if there are many groups."""
        deadlines: list[int] = []
        for line in self._lines.values():
            at = 0
            while at < len(line):
                deadlines.append(line[at][0])
                at = bisect_left(line, (deadlines[-1] + 1,), lo=at)
        return sorted(set(deadlines))

    def _may_abort(self, waiting: Waiting) -> bool:
        return self.settings.on_straggler == "requeue" and waiting.ready >= waiting.needed

    def _permit(self, owner: str, lease_expires: float) -> GroupPermit:
        group_id, prompt_index, attempt = self._next_permit()
        row = self._requeued[0].row if self._requeued else self.row_of_prompt(prompt_index)
        self._emit(Admitted(group_id, prompt_index, attempt, owner, self.version, lease_expires, row))
        group = self._groups[group_id]
        return GroupPermit(group_id, prompt_index, group.row, attempt, self._min_version(group), group.resumed)

    def _oldest_start(self, group: LedgerGroup) -> int:
        """The lowest start version that may be reported of the group."""
        low = self._min_version(group)
        return low if group.start_version is None else min(low, group.start_version)

    def _check_start(self, group: LedgerGroup, version: int) -> None:
        low = self._oldest_start(group)
        if not low <= version <= self.version:
            raise self._error(f"start version {version} is not between {low} and {self.version}", group.group_id)

    def _accept_start(self, group: LedgerGroup, event: Started | Ready, version: int) -> ReportAnswer:
        if self._breaks_schedule(group, version):
            self._fail(group, START_VERSION_FELL)
            return ReportAnswer.GONE
        self._emit(event)
        return ReportAnswer.ACCEPTED

    def _breaks_schedule(self, group: LedgerGroup, version: int) -> bool:
        """True if `version` is below its deadline's start version, and leaves some group without a step."""
        if not self.settings.bounds_groups or version + group.max_staleness >= self.deadline(group):
            return False
        rows = [replace(g, start_version=version) if g is group else g for g in self._unbatched()]
        return not self._fits(rows)

    def _fail(self, group: LedgerGroup, reason: str) -> None:
        """Re-queue the prompt, or discard it after `max_attempts` failures. A session is discarded."""
        last = group.session or group.failures + 1 >= self.settings.max_attempts
        self._emit(Discarded(group.group_id, reason) if last else Requeued(group.group_id, reason, failed=True))

    def _return_leases(self, groups: list[LedgerGroup], reason: str) -> list[str]:
        orphans = [group.group_id for group in groups if group.session and reason in (LEASE_EXPIRED, RELEASED)]
        if orphans:
            self._emit(OwnerChanged(tuple(orphans), "", None))
        for group in groups:
            if group.session and group.group_id not in orphans:
                self._emit(Discarded(group.group_id, reason))
            elif not group.session:
                self._emit(Requeued(group.group_id, reason, failed=False))
        return [group.group_id for group in groups]

    def _renew(self, group_ids: Iterable[str], lease_expires: float) -> None:
        leased = tuple(i for i in group_ids if self._groups[i].lease_expires is not None)
        if leased:
            self._emit(Renewed(leased, lease_expires))

    def _owned(self, group_id: str, owner: str) -> LedgerGroup | None:
        group = self._groups.get(group_id)
        return group if group is not None and group.owner == owner else None

    def _committed(self, version: int) -> StepRecord:
        if version not in self._steps:
            steps = f"{min(self._steps)} to {max(self._steps)}" if self._steps else "none"
            raise LedgerError(f"no record of step {version}: the version is {self.version}, steps kept: {steps}")
        return self._steps[version]

    def _emit(self, event: Event) -> None:
        self._check(event)
        if self.journal is not None:
            self.journal(event)
        self.apply(event)


def _groups_of(event: Event) -> tuple[str, ...]:
    match event:
        case Renewed(group_ids) | OwnerChanged(group_ids) | BatchLogged(group_ids=group_ids):
            return tuple(group_ids)
        case LedgerSettings() | Committed() | Checkpointed():
            return ()
        case _:
            return (event.group_id,)
