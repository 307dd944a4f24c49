"""Mutants: bugs that are put into the real code on purpose, to test that the simulation finds them.

with MUTANTS["no batch gate"]():
    simulate(seed)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np

from actors.evaluator.evaluator import Evaluator
from actors.gateway.ledger_sessions import LedgerSessions
from actors.gateway.session_table import SessionTable
from actors.gateway.user_sessions import UserSession
from actors.generator import generator
from actors.generator.loaded_policy import LoadedPolicy
from actors.generator.shared_devices import SharedDevices
from actors.master import run_state
from actors.master.changes import Change, Stepped
from actors.master.evaluations import Evaluations
from actors.master.hangs import Hangs
from actors.master.master import Master
from actors.master.progress import Progress
from actors.master.run_control import RunControl
from actors.master.run_state import RunState
from actors.master.session_records import SessionRecords
from actors.master.training_requests import TrainingRequests
from actors.rollout_manager.group_run import GroupStart, GroupStore
from actors.rollout_manager.saved_groups import SavedGroups
from actors.runtime.membership import Membership
from actors.runtime.works import Operation, Works
from actors.sampling import sessions
from actors.sampling.group_scores import GroupScores
from actors.sampling.jobs import Call, ScoreJob
from actors.sampling.sampling import Sampling
from actors.sampling.services import Rewards, Services
from actors.sampling.sessions import SampleSession
from actors.trainer import kept_rollouts, weight_publisher
from actors.trainer.checkpoints import Checkpoints
from actors.trainer.sample_store import SampleStore
from actors.trainer.trainer import Trainer
from actors.trainer.turns import Turns
from actors.trainer.weight_publisher import WeightPublisher
from actors.ways_back import past_state
from areal.samples.table import ENGINE_COLUMNS, Finish, Generation, TokenTable
from areal.samples.trajectory import Branch, Group, TokenScores, Trajectory, paths
from areal.staleness.leases import Leases
from areal.staleness.ledger import Ledger, Schedule
from areal.staleness.ledger_records import event_record, snapshot_of
from areal.staleness.ledger_state import (
    Admitted,
    Discarded,
    Event,
    Groups,
    GroupState,
    LedgerGroup,
    LedgerSettings,
    LedgerState,
    Requeued,
    Room,
)
from areal.staleness.run_ahead import RunAhead
from areal.storage import journal, spool_file
from areal.storage.database import prepare
from areal.storage.rollouts import RolloutWriter
from areal.storage.saved_calls import DIGEST_BYTES, SavedCall, unpacked
from areal.storage.spool import Spool
from areal.storage.spooled_calls import SpooledCalls
from areal.training.guard import Guard
from protocols.attempt_messages import AskSamples, StoredSamples
from protocols.bus_errors import RefusedError
from protocols.codec import Frame, decode_header, encode_header
from protocols.messages import (
    Done,
    GroupAccepted,
    GroupStarted,
    JobFailed,
    KeepAlive,
    Message,
    Permit,
    StoreSamples,
    TokenColumns,
)
from protocols.session_messages import DiscardSession, SessionDiscarded
from protocols.training_messages import AskRecovery, Recovery, TrainingFinished
from protocols.transport import Peer, RequestServer
from simulation.engines import HELDOUT, REFERENCE, TEACHER, SimLearner, SimSource

Mutant = Callable[[], AbstractContextManager[None]]


def capacity_from_a_counter() -> AbstractContextManager[None]:
    """Capacity is computed from lifetime counters of admitted and trained groups, not from the live rows."""

    def for_rows(room: Room) -> int:
        counters = room._state.counters
        return max(0, room.most_alive - (counters.admitted - counters.trained))

    return patch.multiple(Room, for_rows=property(for_rows))


def no_deduplication() -> AbstractContextManager[None]:
    """A server handles a repeated request a second time."""
    receive, forget = RequestServer._receive, RequestServer._forget

    def receive_anew(server: RequestServer, frames: list[Frame]) -> None:
        header = decode_header(frames[1:])
        if header.id:
            server._answers.pop((header.sender, header.id, header.token), None)
            server._calls.pop((header.sender, header.id, header.token), None)
        receive(server, frames)

    def forget_if_known(server: RequestServer, key: tuple[str, str, bytes], *more: Any) -> None:
        if key in server._calls:
            forget(server, key, *more)

    return patch.multiple(RequestServer, _receive=receive_anew, _forget=forget_if_known)


def no_batch_gate() -> AbstractContextManager[None]:
    """Rule 3 is switched off: a batch is trained even if another group misses its deadline because of it."""
    return patch.multiple(Schedule, stragglers=lambda schedule, chosen: [])


def no_lease_expiry() -> AbstractContextManager[None]:
    """Leases never end, even if their owner falls silent or leaves."""
    return patch.multiple(Leases, expire=lambda leases, now: [], release=lambda leases, owner: [])


def leases_nobody_knows_of() -> AbstractContextManager[None]:
    """Leases end only when their owner leaves. A lease whose permit never reached its owner stays until then."""
    return patch.multiple(Leases, expire=lambda leases, now: [])


def replies_not_matched() -> AbstractContextManager[None]:
    """Each reply goes to the request that has waited longest, not to the request that it answers."""
    receive = Peer._receive

    def receive_for_anyone(peer: Peer, frames: list[Frame]) -> None:
        header = decode_header(frames)
        if header.reply_to and peer._waiting:
            frames = [encode_header(header._replace(reply_to=next(iter(peer._waiting)))), *frames[1:]]
        receive(peer, frames)

    return patch.multiple(Peer, _receive=receive_for_anyone)


def version_kept_on_roll_back() -> AbstractContextManager[None]:
    """A restarted trainer loads the last checkpoint, but takes its weights for those of the run's current version."""
    ask_master = Membership.ask_master

    async def ask(member: Membership, *arguments: Any) -> Any:
        answer = await ask_master(member, *arguments)
        if isinstance(answer, Recovery):
            answer = answer.model_copy(update={"checkpoint_version": answer.version})
        return answer

    return patch.multiple(Membership, ask_master=ask)


