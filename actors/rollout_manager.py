"""The rollout manager: asks for permits, runs workflows as coroutines, and sends scored samples to the trainer.

The prompt of a group is the row of the data source at the index in the permit. The source is a pure function of that
index. Scored samples are on the trainer's disk, and so are the calls of others, from time to time: if a rollout manager
dies, another one samples what is missing. It never decides admission.

| loop, besides those of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| main | a healthy generator, room on the generators, permits | one task for each group |
| group | what the trainer has of it, if it is resumed; its first G scored samples; the trainer | `GroupReady` |
| sample | tokens of each call, then its score; if an actor dies, another one | its group |
| renew leases | a quarter of a lease | keeps its groups; ends those that were lost |
| balance | 2 s | moves sequences to emptier generators |
"""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import structlog

from actors.runtime.membership import Membership, Spawn
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Prompts, RowActor, Sampling
from actors.sampling.scores import GroupScores
from actors.sampling.services import Services
from actors.sampling.sessions import SampleSession
from areal.base.errors import ToolError, UserError, explain
from areal.config import Config
from areal.data.rows import Row
from areal.generation.routing import groups_that_fit, plan_moves
from areal.samples.pictures import digests_in, find
from areal.samples.trajectory import Note, Trajectory, row_text
from areal.storage.saved_calls import SavedCall, packed, unpacked
from areal.workflows.builtin import Workflow
from protocols.bus_errors import RefusedError, text_of
from protocols.messages import (
    AskCalls,
    AskPermits,
    AskSamples,
    Done,
    GroupAccepted,
    GroupFailed,
    GroupStarted,
    LackingPictures,
    LoadColumns,
    LostLeases,
    Member,
    OfferPictures,
    Permit,
    Permits,
    RenewLeases,
    ScoredSample,
    StoreCalls,
    StoredCalls,
    StoredSamples,
    StorePictures,
    StoreSamples,
)

S = TypeVar("S")

ASK_PERMITS_SECONDS = 20.0
# How long a scored sample waits for others of its group, to be stored with them: with a request for each sample, the
# threads beside the trainer's own took 0.18 s of CPU a step of the quickstart, now 0.07. A kill loses this time.
STORE_AFTER_SECONDS = 2.0
BALANCE_SECONDS = 2.0
# Rows after that of a new group whose images are pulled meanwhile.
ROWS_AHEAD = 8
# Time to save the calls of all samples before others take them over, and how many samples are saved at once.
HAND_OVER_SECONDS = 0.8
SAVES = 4

log = structlog.get_logger()


