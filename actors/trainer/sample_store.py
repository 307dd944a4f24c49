"""The trainer's store of scored samples, on disk until a checkpoint covers the step that trains them."""

import asyncio
import functools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from actors.runtime.actor import HandlesRequests, handles
from actors.runtime.membership import Ask
from actors.trainer.offered_pictures import OfferedPictures, use_disk
from actors.trainer.unfinished_samples import UnfinishedSamples, check_holder
from areal.base import extensions
from areal.base.errors import explain
from areal.config import Config
from areal.rewards.functions import mean_parts
from areal.samples.pictures import digests_in
from areal.samples.trajectory import Group, Note, Trajectory, check_kept_words, samples_of
from areal.storage.rollouts import RolloutWriter
from areal.storage.spool import Spool, SpoolPart, StoredGroup
from protocols.bus_errors import BusyError, FencedError, RefusedError
from protocols.messages import GroupAccepted, GroupReady, ScoredSample, StoreSamples
from protocols.transport import Request


class SampleStore(HandlesRequests):
    """Reports each complete group to the master.

    on_disk: does a write, again until the disk has room. ask_master: as of `Membership`. `pictures`: the pictures of
    the samples. `unfinished`: the stored work of unfinished groups.
    """

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
        self._routing: Any = None
        if config.trainer.routing == "replay":
            routing_of = extensions.need("routing", "of_model", "trainer.routing=replay").load()
            self._routing = routing_of(Path(config.model))
        self._spool = spool
        self._rollouts = rollouts
        self._on_disk = on_disk
        self._use_spool = functools.partial(use_disk, on_disk)
        self.pictures = OfferedPictures(config.pictures_folder, on_disk)
        self._ask_master = ask_master
        self._in_memory: dict[str, Group] = {}  # spooled groups still in memory, oldest first
        self._reporting: set[str] = set()  # complete groups, while the master is told
        self.unfinished = UnfinishedSamples(config, spool, self._use_spool, ask_master, self._report_ready)

    @handles(StoreSamples)
    async def store_samples(self, request: Request[StoreSamples]) -> GroupAccepted:
        stored = request.message
        with explain(ValueError, f"group {stored.group}: {{why}}", RefusedError):
            parts = {sample.place: self._part(stored, sample) for sample in stored.samples}

        def put() -> StoredGroup:  # the disk may have been full for long
            check_holder(self._spool, request)
            return self._spool.put_all(parts, samples_of(stored.prompt_index, self._config.group_size))

        stored_group = await self._use_spool(request, put)
        if stored_group.group is None:  # if a part was removed meanwhile, its group is no longer alive
            return GroupAccepted(accepted=parts.keys() <= set(stored_group.places))
        return GroupAccepted(accepted=await self._report_ready(stored_group.group))

    def _part(self, stored: StoreSamples, sample: ScoredSample) -> SpoolPart:
        """Decode and check a sample for the spool. Raises ValueError if the sample cannot be trained."""
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

    async def _report_ready(self, group: Group) -> bool:
        """Report a complete group to the master. If the master does not accept the group, drop it and return False.
        Raises BusyError for a session that is being reported already: the master's answer is not known yet."""
        if group.id in self._reporting:
            if group.prompt_index < 0:  # a user is told the result at once
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
        except RefusedError:  # otherwise the spool would keep this payload instead of a correct payload sent later
            await self._forget(group)
            raise
        finally:
            self._reporting.remove(group.id)
        if not accepted:
            if self._config.filter_zero_signal and not group.has_signal:
                self._rollouts.add_untrained(group, "filtered", "all its samples had the same reward")
            elif group.prompt_index >= 0:  # nothing of a session is kept: its user may have deleted it
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
    """Return the report that the group is on disk."""
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