def choices_not_journaled() -> AbstractContextManager[None]:
    """The journal does not say which row was chosen for a prompt."""

    def without_row(event: Event) -> tuple[str, dict[str, Any]]:
        return event_record(replace(event, row=event.prompt_index) if isinstance(event, Admitted) else event)

    return patch.multiple(run_state, event_record=without_row)


def lost_groups_stay_ready() -> AbstractContextManager[None]:
    """A run that goes back to a checkpoint does not look which groups the spool still has."""
    return_to = past_state.return_to

    def keep_all(state: RunState, kept: dict[str, Any], spooled: Any) -> None:
        return_to(state, kept, [group["group_id"] for group in kept["ledger"]["groups"]])

    return patch.multiple(past_state, return_to=keep_all)


def only_the_last_checkpoint() -> AbstractContextManager[None]:
    """A trainer whose last checkpoint is damaged does not take the one before."""

    async def load(checkpoints: Checkpoints, recovery: Recovery) -> int:
        await checkpoints._load(recovery.checkpoint_version, recovery.run)
        return recovery.checkpoint_version

    return patch.multiple(Checkpoints, load=load)


def payloads_of_one_checkpoint() -> AbstractContextManager[None]:
    """The trainer removes groups from its spool once one checkpoint covers them, so that none before it can be used."""
    train, forget = Trainer._train, Checkpoints._complete

    async def train_and_note(trainer: Trainer, batch: Any) -> Any:
        done = await train(trainer, batch)
        vars(trainer._checkpoints).setdefault("trained", {})[trainer._version] = batch.groups
        return done

    async def complete(checkpoints: Checkpoints, version: int, *arguments: Any) -> Any:
        error = await forget(checkpoints, version, *arguments)
        trained = vars(checkpoints).get("trained", {})
        checkpoints._spool.forget(group for step in trained if step <= version for group in trained[step])
        return error

    mutation: Any = patch.multiple(Trainer, _train=train_and_note)
    mutation.additional_patchers.append(patch.object(Checkpoints, "_complete", complete))
    applied: AbstractContextManager[None] = mutation
    return applied


def last_checkpoint_left_to_the_dead() -> AbstractContextManager[None]:
    """A trainer that begins after the last step takes the last checkpoint for saved."""
    finish = Trainer._finish_run

    async def report(trainer: Trainer) -> None:
        if trainer._recovery.version < trainer.config.steps:
            await finish(trainer)
        else:
            await trainer.member.ask_master(TrainingFinished(), Done)

    return patch.multiple(Trainer, _finish_run=report)


def nothing_saved_on_leaving() -> AbstractContextManager[None]:
    """A trainer that is told to leave ends its step, and saves no checkpoint."""

    async def save_nothing(trainer: Trainer, ends: float) -> str:
        await trainer._publisher.wait()
        return ""

    return patch.multiple(Trainer, _save_last=save_nothing)


def payloads_dropped_once_trained() -> AbstractContextManager[None]:
    """The trainer removes groups from its spool after each step, not when a checkpoint covers the step."""
    train = Trainer._train

    async def train_and_drop(trainer: Trainer, batch: Any) -> Any:
        done = await train(trainer, batch)
        trainer._spool.forget(batch.groups)
        return done

    return patch.multiple(Trainer, _train=train_and_drop)


def answers_before_the_commit() -> AbstractContextManager[None]:
    """The master answers before its journal events are on disk."""

    async def at_once(master: Master, sender: str, answer: Any) -> Any:
        return await answer

    return patch.multiple(Master, _durably=at_once)


def no_fencing() -> AbstractContextManager[None]:
    """The master accepts all reports of trainers, even those of an old lineage."""
    return patch.multiple(RunControl, check_trainer=lambda run, request, lineage=None: None)


def no_filter() -> AbstractContextManager[None]:
    """The trainer reports every group as having a signal."""
    return patch.multiple(Group, has_signal=True)


def checkpoints_in_a_streak() -> AbstractContextManager[None]:
    """Checkpoints are saved even if the guard finds the last steps suspicious."""
    return patch.multiple(Guard, suspicious=False)


def min_version_ignored() -> AbstractContextManager[None]:
    """Rule 2 is switched off: weights older than a group's admission version may start the group."""
    init = SampleSession.__init__

    def begin(session: SampleSession, *arguments: Any, **more: Any) -> None:
        init(session, *arguments, **more)
        session.min_version = 0

    return patch.multiple(SampleSession, __init__=begin)


def tokens_twice_after_a_break() -> AbstractContextManager[None]:
    """A sequence that continues on another generator has its last tokens twice."""
    leave = Call.leave

    def leave_with_more(call: Call, *more: Any) -> Any:
        call._table.append(call._table.view(max(0, call.sampled - 1)))
        return leave(call, *more)

    return patch.multiple(Call, leave=leave_with_more)


def end_tokens_dropped() -> AbstractContextManager[None]:
    """A completion of several tokens that ends by itself arrives without its last token."""
    add = Call.add

    def add_less(call: Call, new: TokenTable, finish: Finish | None) -> Generation | None:
        drops = finish == "stop" and len(new) and call.sampled + len(new) > 1
        return add(call, new.view(0, len(new) - 1) if drops else new, finish)

    return patch.multiple(Call, add=add_less)


def the_same_random_numbers() -> AbstractContextManager[None]:
    """A generator that is started again begins with the random numbers that it began with before."""

    async def join(member: Membership, address: str) -> None:
        await joined(member, address)
        member.engine_seed = crc32(f"{member.config.seed}/{member.index}".encode())

    joined = Membership._join
    return patch.multiple(Membership, _join=join)


