"""The ledger's state: events, the rows that events change, and the transitions. `ledger.py` has the rules.

A group is admitted, becomes ready, enters a batch and is trained. A group may also leave earlier:

    prompt ──admit──▶ ADMITTED ──ready──▶ READY ──next_batch──▶ BATCHED ──commit──▶ gone (trained)
       ▲                 │                  │
       └──── requeue ────┴─── discard ──────┴──▶ gone (discarded, for a recorded reason)

    user ──open──▶ OPEN ──ready──▶ READY, or discarded

An OPEN group is a session of a user with the policy: a group of one sample without a row, ready once the reward has
come. If the owner of a session is lost, another owner may adopt the session.

These transitions cannot happen:

* A BATCHED group never leaves except by being trained.
* A READY group holds no lease, and is re-queued only if the run has gone back to a checkpoint and the payload is lost.
* A gone group never comes back. Its prompt can come back, in a group with a new id; a session cannot.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

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
DELETED = "deleted"
BY_USERS = DELETED, "opted out"


class GroupState(StrEnum):
    ADMITTED = "admitted"
    OPEN = "open"
    READY = "ready"
    BATCHED = "batched"


UNFINISHED = (GroupState.ADMITTED, GroupState.OPEN)


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """The settings that the ledger needs.

    As an event: the settings hold from here on. Earlier events are judged by the settings of their time. max_sessions:
    the most alive sessions; if it is as large as the limit of all groups, sessions alone are trained, and no rows.
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
        """Copies the ledger's settings from a `Config`, which uses the same names."""
        return cls(**{name: getattr(config, name) for name in cls.__slots__})

    @property
    def bounds_groups(self) -> bool:
        """True if rule 3 applies: no group is trained after the deadline."""
        return self.on_straggler in ("wait", "requeue")

    @property
    def sessions_alone(self) -> bool:
        return self.max_sessions >= self.batch_size * (self.max_staleness + 1)


def oldest_in_loss(on_straggler: str, max_staleness: int, version: int) -> int | None:
    """Return the oldest version with tokens in the loss of the batch trained at `version`; None: of all tokens."""
    return max(0, version - max_staleness) if on_straggler == "mask" else None


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
    """Sessions have another owner. owner: "" if their owner has left them; then they have no lease."""

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
    """The group left, and the prompt waits for a new group. `failed`: the departure counts towards `max_attempts`."""

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


def groups_of(event: Event) -> tuple[str, ...]:
    match event:
        case Renewed(group_ids) | OwnerChanged(group_ids) | BatchLogged(group_ids=group_ids):
            return tuple(group_ids)
        case LedgerSettings() | Committed() | Checkpointed():
            return ()
        case _:
            return (event.group_id,)


QueuePosition = tuple[int, int, str]
"""Deadline, prompt index (without a session's sign) and id of a group. At equal deadlines the lower index is first."""


@dataclass(frozen=True, slots=True)
class LedgerGroup:
    """A row of the ledger. `attempt`: earlier admissions of the prompt; `failures`: failed ones among them.
    `max_staleness`: the bound at admission, which stays when settings change. `resumed`: the previous attempt lost its
    lease, and its stored samples may be in this group. `row`: the training index of the prompt's row, the same for all
    attempts. `session`: the name of a session; empty for a group of a row. The n-th session: index and row -1 - n."""

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

    @property
    def deadline(self) -> int:
        """The last version that may train this group: the start version + the bound at admission. Until the start
        version is known, the version at admission replaces it."""
        return (self.admission_version if self.start_version is None else self.start_version) + self.max_staleness

    @property
    def position(self) -> QueuePosition:
        return self.deadline, abs(self.prompt_index), self.group_id


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups trained at `version`, in order. With `mask`, tokens of versions below `min_token_version` stay out of
    the loss; otherwise `min_token_version` is None."""

    version: int
    group_ids: tuple[str, ...]
    min_token_version: int | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step. `staleness`: i - s, `prompts`: the prompt index of each group, in the batch's order."""

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
    """A row's prompt that waits for admission. The next group has the number `attempt`; the first has number 0."""

    prompt_index: int
    row: int
    attempt: int = 0
    failures: int = 0
    resumed: bool = False


class LedgerError(Exception):
    """Raised for a command or event that no correct actor sends. The message ends with the group's story."""


