"""A group of a rollout manager: its row, its samples, which run in parallel, and their way to the trainer."""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import structlog

from actors.rollout_manager.saved_groups import SavedGroups
from actors.runtime.membership import Membership
from actors.sampling.group_scores import GroupScores
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Prompts, Sampling
from actors.sampling.services import Services
from actors.sampling.sessions import SampleSession
from areal.base.errors import ToolError, UserError, explain
from areal.config import Config
from areal.data.rows import Row
from areal.samples.pictures import digests_in, find
from areal.samples.trajectory import Note, Trajectory, row_text
from protocols.attempt_messages import GroupFailed
from protocols.bus_errors import RefusedError, text_of
from protocols.membership_messages import Member
from protocols.messages import Done, GroupAccepted, GroupStarted, Permit, ScoredSample, StoreSamples
from protocols.picture_messages import LackingPictures, OfferPictures, StorePictures

S = TypeVar("S")

# How long a scored sample waits for more samples of its group, to be stored with them: with a request for each sample,
# the threads beside the trainer's own took 0.18 s of CPU a step of the quickstart, now 0.07. A kill loses this time.
STORE_AFTER_SECONDS = 2.0
# The number of rows ahead of a new group for which images are pulled in advance.
ROWS_AHEAD = 8

log = structlog.get_logger()


def samples_of_group(config: Config) -> int:
    """The number of samples that are started for a group."""
    return config.group_size + config.oversample


def keeps_rollouts(config: Config) -> bool:
    return config.observe.rollouts != "none"


class TrainingRows:
    """The rows to train on, by their index in the data."""

    def __init__(self, config: Config, source: Prompts, services: Services) -> None:
        self._config, self._source, self._services = config, source, services

    def read(self, index: int) -> Row:
        """The row of the data at the index. Raises SampleFailed if the row cannot be used."""
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
        """Have tools prepare for the next rows, for example pull images of containers."""
        for tool in self._services.tools.expecting():
            for later in range(index + 1, index + 1 + ROWS_AHEAD):
                with contextlib.suppress(SampleFailed, ToolError):  # raised again once the row is used
                    tool.expect(self.read(later))


class _Scored(NamedTuple):
    """A scored sample, the place in the group (from 0), a note, and the files of pictures by name."""

    place: int
    sample: Trajectory
    note: Note
    pictures: Mapping[str, bytes] = {}

    @property
    def tokens_sampled(self) -> int:
        """The number of all tokens sampled for this sample, discarded tokens included."""
        return int(self.sample.sampled.sum()) + self.note.discarded


def _tokens_sampled(sessions: list[SampleSession]) -> int:
    return sum(session.tokens_sampled for session in sessions)


class GroupStart:
    """Calls `report` with a group's start version once every sample has started, or has failed before its first token.
    The start version is the oldest version that sampled a first token. stored: the start version of stored samples."""

    def __init__(self, samples: int, stored: int | None, report: Callable[[int], None]) -> None:
        self._missing = samples
        self._report = report
        self._versions = [] if stored is None else [stored]

    def count(self, version: int | None = None) -> None:
        """Count a sample that has started at this version; None: a sample that failed before its first token."""
        self._versions += [] if version is None else [version]
        self._missing -= 1
        if not self._missing and self._versions:
            self._report(min(self._versions))


class GroupStore:
    """Has the scored samples of a group stored. Samples that are scored within STORE_AFTER_SECONDS share a request."""

    def __init__(self, sampling: Sampling, permit: Permit, row: Row) -> None:
        self._sampling, self._permit, self._row = sampling, permit, row
        self._waiting: list[_Scored] = []
        self._timer: asyncio.TimerHandle | None = None
        self._requests: list[asyncio.Task[RefusedError | None]] = []

    def add(self, *scored: _Scored) -> None:
        self._waiting += scored
        self._timer = self._timer or asyncio.get_running_loop().call_later(STORE_AFTER_SECONDS, self.flush)

    def flush(self) -> list[asyncio.Task[RefusedError | None]]:
        """Send the waiting samples. Returns all requests of the group."""
        self._stop_timer()
        if self._waiting:
            self._requests.append(asyncio.create_task(self.send(self._waiting)))
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

    async def send(self, scored: Sequence[_Scored]) -> RefusedError | None:
        """Send samples until the trainer has stored them, or return why the trainer refuses them. Repeats are harmless,
        because group and place identify a sample."""
        request = StoreSamples(
            group=self._permit.group,
            prompt_index=self._permit.prompt_index,
            row=row_text(self._row.fields) if keeps_rollouts(self._sampling.services.config) else "",
            samples=tuple(
                ScoredSample(
                    place=sample.place, frame=np.frombuffer(sample.sample.frame(), np.uint8), **sample.note._asdict()
                )
                for sample in scored
            ),
        )
        try:
            await self._send_pictures(scored)
            await self._sampling.ask_trainer(request, GroupAccepted)
        except RefusedError as error:
            return error
        return None

    async def _send_pictures(self, scored: Sequence[_Scored]) -> None:
        """Send the pictures of the samples that the trainer lacks. Raises RefusedError."""
        files = {name: item.pictures[name] for item in scored for name in digests_in(item.sample.pictures)}
        lacking = (
            (await self._sampling.ask_trainer(OfferPictures(names=tuple(files)), LackingPictures)).names
            if files
            else ()
        )
        if lacking:
            contents = tuple(np.frombuffer(files[name], np.uint8) for name in lacking)
            await self._sampling.ask_trainer(StorePictures(files=contents), Done)


