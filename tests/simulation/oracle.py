"""The oracle: checks the invariants of the run during a simulation, from the events on disks, learners and the network.

The oracle keeps two books about the run, from the events in the master's journal: one of all events that the running
master has appended, and one of the events that are on disk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np

from areal.config import Config
from areal.config.engine_sections import SamplingConfig
from areal.data.rows import Row as DataRow
from areal.samples.table import SCORED, TOP, Generation
from areal.samples.trajectory import Group, Trajectory
from areal.staleness.invariants import check_invariants
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_records import snapshot_of
from areal.staleness.ledger_state import (
    EXPIRED,
    LEASE_EXPIRED,
    LOST_WITH_THE_SPOOL,
    RELEASED,
    START_VERSION_FELL,
    STRAGGLER,
    UNANSWERED,
    ZERO_SIGNAL,
)
from areal.storage.rollouts import Rollout
from areal.storage.saved_calls import SavedCall
from protocols.codec import Frame
from protocols.evaluation_messages import EvaluationDone
from protocols.messages import Message, Permits
from simulation.book import HOPELESS, RETRIED, Book, Row, Violation
from simulation.engines import (
    Files,
    SimTokenizer,
    Weights,
    are_of_one,
    are_whole,
    ends_right,
    is_doubtful,
    likely,
    logprobs_of,
    reward_of,
    serials_of,
    stem,
    taught,
    text_of,
    together,
)
from simulation.loop import WorldScheduler
from simulation.model import BRANCHING

# Differences between times, as floating-point numbers, that mean nothing.
ROUNDING = 1e-6
# Within so many virtual seconds of a publication, a generator that has nothing else to do begins to load it.
PROMPT_SECONDS = 0.1
# A generator may be reading one of so many versions before the newest one.
OLDER_VERSIONS = 3


class Oracle:
    """Watches one simulation, and calls `fail` with each violation.

    The master's answers are checked against the disk: all events that the handler of a request appended have to be
    committed before it is answered. `doubtful`: the share of steps whose metrics are beyond the guard's limits.
    """

    def __init__(
        self,
        config: Config,
        files: Files,
        scheduler: WorldScheduler,
        fail: Callable[[Violation], None],
        doubtful: float = 0.0,
    ) -> None:
        self.config = config
        self.files = files
        self.scheduler = scheduler
        self.fail = fail
        self.doubtful = doubtful
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.times: list[tuple[float, str]] = []
        """When each kind of event was appended, in order, also those that were lost then."""
        self.on_disk = 0
        self.fault, self.fault_until = "", -1.0
        """The last kind of fault, and until when it counts as one that is near."""
        self.pairs: Counter[str] = Counter()
        """How often each kind of event came near each kind of fault."""
        self.memory = self._book()
        self.disk = self._book()
        self.contents: list[bytes] = [stem(files.model.content)]
        self.results: dict[tuple[str, int], bytes] = {}
        """The whole contents of the weights that each writer has for each version."""
        self.ledger: Ledger | None = None
        self.spooled_samples: Callable[[str], Sequence[Trajectory] | None] = lambda group: ()
        """The samples of a group on the trainer's disk; None if it is not there."""
        self.calls: set[tuple[str, tuple[str, str, bytes]]] = set()
        self.stored_calls: Callable[[str], list[np.ndarray]] = lambda group: []
        """The tokens of each answer in a session that the trainer's disk has."""
        self.taken = 0
        """How often a user was told that a reward is taken."""
        self.clocks_jump = False
        """Whether clocks of this simulation jump, so that seconds by them count nothing."""
        self._told: dict[str, dict[str, np.ndarray]] = {}
        """What users were told in a session, by its group and the id of the call."""
        self._rewards: dict[str, float] = {}  # that users were told are taken, by group
        self._opened: dict[str, float] = {}  # when each session was
        self._deleted: set[str] = set()  # groups that users have had deleted
        self._erased: set[str] = set()  # and that were not trained before
        self.ways_back = 0
        self._marks: dict[tuple[str, str], str] = {}  # the group that was ready with a reward, by its session and mark
        self._tokens: dict[int, int] = {}  # that were trained at each version
        self._taught: dict[tuple[str, bytes], str] = {}  # the group in which an answer to a user was trained
        self.counted_after = 0
        """The version that the run has gone back to; the guard counts suspicious steps after it."""
        self._check_is_due = False
        self._samples: Counter[bytes] = Counter()  # digests of the samples that workflows made
        self._trained: dict[bytes, set[tuple[str, int]]] = {}  # by digest: where samples were trained
        self._tokenizer = SimTokenizer()
        self._branching = config.rollout_manager.workflow == BRANCHING
        self.scores_fail = False
        """Whether scores may fail, so that an evaluation may have none."""
        self.causes: Collection[str] | None = ()
        """What the faults of this simulation may make a group fail of; None: anything."""
        self.clock: Callable[[], float] = lambda: 0.0
        """The clock of the running master, which stands still while its process is suspended for long."""
        self._heard_at: dict[str, float] = {}  # when the master last heard of each member, by its clock
        self.disturbed_until = 0.0
        """Until this virtual time, faults or restarts may have kept messages from arriving."""
        self.spooled: Callable[[str], tuple[Mapping[str, int], Collection[str]]] = lambda trainer: ({}, ())
        """The groups in the spool of this trainer, each with the number of its samples, and those among them about
        which the master may still be asked."""
        self.samples_of: Callable[[int], Mapping[tuple[str, int], float]] = lambda prompt: {}
        """The samples of a prompt in the spool, by group and place, and when they were stored."""
        self._lost: set[int] = set()  # prompts whose last attempt has lost its lease
        self._resumed: dict[str, float] = {}  # when a group was admitted, if the attempt before has lost its lease
        self._found_at_start: set[str] = set()  # needless groups in the spool when the last trainer began
        self._begun: set[str] = set()  # groups of which a sample has begun
        self.has_calls: Callable[[str, int], bool] = lambda group, place: False
        """Whether calls of the unfinished sample of the group at this place are in the spool."""
        self.reused_tokens = 0
        """Tokens with which samples have begun whose calls were stored."""
        self._saved: set[bytes] = set()  # digests of the calls that were saved, each with its prompt and place
        self._seeds: dict[int, str] = {}  # of the engines that have started, and their processes
        self._needless: list[set[str]] = [set(), set()]  # in the spool at the last two checkpoints
        self.heard: Callable[[], None] = lambda: None
        """Called PROMPT_SECONDS after each publication that every generator could hear of."""
        self.busy: Callable[[float], str] = lambda seconds: ""
        """A member whose engine has worked on one thing for so long, and on what; empty if there is none."""

    def trainer_left(self, trainer: str) -> None:
        """A trainer that was told to leave, and had the time, has left: the next one has no step to redo."""
        version, saved = self.memory.version, self.memory.checkpoint
        if saved < version and not is_doubtful(self.contents[version], self.doubtful):
            self.fail(Violation(f"{trainer} left at version {version}, with a checkpoint of only {saved}", trainer))

    # --- the master's journal

    def master_starts(self, position: int, changes: list[tuple[str, dict[str, Any]]]) -> None:
        """A new master has read its journal: a snapshot of the first `position` events, and the events in `found`."""
        if position + len(changes) < self.on_disk:
            self.fail(
                Violation(f"{self.on_disk} events were on disk, but a new master found {position + len(changes)}")
            )
            return
        del self.events[position + len(changes) :]
        self.committed(len(self.events))
        self.memory = self._book()
        self._heard_at.clear()
        self._began = self.clock()
        self.ledger = None
        for kind, body in self.events:
            self._guard(self.memory.add, kind, body)
        for row in self.memory.rows.values():
            self._begin(row)

    def went_back(self, version: int, spooled: Collection[str]) -> None:
        """The run has gone back to a version, while no actor ran. Its spool has these groups."""
        body = {"version": version, "spooled": spooled}
        self.events.append(("rolled_back", body))
        self._guard(self.memory.add, "rolled_back", body)
        self.committed(len(self.events))
        del self.contents[version + 1 :]
        self.counted_after = version
        self.results = {key: content for key, content in self.results.items() if key[1] <= version}
        sessions = {group for group in self.memory.session_of if self.memory.is_taken(group)}
        self._marks = {key: group for key, group in self._marks.items() if group in sessions}
        self._tokens = {v: tokens for v, tokens in self._tokens.items() if v < version}
        for of_groups in (self._told, self._rewards):
            for group in of_groups.keys() - sessions:
                del of_groups[group]
        self._taught, self._deleted = {}, self._deleted & self.memory.session_of.keys()
        self._erased = {group for group in self._deleted if self.memory.prompt_of[group] not in self.memory.trained}
        self.ways_back += 1

    def appended(self, kind: str, body: dict[str, Any]) -> None:
        self.events.append((kind, body))
        self.times.append((self.scheduler.now, kind))
        if self.scheduler.now <= self.fault_until:
            self.pairs[f"{kind}/{self.fault}"] += 1
        match kind:
            case "ready":
                self._guard(self._check_ready, **body)
            case "owner_changed":
                self._guard(self._check_owners, **body)
            case "requeued" | "discarded":
                if body["reason"] != UNANSWERED:  # then nothing was done
                    change = self._lost.add if body["reason"] in (LEASE_EXPIRED, RELEASED) else self._lost.discard
                    change(self.memory.prompt_of[body["group_id"]])
                self._guard(self._check_reason, body["group_id"], body["reason"])
        self._guard(self.memory.add, kind, body)
        match kind:
            case "opened":
                self._begin(self.memory.rows[body["group_id"]])
                self._resumed[body["group_id"]], self._opened[body["group_id"]] = 0.0, self.scheduler.now
            case "admitted":
                row = self.memory.rows[body["group_id"]]
                row.granted = False
                self._begin(row)
                lost = body["prompt_index"] in self._lost
                self._resumed[body["group_id"]] = self.scheduler.now if lost else 0.0
            case "joined":
                self.heard_of(body["member"]["identity"])
            case "lineage_opened":
                self._found_at_start = self._needless_of(self.spooled(body["trainer"])[0])
            case "discarded" if body["reason"] == ZERO_SIGNAL:
                self._guard(self._check_filtered, body["group_id"])
            case "committed":
                self._guard(self._check_passed, body["version"] + 1)
            case "checkpoint_saved":
                self._guard(self._check_saved, **body)
                self._guard(self._check_dropped)
            case "published":
                self._guard(self._check_published, body["policy"])
                self._guard(self._check_spool)
                self.scheduler.call_at(self.scheduler.now + PROMPT_SECONDS, self._heard_of, self.scheduler.now)
            case "finished":
                self._guard(self._check_spool)
        if not self._check_is_due:
            self._check_is_due = True
            self.scheduler.call_next(self.check)

    def _begin(self, row: Row) -> None:
        row.admitted, row.leased = self.scheduler.now, self.clock()

    def _heard_of(self, when: float) -> None:
        if self.disturbed_until < when:
            self.heard()

    def _check_ready(self, group_id: str, start_version: int) -> None:
        """The group is on the trainer's disk, with tokens of this version and of none before. The master hears that a
        group has started before it hears that it is ready, unless messages were lost or late, or a sample that is not
        needed never started."""
        samples = self.spooled_samples(group_id)
        if samples is None:
            raise Violation(f"{group_id} is ready, but not on the trainer's disk", group_id)
        versions = [sample.versions[sample.sampled] for sample in samples]
        if start_version != min(int(column.min()) for column in versions):
            raise Violation(f"{group_id} is ready with start version {start_version}, but has {versions}", group_id)
        row = self.memory.rows.get(group_id)
        if row is None or row.session:
            return
        first = min(int(column[0]) for column in versions)  # the first token of a tree may be of a later call
        if row.started_at is not None and row.started_at > first and not self._branching:
            raise Violation(f"{group_id} was reported to start at version {row.started_at}, not {first}", group_id)
        if self._resumed[group_id] and group_id not in self._begun:  # all of it was stored
            return
        if row.started_at is None and row.admitted > self.disturbed_until and not self.config.oversample:
            raise Violation(f"{group_id} is ready, but the master was never told its start version", group_id)

    def _check_reason(self, group: str, reason: str) -> None:
        """Something of this simulation has made the group fail, or has ended its lease."""
        row = self.memory.rows.get(group)
        if row is None:
            return
        if row.session:
            age = self.scheduler.now - self._opened[group]
            too_old = self.clocks_jump or age >= self.config.gateway.session_seconds
            if reason == EXPIRED and not too_old and not self.memory.is_due(group):
                raise Violation(f"the session {group} has expired, although no step had to go on without it", group)
            if reason == "failed" and not self.causes:
                raise Violation(f"the session {group} is given up, but no fault has made it fail", group)
            return
        causes = {*RETRIED, *HOPELESS} if self.causes is None else set(self.causes)
        if self.memory.bounds_groups and row.started_at is not None:
            causes.add(START_VERSION_FELL)
        if self.config.on_straggler == "requeue":
            causes.add(STRAGGLER)
        if reason not in {*causes, ZERO_SIGNAL, LEASE_EXPIRED, RELEASED, UNANSWERED}:
            raise Violation(f"{group} is given up ({reason}), but no fault has made it fail", group)
        leased = self.clock() - row.leased
        if reason == LEASE_EXPIRED and leased < self.config.master.lease_seconds - ROUNDING:
            raise Violation(f"the lease of {group} ends {leased:.2f} s after it was renewed", group)
        if reason == UNANSWERED and row.granted:
            raise Violation(f"{group} is taken back, but its owner has its permit", group)
        if reason == RELEASED and row.owner in self.memory.members:  # the master does this only if nothing moves
            self.remedied(f"{group} is re-queued")

    def _check_owners(self, group_ids: Sequence[str], owner: str, lease_expires: float | None) -> None:
        for group in group_ids:
            row = self.memory.rows.get(group)
            if row and not owner and row.owner in self.memory.members:
                if self.clock() - row.leased < self.config.master.lease_seconds - ROUNDING:
                    self.remedied(f"{group} is taken from {row.owner}")
            elif row and owner:
                row.leased = self.clock()

    def heard_of(self, member: str) -> None:
        """The master hears of a member."""
        self._heard_at[member] = self.clock()

    def removed(self, reason: str) -> str:
        """The master has removed the member that left last, which is returned. Only time in which the master itself ran
        counts as silence."""
        identity: str = next(body["identity"] for kind, body in reversed(self.events) if kind == "left")
        silence = self.clock() - self._heard_at.pop(identity, self._began)
        if reason.startswith("silent") and silence < self.config.master.lease_seconds - ROUNDING:
            self.fail(Violation(f"{identity} is fenced as {reason}, but was heard {silence:.2f} s ago", identity))
        return identity

    def renewed(self, owner: str, groups: Collection[str]) -> None:
        """The master has renewed these leases, as far as the owner has them."""
        for group in groups:
            row = self.memory.rows.get(group)
            if row is not None and row.owner == owner:
                row.leased = self.clock()

    def _check_spool(self) -> None:
        """The spool has what a trainer needs now or after a restart, and nothing else."""
        groups, pending = self.spooled(self.memory.trainer)
        size = self.config.group_size
        complete = {group for group, samples in groups.items() if samples == self.memory.size(group, size)}
        if lost := self.memory.payloads - complete:
            raise Violation(f"the payloads of {sorted(lost)} are needed, but not in the spool", *lost)
        # A session may be deleted once it is ready, or be stored once more after its end: a checkpoint drops it.
        dropped = {group for group in complete | self._found_at_start if group not in self.memory.session_of}
        if surplus := self._needless_of(groups).intersection(dropped).difference(pending):
            raise Violation(f"the spool keeps {sorted(surplus)}, which nobody needs any more", *surplus)

    def _needless_of(self, spooled: Collection[str]) -> set[str]:
        """The groups in the spool that are not needed, nor alive, nor attempts with whose samples another one may go
        on."""
        book = self.memory
        unfinished = {row.prompt for name, row in book.rows.items() if not row.ready and self._resumed[name]}
        resumable = unfinished | (book.waiting & self._lost)
        needed = book.payloads.union(book.rows)
        return {group for group in spooled if group not in needed and book.prompt_of.get(group) not in resumable}

    def _check_dropped(self) -> None:
        """At a checkpoint the trainer drops what is needless, except for samples that arrive at the same time."""
        groups, pending = self.spooled(self.memory.trainer)
        earlier, last = self._needless
        needless = self._needless_of(groups)
        if surplus := (earlier & last & needless).difference(pending):
            raise Violation(f"the spool keeps samples of {sorted(surplus)} over two checkpoints", *surplus)
        self._needless = [last, needless]

    def stores_calls(self, group: str) -> None:
        """Calls of the group are stored: it may have ended, of which its gateway hears when it renews its leases."""
        for groups in self._needless:
            groups.discard(group)

    def begins(self, group: str, place: int) -> None:
        """A rollout manager begins to sample this place of the group."""
        self._begun.add(group)
        self._guard(self._check_begins, group, place)

    def _check_begins(self, group: str, place: int) -> None:
        row = self.memory.rows.get(group)
        if row is None or row.ready:
            return
        stored = self.samples_of(row.prompt)
        if (group, place) in stored:
            raise Violation(f"place {place} of {group} is sampled again, but its sample is stored", group)
        since = self._resumed.get(group, 0.0)
        if leftovers := [key for key, when in stored.items() if key[0] != group and when < since]:
            raise Violation(f"{group} is sampled, but {leftovers} are stored, and neither in it nor dropped", group)

    def saves(self, prompt: int, place: int, calls: Sequence[SavedCall]) -> None:
        """A rollout manager saves the calls so far of the sample of this prompt at this place."""
        self._saved.update(_digest_of_call(prompt, place, call) for call in calls)

    def goes_on(self, group: str, prompt: int, place: int, calls: Sequence[SavedCall]) -> None:
        """A rollout manager begins the sample at this place with these calls."""
        self._guard(self._check_goes_on, group, prompt, place, calls)

    def _check_goes_on(self, group: str, prompt: int, place: int, calls: Sequence[SavedCall]) -> None:
        self.reused_tokens += sum(len(call.sampled) for call in calls)
        if wrong := [call for call in calls if _digest_of_call(prompt, place, call) not in self._saved]:
            raise Violation(f"place {place} of {group} goes on with calls that it has not saved: {wrong}", group)
        if not calls and self.has_calls(group, place):
            raise Violation(f"place {place} of {group} begins anew, but calls of it are stored", group)

    def used(self, group: str, saved: Sequence[SavedCall]) -> None:
        """A sample is finished, of the calls that it began with but for these. The workflow `branching` does not make
        all of its calls again."""
        if saved and not self._branching:
            self.fail(Violation(f"a sample of {group} has not used what was saved of it: {saved}", group))

    def _check_filtered(self, group: str) -> None:
        credits = set().union(*map(credits_of, self.spooled_samples(group) or ()))
        if not self.config.filter_zero_signal or len(credits) != 1:
            raise Violation(f"{group} is filtered, although its tokens are credited with {credits}", group)

    def _check_passed(self, version: int) -> None:
        if self._is_stopped_at(version):
            raise Violation(f"version {version} is committed, although the guard should have stopped the run")

    def _check_published(self, policy: dict[str, Any]) -> None:
        weights, version = self.files.folders.get(policy["folder"]), policy["version"]
        right = weights is not None and stem(weights.content) == self.contents[version]
        # A trainer that has not computed this step itself has the weights of a checkpoint.
        content = self.results.get((weights.writer, version), weights.content) if weights else None
        if weights is None or not right or weights.content != content:
            raise Violation(f"{policy} is published, but its folder contains {weights}", policy["folder"])
        for (lineage, older), folder in self.memory.policies.items():
            still_read = lineage == policy["lineage"] and 0 < version - older <= OLDER_VERSIONS
            if still_read and folder not in self.files.folders:
                raise Violation(
                    f"{folder} is removed, though a generator may still read it at version {version}", folder
                )

    def _is_stopped_at(self, version: int) -> bool:
        """True if the guard has to stop the run at the step that leads to this version."""
        patience = self.config.guard.patience
        last = self.contents[max(1, version + 1 - patience, self.counted_after + 1) : version + 1]
        return len(last) == patience and all(is_doubtful(content, self.doubtful) for content in last)

    def _check_saved(self, version: int, folder: str) -> None:
        saved = self.files.folders.get(folder)
        if saved is None or stem(saved.content) != self.contents[version]:
            raise Violation(f"a checkpoint of version {version} is reported, but its folder contains {saved}", folder)
        suspicious = is_doubtful(self.contents[version], self.doubtful)
        if suspicious and version != self.config.steps:
            raise Violation(
                f"a checkpoint of version {version} is saved, although its step was beyond the guard's limits"
            )

    def committed(self, count: int) -> None:
        """The first `count` events of the run are on disk."""
        for kind, body in self.events[self.on_disk : count]:
            self._guard(self.disk.add, kind, body)
        self.on_disk = max(self.on_disk, count)

    def check(self) -> None:
        """Called after a callback that appended events: check the ledger's own invariants, and compare it with the
        book."""
        self._check_is_due = False
        if self.ledger is not None:
            self._guard(self.memory.check_members)
            self._guard(self._check_ledger, self.ledger)

    def _check_ledger(self, ledger: Ledger) -> None:
        try:
            check_invariants(ledger.state)
        except Exception as error:
            groups = dict.fromkeys(re.findall(r"\b[gs]\d+\.\d+", f"{error}"))
            raise Violation(f"the ledger violates an invariant: {error}", *groups) from error
        book = self.memory
        if ledger.version != book.version:
            raise Violation(f"the ledger is at version {ledger.version}, but its journal at {book.version}")
        if len(ledger.state.groups) != len(book.rows) or not all(map(ledger.state.groups.get, book.rows)):
            raise Violation(f"the ledger does not have the groups {list(book.rows)} that are alive by its journal")
        rooms = ledger.state.room.for_rows, ledger.state.room.for_sessions
        if rooms != book.rooms:
            raise Violation(
                f"the ledger has room for {rooms} groups of rows and sessions, but {book.rooms} may start: "
                f"{len(book.rows)} are alive at version {book.version}",
                *book.rows,
            )

    def look(self) -> None:
        """Compare the order of the ledger's groups with that in the book."""
        order = [row["group_id"] for row in snapshot_of(self.ledger.state)["groups"]] if self.ledger else []
        if self.ledger and order != list(self.memory.rows):
            self.fail(Violation(f"the ledger has the groups {order}, but its journal {list(self.memory.rows)}"))

    # --- what the master answers and publishes

    def answered(self, sender: str, kind: str, journaled: int, answer: Message) -> None:
        """The master is about to answer; `journaled`: number of events in the journal when the handler last added
        one."""
        if journaled > self.on_disk:
            lost = self.events[self.on_disk : journaled]
            self.fail(Violation(f"{kind} of {sender} is answered before {lost} is on disk", sender))
        if isinstance(answer, Permits):
            for permit in answer.permits:
                if row := self.memory.rows.get(permit.group):
                    row.granted = True
        policy = getattr(answer, "policy", None)
        if policy is None and hasattr(answer, "snapshot"):
            policy = answer.snapshot.policy
        if policy is not None:
            self._is_on_disk((policy.lineage, policy.version), sender)

    def published(self, frames: list[Frame]) -> None:
        """The master has published this event."""
        if msgpack.unpackb(frames[0])["kind"] == "policy_published":
            policy = msgpack.unpackb(frames[1])["policy"]
            self._is_on_disk((policy["lineage"], policy["version"]), "a subscriber")

    def _is_on_disk(self, policy: tuple[int, int], listener: str) -> None:
        if policy != (0, 0) and policy not in self.disk.policies:
            self.fail(Violation(f"the master tells {listener} of policy {policy}, which is not on disk", listener))

    # --- requests

    def called(self, process: str, call: tuple[str, str, bytes]) -> None:
        """A handler is called. Each incarnation of a server may handle a request (sender, id, token) only once."""
        if (process, call) in self.calls:
            self.fail(Violation(f"{process} handles request {call[1]} of {call[0]} twice", call[0]))
        self.calls.add((process, call))

    # --- learners (simulation.engines.Judge)

    def trained(self, writer: str, version: int, groups: Sequence[Group], mask_older_than: int | None) -> None:
        self._guard(self._check_training, writer, version, groups, mask_older_than)

    def _check_training(self, writer: str, version: int, groups: Sequence[Group], mask: int | None) -> None:
        ids = tuple(group.id for group in groups)
        logged = self.disk.batches.get(version)
        if ids != logged:
            raise Violation(f"{writer} trains {ids} at version {version}, but the logged batch is {logged}", *ids)
        if self.config.on_straggler == "mask" and mask != self.disk.masks[version]:
            raise Violation(f"{writer} masks tokens older than {mask} at version {version}", *ids)
        self._tokens[version] = sum(int(part.sampled.sum()) for group in groups for part in group.trajectories)
        for group in groups:
            session = self.disk.session_of.get(group.id)
            if len(group.trajectories) != self.disk.size(group.id, self.config.group_size):
                raise Violation(f"{group.id} has {len(group.trajectories)} samples", group.id)
            if session:
                self._check_session(group, session)
            elif self.config.filter_zero_signal and len(set().union(*map(credits_of, group.trajectories))) == 1:
                raise Violation(f"{group.id} is trained, but has no signal", group.id)
            row = None if session else self.disk.row_of[self.disk.prompt_of[group.id]]
            start = [] if session else self._tokenizer.encode(f"{row}", add_special_tokens=False)
            for place, part in enumerate(group.trajectories):
                if part.tokens[: len(start)].tolist() != start:
                    raise Violation(f"a sample of {group.id}, of row {row}, is {part.tokens}, not {start}", group.id)
                trained = self._trained.setdefault(_digest(part), set())
                trained.add((group.id, place))
                if _digest(part) not in self._samples:
                    raise Violation(f"a sample of {group.id} is trained that no workflow made: {part}", group.id)
                if len(trained) > self._samples[_digest(part)]:
                    raise Violation(f"a sample is trained at more than one place: {trained}", group.id)
                for sequence in part.sequences():
                    if not are_whole(sequence.tokens, sequence.sampled):
                        raise Violation(f"tokens of {group.id} are lost or repeated: {sequence.tokens}", group.id)
                    if wrong := self._wrong_columns(sequence):
                        raise Violation(
                            f"tokens of {group.id} do not have the {wrong} of their own: {sequence}", group.id
                        )
                self._check_labels(group.id, part)
            if self.config.reward.groups and not session:
                self._check_scores(group, f"{row}")
            age = version - group.start_version
            if self.memory.bounds_groups and age > self.memory.bounds[group.id]:
                raise Violation(f"{group.id} is {age} versions old when it is trained", group.id)

    def _check_session(self, group: Group, session: str) -> None:
        """The session has all that its user was told, and the reward that its user was told is taken."""
        (sample,) = group.trajectories
        if group.id in self._erased:
            raise Violation(f"{group.id} is trained, but its user was told that it is deleted", group.id)
        if abs(self._rewards.get(group.id, sample.reward) - sample.reward) > ROUNDING:
            rewards = self._rewards[group.id]
            raise Violation(
                f"{group.id} is trained with the reward {sample.reward}, but its user gave {rewards}", group.id
            )
        sampled = sample.tokens[sample.sampled].tobytes()
        for mark, tokens in self._told.get(group.id, {}).items():
            if tokens.tobytes() not in sampled:
                raise Violation(
                    f"{group.id} is trained without the answer {mark}, of which its user was told", group.id
                )
            self._taught.setdefault((session, tokens.tobytes()), group.id)
        for (name, answer), first in self._taught.items():
            if name == session and first != group.id and answer in sampled:
                raise Violation(f"an answer of {session} is trained in {first} and in {group.id}", group.id)

    def _wrong_columns(self, sequence: Trajectory) -> list[str]:
        """The columns of a sequence that are not what the scorer, which is to give them, gives its tokens."""
        teacher, top_k = self.config.trainer.teacher, self.config.trainer.teacher_top_k
        names = teacher, self.config.trainer.reference_scorer
        expected = [
            name and np.append(np.float32(0), taught(sequence.tokens, name)) * sequence.sampled for name in names
        ]
        best: list[np.ndarray | None] = [None, None]
        if teacher and top_k:
            rows = likely(sequence.tokens, taught(sequence.tokens, teacher), top_k)
            best = [np.insert(row, 0, 0, axis=0) * sequence.sampled[:, None] for row in rows]
        columns = {column: getattr(sequence, column) for column in (*SCORED, *TOP)}
        return [
            column
            for (column, values), right in zip(columns.items(), [*expected, *best], strict=True)
            if (values is None) != (right is None) or (right is not None and not np.array_equal(values, right))
        ]

    def _check_scores(self, group: Group, prompt: str) -> None:
        """The samples of a group have the scores that it gets with just their completions."""
        answer = f"answer {prompt}"
        row = DataRow(int(prompt), prompt, answer, None, {"answer": answer})
        calls = [Generation(s.tokens[s.sampled], s.logprobs, s.versions, s.finish) for s in group.trajectories]
        expected_scores = [reward_of(row, [call], False, self.config.rewards) for call in calls]
        expected = np.add(expected_scores, together(prompt, [text_of([call]) for call in calls]))
        rewards = [sample.reward for sample in group.trajectories]
        if np.abs(expected - rewards).max() > ROUNDING:
            raise Violation(f"{group.id} is trained with {rewards}, but is scored {expected.tolist()}", group.id)

    def sampled(self, row: DataRow, sample: Trajectory, calls: Sequence[Generation], trains: bool = True) -> None:
        """A workflow has made a sample of the row, of these calls. `trains`: whether it may be trained."""
        self._guard(self._check_sample, row, sample, calls, trains)
        if trains:
            self._samples[_digest(sample)] += 1

    def sampling(self, request: str, sampling: SamplingConfig) -> None:
        """An engine begins a sequence. What is trained and what is evaluated are sampled as the run says of each."""
        sections: dict[str, Any] = {"rollout_manager": self.config.sampling, "evaluator": self.config.evaluator}
        of = sections.get(request.partition("/")[0])
        if of is not None and (sampling.temperature, sampling.top_p) != (of.temperature, of.top_p):
            got, due = sampling.temperature, of.temperature
            self.fail(Violation(f"{request} is sampled at the temperature {got}, not {due}"))

    def made(self, group: str, sample: Trajectory) -> None:
        """A gateway has made a sample of a session."""
        self._samples[_digest(sample)] += 1

    def told(self, group: str, session: str, mark: str, answer: Generation) -> None:
        """A user is about to hear an answer, which is to be trained as part of this group."""
        self._guard(self._check_told, group, session, mark, answer.tokens)

    def _check_told(self, group: str, session: str, mark: str, tokens: np.ndarray) -> None:
        row = self.memory.rows.get(group)
        if row is None or row.ready:
            return
        if row.session != session:
            raise Violation(f"{session} is told that {group} has its call, which is {row.session}", group)
        if not any(np.array_equal(tokens, stored) for stored in self.stored_calls(group)):
            raise Violation(f"the answer {mark} of {group} is given before it is on the trainer's disk", group)
        first = self._told.setdefault(group, {}).setdefault(mark, tokens)
        if not np.array_equal(first, tokens):
            raise Violation(f"the call {mark} of {group} is answered with {tokens}, and before with {first}", group)

    def rewarded(self, session: str, value: float | None, mark: str) -> None:
        """A user is told that its session is ready, with this reward, or with the one before (None)."""
        self._guard(self._check_rewarded, session, value, mark)

    def _check_rewarded(self, session: str, value: float | None, mark: str) -> None:
        groups = [group for group, name in self.disk.session_of.items() if name == session]
        taken = [group for group in groups if self.disk.is_taken(group)]
        if not taken:
            raise Violation(f"{session} is told that its reward is taken, but none of {groups} is ready", *groups)
        if value is not None:
            self._rewards[taken[-1]] = value
            self.taken += 1
            if mark:
                self._marks.setdefault((session, mark), taken[-1])

    def forgotten(self, session: str) -> None:
        """A user is told that a reward does not count of which it was told that it does."""
        groups = [group for group, name in self.disk.session_of.items() if name == session]
        if taken := [group for group in groups if self.disk.is_taken(group)]:
            self.fail(Violation(f"{session} is told that its reward does not count, but {taken} has it", *taken))

    def deleted(self, session: str, steps: Collection[int]) -> None:
        """A user is told that nothing of its session will be trained any more, and which steps have trained some."""
        book = self.disk
        groups = {group for group, name in book.session_of.items() if name == session}
        if alive := [group for group in groups if group in book.rows]:
            self.fail(Violation(f"{session} is told that it is deleted, but {alive} are alive", *alive))
        batches = ((v + 1, batch) for v, batch in book.batches.items() if v < book.version)
        trained = {step for step, batch in batches if groups.intersection(batch)}
        if trained != {*steps}:
            self.fail(Violation(f"{session} is told that steps {steps} have trained it, but {trained} have", *groups))
        self._deleted |= groups
        self._erased |= {group for group in groups if book.prompt_of[group] not in book.trained}

    def _check_sample(self, row: DataRow, sample: Trajectory, calls: Sequence[Generation], trains: bool) -> None:
        reward = reward_of(row, calls, self._branching, self.config.rewards)
        if self.config.reward.groups and not trains:
            reward += together(f"{row.prompt}", [text_of(calls)])[0]
        is_known = not trains or not self.config.reward.groups  # else it depends on the others of the group
        if is_known and abs(sample.reward - reward) > ROUNDING:
            raise Violation(f"a sample of row {row.index} has the reward {sample.reward}, but its score is {reward}")
        if mixed := [call.tokens for call in calls if not are_of_one(call.tokens)]:
            raise Violation(f"a sample of row {row.index} has tokens of several sequences in one call: {mixed}")
        if wrong := [(call.tokens, call.finish) for call in calls if not ends_right(call)]:
            raise Violation(f"a sample of row {row.index} has calls without their own ends: {wrong}")
        trained = sorted(
            pair
            for sequence in sample.sequences()
            for pair in _sampled(sequence.tokens, sequence.logprobs, sequence.sampled)
        )
        if trained != sorted(pair for call in calls for pair in _sampled(call.tokens, call.logprobs)):
            raise Violation(f"a sample trains {trained}, but its calls are {calls}")

    def _check_labels(self, group: str, part: Trajectory) -> None:
        """Check that each token was sampled by the run's weights of the version on its label, with this log-prob."""
        tokens, logprobs, versions = (column[part.sampled] for column in (part.tokens, part.logprobs, part.versions))
        serials = serials_of(logprobs)
        if not np.array_equal(logprobs_of(tokens, serials), logprobs):
            raise Violation(f"tokens of {group} have log-probs of others: {tokens}, {logprobs}", group)
        pairs = dict.fromkeys(zip(serials.tolist(), versions.tolist(), strict=True))
        for serial, version in pairs:
            weights = self.files.written[serial]
            if version >= len(self.contents) or stem(weights.content) != self.contents[version]:
                raise Violation(f"a token of {group} has the label {version}, but was sampled by {weights}", group)
            if version and weights.folder not in self.disk.policies.values():
                raise Violation(f"a token of {group} was sampled by {weights.folder}, which was never published", group)

    def scored(
        self, version: int, rows: Mapping[int, tuple[list[float], int]], seen: Mapping[int, Sequence[Trajectory]]
    ) -> None:
        """An evaluator reports rows as scored. `seen`: the samples of its attempt, by row."""
        self._guard(self._check_rows, version, rows, seen)

    def _check_rows(
        self, version: int, rows: Mapping[int, tuple[list[float], int]], seen: Mapping[int, Sequence[Trajectory]]
    ) -> None:
        name = f"an evaluation of {version}"
        for row, (scores, tokens) in rows.items():
            for part in seen[row]:
                self._check_labels(name, part)
                if set(part.versions[part.sampled].tolist()) != {version}:
                    raise Violation(f"{name} has tokens of versions {part.versions.tolist()}")
            rewards = [part.reward for part in seen[row]], sum(int(part.sampled.sum()) for part in seen[row])
            if (sorted(scores), tokens) != (sorted(rewards[0]), rewards[1]):
                raise Violation(f"{name} has for row {row} {scores} and {tokens} tokens, but it saw {rewards}")

    def evaluated(
        self,
        message: EvaluationDone,
        scores: Mapping[int, tuple[list[float], int]],
        seen: Mapping[int, Sequence[Trajectory]],
    ) -> None:
        """An evaluator reports a result. `kept`: the rows that the master gave it. `seen`: the samples of its
        attempt."""
        self._guard(self._check_evaluation, message, scores, seen)

    def _check_evaluation(
        self,
        message: EvaluationDone,
        evaluator_scores: Mapping[int, tuple[list[float], int]],
        seen: Mapping[int, Sequence[Trajectory]],
    ) -> None:
        version, name = message.version, f"an evaluation of {message.version}"
        on_disk = self.disk.row_scores.get(version, {})
        if lost := [row for row, (scores, _) in evaluator_scores.items() if on_disk.get(row) != scores or row in seen]:
            raise Violation(
                f"{name} goes on with the rows {lost}, which are not kept on disk, or which it samples again"
            )
        fresh = {
            row: ([part.reward for part in parts], sum(int(part.sampled.sum()) for part in parts))
            for row, parts in seen.items()
        }
        self._check_rows(version, fresh, seen)
        rows = [scores for scores, _ in (fresh | dict(evaluator_scores)).values()]
        accuracy = sum(sum(scores) / len(scores) for scores in rows) / len(rows)
        wrong = message.accuracy is None or abs(accuracy - message.accuracy) > 1e-9
        if wrong or len(rows) + message.failed != message.rows:
            raise Violation(
                f"{name} reports {message}, but the rows {sorted(fresh)} and {sorted(evaluator_scores)} give {accuracy}"
            )

    # --- what actors do and do not do

    def remedied(self, what: str) -> None:
        """The master has done something because nothing moves."""
        if busy := self.busy(self.config.master.stall_seconds / 3):
            self.fail(Violation(f"{what} because nothing moves, but {busy}"))

    def asked(self, group: str, min_version: int) -> None:
        """A rollout manager asks a generator for tokens of the group, from weights of `min_version` or later."""
        row = self.memory.rows.get(group)
        if row is not None and row.started_at is not None and min_version < row.started_at:
            self.fail(Violation(f"{group} started at version {row.started_at}, but goes on from {min_version}", group))

    def engine_starts(self, generator: str, seed: int) -> None:
        """An engine starts, whose random numbers begin with this seed."""
        if earlier := self._seeds.get(seed):
            self.fail(Violation(f"{generator} draws the random numbers of {earlier} again", generator))
        self._seeds[seed] = generator

    def loads(self, generator: str, version: int, loaded: int, held: int | None) -> None:
        """A generator begins to load a version. `held`: the version that it knows it holds, and that could be
        loaded."""
        if held is not None and loaded <= held < version:
            self.fail(
                Violation(f"{generator} loads version {version} after {loaded}, although it holds {held}", generator)
            )

    def computed(self, writer: str, content: bytes, version: int, groups: Sequence[Group], new_content: bytes) -> None:
        """A learner has computed a step. Every repetition of a step has to be made of the same groups and weights, and
        its result may differ only in what depends on the trainer."""
        if version >= len(self.contents) or stem(content) != self.contents[version]:
            return self.fail(Violation(f"{writer} computes the step of version {version} from other weights", writer))
        if version + 1 == len(self.contents):
            self.contents.append(stem(new_content))
        self.results[writer, version + 1] = new_content
        if self.contents[version + 1] != stem(new_content):
            self.fail(Violation(f"{writer} redoes the step of version {version} with another result", writer))

    def wrote(self, writer: str, weights: Weights) -> None:
        if stem(weights.content) not in self.contents:
            self.fail(Violation(f"{writer} writes weights to {weights.folder} that no step produced", writer))

    # --- the end

    def stopped(self, reason: str) -> None:
        """The run has failed. Only the guard may end a run so, or rewards and workflows that have all failed so far."""
        may_fail = self.causes is None or bool(self.causes)
        if may_fail and not self._samples and "No sample has succeeded" in reason:
            return
        version = self.disk.version + 1
        if not self._is_stopped_at(version) or f"at step {version}:" not in reason:
            self.fail(Violation(f"the run fails after version {version - 1}: {reason}", "master-0"))

    def check_receipts(self, receipts: Mapping[str, str], when: str) -> None:
        """The master knows the rewards that were taken, and no others."""
        book = self.memory
        last = {name: group for group, name in book.session_of.items()}  # of each name
        due = {name: group for name, group in last.items() if book.is_taken(group)}
        due |= {f"{name} {mark}": group for (name, mark), group in self._marks.items() if book.is_taken(group)}
        of = {key: receipt.partition(" ")[0] for key, receipt in receipts.items()}
        if lost := [key for key, group in due.items() if of.get(key) != group]:
            self.fail(Violation(f"{when}, the master does not know that the rewards {lost} were taken"))
        if wrong := [key for key, group in of.items() if group not in book.session_of or not book.is_taken(group)]:
            self.fail(Violation(f"{when}, the master has receipts of {wrong}, which were undone"))

    def check_summary(self, summary: Mapping[str, Any]) -> None:
        """The numbers of the summary are those of the journal and the batches."""
        book = self.memory
        tokens = sum(self._tokens.get(v, 0) for v in range(book.version))  # the last step may not be committed
        trained = [group for v in range(book.version) for group in book.batches[v]]
        sessions = {"opened": book.sessions, "trained": sum(group in book.session_of for group in trained)}
        samples = sum(book.size(group, self.config.group_size) for group in trained)
        due = {
            "steps": book.version,
            "samples_trained": samples,
            "tokens_trained": tokens,
            "sessions": sessions,
            "groups_discarded": dict(Counter(book.discarded.values())),
            "rollbacks": self.ways_back,
            "lineages": book.lineage + 1,
        }
        if wrong := {name: (summary[name], value) for name, value in due.items() if summary[name] != value}:
            self.fail(Violation(f"the summary says otherwise than the journal: {wrong}"))
        if summary["tokens_generated"] < tokens + summary["tokens_discarded"] + summary["tokens_lost"]:
            self.fail(Violation(f"the summary's tokens do not add up: {summary['tokens_generated']}"))

    def ended(self, rollouts: Sequence[Rollout]) -> None:
        """The run has reached its end: check what it has done, and the rollouts that it has written."""
        book = self.disk
        steps = self.config.steps
        if book.version != steps:
            self.fail(Violation(f"the run ends at version {book.version} of {steps}"))
        elif book.policy[1] != steps:
            self.fail(Violation(f"the last published policy is {book.policy}, not version {steps}"))
        elif book.checkpoint != steps:
            self.fail(Violation(f"the last checkpoint is of version {book.checkpoint}, not {steps}"))
        elif len(book.trained) != steps * book.batch_size:
            self.fail(Violation(f"{len(book.trained)} prompts were trained in {steps} steps"))
        self._check_fates_of_evaluations(book)
        prompts = set(book.trained) | set(book.discarded) | book.waiting | {row.prompt for row in book.rows.values()}
        if prompts != set(range(-book.sessions, book.prompts)):
            self.fail(Violation(f"prompts {sorted(set(range(-book.sessions, book.prompts)) - prompts)} are lost"))
        lost = [group for group in self._rewards.keys() - self._erased if not book.is_taken(group)]
        if lost := [group for group in lost if book.discarded.get(book.prompt_of[group]) != LOST_WITH_THE_SPOOL]:
            self.fail(Violation(f"users were told that {lost} are taken, but these are gone", *lost))
        self._check_rollouts(book, rollouts)

    def _check_rollouts(self, book: Book, rollouts: Sequence[Rollout]) -> None:
        written = [(r.step, r.place, r.group.id) for r in rollouts if r.fate == "trained"]
        trained = [(v + 1, *pair) for v in range(book.version) for pair in enumerate(book.batches[v])]
        if written != trained:
            wrong = sorted(set(written) ^ set(trained)) or written
            self.fail(Violation(f"the rollouts of {wrong} are missing, twice or not in order", wrong[0][2]))
        counts = Counter(rollout.group.id for rollout in rollouts)
        if twice := [group for group, times in counts.items() if times > 1]:
            self.fail(Violation(f"the rollouts of {twice} are kept twice", *twice))

    def _check_fates_of_evaluations(self, book: Book) -> None:
        config, steps = self.config, self.config.steps
        if book.holds:
            self.fail(Violation(f"the run ends, but {book.holds} are still held", *book.holds))
        if not config.data.eval_size:
            return
        every = config.evaluator.every
        due = {0, steps} | (set(range(0, steps, every)) if every else set())
        first = book.evaluated.get(0) or book.lost_version_0
        may_fail = self.scores_fail or (first and book.evaluated.get(steps))
        if (due ^ set(book.evaluated)) - book.earlier_ends or not may_fail:
            self.fail(Violation(f"the versions {due} had to be evaluated, but the outcomes are {book.evaluated}"))

    # ---

    def _book(self) -> Book:
        config = self.config
        bounds = config.on_straggler in ("wait", "requeue")
        return Book(config.batch_size, bounds, serves_evaluated=config.gateway.serve == "evaluated")

    def _guard(self, check: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        try:
            check(*arguments, **keywords)
        except Violation as violation:
            self.fail(violation)


def credits_of(sample: Trajectory) -> set[float]:
    """What its sampled tokens are credited with."""
    return {sample.reward} if sample.returns is None else set(sample.returns[sample.sampled].tolist())


def _sampled(tokens: np.ndarray, logprobs: np.ndarray, which: Any = slice(None)) -> list[tuple[int, float]]:
    return list(zip(tokens[which].tolist(), logprobs[which].tolist(), strict=True))


def _digest_of_call(prompt: int, place: int, call: SavedCall) -> bytes:
    digest = blake2b(f"{prompt} {place} {call.limit} {call.sampled.finish}".encode() + call.prompt, digest_size=16)
    for column in call.sampled.columns.values():
        digest.update(column.tobytes())
    return digest.digest()


def _digest(sample: Trajectory) -> bytes:
    digest = blake2b(f"{sample.reward} {sample.finish} {sample.branches}".encode(), digest_size=16)
    for column in (sample.tokens, sample.logprobs, sample.versions, sample.filled("returns")):
        digest.update(column.tobytes())
    return digest.digest()