def shared_tokens_trained_twice() -> AbstractContextManager[None]:
    """A branch has the sampled tokens that it shares as its own, too."""

    def sequences(sample: Trajectory) -> Iterator[Trajectory]:
        for path in paths(sample.branches or (Branch(0, len(sample)),)):
            columns: dict[str, Any] = {name: getattr(sample, name)[path] for name in ENGINE_COLUMNS}
            yield replace(sample, **columns | {"returns": None}, branches=())

    return patch.multiple(Trajectory, sequences=sequences)


def branches_lost_on_the_way() -> AbstractContextManager[None]:
    """A group arrives at the trainer as if each of its samples were one conversation."""

    frame = Trajectory.frame
    return patch.multiple(Trajectory, frame=lambda sample: frame(replace(sample, branches=())))


def hold_ignored() -> AbstractContextManager[None]:
    """A generator loads the newest version even while it holds another one."""
    return patch.multiple(LoadedPolicy, _wanted=lambda loaded: loaded._directory.policy)


def published_before_it_is_written() -> AbstractContextManager[None]:
    """The trainer publishes a version as soon as it is committed, before its files are complete."""
    write = WeightPublisher._write

    async def begin_to_write(publisher: WeightPublisher, policy: Any) -> Any:
        publisher._member.spawn(write(publisher, policy), "write")
        return policy

    return patch.multiple(WeightPublisher, _write=begin_to_write)


def no_wait_for_the_write() -> AbstractContextManager[None]:
    """The trainer takes the next snapshot and commits the next step while the last version is still being written."""

    async def at_once(publisher: WeightPublisher) -> None:
        pass

    return patch.multiple(WeightPublisher, wait=at_once)


def checkpoint_reported_before_it_is_written() -> AbstractContextManager[None]:
    """The trainer reports a checkpoint as soon as it is copied, before its files are on disk."""
    saved = SimLearner.finish_save

    async def at_once(learner: SimLearner) -> None:
        learner.writing = asyncio.create_task(saved(learner))  # type: ignore[attr-defined]

    return patch.multiple(SimLearner, finish_save=at_once)


def start_versions_not_reported() -> AbstractContextManager[None]:
    """A rollout manager does not tell the master at which version a group started."""
    ask_master = Membership.ask_master

    async def ask(member: Membership, message: Message, *more: Any) -> Any:
        return Done() if isinstance(message, GroupStarted) else await ask_master(member, message, *more)

    return patch.multiple(Membership, ask_master=ask)


def min_version_stays() -> AbstractContextManager[None]:
    """The samples of a group may go on from weights older than the version at which the group started."""

    class First:
        """An attribute that keeps the first value that is assigned to it."""

        def __get__(self, session: SampleSession, owner: type) -> int:
            version: int = session.__dict__["first_min_version"]
            return version

        def __set__(self, session: SampleSession, version: int) -> None:
            session.__dict__.setdefault("first_min_version", version)

    return patch.multiple(SampleSession, create=True, min_version=First())


def rollouts_written_at_the_end() -> AbstractContextManager[None]:
    """The trainer writes its rollouts when the run has ended, not before each checkpoint."""
    write = kept_rollouts.write_rollouts

    async def write_if_over(member: Membership, rollouts: RolloutWriter) -> None:
        if member.stopped.done():
            await write(member, rollouts)

    return patch.multiple(kept_rollouts, write_rollouts=write_if_over)


def rollouts_written_again() -> AbstractContextManager[None]:
    """A trainer that redoes steps writes their rollouts a second time."""
    trained = RolloutWriter.add_trained

    def trained_anew(writer: RolloutWriter, *arguments: Any) -> None:
        writer.step = 0
        trained(writer, *arguments)

    return patch.multiple(RolloutWriter, add_trained=trained_anew)


def rejected_payloads_kept() -> AbstractContextManager[None]:
    """The trainer keeps the payloads of groups that the master does not accept."""

    async def keep(store: SampleStore, group: Group) -> None:
        pass

    return patch.multiple(SampleStore, _forget=keep)


def payloads_not_dropped_at_a_start() -> AbstractContextManager[None]:
    """A trainer that starts keeps the payloads that its predecessor left and nobody needs any more."""
    ask_recovery = TrainingRequests.ask_recovery

    async def drop_nothing(requests: TrainingRequests, request: Any) -> Recovery:
        return (await ask_recovery(requests, request)).model_copy(update={"drop": ""})

    drop_nothing.handled_kind = AskRecovery  # type: ignore[attr-defined]
    return patch.multiple(TrainingRequests, ask_recovery=drop_nothing)


def spool_never_emptied() -> AbstractContextManager[None]:
    """No payload ever leaves the spool."""
    return patch.multiple(Spool, forget=lambda spool, ids: None)


def lineages_ignored() -> AbstractContextManager[None]:
    """A generator loads only newer versions, not the same version of a new lineage."""
    return patch.multiple(LoadedPolicy, is_behind=lambda loaded: loaded._wanted().version > loaded._engine.version)


def leases_not_renewed_at_a_start() -> AbstractContextManager[None]:
    """A restarted master keeps the leases as the one before left them."""
    return patch.multiple(Leases, renew_all=lambda leases, now, lease_seconds: None)


def work_not_reported() -> AbstractContextManager[None]:
    """Heartbeats do not say what an actor works on."""
    return patch.multiple(Works, report=lambda works: ())


def awake_in_a_turn() -> AbstractContextManager[None]:
    """A generator answers that it has yielded the devices, and goes on."""

    async def stay_awake(devices: SharedDevices) -> None:
        pass

    return patch.multiple(SharedDevices, _sleep=stay_awake)