class Lines:
    """The groups outside a batch, in a sorted line for each state, earliest deadline first."""

    def __init__(self) -> None:
        self._lines: dict[GroupState, list[QueuePosition]] = {state: [] for state in (*UNFINISHED, GroupState.READY)}

    def add(self, group: LedgerGroup) -> None:
        if group.state in self._lines:
            insort(self._lines[group.state], group.position)

    def remove(self, group: LedgerGroup) -> None:
        if group.state in self._lines:
            line = self._lines[group.state]
            del line[bisect_left(line, group.position)]

    def count(self, state: GroupState) -> int:
        return len(self._lines[state])

    def head(self, state: GroupState, n: int | None = None) -> list[str]:
        """Return the ids of the first n groups in this state; None: of all groups."""
        return [group_id for _, _, group_id in self._lines[state][:n]]

    def due(self, deadline: int) -> tuple[int, int, int]:
        """Return the numbers of ADMITTED, OPEN and READY groups with this deadline or an earlier deadline."""
        admitted, opened, ready = (bisect_left(line, (deadline + 1,)) for line in self._lines.values())
        return admitted, opened, ready

    def deadlines(self) -> list[int]:
        """Return the distinct deadlines, ascending: few, even for many groups."""
        deadlines: list[int] = []
        for line in self._lines.values():
            at = 0
            while at < len(line):
                deadlines.append(line[at][0])
                at = bisect_left(line, (deadlines[-1] + 1,), lo=at)
        return sorted(set(deadlines))

    def match(self, groups: Iterable[LedgerGroup]) -> bool:
        """True if the lines have exactly these groups, in order."""
        rows = list(groups)
        return all(line == sorted(row.position for row in rows if row.state is s) for s, line in self._lines.items())


class Groups:
    """The alive groups, in order of admission. `lines`: the groups outside a batch, by deadline. `sessions`: the number
    of alive sessions."""

    def __init__(self) -> None:
        self._rows: dict[str, LedgerGroup] = {}
        self.lines = Lines()
        self.sessions = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LedgerGroup]:
        return iter(self._rows.values())

    def __getitem__(self, group_id: str) -> LedgerGroup:
        return self._rows[group_id]

    def get(self, group_id: str) -> LedgerGroup | None:
        """The row of an alive group, else None."""
        return self._rows.get(group_id)

    def add(self, group: LedgerGroup) -> None:
        self._rows[group.group_id] = group
        self.sessions += bool(group.session)
        self.lines.add(group)

    def update(self, group_id: str, **changes: Any) -> None:
        group = self._rows[group_id]
        self.lines.remove(group)
        self._rows[group_id] = group = replace(group, **changes)
        self.lines.add(group)

    def remove(self, group_id: str) -> LedgerGroup:
        group = self._rows.pop(group_id)
        self.sessions -= bool(group.session)
        self.lines.remove(group)
        return group

    def are(self, group_ids: Iterable[str], *states: GroupState) -> bool:
        """True if `group_ids` is not empty, and each group is alive and in one of these states."""
        rows = [self._rows.get(group_id) for group_id in group_ids]
        return bool(rows) and all(row is not None and row.state in states for row in rows)

    def count(self, state: GroupState) -> int:
        """The number of groups in this state, any state but BATCHED."""
        return self.lines.count(state)

    def head(self, state: GroupState, n: int | None = None) -> list[LedgerGroup]:
        """Return the first n groups in this state, earliest deadline first; None: all groups."""
        return [self._rows[group_id] for group_id in self.lines.head(state, n)]

    def unbatched(self) -> list[LedgerGroup]:
        return [group for group in self if group.state is not GroupState.BATCHED]

    def leased(self, owner: str | None = None) -> list[LedgerGroup]:
        """Return the groups with a lease: of `owner`, or of all owners if `owner` is None."""
        return [group for group in self if group.lease_expires is not None and owner in (None, group.owner)]

    def of_session(self, name: str) -> list[LedgerGroup]:
        """Return the alive sessions of this name. Only the last may be open."""
        return [group for group in self if group.session == name]


class PromptQueue:
    """The prompts of rows for further groups: re-queued prompts first, then new prompts in order. `next_prompt`: the
    index of the first prompt without an admitted group. `next_session`: the number of opened sessions."""

    def __init__(self) -> None:
        self.requeued: deque[QueuedPrompt] = deque()
        self.next_prompt = self.next_session = 0

    def next_permit(self) -> tuple[str, int, int]:
        """The id, the prompt index and the attempt of the next group of a row."""
        prompt, attempt = self.next_prompt, 0
        if self.requeued:
            prompt, attempt = self.requeued[0].prompt_index, self.requeued[0].attempt
        return f"g{prompt}.{attempt}", prompt, attempt

    def take(self, prompt_index: int, row: int) -> QueuedPrompt:
        """Remove the first prompt. prompt_index, row: of the prompt if it is new."""
        if self.requeued:
            return self.requeued.popleft()
        self.next_prompt += 1
        return QueuedPrompt(prompt_index, row)

    def requeue(self, group: LedgerGroup, reason: str, failed: bool) -> None:
        resumed = reason in (LEASE_EXPIRED, RELEASED) or (reason == UNANSWERED and group.resumed)
        attempt, failures = group.attempt + 1, group.failures + failed
        self.requeued.append(QueuedPrompt(group.prompt_index, group.row, attempt, failures, resumed=resumed))