class RolloutManager(RowActor):
    role = "rollout_manager"

    def __init__(self, member: Membership, sampling: Sampling, source: Prompts, workflow: Workflow) -> None:
        super().__init__(member, sampling, source, workflow)
        self._rows = TrainingRows(self.config, source, sampling.services)
        self._groups: dict[str, GroupRun] = {}
        self._samples_finished = 0  # in the groups that have ended
        self._moved = 0
        self._stored = StoredGroups(sampling, member.spawn)

    async def main(self) -> None:
        await self.member.become_healthy()
        self.member.spawn(self._renew_leases(), "renew leases")
        self.member.spawn(self._balance(), "balance")
        while self.member.state == "healthy":
            self.member.activity = "waiting for a healthy generator"
            await self.directory.until(lambda: self.directory.with_role("generator"))
            self.member.activity = f"the generators are full: no new group starts, {self._running} samples run"
            await self.sampling.dispatch.loads.room.until(lambda: self._free_groups() > 0)
            self.member.activity = "waiting for permits from the master"
            permits = await self.member.ask_master(AskPermits(count=self._free_groups()), Permits, ASK_PERMITS_SECONDS)
            for permit in permits.permits:
                if self.member.state == "healthy":  # otherwise it is free again once this manager has left
                    self._begin_group(permit)

    async def hand_over(self) -> None:
        """Leave the groups in progress to another manager, which goes on with what is saved of them. If there is none,
        finish them."""
        if any(m.identity != self.member.bus.identity.name for m in self.directory.with_role("rollout_manager")):
            groups = self._groups.values()
            saves = [save for group in groups for save in group.save_calls()]
            saves += [request for group in groups for request in group.flush()]
            if saves:
                await asyncio.wait(saves, timeout=HAND_OVER_SECONDS)
            for group in groups:
                group.task.cancel()
        await self.sampling.dispatch.loads.room.until(lambda: not self._groups)

    def stats(self) -> dict[str, float]:
        return self.sampling.stats() | {
            "groups_running": len(self._groups),
            "samples_running": self._running,
            "samples_finished": self._samples_finished + sum(group.finished for group in self._groups.values()),
            "moved": self._moved,
        }

    def note_loads(self, loads: LoadColumns) -> None:
        self.sampling.dispatch.loads.note(loads)

    def _free_groups(self) -> int:
        """Number of groups to start now. It is at least 1 if no group is in progress."""
        slots = self.sampling.dispatch.loads.places / self.sampling.dispatch.askers
        samples = samples_of_group(self.config)
        beginning = samples * sum(not group.sessions for group in self._groups.values())
        requests = self.sampling.dispatch.loads.sequences + beginning
        free = groups_that_fit(samples, slots, requests, self._running)
        if not self._groups:
            free = max(1, free)
        return min(free, self.config.rollout_manager.max_concurrent_groups - len(self._groups))

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.config.master.lease_seconds / 4)
            if self._groups:
                renewed = await self.member.ask_master(RenewLeases(groups=tuple(self._groups)), LostLeases)
                for group in renewed.groups:
                    if running := self._groups.get(group):
                        log.warning("lease lost", group=group)
                        running.task.cancel()

    async def _balance(self) -> None:
        """Every BALANCE_SECONDS, move sequences to generators where they finish sooner."""
        while True:
            await asyncio.sleep(BALANCE_SECONDS)
            dispatch = self.sampling.dispatch
            loads = {
                m.identity: load
                for m in self.directory.with_role("generator")
                if (load := dispatch.loads.reported.get(m.identity)) and dispatch.avoidance.trusts(m)
            }
            sessions = [session for group in self._groups.values() for session in group.sessions]
            calls = [call for session in sessions for call in session.running]
            moves = plan_moves(loads, calls, dispatch.askers, asyncio.get_running_loop().time())
            for call, target in moves:
                call.move(self.directory.members[target])
            self._moved += len(moves)

    @property
    def _running(self) -> int:
        """Number of unfinished samples in all groups."""
        return sum(group.unfinished for group in self._groups.values())

    def _begin_group(self, permit: Permit) -> None:
        self.sampling.awaited_rewards.update(permit.rewards)
        group = self._groups[permit.group] = self._group_of(permit)
        group.task = self.member.spawn(group.run(), permit.group)
        # A callback, not code in the task: a task that is cancelled before its first step never runs.
        group.task.add_done_callback(lambda _: self._end_group(group))

    def _group_of(self, permit: Permit) -> "GroupRun":
        return GroupRun(permit, self.member, self.sampling, self._rows, self._stored, self.run_workflow)

    def _end_group(self, group: "GroupRun") -> None:
        del self._groups[group.permit.group]
        self._samples_finished += group.finished
        self.sampling.dispatch.loads.room.notify()

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """Run the workflow for one sample, lower its reward if the completion is too long (`reward.overlong_tokens`),
        and have scorers score its tokens. Only training samples get this, not those of an evaluation."""
        sample = await self.sampling.run_workflow(session, self._workflow, row)
        for column, name in scorers_of(self.config, row).items():
            branches = [
                self.sampling.services.rewards.score_tokens(name, branch.tokens) for branch in sample.sequences()
            ]
            scores = await asyncio.gather(*branches)
            with explain(ValueError, f"scorer {name!r}: {{why}}", functools.partial(SampleFailed, "scorer")):
                sample = sample.with_scores(column, [score.logprobs for score in scores])
                if column == "teacher_logprobs" and self.config.trainer.teacher_top_k:
                    sample = sample.with_scores("teacher_top_tokens", [score.top_tokens for score in scores])
                    sample = sample.with_scores("teacher_top_logprobs", [score.top_logprobs for score in scores])
        penalty = self.sampling.services.overlong(sample)
        return sample.lowered(penalty) if penalty else sample


def scorers_of(config: Config, row: Row) -> dict[str, str]:
    """The names of the scorers of a sample of this row, by the column that each gives. Raises SampleFailed."""
    trainer = config.trainer
    named = {"teacher_logprobs": trainer.teacher, "reference_logprobs": trainer.reference_scorer}
    if trainer.teacher_key:
        named["teacher_logprobs"] = row.fields.get(trainer.teacher_key) or trainer.teacher
    for name in filter(None, named.values()):
        if name not in config.logprob_scorers:
            names = ", ".join(config.logprob_scorers)
            why = f"row {row.index} has {trainer.teacher_key}={name!r} (trainer.teacher_key): scorers has {names}"
            raise SampleFailed("row", why)
    return {column: name for column, name in named.items() if name}