def old_trainers_give_devices() -> AbstractContextManager[None]:
    """A trainer gives its devices away without asking whether they are still its own."""

    async def give(turns: Turns, request: Any) -> Done:
        await turns._directory.until(lambda: not turns._mine and request.sender in turns._directory.members)
        return Done()

    return patch.multiple(Turns, give_devices=give)


def failures_in_parts_are_lost() -> AbstractContextManager[None]:
    """An asker does not look at the failed sequences in the parts of a flow."""
    deliver = Call.deliver

    def deliver_tokens(part: Message, jobs: Any) -> Sequence[JobFailed]:
        deliver(part, jobs)
        return ()

    return patch.multiple(Call, deliver=staticmethod(deliver_tokens))


def columns_mixed_up() -> AbstractContextManager[None]:
    """Where a message has tokens of several sequences, the first two are exchanged."""
    columns = generator._columns

    def exchanged(new: Sequence[Any], failed: Sequence[JobFailed]) -> TokenColumns:
        if len(new) > 1 and not new[0].tokens.finish and not new[1].tokens.finish:
            first, second, *rest = new
            new = [first._replace(job=second.job), second._replace(job=first.job), *rest]
        return columns(new, failed)

    return patch.multiple(generator, _columns=exchanged)


def keep_alives_count_nothing() -> AbstractContextManager[None]:
    """A keep-alive does not tell how many parts were sent, so that a lost part is noticed only with the next one."""
    receive = Peer._receive
    arrived: dict[tuple[Peer, str], int] = {}  # parts of each stream, as its asker counts them

    def receive_uncounted(peer: Peer, frames: list[Frame]) -> None:
        header = decode_header(frames)
        stream = peer, header.reply_to
        if header.kind != KeepAlive.kind:
            arrived[stream] = header.part + 1
            receive(peer, frames)
        elif inbox := peer._waiting.get(header.reply_to):
            inbox.put((header._replace(part=arrived.get(stream, 0)), KeepAlive()))

    return patch.multiple(Peer, _receive=receive_uncounted)


def rewards_negated() -> AbstractContextManager[None]:
    """A group arrives at the trainer with the opposites of its rewards."""
    frame = Trajectory.frame
    return patch.multiple(Trajectory, frame=lambda sample: frame(replace(sample, reward=-sample.reward)))


def scores_exchanged() -> AbstractContextManager[None]:
    """Where two completions are scored for an asker at the same time, each gets the score of the other one."""
    deliver = ScoreJob.deliver

    def deliver_exchanged(part: Message, jobs: dict[int, ScoreJob]) -> Sequence[JobFailed]:
        if len(jobs) > 1:
            first, second = list(jobs)[:2]
            jobs[first], jobs[second] = jobs[second], jobs[first]
        return deliver(part, jobs)

    return patch.multiple(ScoreJob, deliver=staticmethod(deliver_exchanged))


def rows_for_another_scorer() -> AbstractContextManager[None]:
    """A row of tokens goes to a scorer of another name, if there is one."""
    score_tokens = Rewards.score_tokens

    def scores_of_another(rewards: Rewards, name: str, tokens: np.ndarray) -> Coroutine[Any, Any, TokenScores]:
        dispatch: Any = rewards._dispatch
        served = {other for member in dispatch._directory.with_role("scorer") for other in member.serves}
        others = [other for other in (TEACHER, REFERENCE) if other in served and other != name]
        return score_tokens(rewards, next(iter(others), name), tokens)

    return patch.multiple(Rewards, score_tokens=scores_of_another)


def next_row_sampled() -> AbstractContextManager[None]:
    """A group is sampled for the row after its own."""
    row = SimSource.row
    return patch.multiple(SimSource, row=lambda source, index: row(source, index + (index < HELDOUT)))


def stored_samples_sampled_again() -> AbstractContextManager[None]:
    """A rollout manager samples the whole of a group, whatever is stored of it."""

    async def nothing(saved: SavedGroups, *_: Any) -> StoredSamples:
        return StoredSamples(places=(), start_version=None)

    return patch.multiple(SavedGroups, ask=nothing)


def scored_groups_stored_in_parts() -> AbstractContextManager[None]:
    """The samples of a group whose scores depend on each other are stored, and used again, one by one."""
    ask, send = SavedGroups.ask, GroupStore.send

    async def stored_of_any(saved: SavedGroups, permit: Permit, whole: bool) -> StoredSamples:
        return await ask(saved, permit, False)

    async def one_by_one(store: GroupStore, scored: Sequence[Any]) -> Any:
        refusals = [await send(store, [one]) for one in scored]
        return next(filter(None, refusals), None)

    mutation: Any = patch.multiple(SavedGroups, ask=stored_of_any)
    mutation.additional_patchers.append(patch.object(GroupStore, "send", one_by_one))
    applied: AbstractContextManager[None] = mutation
    return applied


def groups_in_order_of_arrival() -> AbstractContextManager[None]:
    """A reward of groups gets the completions in the order in which they were finished."""
    complete = GroupScores._score_all

    async def score_all(group: GroupScores, names: Sequence[str]) -> Any:
        group._sessions = [*group._completions]
        return await complete(group, names)

    return patch.multiple(GroupScores, _score_all=score_all)


def stored_samples_of_another_group() -> AbstractContextManager[None]:
    """A group that is resumed gets the stored samples of the prompts beside its own, too."""
    samples = Spool.samples

    def samples_of_three(spool: Spool, prompt_index: int) -> dict[tuple[str, int], Trajectory]:
        rows = (samples(spool, index) for index in (prompt_index - 1, prompt_index, prompt_index + 1))
        return {key: sample for found in rows for key, sample in found.items()}

    return patch.multiple(Spool, samples=samples_of_three)