async def first_scored(
    work: list[Coroutine[Any, Any, S | SampleFailed]], needed: int, on_scored: Callable[[S], None] | None
) -> list[S]:
    """Return the first `needed` scored samples, and cancel the rest of the work.

    on_scored: called at once with every sample but the last; None if scores depend on more samples. Raises SampleFailed
    as soon as too few samples are left.
    """
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
        raise failures[-1]  # the first failures may be of samples that the group did not need
    return scored


class GroupRun:
    """A group from the permit until all samples are stored, or until the group has failed.

    run_workflow: returns the sample of a session on a row. `unfinished`, `finished`: the number of samples in progress,
    and of ended samples. `task`: runs `run`.
    """

    task: asyncio.Task[None]

    def __init__(
        self,
        permit: Permit,
        member: Membership,
        sampling: Sampling,
        rows: TrainingRows,
        saved: SavedGroups,
        run_workflow: Callable[[SampleSession, Row], Awaitable[Trajectory]],
    ) -> None:
        self.permit = permit
        self._permitted = time.monotonic()
        self._member, self._sampling, self._rows, self._saved = member, sampling, rows, saved
        self._run_workflow = run_workflow
        self._config = member.config
        self.sessions: list[SampleSession] = []
        self.unfinished, self.finished = samples_of_group(self._config), 0
        self._store: GroupStore | None = None

    def save_calls(self) -> list[asyncio.Task[Any]]:
        """Begin to save the calls so far of all samples with unsaved tokens."""
        return [session.save() for session in self.sessions if session.unsaved and session.save_every < math.inf]

    def flush(self) -> list[asyncio.Task[RefusedError | None]]:
        """Have the trainer store the scored samples now. Returns all requests of the group."""
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
        """Sample the missing samples of the group, and have the trainer store each sample soon after its score. Raises
        SampleFailed if the group cannot be finished."""
        permit, services, size = self.permit, self._sampling.services, self._config.group_size
        row = self._rows.read(permit.row)
        self._rows.prepare_ahead(permit.row)
        all_or_none = bool(services.of_groups(services.weights(row, permit.rewards)))
        stored = await self._saved.ask(permit, all_or_none)
        places = [place for place in range(self.unfinished) if place not in stored.places]
        needed = size - len(stored.places)
        self.unfinished = len(places) if needed > 0 else 0
        if needed <= 0:
            return
        home = await self._sampling.dispatch.choose("generator", min_version=permit.min_version)
        start = GroupStart(len(places), stored.start_version, self._report_start)
        sessions = self._open_sessions(row, places, home, start)
        group = GroupScores(services.rewards, row, sessions, needed) if all_or_none else None
        for session in sessions:
            session.group = group
        work = [
            self._run_sample(place, session, row, start, place in stored.unfinished)
            for place, session in zip(places, sessions, strict=True)
        ]
        self._store = store = GroupStore(self._sampling, permit, row)
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

    def _open_sessions(self, row: Row, places: Sequence[int], home: Member, start: GroupStart) -> list[SampleSession]:
        """Open a session for the sample at each place."""
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
            self._saved.save_regularly(self.permit, place, session)
        return sessions

    def _report_start(self, version: int) -> None:
        """Report the start version to the master. From now on no older version samples a token of the group."""
        for session in self.sessions:
            session.min_version = max(version, self.permit.min_version)
        self._member.spawn(
            self._member.ask_master(GroupStarted(group=self.permit.group, start_version=version), Done), "group started"
        )

    async def _run_sample(
        self, place: int, session: SampleSession, row: Row, start: GroupStart, begun: bool
    ) -> _Scored | SampleFailed:
        """Sample and score a sample. begun: whether the trainer may have calls of the sample."""
        began, at = time.time(), time.monotonic()
        try:
            if begun:
                session.saved_calls = await self._saved.calls(self.permit, place)
            sample = await self._run_workflow(session, row)
            if session.group:
                session.group.finished(session)
            discarded = session.tokens_sampled - int(sample.sampled.sum())
            note = Note(session.reward_parts, max(0, discarded))
            if keeps_rollouts(self._config):
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