class TrainingRows:
    """The rows to train on, by their index in the data."""

    def __init__(self, config: Config, source: Prompts, services: Services) -> None:
        self._config, self._source, self._services = config, source, services

    def read(self, index: int) -> Row:
        """The row of the data at the index. Raises SampleFailed if it cannot be used."""
        try:
            row = self._source.row(index)
        except Exception as error:  # a bad row, or a data set that cannot be read; libraries raise anything
            log.error("row failed", row=index, exc_info=error)
            raise SampleFailed("row", f"row {index} of the data cannot be used: {error}") from None
        if row.pictures:
            with explain(UserError, "{why}", functools.partial(SampleFailed, "row")):
                find("check")(self._config)
        if too_long := self._services.too_long(row):
            raise SampleFailed("long", too_long)
        return row

    def prepare_ahead(self, index: int) -> None:
        """Have the tools prepare for the next rows: their images are pulled, if samples run in containers."""
        for tool in self._services.tools.expecting():
            for later in range(index + 1, index + 1 + ROWS_AHEAD):
                with contextlib.suppress(SampleFailed, ToolError):  # heard again once the row is used
                    tool.expect(self.read(later))


class GroupRun:
    """One group of a rollout manager: its sessions, and what becomes of them.

    unfinished, finished: number of its samples that have not ended, and that have. task: the one of `run`.
    run_workflow: gives the sample of a session on a row.
    """

    task: asyncio.Task[None]

    def __init__(
        self,
        permit: Permit,
        member: Membership,
        sampling: Sampling,
        rows: TrainingRows,
        stored: "StoredGroups",
        run_workflow: Callable[[SampleSession, Row], Awaitable[Trajectory]],
    ) -> None:
        self.permit = permit
        self._permitted = time.monotonic()
        self._member, self._sampling, self._rows, self._stored = member, sampling, rows, stored
        self._run_workflow = run_workflow
        self._config = member.config
        self.sessions: list[SampleSession] = []
        self.unfinished, self.finished = samples_of_group(self._config), 0
        self._store: _GroupStore | None = None

    def save_calls(self) -> list[asyncio.Task[Any]]:
        """Begin to have the trainer store the calls so far that it lacks."""
        return [session.save() for session in self.sessions if session.unsaved and session.save_every < math.inf]

    def flush(self) -> list[asyncio.Task[RefusedError | None]]:
        """Have the trainer store the scored samples that wait. Returns all such requests of the group."""
        return self._store.flush() if self._store else []

    async def run(self) -> None:
        try:
            await self._sample()
        except SampleFailed as failure:
            discarded = _tokens_sampled(self.sessions)
            reason, group = text_of(failure), self.permit.group
            failed = GroupFailed(group=group, cause=failure.cause, reason=reason, discarded=discarded)
            await self._member.ask_master(failed, Done)

    async def _sample(self) -> None:
        """Sample a group, or what is missing of it, and have the trainer store its samples soon after they are scored.
        Raises SampleFailed if the group cannot be finished."""
        permit, services, size = self.permit, self._sampling.services, self._config.group_size
        row = self._rows.read(permit.row)
        self._rows.prepare_ahead(permit.row)
        all_or_none = bool(services.of_groups(services.weights(row, permit.rewards)))
        stored = await self._stored.ask(permit, all_or_none)
        places = [place for place in range(self.unfinished) if place not in stored.places]
        needed = size - len(stored.places)
        self.unfinished = len(places) if needed > 0 else 0
        if needed <= 0:
            return
        home = await self._sampling.dispatch.choose("generator", min_version=permit.min_version)
        start = _GroupStart(len(places), stored.start_version, self._report_start)
        sessions = self._open_sessions(row, places, home, start)
        group = GroupScores(services.rewards, row, sessions, needed) if all_or_none else None
        for session in sessions:
            session.group = group
        work = [
            self._run_sample(place, session, row, start, place in stored.unfinished)
            for place, session in zip(places, sessions, strict=True)
        ]
        self._store = store = _GroupStore(functools.partial(self._stored.store, permit, row))
        try:
            scored = await first_scored(work, needed, None if all_or_none else store.add)
            unused = _tokens_sampled(sessions) - sum(sample.tokens_sampled for sample in scored)
            note = scored[-1].note
            scored[-1] = scored[-1]._replace(note=note._replace(discarded=note.discarded + max(0, unused)))
            store.add(*(scored if all_or_none else scored[-1:]))
            for refusal in filter(None, await asyncio.gather(*store.flush())):
                raise SampleFailed("trainer", f"the trainer refused the group: {refusal}")
        finally:
            for session in sessions:
                session.close()
            self._store = None
            store.cancel()
            if group:
                await group.close()

    def _open_sessions(
        self, row: Row, places: Sequence[int], home: Member, start: "_GroupStart"
    ) -> list[SampleSession]:
        """A session for the sample at each of these places."""
        self.sessions = sessions = [
            SampleSession(
                self._sampling.services,
                row,
                self._config.sampling,
                self.permit.min_version,
                home=home,
                slot=self._sampling.dispatch.loads.slot_at(home),
                on_start=start.count,
                rewards=self.permit.rewards,
            )
            for _ in places
        ]
        for place, session in zip(places, sessions, strict=True):
            self._stored.save_regularly(self.permit, place, session)
        return sessions

    def _report_start(self, version: int) -> None:
        """The group has this start version: no sample of it goes on at an older one, and the master is told."""
        for session in self.sessions:
            session.min_version = max(version, self.permit.min_version)
        self._member.spawn(
            self._member.ask_master(GroupStarted(group=self.permit.group, start_version=version), Done), "group started"
        )

    async def _run_sample(
        self, place: int, session: SampleSession, row: Row, start: "_GroupStart", begun: bool
    ) -> "_Scored | SampleFailed":
        """Sample and score one sample. begun: the trainer may have calls of it."""
        began, at = time.time(), time.monotonic()
        try:
            if begun:
                session.saved_calls = await self._stored.calls(self.permit, place)
            sample = await self._run_workflow(session, row)
            if session.group:
                session.group.finished(session)
            discarded = session.tokens_sampled - int(sample.sampled.sum())
            note = Note(session.reward_parts, max(0, discarded))
            if self._stored.keeps_rollouts:
                note = note._replace(
                    generators=(*session.generators,),
                    began=began,
                    seconds=time.monotonic() - at,
                    waited=at - self._permitted,
                    scoring=session.scoring_seconds,
                )
            return _Scored(place, sample, note, session.pictures)
        except SampleFailed as failure:
            if session.first_version is None:
                start.count()
            return failure
        finally:
            self.unfinished -= 1
            self.finished += 1
            self._sampling.dispatch.loads.room.notify()