def stored_samples_however_old() -> AbstractContextManager[None]:
    """A group that is resumed gets all its stored samples, also if it then misses its deadline."""
    return patch.multiple(Schedule, breaks=lambda schedule, group, version: False)


def saved_calls_sampled_again() -> AbstractContextManager[None]:
    """A rollout manager samples an unfinished sample anew, whatever calls of it are stored."""

    async def nothing(saved: SavedGroups, permit: Permit, place: int) -> list[SavedCall]:
        return []

    return patch.multiple(SavedGroups, calls=nothing)


def saved_calls_of_another_sample() -> AbstractContextManager[None]:
    """A sample goes on with the calls of the sample beside it in the group, if there are any."""
    calls = SpooledCalls.calls

    def calls_beside(spool: SpooledCalls, group_id: str, place: int) -> bytes:
        return calls(spool, group_id, place ^ 1) or calls(spool, group_id, place)

    return patch.multiple(SpooledCalls, calls=calls_beside)


def saved_calls_whatever_their_prompts() -> AbstractContextManager[None]:
    """A call goes on from saved tokens of a call with another prompt."""
    return patch.multiple(sessions, digest_of=lambda prompt, names: bytes(DIGEST_BYTES))


def newest_version_of_saved_calls() -> AbstractContextManager[None]:
    """The spool gives the newest version in the saved calls of a sample for the oldest."""
    oldest_versions = SpooledCalls.oldest_versions

    def newest(unfinished: SpooledCalls, prompt_index: int) -> dict[tuple[str, int], int]:
        calls = {key: unpacked(unfinished.calls(*key)) for key in oldest_versions(unfinished, prompt_index)}
        return {key: max(int(call.sampled.versions.max()) for call in of_sample) for key, of_sample in calls.items()}

    return patch.multiple(SpooledCalls, oldest_versions=newest)


def logprobs_reversed_after_a_break() -> AbstractContextManager[None]:
    """A sequence that continues on another generator has the log-probs that it brings in the opposite order."""
    leave = Call.leave

    def leave_reversed(call: Call, *more: Any) -> Any:
        call._table.logprobs[:] = call._table.logprobs[::-1].copy()
        return leave(call, *more)

    return patch.multiple(Call, leave=leave_reversed)


def bounds_of_now() -> AbstractContextManager[None]:
    """When a run is resumed with another `max_staleness`, it holds for the groups of before, too."""

    change = LedgerState._change

    def change_all(state: LedgerState, event: Event) -> None:
        change(state, event)
        if isinstance(event, LedgerSettings):
            for group in list(state.groups):
                state.groups.update(group.group_id, max_staleness=event.max_staleness)

    return patch.multiple(LedgerState, _change=change_all)


def hangs_not_noticed() -> AbstractContextManager[None]:
    """The master does not look for how long works stand still."""
    return patch.multiple(Hangs, find=lambda hangs: [])


def own_code_without_a_limit() -> AbstractContextManager[None]:
    """A workflow may wait for ever for something that is no actor of the run."""
    return patch.multiple(Services, sample_seconds=math.inf)


def started_with_the_newest_version() -> AbstractContextManager[None]:
    """A rollout manager reports the newest version that sampled a first token of a group as its start version."""

    def count(start: GroupStart, version: int | None = None) -> None:
        start._versions += [] if version is None else [version]
        start._missing -= 1
        if not start._missing and start._versions:
            start._report(max(start._versions))

    return patch.multiple(GroupStart, count=count)


def ready_with_the_newest_version() -> AbstractContextManager[None]:
    """The trainer reports the newest version in a group as its start version."""
    newest = property(lambda group: max(int(sample.versions[sample.sampled].max()) for sample in group.trajectories))
    return patch.multiple(Group, start_version=newest)


def discarded_at_the_first_failure() -> AbstractContextManager[None]:
    """A prompt is discarded when it fails, not after `max_attempts` failures."""
    return patch.multiple(
        Ledger, _fail=lambda ledger, group, reason: ledger.state.emit(Discarded(group.group_id, reason))
    )


def never_discarded_for_failures() -> AbstractContextManager[None]:
    """A prompt is tried again however often it has failed."""

    def fail(ledger: Ledger, group: LedgerGroup, reason: str) -> None:
        ledger.state.emit(Requeued(group.group_id, reason, failed=True))

    return patch.multiple(Ledger, _fail=fail)


def each_failure_counts() -> AbstractContextManager[None]:
    """Failures in a row, which are not the fault of the prompts, count against each of them."""
    failed = Ledger.failed

    def failed_anyway(ledger: Ledger, group_id: str, owner: str, reason: str, counts: bool = True) -> Any:
        return failed(ledger, group_id, owner, reason)

    return patch.multiple(Ledger, failed=failed_anyway)


def shortages_are_failures() -> AbstractContextManager[None]:
    """The trainer refuses a sample for good if its disk has no room for it."""
    store_samples = SampleStore.store_samples

    async def store_at_once(store: Any, request: Any) -> GroupAccepted:
        if store._on_disk.__self__.disk.shortage:
            raise RefusedError("the disk is full")
        return await store_samples(store, request)

    store_at_once.handled_kind = StoreSamples  # type: ignore[attr-defined]
    return patch.multiple(SampleStore, store_samples=store_at_once)


def snapshots_without_failures() -> AbstractContextManager[None]:
    """A snapshot of the master's state does not have how often each prompt has failed."""

    def snapshot_less(state: LedgerState) -> dict[str, Any]:
        full = snapshot_of(state)
        return full | {name: [row | {"failures": 0} for row in full[name]] for name in ("groups", "requeued")}

    return patch.multiple(run_state, snapshot_of=snapshot_less)


def snapshots_without_run_ahead() -> AbstractContextManager[None]:
    """A snapshot of the master's state does not have how far generation may run ahead."""
    return patch.multiple(RunAhead, dump=lambda run_ahead: {"limit": 0.0, "filling": 0})


