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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import structlog

from actors.runtime.actor import Actor
from actors.runtime.membership import Membership, Spawn
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Prompts, Sampling, open_rows
from actors.sampling.scores import GroupScores
from actors.sampling.sessions import SampleSession
from areal.base.errors import ToolError, UserError, explain
from areal.config.data_section import DataConfig
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.generation.routing import groups_that_fit, plan_moves
from areal.samples.pictures import digests_in, find
from areal.samples.tokenizer import load_tokenizer
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
    Work,
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


class RolloutManager(Actor):
    role = "rollout_manager"

    @classmethod
    async def start(
        cls,
        member: Membership,
        open_source: Callable[[DataConfig, int], Prompts] = open_source,
        load_tokenizer: Callable[[str, DataConfig], Any] = load_tokenizer,
        workflow: Workflow | None = None,
    ) -> Self:
        rows = await open_rows(member, open_source, workflow)
        return cls(member, await Sampling.start(member, load_tokenizer), *rows)

    def __init__(self, member: Membership, sampling: Sampling, source: Prompts, workflow: Workflow) -> None:
        self.member = member
        self.config, self.directory = member.config, member.directory
        self.sampling = sampling
        self._source = source
        self._workflow = workflow
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._unfinished: dict[str, int] = {}  # number of unfinished samples, by group
        self._sessions: dict[str, list[SampleSession]] = {}
        self._stores: dict[str, _GroupStore] = {}
        self._samples_finished = self._moved = 0
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
            sessions = [session for sessions in self._sessions.values() for session in sessions]
            unsaved = [session for session in sessions if session.unsaved and session.save_every < math.inf]
            saves: list[asyncio.Task[Any]] = [session.save() for session in unsaved]
            for store in self._stores.values():
                saves += store.flush()
            if saves:
                await asyncio.wait(saves, timeout=HAND_OVER_SECONDS)
            for group in self._groups.values():
                group.cancel()
        await self.sampling.dispatch.loads.room.until(lambda: not self._groups)

    def stats(self) -> dict[str, float]:
        return self.sampling.stats() | {
            "groups_running": len(self._groups),
            "samples_running": self._running,
            "samples_finished": self._samples_finished,
            "moved": self._moved,
        }

    def works(self) -> tuple[Work, ...]:
        return self.sampling.works()

    def note_loads(self, loads: LoadColumns) -> None:
        self.sampling.dispatch.loads.note(loads)

    def _free_groups(self) -> int:
        """Number of groups to start now. It is at least 1 if no group is in progress."""
        slots = self.sampling.dispatch.loads.places / self.sampling.dispatch.askers
        beginning = self._samples * sum(not sessions for sessions in self._sessions.values())
        requests = self.sampling.dispatch.loads.sequences + beginning
        free = groups_that_fit(self._samples, slots, requests, self._running)
        if not self._groups:
            free = max(1, free)
        return min(free, self.config.rollout_manager.max_concurrent_groups - len(self._groups))

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.config.master.lease_seconds / 4)
            if self._groups:
                renewed = await self.member.ask_master(RenewLeases(groups=tuple(self._groups)), LostLeases)
                for group in renewed.groups:
                    if task := self._groups.get(group):
                        log.warning("lease lost", group=group)
                        task.cancel()

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
            calls = [call for sessions in self._sessions.values() for session in sessions for call in session.running]
            moves = plan_moves(loads, calls, dispatch.askers, asyncio.get_running_loop().time())
            for call, target in moves:
                call.move(self.directory.members[target])
            self._moved += len(moves)

    @property
    def _samples(self) -> int:
        """Number of samples that are started for a group."""
        return self.config.group_size + self.config.oversample

    @property
    def _running(self) -> int:
        """Number of unfinished samples in all groups."""
        return sum(self._unfinished.values())

    # --- one group

    def _begin_group(self, permit: Permit) -> None:
        self.sampling.awaited_rewards.update(permit.rewards)
        self._unfinished[permit.group] = self._samples
        self._sessions[permit.group] = []
        self._groups[permit.group] = task = self.member.spawn(self._run_group(permit), permit.group)
        # A callback, not code in the task: a task that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: self._end_group(permit.group))

    def _end_group(self, group: str) -> None:
        del self._groups[group]
        del self._unfinished[group]
        del self._sessions[group]
        self.sampling.dispatch.loads.room.notify()

    async def _run_group(self, permit: Permit) -> None:
        try:
            await self._sample_group(permit)
        except SampleFailed as failure:
            discarded = _tokens_sampled(self._sessions[permit.group])
            failed = GroupFailed(group=permit.group, cause=failure.cause, reason=text_of(failure), discarded=discarded)
            await self.member.ask_master(failed, Done)

    async def _sample_group(self, permit: Permit) -> None:
        """Sample a group, or what is missing of it, and have the trainer store its samples soon after they are scored.
        Raises SampleFailed if the group cannot be finished."""
        row = self._read_row(permit.row)
        self._prepare_ahead(permit.row)
        all_or_none = bool(self.sampling.services.of_groups(self.sampling.services.weights(row, permit.rewards)))
        stored = await self._stored.ask(permit, all_or_none)
        places = [place for place in range(self._samples) if place not in stored.places]
        needed = self.config.group_size - len(stored.places)
        self._unfinished[permit.group] = len(places) if needed > 0 else 0
        if needed <= 0:
            return
        home = await self.sampling.dispatch.choose("generator", min_version=permit.min_version)
        start = _GroupStart(len(places), stored.start_version, functools.partial(self._report_start, permit))
        sessions = self._open_sessions(permit, row, places, home, start)
        group = GroupScores(self.sampling.services.rewards, row, sessions, needed) if all_or_none else None
        for session in sessions:
            session.group = group
        work = [
            self._run_sample(permit, place, session, row, start, place in stored.unfinished)
            for place, session in zip(places, sessions, strict=True)
        ]
        store = self._stores[permit.group] = _GroupStore(functools.partial(self._stored.store, permit, row))
        try:
            scored = await self._first_scored(work, needed, None if all_or_none else store.add)
            unused = _tokens_sampled(sessions) - sum(sample.tokens_sampled for sample in scored)
            note = scored[-1].note
            scored[-1] = scored[-1]._replace(note=note._replace(discarded=note.discarded + max(0, unused)))
            store.add(*(scored if all_or_none else scored[-1:]))
            for refusal in filter(None, await asyncio.gather(*store.flush())):
                raise SampleFailed("trainer", f"the trainer refused the group: {refusal}")
        finally:
            for session in sessions:
                session.close()
            self._stores.pop(permit.group).cancel()
            if group:
                await group.close()

    def _open_sessions(
        self, permit: Permit, row: Row, places: Sequence[int], home: Member, start: "_GroupStart"
    ) -> list[SampleSession]:
        """A session for the sample at each of these places."""
        sessions = self._sessions[permit.group] = [
            SampleSession(
                self.sampling.services,
                row,
                self.config.sampling,
                permit.min_version,
                home=home,
                slot=self.sampling.dispatch.loads.slot_at(home),
                on_start=start.count,
                rewards=permit.rewards,
            )
            for _ in places
        ]
        for place, session in zip(places, sessions, strict=True):
            self._stored.save_regularly(permit, place, session)
        return sessions

    def _report_start(self, permit: Permit, version: int) -> None:
        """The group has this start version: no sample of it goes on at an older one, and the master is told."""
        for session in self._sessions[permit.group]:
            session.min_version = max(version, permit.min_version)
        self.member.spawn(
            self.member.ask_master(GroupStarted(group=permit.group, start_version=version), Done), "group started"
        )

    def _read_row(self, index: int) -> Row:
        """The row of the data at the index. Raises SampleFailed if it cannot be used."""
        try:
            row = self._source.row(index)
        except Exception as error:  # a bad row, or a data set that cannot be read; libraries raise anything
            log.error("row failed", row=index, exc_info=error)
            raise SampleFailed("row", f"row {index} of the data cannot be used: {error}") from None
        if row.pictures:
            with explain(UserError, "{why}", functools.partial(SampleFailed, "row")):
                find("check")(self.config)
        if too_long := self.sampling.services.too_long(row):
            raise SampleFailed("long", too_long)
        return row

    def _prepare_ahead(self, index: int) -> None:
        """Have the tools prepare for the next rows: their images are pulled, if samples run in containers."""
        for tool in self.sampling.services.tools.expecting():
            for later in range(index + 1, index + 1 + ROWS_AHEAD):
                with contextlib.suppress(SampleFailed, ToolError):  # heard again once the row is used
                    tool.expect(self._read_row(later))

    async def _first_scored(
        self, work: list[Coroutine[Any, Any, S | SampleFailed]], needed: int, on_scored: Callable[[S], None] | None
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

    async def _run_sample(
        self, permit: Permit, place: int, session: SampleSession, row: Row, start: "_GroupStart", begun: bool
    ) -> "_Scored | SampleFailed":
        """Sample and score one sample. begun: the trainer may have calls of it."""
        began, at = time.time(), time.monotonic()
        try:
            if begun:
                session.saved_calls = await self._stored.calls(permit, place)
            sample = await self.run_workflow(session, row)
            if session.group:
                session.group.finished(session)
            discarded = session.tokens_sampled - int(sample.sampled.sum())
            note = Note(session.reward_parts, max(0, discarded))
            if self._stored.keeps_rollouts:
                note = Note(*note[:2], (*session.generators,), began, time.monotonic() - at)
            return _Scored(place, sample, note, session.pictures)
        except SampleFailed as failure:
            if session.first_version is None:
                start.count()
            return failure
        finally:
            self._unfinished[permit.group] -= 1
            self._samples_finished += 1
            self.sampling.dispatch.loads.room.notify()

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """Run the workflow for one sample, lower its reward if the completion is too long (`reward.overlong_tokens`),
        and have scorers score its tokens. Only training samples get this, not those of an evaluation."""
        sample = await self.sampling.run_workflow(session, self._workflow, row)
        for column, name in self._scorers(row).items():
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

    def _scorers(self, row: Row) -> dict[str, str]:
        """The names of the scorers of a sample of this row, by the column that each gives. Raises SampleFailed."""
        trainer = self.config.trainer
        named = {"teacher_logprobs": trainer.teacher, "reference_logprobs": trainer.reference_scorer}
        if trainer.teacher_key:
            named["teacher_logprobs"] = row.fields.get(trainer.teacher_key) or trainer.teacher
        for name in filter(None, named.values()):
            if name not in self.config.logprob_scorers:
                names = ", ".join(self.config.logprob_scorers)
                why = f"row {row.index} has {trainer.teacher_key}={name!r} (trainer.teacher_key): scorers has {names}"
                raise SampleFailed("row", why)
        return {column: name for column, name in named.items() if name}


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
