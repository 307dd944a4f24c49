"""The master's persistent state: the ledger, the members, the policy, and the progress of the run.

Every change is an event of the ledger or a `Change`. `RunState.emit` appends a change to the journal and applies the
change. A new `RunState` replays the journal. Only lease renewals are not journaled: a restarted master renews all
leases, so no member loses a group to an absence of the master.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from actors.master.changes import (
    Abandoned,
    Change,
    CheckpointSavedChange,
    Evaluated,
    EvaluationDropped,
    Finished,
    Joined,
    Left,
    LineageOpened,
    MasterStarted,
    MemberChanged,
    PublishedChange,
    RewardAdded,
    Rewarded,
    RowsScoredChange,
    SessionsDeleted,
    Stepped,
    TokensDiscarded,
    change_of,
)
from actors.master.evaluation_results import EvaluationResults, conditions_of
from actors.master.session_records import SessionRecords
from areal.base.fields import with_defaults
from areal.config import Config
from areal.data.history import History
from areal.data.prompt_sources import PromptSource
from areal.data.samplers import open_sampler, safe_choice
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_records import event_of, event_record, snapshot_of, state_of
from areal.staleness.ledger_state import (
    BY_USERS,
    Admitted,
    Committed,
    Discarded,
    Event,
    LedgerSettings,
    LedgerState,
    Opened,
    Renewed,
    Requeued,
)
from areal.staleness.run_ahead import RunAhead
from areal.storage.journal import Journal
from areal.storage.run_folder import checkpoint_of
from protocols.membership_messages import Member, Policy, actor_name

# Number of events after which a snapshot replaces the events, or the number of rows in the snapshot if larger. The
# number bounds the journal, and the replay at a restart.
COMPACT_EVENTS = 10_000
# The attributes of `RunState` that a snapshot has unchanged.
PLAIN = (
    "masters", "lineage", "trainer", "checkpoint_version", "checkpoint", "finished",
    "seconds", "last_step", "rollbacks", "abandoning", "added_rewards", "starts",
)  # fmt: skip


@dataclass(slots=True)
class GroupTally:
    """The rewards and tokens of every group that is ready and not trained yet, and sums over groups.

    rewards, reward_parts: the mean reward of a group, and the mean of every part of the reward. tokens: the sampled
    tokens of a group. tokens_trained, tokens_discarded: sums over the run. tokens_sampled: sum of the generators'
    counts up to the last step, without tokens of evaluations. scored, score: the number of groups that became ready
    since the last step, filtered groups too, and the sum of their mean rewards. discarded: prompt and reason of every
    group discarded since the last step.
    """

    rewards: dict[str, float] = field(default_factory=dict)
    reward_parts: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    tokens_trained: int = 0
    tokens_discarded: int = 0
    tokens_sampled: int = 0
    scored: int = 0
    score: float = 0.0
    discarded: list[tuple[int, str]] = field(default_factory=list)

    def add(self, rewarded: Rewarded) -> None:
        """Add a group that became ready."""
        self.scored, self.score = self.scored + 1, self.score + rewarded.mean
        self.rewards[rewarded.group], self.reward_parts[rewarded.group] = rewarded.mean, rewarded.parts
        self.tokens[rewarded.group] = rewarded.tokens
        self.tokens_discarded += rewarded.discarded

    def drop(self, group: str) -> None:
        """Count the tokens of a group as discarded."""
        self._forget_reward(group)
        self.tokens_discarded += self.tokens.pop(group, 0)

    def train(self, groups: Iterable[str], step: Mapping[str, Any]) -> None:
        """Count the tokens of groups as trained, in a step with the metrics `step`. Begin the next step's counts."""
        self.tokens_sampled += step.get("tokens_generated", 0) - step.get("tokens_evaluated", 0)
        for group in groups:
            self._forget_reward(group)
            self.tokens_trained += self.tokens.pop(group, 0)
        self.discarded.clear()
        self.scored, self.score = 0, 0.0

    def _forget_reward(self, group: str) -> None:
        self.rewards.pop(group, None)
        self.reward_parts.pop(group, None)

    def dump(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def load(self, dump: Mapping[str, Any]) -> None:
        for part in fields(self):
            setattr(self, part.name, dump[part.name])
        self.discarded = [(prompt, reason) for prompt, reason in dump["discarded"]]


class RunState:
    """The master's state. Events of an earlier master in `journal` are replayed. source: the rows for the sampler;
    without rows no prompt can be chosen, and `history` comes from the last snapshot."""

    def __init__(self, config: Config, journal: Journal, source: PromptSource | None = None) -> None:
        self.config = config
        self.journal = journal
        self.settings = LedgerSettings.of(config)
        self.ledger = Ledger(LedgerState(self.settings))
        self.run_ahead = RunAhead(config.batch_size, config.max_staleness)
        chooses = config.data.sampler != "shuffle" and config.steps > 0  # shuffle needs no history
        prompts = config.steps * config.batch_size
        self.history = History(source if chooses else None, config.seed, config.group_size, prompts)
        self.rows = None if source is None else source.rows
        self.masters, self.lineage, self.trainer = 0, -1, ""
        self.policy = Policy(lineage=0, version=0, folder=config.model)
        self.checkpoint_version = 0
        self.checkpoint: str | None = None
        self.finished: int | None = None
        # The number of ways back to a checkpoint, and the version of the last way back while its files are to be moved.
        self.rollbacks, self.abandoning = 0, None
        # The first prompt, the name and the weight of every change, in order.
        self.added_rewards: list[tuple[int, str, float]] = []
        self.members: dict[str, Member] = {}
        self.starts: dict[str, int] = {}  # number of joins by role/index
        self.results = EvaluationResults(config.steps, conditions_of(config))
        self.tally = GroupTally()
        self.sessions = SessionRecords()
        self.seconds, self.last_step = 0.0, dict[str, Any]()
        self._new = deepcopy(self.dump())
        self._restore()
        self.ledger.state.journal = self._ledger_event
        if chooses and source is not None:
            sampler = open_sampler(config.data, source)
            self.ledger.row_of_prompt = lambda prompt: safe_choice(config.data.sampler, sampler, self.history, prompt)

    def emit(self, change: Change) -> None:
        """Append a change to the journal and apply the change."""
        self.journal.append(*change.record())
        self.apply(change)

    def rewards_of(self, prompt: int) -> dict[str, float]:
        """The weights of added rewards for the prompt `prompt`."""
        return {name: weight for first, name, weight in self.added_rewards if first <= prompt}

    @property
    def reward_names(self) -> set[str]:
        """The rewards of the configuration, and the added rewards."""
        return {*self.config.rewards, *(name for _, name, _ in self.added_rewards)}

    @property
    def unpublished(self) -> bool:
        """True if the last committed version is not published yet."""
        return self.policy.version < self.ledger.version

    def compact_if_due(self) -> None:
        """Replace the events of a long journal with a snapshot of the current state."""
        if self.journal.size >= max(COMPACT_EVENTS, len(self.history.rows)):
            self.journal.compact(self.dump())

    def _ledger_event(self, event: Event) -> None:
        if not isinstance(event, Renewed):
            self.journal.append(*event_record(event))
        self._follow(event)

    def replay(self, event: Event) -> None:
        """Apply an event of the ledger without writing the event into the journal."""
        self._follow(event)
        self.ledger.state.apply(event)

    def _follow(self, event: Event) -> None:
        """Update the state outside the ledger for the ledger's event, before the ledger applies the event."""
        groups = self.ledger.state.groups
        match event:
            case Admitted(prompt_index=prompt, row=row) if prompt == self.ledger.state.prompts.next_prompt:
                self.history.chosen(prompt, row)
            case Discarded(group_id, reason):
                group = groups.get(group_id)
                assert group is not None  # the ledger has not applied the event yet
                self.tally.discarded.append((group.prompt_index, reason))
                if group.session and reason in BY_USERS:
                    self.sessions.note_deleted([group_id])
                self._drop(group_id)
            case Requeued(group_id):
                self._drop(group_id)
            case Opened(session=session):
                self.sessions.receipts.pop(session, None)
            case Committed(version):
                batch = self.ledger.state.steps.batch
                assert batch is not None  # the event commits the batch
                self.sessions.note_trained(map(groups.get, batch.group_ids), version + 1)
            case LedgerSettings(steps=steps) if steps != self.ledger.state.settings.steps:
                self.results.not_evaluated.pop(steps, None)  # the version is evaluated after all, as the last version

    def _drop(self, group: str) -> None:
        if group in self.tally.rewards:
            self.sessions.drop_receipts(group)
        self.tally.drop(group)

    def apply(self, change: Change) -> None:
        match change:
            case MasterStarted():
                self.masters += 1
            case Joined(member=member):
                self.members[member.identity] = member
                name = actor_name(member.identity)
                self.starts[name] = self.starts.get(name, 0) + 1
            case MemberChanged(member=member):
                self.members[member.identity] = member
            case Left(identity=identity):
                del self.members[identity]
            case LineageOpened(lineage=lineage, trainer=trainer):
                self.lineage, self.trainer = lineage, trainer
            case PublishedChange(policy=policy):
                self.policy = policy
            case Rewarded():
                self._apply_rewarded(change)
            case SessionsDeleted(groups=groups):
                self.sessions.note_deleted(groups)
            case TokensDiscarded(count=count):
                self.tally.tokens_discarded += count
            case Stepped(metrics=step, groups=groups):
                self.last_step = step
                self.seconds += step["step_seconds"]
                self.tally.train(groups, step)
                self.run_ahead.stepped(step["starved_seconds"], step["step_seconds"], step["groups_left_over"])
            case CheckpointSavedChange(version=version, folder=folder):
                self.checkpoint_version, self.checkpoint = version, folder
            case Evaluated() | EvaluationDropped() | RowsScoredChange():
                self.results.apply(change)
            case RewardAdded(prompt=prompt, name=name, weight=weight):
                self.added_rewards.append((prompt, name, weight))
            case Finished(version=version):
                self.finished = version
            case Abandoned():
                self.abandoning = None

    def _apply_rewarded(self, rewarded: Rewarded) -> None:
        self.tally.add(rewarded)
        shown = rewarded.model_dump(include={"mean", "spread", "signal", "version", "tokens"})
        if rewarded.row >= 0:  # a session has none
            self.history.finished(rewarded.row, **shown)
        group = self.ledger.state.groups.get(rewarded.group)
        if group is None:  # filtered
            self._drop(rewarded.group)
        elif group.session:
            self.sessions.add_receipt(group.session, rewarded)

    def _restore(self) -> None:
        snapshot, events = self.journal.read()
        if snapshot:
            self.load(snapshot)
        for kind, body in events:
            with self.journal.version_errors(kind):
                event = event_of(kind, body)
                change = None if event else change_of(kind, body)
            if event:
                self.replay(event)
            elif change:
                self.apply(change)
        # The run folder may have been moved since the journal was written.
        if self.checkpoint:
            self.checkpoint = str(checkpoint_of(self.config.folder, self.checkpoint_version))
        name = Path(self.policy.folder).name
        folder = str(self.config.weights_folder / name) if self.policy.version else self.config.model
        self.policy = self.policy.model_copy(update={"folder": folder})

    def dump(self) -> dict[str, Any]:
        """All state, fit for JSON: a snapshot for the journal."""
        return {
            "ledger": snapshot_of(self.ledger.state),
            "run_ahead": self.run_ahead.dump(),
            "policy": self.policy.model_dump(),
            "members": [member.model_dump() for member in self.members.values()],
            "history": self.history.dump(),
            **self.results.dump(),
            **self.tally.dump(),
            **self.sessions.dump(),
            **{name: getattr(self, name) for name in PLAIN},
        }

    def load(self, dump: Mapping[str, Any]) -> None:
        """Become the state that `dump` returned. Fields that an earlier version did not know are as in a new run."""
        with self.journal.version_errors("the snapshot"):
            dump = with_defaults(dump, self._new)
            self.ledger = Ledger(state_of(dump["ledger"]))
            self.run_ahead.load(dump["run_ahead"])
            self.policy = Policy.model_validate(dump["policy"])
            members = [Member.model_validate(member, strict=False) for member in dump["members"]]
            self.members = {member.identity: member for member in members}
            self.history.load(dump["history"])
            self.results.load(dump)
            self.tally.load(dump)
            self.sessions.load(dump)
            for name in PLAIN:
                setattr(self, name, dump[name])