def snapshots_without_lost_evaluations() -> AbstractContextManager[None]:
    """A snapshot of the master's state does not have the evaluations that were given up."""
    dump = RunState.dump
    return patch.multiple(RunState, dump=lambda state: dump(state) | {"not_evaluated": []})


def own_pause_not_excused() -> AbstractContextManager[None]:
    """The master takes time in which it was suspended itself for silence of the others."""
    return patch.multiple(RunControl, now=lambda run: asyncio.get_running_loop().time())


def leases_of_leavers_stay() -> AbstractContextManager[None]:
    """The groups of a member that has left stay with it until their leases end."""
    return patch.multiple(Leases, release=lambda leases, owner: [])


def evaluations_of_dead_lineages() -> AbstractContextManager[None]:
    """An evaluation of a version in between goes on when a new trainer has opened a new lineage."""
    abandon = Evaluations.abandon

    def abandon_unless_new(evaluations: Evaluations, reason: str) -> None:
        if "lineage" not in reason:
            abandon(evaluations, reason)

    return patch.multiple(Evaluations, abandon=abandon_unless_new)


def only_the_newest_weights() -> AbstractContextManager[None]:
    """The trainer removes a published version as soon as there is a newer one."""
    return patch.multiple(weight_publisher, VERSIONS_KEPT=1)


def no_remedies() -> AbstractContextManager[None]:
    """The master does nothing about a run in which nothing moves, and ends it after `stall_seconds`."""
    remedy = Progress.remedy
    return patch.multiple(Progress, remedy=lambda progress: "end" if remedy(progress) == "end" else None)


def latest_deadlines_first() -> AbstractContextManager[None]:
    """A batch has the ready groups with the latest deadlines."""

    def choose(schedule: Schedule) -> list[LedgerGroup]:
        return schedule._state.groups.head(GroupState.READY)[-schedule._state.settings.batch_size :]

    return patch.multiple(Schedule, choose=choose)


def evidence_ignored() -> AbstractContextManager[None]:
    """An actor counts all the time that a work takes as a standstill, although its evidence of life moves."""
    look = Operation.look

    def look_away(operation: Operation, now: float, value: float | None) -> None:
        operation.value = value
        look(operation, now, value)

    return patch.multiple(Operation, look=look_away)


def steps_wait_for_sessions() -> AbstractContextManager[None]:
    """A batch waits for open sessions, as for groups of rows."""
    stragglers = Schedule.stragglers

    def and_sessions(schedule: Schedule, chosen: list[LedgerGroup]) -> list[LedgerGroup]:
        sessions = schedule._state.groups.head(GroupState.OPEN, schedule.in_excess(chosen)[1])
        return [*stragglers(schedule, chosen), *sessions]

    return patch.multiple(Schedule, stragglers=and_sessions, overdue=lambda schedule: [])


def sessions_beyond_the_bound() -> AbstractContextManager[None]:
    """No open session expires at its deadline."""
    return patch.multiple(Schedule, overdue=lambda schedule: [])


def sessions_expire_at_each_step() -> AbstractContextManager[None]:
    """All open sessions expire when a batch is formed."""
    return patch.multiple(Schedule, overdue=lambda schedule: schedule._state.groups.head(GroupState.OPEN))


def served_versions_however_old() -> AbstractContextManager[None]:
    """A session may begin with a version for which no step is left."""
    return patch.multiple(LedgerSessions, _fits_start=lambda sessions, version: True)


def sessions_without_a_limit() -> AbstractContextManager[None]:
    """Sessions may take all places of rows."""
    return patch.multiple(Room, most_sessions=Room.most_alive)


def sessions_lost_with_their_gateway() -> AbstractContextManager[None]:
    """A session ends with the gateway that holds it."""
    give_back = Leases.give_back

    def discard(leases: Leases, groups: list[LedgerGroup], reason: str) -> list[str]:
        for group in groups:
            if group.session:
                leases._state.emit(Discarded(group.group_id, reason))
        return give_back(leases, [group for group in groups if not group.session], reason)

    return patch.multiple(Leases, give_back=discard)


def sessions_taken_from_gateways() -> AbstractContextManager[None]:
    """A gateway adopts sessions that others hold."""
    return patch.multiple(
        LedgerSessions, ownerless=lambda held: [group.group_id for group in held._state.groups.head(GroupState.OPEN)]
    )


def rewards_acknowledged_at_once() -> AbstractContextManager[None]:
    """A gateway answers a reward before the trainer has the sample."""
    ask_trainer = Sampling.ask_trainer

    async def ask_later(sampling: Sampling, request: Message, answer: Any) -> Any:
        if not isinstance(request, StoreSamples) or sampling._member.kind.role != "gateway":
            return await ask_trainer(sampling, request, answer)
        sampling._member.spawn(ask_trainer(sampling, request, answer), "later")
        return GroupAccepted(accepted=True)

    return patch.multiple(Sampling, ask_trainer=ask_later)


def answers_before_they_are_saved() -> AbstractContextManager[None]:
    """A gateway answers a call before the trainer has it."""

    async def save_nothing(session: UserSession) -> None:
        pass

    return patch.multiple(UserSession, save=save_nothing)


def calls_sampled_again() -> AbstractContextManager[None]:
    """A gateway does not look whether it has answered a call with this id."""

    async def answer(session: UserSession, request: Any, name: str, on_text: Any, mark: str) -> Any:
        return await session._turn(request, name, on_text, mark)

    return patch.multiple(UserSession, answer=answer)


def left_sessions_begin_anew() -> AbstractContextManager[None]:
    """Who goes on with a session does not ask for what is saved of it."""

    async def nothing(session: UserSession, frame: Any) -> None:
        pass

    return patch.multiple(UserSession, restore=nothing)