async def first_scored(
    work: list[Coroutine[Any, Any, S | SampleFailed]], needed: int, on_scored: Callable[[S], None] | None
) -> list[S]:
    """The first `needed` scored samples; the others are cancelled. `on_scored` is called with each of them but the
    last one, at once; None: the score of one depends on the others. Raises SampleFailed once so many samples have
    failed that too few are left."""
    scored: list[S] = []
    failures: list[SampleFailed] = []
    async with asyncio.TaskGroup() as tasks:
        samples = [tasks.create_task(task) for task in work]
        for ended in asyncio.as_completed(samples):
            sample = await ended
            if isinstance(sample, SampleFailed):
                failures.append(sample)
            else:
                scored.append(sample)
                if on_scored and len(scored) < needed:
                    on_scored(sample)
            if len(scored) == needed or len(failures) > len(work) - needed:
                break
        for task in samples:
            task.cancel()
    if len(scored) < needed:
        raise failures[-1]  # the first ones may be of samples that the group did not need
    return scored


def samples_of_group(config: Config) -> int:
    """Number of samples that are started for a group."""
    return config.group_size + config.oversample


class _Scored(NamedTuple):
    """A scored sample, its place in its group, what is noted of it, and the files of pictures by their names."""

    place: int
    sample: Trajectory
    note: Note
    pictures: Mapping[str, bytes] = {}

    @property
    def tokens_sampled(self) -> int:
        """All tokens that were sampled for it, also those that are not in it."""
        return int(self.sample.sampled.sum()) + self.note.discarded


def _tokens_sampled(sessions: list[SampleSession]) -> int:
    return sum(session.tokens_sampled for session in sessions)


