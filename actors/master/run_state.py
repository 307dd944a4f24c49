"""The master's persistent state: the ledger, the members, the policy, and the progress of the run.

Each change is an event of the ledger or a `Change`. `RunState.emit` appends it to the journal and applies it. A new
`RunState` replays the journal. Only lease renewals are not journaled: a restarted master renews all leases, so that no
member loses a group because the master was absent.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from hashlib import blake2b
from itertools import zip_longest
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
from areal.base.fields import with_defaults
from areal.config import Config
from areal.data.history import History
from areal.data.prompt_sources import PromptSource
from areal.data.samplers import open_sampler, safe_choice
from areal.staleness.invariants import check_invariants
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_state import (
    BY_USERS,
    DELETED,
    LOST_WITH_THE_SPOOL,
    ROLLED_BACK,
    Admitted,
    Committed,
    Discarded,
    Event,
    LedgerSettings,
    LedgerState,
    Opened,
    Renewed,
    Requeued,
    event_of,
    event_record,
)
from areal.staleness.run_ahead import RunAhead
from areal.storage.journal import Journal
from areal.storage.run_folder import checkpoint_of
from protocols.evaluation_messages import EvaluationDone
from protocols.messages import Member, Policy, actor_name
from protocols.session_messages import Receipt

# Number of events after which a snapshot replaces them, or that of the rows in the snapshot if it is higher. It bounds
# the journal, and the replay at a restart.
COMPACT_EVENTS = 10_000
# Rewards of sessions that are known after they were taken, and sessions that are known after they were trained or
# deleted: whoever asks about one of the last hears so.
RECEIPTS = 10_000
# The attributes of `RunState` that a snapshot has as they are.
PLAIN = (
    "masters", "lineage", "trainer", "checkpoint_version", "checkpoint", "finished", "rewards", "reward_parts",
    "scored", "score", "seconds", "last_step", "tokens", "tokens_trained", "tokens_discarded",
    "rollbacks", "abandoning", "added_rewards", "receipts", "trained_sessions",
    "deleted_sessions", "tokens_sampled", "starts",
)  # fmt: skip


class RunState:
    """The master's state. If `journal` holds the events of an earlier master, they are replayed. source: the rows, from
    which the sampler chooses; without it none can be chosen, and `history` is that of the last snapshot."""

    def __init__(self, config: Config, journal: Journal, source: PromptSource | None = None) -> None:
        self.config = config
        self.journal = journal
        self.settings = LedgerSettings.of(config)
        self.ledger = Ledger(LedgerState(self.settings))
        self.run_ahead = RunAhead(config.batch_size, config.max_staleness)
        chooses = config.data.sampler != "shuffle" and config.steps > 0  # shuffle needs no history
        prompts = config.steps * config.batch_size
        self.history = History(source if chooses else None, config.seed, config.group_size, prompts)
        self._rows = None if source is None else source.rows
        self.masters, self.lineage, self.trainer = 0, -1, ""
        self.policy = Policy(lineage=0, version=0, folder=config.model)
        self.checkpoint_version = 0
        self.checkpoint: str | None = None
        self.finished: int | None = None
        # How often the run went back to a checkpoint; the version that it went back to, while files are to be moved.
        self.rollbacks, self.abandoning = 0, None
        # The first prompt, the name and the weight of each change, in order.
        self.added_rewards: list[tuple[int, str, float]] = []
        self.members: dict[str, Member] = {}
        self.starts: dict[str, int] = {}  # how often each actor has joined, by role/index
        self.evaluations: dict[int, EvaluationDone] = {}
        self.not_evaluated: dict[int, str] = {}
        # Version and conditions of an evaluation without a result yet, and the scores and tokens of each scored row.
        self._partial: tuple[int, str] | None = None
        self._row_scores: dict[int, tuple[list[float], int]] = {}
        self._conditions = _conditions_of(config)
        self.rewards: dict[str, float] = {}
        self.reward_parts: dict[str, dict[str, float]] = {}
        # Sampled tokens: of each group that is ready and not trained yet; of all trained groups; discarded tokens; and
        # all that generators have counted, up to the last step, without those of evaluations.
        self.tokens: dict[str, int] = {}
        self.tokens_trained = self.tokens_discarded = self.tokens_sampled = 0
        # Groups that became ready since the last step, also filtered: their number, and the sum of mean rewards.
        self.scored, self.score = 0, 0.0
        self.discarded: list[tuple[int, str]] = []
        # The group that became ready and what the reward gave, by the session's name and a mark of the reward; the last
        # group of a name by the name alone.
        self.receipts: dict[str, str] = {}
        # The name and the step of each session that was trained, by its group; the groups that users had deleted.
        self.trained_sessions: dict[str, tuple[str, int]] = {}
        self.deleted_sessions: dict[str, None] = {}
        self.seconds, self.last_step = 0.0, dict[str, Any]()
        self._new = deepcopy(self.dump())
        self._restore()
        self._find_folders()
        self.ledger.state.journal = self._ledger_event
        if chooses and source is not None:
            sampler = open_sampler(config.data, source)
            self.ledger.row_of_prompt = lambda prompt: safe_choice(config.data.sampler, sampler, self.history, prompt)

    @property
    def coverage(self) -> float | None:
        """The share of the rows of which a prompt was admitted; None if the data has no end."""
        if self.history.source is None and self._rows is not None:  # in an epoch each row comes once
            return min(1.0, self.ledger.state.prompts.next_prompt / self._rows)
        return self.history.coverage()

    def emit(self, change: Change) -> None:
        """Append a change to the journal and apply it."""
        self.journal.append(*change.record())
        self.apply(change)

    def rewards_of(self, prompt: int) -> dict[str, float]:
        """The weights of rewards that were changed for the prompt of this index."""
        return {name: weight for first, name, weight in self.added_rewards if first <= prompt}

    @property
    def reward_names(self) -> set[str]:
        """The rewards that the configuration names, and those that were added."""
        return {*self.config.rewards, *(name for _, name, _ in self.added_rewards)}

    @property
    def holder(self) -> tuple[Member, Policy] | None:
        """The generator that holds a policy until it is evaluated, and that policy; None if no generator does."""
        over = {*self.evaluations, *self.not_evaluated}
        holders = ((member, held) for member in self.members.values() if (held := member.held) is not None)
        return next(((member, held) for member, held in holders if held.version not in over), None)

    @property
    def unpublished(self) -> bool:
        """True if the last committed version is not published yet."""
        return self.policy.version < self.ledger.version

    def row_scores(self, version: int) -> Mapping[int, tuple[Sequence[float], int]]:
        """The scores and tokens of each row that is scored at this version, whose evaluation has no result yet."""
        return self._row_scores if self._partial == (version, self._conditions) else {}

    def keep_scores(self, version: int, rows: Mapping[int, tuple[Sequence[float], int]]) -> None:
        """Keep the scores of more rows. They replace those of another version, or of a run with other settings."""
        records = tuple((row, tokens, *scores) for row, (scores, tokens) in rows.items())
        self.emit(RowsScoredChange(version=version, conditions=self._conditions, rows=records))

    def compact_if_due(self) -> None:
        """If the journal is long, replace its events with a snapshot of the current state."""
        if self.journal.size >= max(COMPACT_EVENTS, len(self.history.rows)):
            self.journal.compact(self.dump())

    def go_back(self, past: dict[str, Any], spooled: Collection[str]) -> None:
        """Become the state `past`, which `dump` returned earlier. All actors have ended. Of the groups that were alive
        those remain that were ready, are `spooled`, and were not deleted by users since. Other rows are generated anew,
        and other sessions are discarded. Lineages and masters go on with their numbers, and evaluations of the versions
        that remain are kept."""
        now, version = self.dump(), past["ledger"]["version"]
        rows = [row | {"state": "ready"} if row["state"] == "batched" else row for row in past["ledger"]["groups"]]
        # Their samples in the spool may be of versions that are undone.
        waiting = [prompt | {"resumed": False} for prompt in past["ledger"]["requeued"]]
        lost_holds = [m.held.version for m in self.members.values() if m.held and 0 < m.held.version < version]
        scored = now["partial"] is not None and now["partial"][0] <= version
        deleted = [row["group_id"] for row in rows if row["group_id"] in self.deleted_sessions]
        self._partial, self._row_scores = None, {}
        self._load(
            past
            | {name: now[name] for name in ("masters", "lineage", "partial", "row_scores", "tokens_sampled", "starts")}
            | {
                "ledger": past["ledger"] | {"steps": [], "batch": None, "groups": rows, "requeued": waiting},
                "policy": Policy(lineage=0, version=0, folder=self.config.model).model_dump(),
                "members": [],
                "trainer": "",
                "finished": None,
                "partial": now["partial"] if scored else None,
                "checkpoint_version": version,
                "checkpoint": str(checkpoint_of(self.config.folder, version)),
                "evaluations": [row for row in now["evaluations"] if row["version"] <= version],
                "not_evaluated": [row for row in now["not_evaluated"] if row[0] <= version]
                + [(held, ROLLED_BACK) for held in lost_holds],
                "deleted_sessions": dict.fromkeys([*past.get("deleted_sessions", ()), *deleted]),
                "rollbacks": now["rollbacks"] + 1,
                "abandoning": version,
            }
        )
        for row in rows:
            if row["state"] != "ready" or row["group_id"] not in spooled or row["group_id"] in deleted:
                lost = LOST_WITH_THE_SPOOL if row["state"] == "ready" else ROLLED_BACK
                reason = DELETED if row["group_id"] in deleted else lost
                of_row: Event = Requeued(row["group_id"], reason, failed=False)
                event = Discarded(row["group_id"], reason) if row["session"] else of_row
                self._follow(event)
                self.ledger.state.apply(event)
        check_invariants(self.ledger.state)

    def become_fork(self, parent: "RunState", past: dict[str, Any], *, keeps_history: bool) -> None:
        """Become, as a new run does, the state `past` of another run, whose newest state is `parent`. keeps_history: of
        the rows, which are the same."""
        history, run_ahead = self.history.dump(), self.run_ahead.dump()
        self._load(parent.dump())
        history = past.get("history", history) if keeps_history else history
        self.go_back(past | {"run_ahead": run_ahead, "history": history}, ())
        self.rollbacks, self.abandoning = parent.rollbacks, None
        self.tokens_sampled = past.get("tokens_sampled", 0)

    # --- the ledger's own events

    def _ledger_event(self, event: Event) -> None:
        if not isinstance(event, Renewed):
            self.journal.append(*event_record(event))
        self._follow(event)

    def _follow(self, event: Event) -> None:
        """Update the state outside the ledger for one of its events. Called before the ledger applies the event."""
        match event:
            case Admitted(prompt_index=prompt, row=row) if prompt == self.ledger.state.prompts.next_prompt:
                self.history.chosen(prompt, row)
            case Discarded(group_id, reason):
                group = self.ledger.state.groups.get(group_id)
                assert group is not None  # the ledger removes it only when it applies this event
                self.discarded.append((group.prompt_index, reason))
                if group.session and reason in BY_USERS:
                    self.deleted_sessions[group_id] = None
                    _shorten(self.deleted_sessions)
                self._drop(group_id)
            case Requeued(group_id):
                self._drop(group_id)
            case Opened(session=session):
                self.receipts.pop(session, None)
            case Committed(version):
                self._note_trained(version + 1)
            case LedgerSettings(steps=steps) if steps != self.ledger.state.settings.steps:
                self.not_evaluated.pop(steps, None)  # it is evaluated after all, as the last version

    def _note_trained(self, step: int) -> None:
        batch = self.ledger.state.steps.batch
        assert batch is not None  # it is committed now
        for group in map(self.ledger.state.groups.get, batch.group_ids):
            if group is not None and group.session:
                self.trained_sessions[group.group_id] = group.session, step
        _shorten(self.trained_sessions)

    def _drop(self, group: str) -> None:
        if group in self.rewards:
            self.receipts = {key: of for key, of in self.receipts.items() if of.partition(" ")[0] != group}
        self._forget_reward(group)
        self.tokens_discarded += self.tokens.pop(group, 0)

    def _forget_reward(self, group: str) -> None:
        self.rewards.pop(group, None)
        self.reward_parts.pop(group, None)

    # --- the changes outside the ledger

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
                self.deleted_sessions |= dict.fromkeys(groups)
                _shorten(self.deleted_sessions)
            case TokensDiscarded(count=count):
                self.tokens_discarded += count
            case Stepped():
                self._apply_stepped(change)
            case CheckpointSavedChange(version=version, folder=folder):
                self.checkpoint_version, self.checkpoint = version, folder
            case Evaluated(evaluation=evaluation):
                if evaluation.version not in (0, self.settings.steps):  # the summary shows samples of these two only
                    evaluation = evaluation.model_copy(update={"samples": ()})
                self.evaluations[evaluation.version] = evaluation
                self._forget_row_scores(evaluation.version)
            case EvaluationDropped(version=version, reason=reason):
                self.not_evaluated[version] = reason
                self._forget_row_scores(version)
            case RowsScoredChange():
                self._apply_rows_scored(change)
            case RewardAdded(prompt=prompt, name=name, weight=weight):
                self.added_rewards.append((prompt, name, weight))
            case Finished(version=version):
                self.finished = version
            case Abandoned():
                self.abandoning = None

    def _apply_rewarded(self, rewarded: Rewarded) -> None:
        self.scored, self.score = self.scored + 1, self.score + rewarded.mean
        self.rewards[rewarded.group], self.reward_parts[rewarded.group] = rewarded.mean, rewarded.parts
        self.tokens[rewarded.group] = rewarded.tokens
        self.tokens_discarded += rewarded.discarded
        shown = rewarded.model_dump(include={"mean", "spread", "signal", "version", "tokens"})
        if rewarded.row >= 0:  # a session has none
            self.history.finished(rewarded.row, **shown)
        group = self.ledger.state.groups.get(rewarded.group)
        if group is None:  # filtered
            self._drop(rewarded.group)
        elif group.session:
            self.receipts[group.session] = group.group_id
            for mark, gave in zip_longest(rewarded.marks, rewarded.gave, fillvalue=""):
                self.receipts[f"{group.session} {mark}"] = f"{group.group_id} {gave}"
            _shorten(self.receipts)

    def receipt(self, session: str, mark: str) -> Receipt | None:
        """That of the reward with this mark of a session with this name."""
        group, _, gave = self.receipts.get(f"{session} {mark}", "").partition(" ")
        return Receipt(group=group, gave=gave) if mark and group else None

    def _apply_rows_scored(self, scored: RowsScoredChange) -> None:
        if self._partial != (scored.version, scored.conditions):
            self._partial, self._row_scores = (scored.version, scored.conditions), {}
        self._row_scores |= {row: (scores, tokens) for row, tokens, *scores in scored.rows}

    def _forget_row_scores(self, version: int) -> None:
        if self._partial and self._partial[0] == version:
            self._partial, self._row_scores = None, {}

    def _apply_stepped(self, change: Stepped) -> None:
        self.last_step = step = change.metrics
        self.seconds += step["step_seconds"]
        self.tokens_sampled += step.get("tokens_generated", 0) - step.get("tokens_evaluated", 0)
        for group in change.groups:
            self._forget_reward(group)
            self.tokens_trained += self.tokens.pop(group, 0)
        self.discarded.clear()
        self.scored, self.score = 0, 0.0
        self.run_ahead.stepped(step["starved_seconds"], step["step_seconds"], step["groups_left_over"])

    # --- persistence

    def _restore(self) -> None:
        snapshot, events = self.journal.read()
        if snapshot:
            self._load(snapshot)
        for kind, body in events:
            with self.journal.version_errors(kind):
                event = event_of(kind, body)
                change = None if event else change_of(kind, body)
            if event:
                self._follow(event)
                self.ledger.state.apply(event)
            elif change:
                self.apply(change)

    def _find_folders(self) -> None:
        """The run folder may have been moved since the journal was written."""
        if self.checkpoint:
            self.checkpoint = str(checkpoint_of(self.config.folder, self.checkpoint_version))
        name = Path(self.policy.folder).name
        folder = str(self.config.weights_folder / name) if self.policy.version else self.config.model
        self.policy = self.policy.model_copy(update={"folder": folder})

    def dump(self) -> dict[str, Any]:
        """All state, fit for JSON, as a snapshot of the journal has it."""
        return {
            "ledger": self.ledger.state.dump(),
            "run_ahead": self.run_ahead.dump(),
            "policy": self.policy.model_dump(),
            "members": [member.model_dump() for member in self.members.values()],
            "evaluations": [evaluation.model_dump() for evaluation in self.evaluations.values()],
            "not_evaluated": list(self.not_evaluated.items()),
            "partial": self._partial,
            "row_scores": [[row, tokens, *scores] for row, (scores, tokens) in self._row_scores.items()],
            "discarded": self.discarded,
            "history": self.history.dump(),
            **{name: getattr(self, name) for name in PLAIN},
        }

    def _load(self, dump: dict[str, Any]) -> None:
        """Become the state that `dump` returned; what an earlier version did not know is as in a new run."""
        with self.journal.version_errors("the snapshot"):
            self._load_parts(with_defaults(dump, self._new))

    def _load_parts(self, dump: dict[str, Any]) -> None:
        self.ledger = Ledger(LedgerState.load(dump["ledger"]))
        self.run_ahead.load(dump["run_ahead"])
        self.policy = Policy.model_validate(dump["policy"])
        members = [Member.model_validate(member, strict=False) for member in dump["members"]]
        self.members = {member.identity: member for member in members}
        evaluations = [EvaluationDone.model_validate(evaluation, strict=False) for evaluation in dump["evaluations"]]
        self.evaluations = {evaluation.version: evaluation for evaluation in evaluations}
        self.not_evaluated = {version: reason for version, reason in dump["not_evaluated"]}
        if dump["partial"]:
            version, conditions = dump["partial"]
            self._apply_rows_scored(RowsScoredChange(version=version, conditions=conditions, rows=dump["row_scores"]))
        self.discarded = [(prompt, reason) for prompt, reason in dump["discarded"]]
        self.history.load(dump["history"])
        for name in PLAIN:
            setattr(self, name, dump[name])


def _shorten(entries: dict[str, Any]) -> None:
    """Forget the oldest entries beyond RECEIPTS."""
    while len(entries) > RECEIPTS:
        del entries[next(iter(entries))]


def _conditions_of(config: Config) -> str:
    """A digest of the settings under which rows are evaluated, as far as they may change when a run is resumed. Scores
    under different conditions do not make up one result."""
    evaluator, workflow = config.evaluator, config.rollout_manager
    settings = [evaluator.samples, evaluator.temperature, evaluator.top_p, workflow.workflow, workflow.workflow_options]
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