def rewards_without_receipts() -> AbstractContextManager[None]:
    """The master forgets the ids of rewards at each step."""
    apply = RunState.apply

    def forget(state: RunState, change: Change) -> None:
        apply(state, change)
        if isinstance(change, Stepped):
            state.sessions.receipts.clear()

    return patch.multiple(RunState, apply=forget)


def stored_sessions_begin_anew() -> AbstractContextManager[None]:
    """Who goes on with a session does not ask whether its sample is stored."""
    ask_trainer = Sampling.ask_trainer

    async def ask(sampling: Sampling, request: Message, answer: Any) -> Any:
        if isinstance(request, AskSamples) and sampling._member.kind.role == "gateway":
            return StoredSamples(places=(), start_version=None)
        return await ask_trainer(sampling, request, answer)

    return patch.multiple(Sampling, ask_trainer=ask)


def deleted_sessions_stay() -> AbstractContextManager[None]:
    """A gateway forgets a session that is to be deleted, and does not tell the master."""
    ask_master = Membership.ask_master

    async def ask(member: Membership, message: Message, *more: Any) -> Any:
        deletes = isinstance(message, DiscardSession) and message.reason == "deleted"
        return SessionDiscarded(count=1) if deletes else await ask_master(member, message, *more)

    return patch.multiple(Membership, ask_master=ask)


def journal_not_synced() -> AbstractContextManager[None]:
    """The journal's transactions are lost if the machine loses its power soon afterwards."""
    return patch.multiple(journal, prepare=_prepare_unsynced)


def spool_not_synced() -> AbstractContextManager[None]:
    """The spool's transactions are lost if the machine loses its power soon afterwards."""
    return patch.multiple(spool_file, prepare=_prepare_unsynced)


def _prepare_unsynced(connection: Any, mark: int, version: int, schema: str) -> None:
    prepare(connection, mark, version, schema)
    connection.execute("PRAGMA synchronous = OFF")


def evaluations_sampled_as_for_training() -> AbstractContextManager[None]:
    """An evaluator samples at the temperature of training."""
    sample = Evaluator._sample

    def as_trained(evaluator: Evaluator, row: Any, sampling: Any, *where: Any) -> Any:
        return sample(evaluator, row, evaluator.config.sampling, *where)

    return patch.multiple(Evaluator, _sample=as_trained)


def forgotten_samples_accepted() -> AbstractContextManager[None]:
    """The spool says that it has a sample which another thread has removed while it was stored."""
    put_all = Spool.put_all

    def put(store: Spool, parts: Any, size: int) -> Any:
        stored = put_all(store, parts, size)
        return stored if stored.places else stored._replace(places=tuple(parts))

    return patch.multiple(Spool, put_all=put)


def deletions_of_the_last_session() -> AbstractContextManager[None]:
    """A deletion reaches only the last session of a name, and not the earlier ones that are ready."""
    of_session = Groups.of_session
    return patch.multiple(Groups, of_session=lambda groups, name: of_session(groups, name)[-1:])


def kept_on_a_way_back(part: str, name: str) -> AbstractContextManager[None]:
    """A run that goes back keeps what this part of its state has under this name."""
    return_to = past_state.return_to

    def keep(state: RunState, past: Any, spooled: Any) -> None:
        value = getattr(getattr(state, part), name)
        return_to(state, past, spooled)
        setattr(getattr(state, part), name, value)

    return patch.multiple(past_state, return_to=keep)


def receipts_kept_on_a_way_back() -> AbstractContextManager[None]:
    """A run that goes back keeps the receipts of rewards that it undoes."""
    return kept_on_a_way_back("sessions", "receipts")


def deletions_undone_on_a_way_back() -> AbstractContextManager[None]:
    """A run that goes back forgets which sessions users had deleted since."""
    return_to = past_state.return_to

    def forget(state: RunState, past: Any, spooled: Any) -> None:
        state.sessions.deleted_sessions.clear()
        return_to(state, past, spooled)

    return patch.multiple(past_state, return_to=forget)


def snapshots_without_receipts() -> AbstractContextManager[None]:
    """A master that starts with a snapshot does not know which rewards were taken before."""
    dump = RunState.dump
    return patch.multiple(RunState, dump=lambda state: dump(state) | {"receipts": {}})


def trained_sessions_not_counted() -> AbstractContextManager[None]:
    """The master does not note which step has trained a session."""
    return patch.multiple(SessionRecords, note_trained=lambda records, groups, step: None)


def tokens_of_steps_alone() -> AbstractContextManager[None]:
    """The summary counts the tokens of groups that were undone as trained."""
    return kept_on_a_way_back("tally", "tokens_trained")


def sessions_trained_twice() -> AbstractContextManager[None]:
    """Who talks on after the reward of a session goes on in its sample, under a new permit."""
    add = SessionTable.add

    def go_on(sessions: SessionTable, name: str, group: Any) -> UserSession:
        session, earlier = add(sessions, name, group), vars(sessions).setdefault("earlier", {})
        if name in earlier:
            session.sample.forest, session.sample._finished = earlier[name].forest, earlier[name]._finished
        earlier[name] = session.sample
        return session

    return patch.multiple(SessionTable, add=go_on)


def sessions_of_two_gateways() -> AbstractContextManager[None]:
    """The trainer takes the calls of a session also from a gateway that was replaced."""
    return patch.multiple(SpooledCalls, holder=lambda calls, group: "")


def expiry_not_told() -> AbstractContextManager[None]:
    """The trainer answers that a session is ready, even if the master did not accept it."""
    report = SampleStore._report_ready

    async def accept(store: SampleStore, group: Any) -> bool:
        await report(store, group)
        return True

    return patch.multiple(SampleStore, _report_ready=accept)