class StoredGroups:
    """What the trainer has of groups, and gets of them: scored samples, and the calls so far of other samples."""

    def __init__(self, sampling: Sampling, spawn: Spawn) -> None:
        self._sampling = sampling
        self._spawn = spawn
        self._saves = asyncio.Semaphore(SAVES)

    async def ask(self, permit: Permit, all_or_none: bool) -> StoredSamples:
        """What the trainer has of the group. Raises SampleFailed if it refuses the group."""
        if not permit.resumed:
            return StoredSamples(places=(), start_version=None)
        request = AskSamples(group=permit.group, prompt_index=permit.prompt_index, all_or_none=all_or_none)
        with explain(RefusedError, "the trainer refused the group: {why}", functools.partial(SampleFailed, "trainer")):
            return await self._sampling.ask_trainer(request, StoredSamples)

    async def calls(self, permit: Permit, place: int) -> list[SavedCall]:
        """The calls that the trainer has of a sample. Without them it is sampled anew."""
        try:
            stored = await self._sampling.ask_trainer(AskCalls(group=permit.group, place=place), StoredCalls)
        except RefusedError as error:
            log.warning("the trainer gives no calls of a sample", group=permit.group, error=str(error))
            return []
        return unpacked(stored.frame.data) if len(stored.frame) else []

    def save_regularly(self, permit: Permit, place: int, session: SampleSession) -> None:
        session.save = lambda: self._spawn(self._save(permit, place, session), "save calls")
        session.save_every = self._sampling.services.config.rollout_manager.save_every_tokens or math.inf

    async def _save(self, permit: Permit, place: int, session: SampleSession) -> None:
        """Have the trainer store the calls so far of a sample, unless it refuses them."""
        async with self._saves:
            tokens, calls = session.unsaved, session.calls_so_far()
            if not calls:  # the call with these tokens has failed
                return
            frame = np.frombuffer(packed(calls), np.uint8)
            request = StoreCalls(group=permit.group, prompt_index=permit.prompt_index, place=place, frame=frame)
            try:
                await self._sampling.ask_trainer(request, Done)
                session.unsaved -= tokens
            except RefusedError as error:
                session.save_every = math.inf
                log.warning("the trainer refused the calls of a sample", group=permit.group, error=str(error))

    async def store(self, permit: Permit, row: Row, scored: "Sequence[_Scored]") -> RefusedError | None:
        """Send samples to the trainer, until the trainer has stored them. Repeats are harmless, because a sample is
        identified by its group and its place there. Returns why the trainer refuses them."""
        request = StoreSamples(
            group=permit.group,
            prompt_index=permit.prompt_index,
            row=row_text(row.fields) if self.keeps_rollouts else "",
            samples=tuple(
                ScoredSample(
                    place=sample.place, frame=np.frombuffer(sample.sample.frame(), np.uint8), **sample.note._asdict()
                )
                for sample in scored
            ),
        )
        try:
            await self._store_pictures(scored)
            await self._sampling.ask_trainer(request, GroupAccepted)
        except RefusedError as error:
            return error
        return None

    async def _store_pictures(self, scored: "Sequence[_Scored]") -> None:
        """Have the trainer store those of the samples' pictures that it lacks. Raises RefusedError."""
        files = {name: item.pictures[name] for item in scored for name in digests_in(item.sample.pictures)}
        lacking = (
            (await self._sampling.ask_trainer(OfferPictures(names=tuple(files)), LackingPictures)).names
            if files
            else ()
        )
        if lacking:
            contents = tuple(np.frombuffer(files[name], np.uint8) for name in lacking)
            await self._sampling.ask_trainer(StorePictures(files=contents), Done)

    @property
    def keeps_rollouts(self) -> bool:
        return self._sampling.services.config.observe.rollouts != "none"


class _GroupStore:
    """Has the scored samples of a group stored: those that are scored within STORE_AFTER_SECONDS together.

    store: sends samples, and returns why they are refused.
    """

    def __init__(self, store: Callable[[Sequence[_Scored]], Coroutine[Any, Any, RefusedError | None]]) -> None:
        self._store = store
        self._waiting: list[_Scored] = []
        self._timer: asyncio.TimerHandle | None = None
        self._requests: list[asyncio.Task[RefusedError | None]] = []

    def add(self, *scored: _Scored) -> None:
        self._waiting += scored
        self._timer = self._timer or asyncio.get_running_loop().call_later(STORE_AFTER_SECONDS, self.flush)

    def flush(self) -> list[asyncio.Task[RefusedError | None]]:
        """Send what waits. Returns all requests of the group."""
        self._stop_timer()
        if self._waiting:
            self._requests.append(asyncio.create_task(self._store(self._waiting)))
            self._waiting = []
        return self._requests

    def cancel(self) -> None:
        self._stop_timer()
        for request in self._requests:
            request.cancel()

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None


class _GroupStart:
    """Calls `report` with a group's start version once each of `samples` has started, or has failed before its first
    token. The start version is the oldest version that sampled a first token. `stored`: that of the samples that are
    stored."""

    def __init__(self, samples: int, stored: int | None, report: Callable[[int], None]) -> None:
        self._missing = samples
        self._report = report
        self._versions = [] if stored is None else [stored]

    def count(self, version: int | None = None) -> None:
        """A sample has started at this version; None: it has failed before its first token."""
        self._versions += [] if version is None else [version]
        self._missing -= 1
        if not self._missing and self._versions:
            self._report(min(self._versions))
