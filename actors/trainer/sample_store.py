"""The trainer's store of scored samples, on disk, and of the calls of unfinished ones."""

import asyncio
import functools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.runtime.actor import HandlesRequests, handles
from actors.runtime.membership import Ask
from actors.trainer.offered_pictures import OfferedPictures, use_disk
from areal.base.errors import explain
from areal.config import Config
from areal.models import routing_of
from areal.rewards.result import mean_parts
from areal.samples.pictures import digests_in
from areal.samples.trajectory import Group, Note, Trajectory, check_kept_words, samples_of
from areal.storage.rollouts import RolloutWriter
from areal.storage.spool import Spool, SpoolPart, StoredGroup
from protocols.bus_errors import BusyError, FencedError, RefusedError
from protocols.messages import (
    AskCalls,
    AskReuse,
    AskSamples,
    Done,
    GroupAccepted,
    GroupReady,
    ReuseAnswer,
    ScoredSample,
    StoreCalls,
    StoredCalls,
    StoredSamples,
    StoreSamples,
)
from protocols.transport import Request


class SampleStore(HandlesRequests):
    """Reports each group that is complete to the master. on_disk: does a write once the disk has room for it.
    `pictures`: those of its samples."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        spool: Spool,
        rollouts: RolloutWriter,
        on_disk: Callable[..., Awaitable[Any]],
        ask_master: Ask,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._routing = routing_of(Path(config.model)) if config.trainer.routing == "replay" else None
        self._spool = spool
        self._rollouts = rollouts
        self._on_disk = on_disk
        self._use_spool = functools.partial(use_disk, on_disk)
        self.pictures = OfferedPictures(config.pictures_folder, on_disk)
        self._ask_master = ask_master
        self._in_memory: dict[str, Group] = {}  # spooled groups that are still in memory, oldest first
        self._reporting: set[str] = set()  # groups that are complete, while the master is told

    @handles(StoreSamples)
    async def store_samples(self, request: Request[StoreSamples]) -> GroupAccepted:
        stored = request.message
        with explain(ValueError, f"group {stored.group}: {{why}}", RefusedError):
            parts = {sample.place: self._part(stored, sample) for sample in stored.samples}

        def put() -> StoredGroup:  # the disk may have been full for long
            self._check_holder(request)
            return self._spool.put_all(parts, self._size(stored.prompt_index))

        stored_group = await self._use_spool(request, put)
        if stored_group.group is None:  # a part that was forgotten meanwhile is of a group that is no longer alive
            return GroupAccepted(accepted=parts.keys() <= set(stored_group.places))
        return GroupAccepted(accepted=await self._report_ready(stored_group.group))

    def _size(self, prompt_index: int) -> int:
        return samples_of(prompt_index, self._config.group_size)

    def _part(self, stored: StoreSamples, sample: ScoredSample) -> SpoolPart:
        """A sample for the spool. Raises ValueError for one that cannot be trained."""
        trajectory = Trajectory.of_frame(sample.frame.data)
        trajectory.validate()
        if not (trajectory.tokens.min() >= 0 and trajectory.tokens.max() < self._vocab_size):
            raise ValueError(f"a token is outside the model's vocabulary of {self._vocab_size}")
        if digests_in(trajectory.pictures):
            self.pictures.store.check(trajectory, self._config.model)
        if self._config.keeps_words:
            check_kept_words(trajectory, self._vocab_size)
        if self._routing:
            self._routing.check(trajectory.routes, trajectory.sampled)
        note = Note(**{name: getattr(sample, name) for name in Note._fields})
        return SpoolPart(
            Group(stored.group, stored.prompt_index, (trajectory,), stored.row, (note,)), sample.frame.data
        )

    @handles(AskSamples)
    async def ask_samples(self, request: Request[AskSamples]) -> StoredSamples:
        """What is stored of a group. What groups of its prompt that were given up have stored becomes its own, as far
        as the master allows it, and is forgotten otherwise."""
        group, size = request.message.group, self._size(request.message.prompt_index)
        stored, unfinished = await self._oldest_versions(request, size)
        if earlier := {key: version for key, version in [*unfinished.items(), *stored.items()] if key[0] != group}:
            answer = await self._ask_master(AskReuse(group=group, versions=tuple(earlier.values())), ReuseAnswer)
            if answer.oldest is not None:
                fresh = {key for key, version in earlier.items() if version >= answer.oldest}
                await self._use_spool(request, self._spool.move, group, sorted(fresh & stored.keys()), size)
                begun = [key for key in unfinished if key in fresh]
                await self._use_spool(request, self._spool.move_calls, group, begun)
                await self._use_spool(request, self._spool.forget, {earlier_id for earlier_id, _ in earlier})
                stored, unfinished = await self._oldest_versions(request, size)
        stored_group = await self._use_spool(request, self._spool.complete, group, size)
        if stored_group.group is not None:
            await self._report_ready(stored_group.group)
        scored = {place: version for (group_id, place), version in stored.items() if group_id == group}
        calls = {place: version for (group_id, place), version in unfinished.items() if group_id == group}
        return StoredSamples(
            places=tuple(scored),
            unfinished=tuple(place for place in calls if place not in scored),
            start_version=min([*scored.values(), *calls.values()], default=None),
        )

    async def _oldest_versions(self, request: Request[AskSamples], size: int) -> tuple[dict[tuple[str, int], int], ...]:
        """The oldest version in each stored sample of the prompt, and in each of which calls are stored, by group and
        place. If samples are of use only with all of their group, the former is the oldest in all, and others are left
        out."""
        samples = await self._use_spool(request, self._spool.samples, request.message.prompt_index)
        unfinished = await self._use_spool(request, self._spool.unfinished, request.message.prompt_index)
        stored = {key: sample.start_version for key, sample in samples.items()}
        if request.message.all_or_none:
            of_groups: dict[str, list[int]] = {}
            for (group, _), version in stored.items():
                of_groups.setdefault(group, []).append(version)
            stored = {key: min(of_groups[key[0]]) for key in stored if len(of_groups[key[0]]) == size}
        return stored, unfinished

    @handles(StoreCalls)
    async def store_calls(self, request: Request[StoreCalls]) -> Done:
        stored = request.message
        key = stored.group, stored.place

        def put() -> None:
            self._check_holder(request)
            self._spool.put_calls(*key, stored.prompt_index, stored.frame.data, stored.number)
            self._check_holder(request)  # another one may have read the calls before these

        with explain(ValueError, f"group {stored.group}: {{why}}", RefusedError):
            await self._use_spool(request, put)
        return Done()

    @handles(AskCalls)
    async def ask_calls(self, request: Request[AskCalls]) -> StoredCalls:
        """The calls of a session go to the gateway that goes on with it: from then on, no other may store any."""
        key = request.message.group, request.message.place
        if request.sender.startswith("gateway/"):
            await self._use_spool(request, self._spool.hold, key[0], request.sender)
        frame = await self._use_spool(request, self._spool.calls, *key)
        return StoredCalls(frame=np.frombuffer(frame, np.uint8))

    def _check_holder(self, request: Request[StoreSamples] | Request[StoreCalls]) -> None:
        """Raises RefusedError if another gateway has asked for the calls of a session since: it lacks these."""
        if request.message.prompt_index < 0:
            group = request.message.group
            holder = self._spool.holder(group)
            if holder not in ("", request.sender):
                raise RefusedError(f"{holder} goes on with {group}")

    async def _report_ready(self, group: Group) -> bool:
        """Report a group that is complete to the master, and drop it if the master does not accept it. Returns False
        then. Raises BusyError for a session of which the master is told already: its answer is not known."""
        if group.id in self._reporting:
            if group.prompt_index < 0:  # a user is told at once what this says
                raise BusyError(f"the master is being told of {group.id}")
            return True
        self._reporting.add(group.id)
        try:
            # Keep the group in memory, so that the next steps need not read it from disk. At most as many groups are
            # kept as may be alive, even if groups are stored twice.
            self._in_memory.setdefault(group.id, group)
            while len(self._in_memory) > (self._config.max_staleness + 1) * self._config.batch_size:
                del self._in_memory[next(iter(self._in_memory))]
            accepted: bool = (await self._ask_master(_ready_report(group), GroupAccepted)).accepted
        except FencedError:
            raise
        except RefusedError:  # otherwise the spool would keep this payload instead of a correct one sent later
            await self._forget(group)
            raise
        finally:
            self._reporting.remove(group.id)
        if not accepted:
            if self._config.filter_zero_signal and not group.has_signal:
                self._rollouts.add_untrained(group, "filtered", "all its samples had the same reward")
            elif group.prompt_index >= 0:  # of a session nothing is kept: its user may have deleted it
                self._rollouts.add_untrained(group, "discarded", "its lease had ended, or it had become too old")
            await self._forget(group)
        return accepted

    async def _forget(self, group: Group) -> None:
        self._in_memory.pop(group.id, None)
        await self._on_disk("the spool", self._spool.forget, [group.id])
        if group.prompt_index < 0:
            await self._on_disk("the spool", self._spool.scrub)

    async def load_groups(self, ids: Sequence[str]) -> list[Group]:
        fresh = {group: self._in_memory.pop(group) for group in ids if group in self._in_memory}
        if missing := [group for group in ids if group not in fresh]:
            fresh |= {group.id: group for group in await asyncio.to_thread(self._spool.get, missing)}
        return [fresh[group] for group in ids]


def _ready_report(group: Group) -> GroupReady:
    """The report that the group is on disk."""
    samples = group.trajectories
    rewards = [t.reward for t in samples]
    return GroupReady(
        group=group.id,
        start_version=group.start_version,
        reward_mean=sum(rewards) / len(rewards),
        reward_spread=statistics.pstdev(rewards),
        signal=group.has_signal,
        tokens=sum(int(t.sampled.sum()) for t in samples),
        discarded=sum(note.discarded for note in group.notes),
        reward_parts=mean_parts(note.parts for note in group.notes),
        marks=tuple(mark for note in group.notes for mark in note.marks),
        gave=tuple(gave for note in group.notes for gave in note.gave),
    )