MUTANTS: dict[str, Mutant] = {
    "bounds of now": bounds_of_now,
    "capacity from a counter": capacity_from_a_counter,
    "no de-duplication": no_deduplication,
    "no batch gate": no_batch_gate,
    "no lease expiry": no_lease_expiry,
    "leases nobody knows of": leases_nobody_knows_of,
    "replies not matched": replies_not_matched,
    "version kept on roll-back": version_kept_on_roll_back,
    "choices not journaled": choices_not_journaled,
    "lost groups stay ready": lost_groups_stay_ready,
    "only the last checkpoint": only_the_last_checkpoint,
    "payloads of one checkpoint": payloads_of_one_checkpoint,
    "last checkpoint left to the dead": last_checkpoint_left_to_the_dead,
    "nothing saved on leaving": nothing_saved_on_leaving,
    "payloads dropped once trained": payloads_dropped_once_trained,
    "answers before the commit": answers_before_the_commit,
    "no fencing": no_fencing,
    "min_version ignored": min_version_ignored,
    "no filter": no_filter,
    "checkpoints in a streak": checkpoints_in_a_streak,
    "hold ignored": hold_ignored,
    "published before it is written": published_before_it_is_written,
    "no wait for the write": no_wait_for_the_write,
    "checkpoint before it is written": checkpoint_reported_before_it_is_written,
    "tokens twice after a break": tokens_twice_after_a_break,
    "end tokens dropped": end_tokens_dropped,
    "the same random numbers": the_same_random_numbers,
    "shared tokens trained twice": shared_tokens_trained_twice,
    "branches lost on the way": branches_lost_on_the_way,
    "start versions not reported": start_versions_not_reported,
    "min_version stays": min_version_stays,
    "rollouts written at the end": rollouts_written_at_the_end,
    "rollouts written again": rollouts_written_again,
    "rejected payloads kept": rejected_payloads_kept,
    "payloads not dropped at a start": payloads_not_dropped_at_a_start,
    "spool never emptied": spool_never_emptied,
    "lineages ignored": lineages_ignored,
    "leases not renewed at a start": leases_not_renewed_at_a_start,
    "work not reported": work_not_reported,
    "awake in a turn": awake_in_a_turn,
    "old trainers give devices": old_trainers_give_devices,
    "failures in parts are lost": failures_in_parts_are_lost,
    "columns mixed up": columns_mixed_up,
    "keep-alives count nothing": keep_alives_count_nothing,
    "rewards negated": rewards_negated,
    "scores exchanged": scores_exchanged,
    "rows for another scorer": rows_for_another_scorer,
    "next row sampled": next_row_sampled,
    "scored groups stored in parts": scored_groups_stored_in_parts,
    "groups in order of arrival": groups_in_order_of_arrival,
    "stored samples sampled again": stored_samples_sampled_again,
    "stored samples of another group": stored_samples_of_another_group,
    "stored samples however old": stored_samples_however_old,
    "saved calls sampled again": saved_calls_sampled_again,
    "saved calls of another sample": saved_calls_of_another_sample,
    "saved calls whatever their prompts": saved_calls_whatever_their_prompts,
    "newest version of saved calls": newest_version_of_saved_calls,
    "log-probs reversed after a break": logprobs_reversed_after_a_break,
    "hangs not noticed": hangs_not_noticed,
    "own code without a limit": own_code_without_a_limit,
    "started with the newest version": started_with_the_newest_version,
    "ready with the newest version": ready_with_the_newest_version,
    "discarded at the first failure": discarded_at_the_first_failure,
    "never discarded for failures": never_discarded_for_failures,
    "each failure counts": each_failure_counts,
    "shortages are failures": shortages_are_failures,
    "snapshots without failures": snapshots_without_failures,
    "snapshots without run-ahead": snapshots_without_run_ahead,
    "snapshots without lost evaluations": snapshots_without_lost_evaluations,
    "own pause not excused": own_pause_not_excused,
    "leases of leavers stay": leases_of_leavers_stay,
    "evaluations of dead lineages": evaluations_of_dead_lineages,
    "only the newest weights": only_the_newest_weights,
    "no remedies": no_remedies,
    "latest deadlines first": latest_deadlines_first,
    "evidence ignored": evidence_ignored,
    "steps wait for sessions": steps_wait_for_sessions,
    "sessions beyond the bound": sessions_beyond_the_bound,
    "sessions expire at each step": sessions_expire_at_each_step,
    "served versions however old": served_versions_however_old,
    "sessions without a limit": sessions_without_a_limit,
    "sessions lost with their gateway": sessions_lost_with_their_gateway,
    "sessions taken from gateways": sessions_taken_from_gateways,
    "rewards acknowledged at once": rewards_acknowledged_at_once,
    "answers before they are saved": answers_before_they_are_saved,
    "calls sampled again": calls_sampled_again,
    "left sessions begin anew": left_sessions_begin_anew,
    "rewards without receipts": rewards_without_receipts,
    "stored sessions begin anew": stored_sessions_begin_anew,
    "deleted sessions stay": deleted_sessions_stay,
    "evaluations sampled as for training": evaluations_sampled_as_for_training,
    "forgotten samples accepted": forgotten_samples_accepted,
    "journal not synced": journal_not_synced,
    "spool not synced": spool_not_synced,
    "deletions of the last session": deletions_of_the_last_session,
    "receipts kept on a way back": receipts_kept_on_a_way_back,
    "deletions undone on a way back": deletions_undone_on_a_way_back,
    "snapshots without receipts": snapshots_without_receipts,
    "trained sessions not counted": trained_sessions_not_counted,
    "tokens of steps alone": tokens_of_steps_alone,
    "sessions trained twice": sessions_trained_twice,
    "sessions of two gateways": sessions_of_two_gateways,
    "expiry not told": expiry_not_told,
}