class Steps:
    """The steps that a restarted trainer has to redo: committed steps that no checkpoint covers. `batch`: logged for
    the next step, which is not committed."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self._records: dict[int, StepRecord] = {}
        self._groups: set[str] = set()  # of `_records`

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records.values())

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def get(self, version: int) -> StepRecord | None:
        return self._records.get(version)

    @property
    def versions(self) -> list[int]:
        return list(self._records)

    def keep(self, record: StepRecord) -> None:
        self._records[record.batch.version] = record
        self._groups.update(record.batch.group_ids)

    def forget_before(self, version: int) -> None:
        for step in [step for step in self._records if step < version]:
            self._groups.difference_update(self._records.pop(step).batch.group_ids)


class Room:
    """The room for more groups. It depends on the alive groups and the version, never on counters."""

    def __init__(self, state: "LedgerState") -> None:
        self._state = state

    @property
    def for_rows(self) -> int:
        """The number of groups of rows that may be admitted now, by rule 1, the remaining steps, and sessions."""
        alive, sessions = len(self._state.groups), self._state.groups.sessions
        limit = self.most_alive - self.most_sessions
        return max(0, min(self.most_alive - alive, limit - alive + sessions))

    @property
    def for_sessions(self) -> int:
        """The number of sessions that may be opened now."""
        alive, sessions = len(self._state.groups), self._state.groups.sessions
        return max(0, min(self.most_alive - alive, self.most_sessions - sessions))

    @property
    def most_alive(self) -> int:
        """The limit of rule 1, and at most the number of groups that the remaining steps can train."""
        settings = self._state.settings
        return settings.batch_size * min(settings.max_staleness + 1, settings.steps - self._state.version)

    @property
    def most_sessions(self) -> int:
        """The limit on sessions. Rows keep room for at least a batch, unless sessions alone are trained."""
        settings = self._state.settings
        if settings.sessions_alone:
            return self.most_alive
        return max(0, min(settings.max_sessions, self.most_alive - settings.batch_size))


class LedgerState:
    """The groups, prompts, batch and steps. Only events change them: `emit` hands an event to `journal`, and then
    `apply` makes the transition. If `journal` raises, nothing has changed.

    The memory in use is bounded by the alive groups and the re-queued prompts (together at most `(max_staleness + 1) *
    batch_size`), and by the group ids of the steps since the last checkpoint, for a restarted trainer to redo.
    """

    def __init__(self, settings: LedgerSettings, journal: Callable[[Event], None] | None = None) -> None:
        self.settings = settings
        self.journal = journal
        self.version = 0
        self.counters = Counters()
        self.groups = Groups()
        self.prompts = PromptQueue()
        self.steps = Steps()
        self.room = Room(self)
        self._story: deque[Event] = deque(maxlen=STORY_EVENTS)

    @property
    def batches_logged(self) -> int:
        """The number of steps with a fixed batch; the last step may not be committed yet."""
        return self.version + (self.steps.batch is not None)

    def min_version(self, group: LedgerGroup) -> int:
        """The lowest version that may sample the group (rule 2). `admission_only`, as in the paper, has no rule 2."""
        return 0 if self.settings.on_straggler == "admission_only" else group.admission_version

    def open_prompts(self) -> list[int]:
        """Return the indices of the admitted prompts that are neither trained nor discarded: alive or re-queued."""
        rows: list[LedgerGroup | QueuedPrompt] = [*self.groups, *self.prompts.requeued]
        return sorted(row.prompt_index for row in rows)

    def needs_payload(self, group_id: str) -> bool:
        """True if the trainer has to keep stored samples: the group is alive, in no checkpoint yet, or may go on."""
        if group_id in self.steps or self.groups.get(group_id):
            return True
        unfinished: list[LedgerGroup | QueuedPrompt] = [*self.groups.leased(), *self.prompts.requeued]
        return any(row.resumed and group_id.startswith(f"g{row.prompt_index}.") for row in unfinished)

    def emit(self, event: Event) -> None:
        """Make one transition, after the journal has the event. Raises LedgerError as `apply` does."""
        self._check(event)
        if self.journal is not None:
            self.journal(event)
        self._change(event)

    def apply(self, event: Event) -> None:
        """Make one transition. Raises LedgerError, and changes nothing, if the event does not fit the state."""
        self._check(event)
        self._change(event)

    def _change(self, event: Event) -> None:
        match event:
            case LedgerSettings():
                self.settings = event
            case Admitted() | Opened():
                self._admit(event)
            case OwnerChanged(group_ids, owner, lease_expires):
                for group_id in group_ids:
                    self.groups.update(group_id, owner=owner, lease_expires=lease_expires)
            case Renewed(group_ids, lease_expires):
                for group_id in group_ids:
                    self.groups.update(group_id, lease_expires=lease_expires)
            case Started(group_id, version):
                self.groups.update(group_id, start_version=version)
            case Ready(group_id, version):
                group = self.groups[group_id]
                reported = None if group.session else group.start_version  # users may have got a newer version
                start = version if reported is None else min(reported, version)
                self.groups.update(group_id, state=GroupState.READY, start_version=start, lease_expires=None)
            case Requeued(group_id, reason, failed):
                self.prompts.requeue(self.groups.remove(group_id), reason, failed)
                self.counters.requeued[reason] += 1
            case Discarded(group_id, reason):
                self.groups.remove(group_id)
                self.counters.discarded[reason] += 1
            case BatchLogged(version, group_ids):
                min_version = oldest_in_loss(self.settings.on_straggler, self.settings.max_staleness, version)
                self.steps.batch = Batch(version, tuple(group_ids), min_version)
                for group_id in group_ids:
                    self.groups.update(group_id, state=GroupState.BATCHED)
            case Committed():
                self._commit()
            case Checkpointed(version):
                self.steps.forget_before(version)
        if not isinstance(event, Renewed):
            self._story.append(event)

    def _admit(self, event: Admitted | Opened) -> None:
        if isinstance(event, Admitted):
            prompt = self.prompts.take(event.prompt_index, event.row)
            state, session = GroupState.ADMITTED, ""
        else:
            number = -1 - self.prompts.next_session
            prompt = QueuedPrompt(number, number)
            state, session = GroupState.OPEN, event.session
            self.prompts.next_session += 1
        group = LedgerGroup(
            group_id=event.group_id,
            prompt_index=prompt.prompt_index,
            row=prompt.row,
            attempt=prompt.attempt,
            failures=prompt.failures,
            owner=event.owner,
            lease_expires=event.lease_expires,
            admission_version=event.version,
            max_staleness=self.settings.max_staleness,
            state=state,
            resumed=prompt.resumed,
            session=session,
        )
        self.groups.add(group)
        self.counters.admitted += 1

    def _commit(self) -> None:
        batch = self.steps.batch
        assert batch is not None  # checked
        rows = [self.groups.remove(group_id) for group_id in batch.group_ids]
        starts = [row.start_version for row in rows if row.start_version is not None]
        staleness = tuple(self.version - start for start in starts)
        self.steps.keep(StepRecord(batch, staleness, tuple(row.prompt_index for row in rows)))
        self.counters.trained += len(rows)
        self.counters.sessions_trained += sum(bool(row.session) for row in rows)
        self.version += 1
        self.steps.batch = None

    def _check(self, event: Event) -> None:
        groups = self.groups
        match event:
            case LedgerSettings(batch_size, steps=steps):
                fits = batch_size == self.settings.batch_size and steps >= self.version
            case Admitted():
                fits = self.prompts.next_permit() == (event.group_id, event.prompt_index, event.attempt)
                fits = fits and event.version == self.version and self.room.for_rows > 0
            case Opened(group_id, session, version=version):
                fits = group_id == f"s{self.prompts.next_session}.0" and bool(session)
                fits = fits and version == self.version and self.room.for_sessions > 0
            case OwnerChanged(group_ids):
                fits = groups.are(group_ids, GroupState.OPEN)
            case Renewed() | Started() | Ready():
                fits = groups.are(groups_of(event), *UNFINISHED)
            case Requeued(group_id):
                fits = groups.are((group_id,), GroupState.ADMITTED, GroupState.READY)
                fits = fits and not groups[group_id].session
            case Discarded(group_id):
                fits = groups.are((group_id,), *UNFINISHED, GroupState.READY)
            case BatchLogged(version, group_ids):
                fits = version == self.version and self.steps.batch is None and groups.are(group_ids, GroupState.READY)
            case Committed(version):
                fits = version == self.version < self.settings.steps and self.steps.batch is not None
            case Checkpointed(version):
                fits = version <= self.version
        if not fits:
            raise self.error(f"{event} does not fit the state at version {self.version}", *groups_of(event))

    def error(self, problem: str, *group_ids: str) -> LedgerError:
        stories = [f"  {event}" for group_id in group_ids for event in self.story(group_id)]
        return LedgerError("\n".join([problem, *stories]))

    def story(self, group_id: str) -> list[Event]:
        """The recent events of a group, oldest first, without renewals of its lease."""
        return [event for event in self._story if group_id in groups_of(event)]
