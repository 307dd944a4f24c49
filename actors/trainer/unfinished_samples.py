"""The unfinished groups and sessions in the trainer's spool, for the actor that continues them."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from actors.runtime.actor import HandlesRequests, handles
from actors.runtime.membership import Ask
from areal.base.errors import explain
from areal.config import Config
from areal.samples.trajectory import Group, samples_of
from areal.storage.spool import Spool
from protocols.attempt_messages import (
    AskCalls,
    AskReuse,
    AskSamples,
    ReuseAnswer,
    StoreCalls,
    StoredCalls,
    StoredSamples,
)
from protocols.bus_errors import RefusedError
from protocols.messages import Done, StoreSamples
from protocols.transport import Request

# The oldest version in each stored sample, by group and place.
Versions = dict[tuple[str, int], int]


class UnfinishedSamples(HandlesRequests):
    """Stores the calls of unfinished samples, and finds the stored work of a group.

    use_spool: calls a method of the spool for a request. report_ready: reports a complete group to the master.
    """

    def __init__(
        self,
        config: Config,
        spool: Spool,
        use_spool: Callable[..., Awaitable[Any]],
        ask_master: Ask,
        report_ready: Callable[[Group], Awaitable[bool]],
    ) -> None:
        self._config = config
        self._spool = spool
        self._use_spool = use_spool
        self._ask_master = ask_master
        self._report_ready = report_ready

    @handles(AskSamples)
    async def ask_samples(self, request: Request[AskSamples]) -> StoredSamples:
        """The stored samples and calls of a group. Stored work of earlier groups of the same prompt, which were given
        up, moves to this group as far as the master allows, and is removed otherwise."""
        group, size = request.message.group, samples_of(request.message.prompt_index, self._config.group_size)
        stored, unfinished = await self._oldest_versions(request, size)
        if earlier := {key: version for key, version in [*unfinished.items(), *stored.items()] if key[0] != group}:
            answer = await self._ask_master(AskReuse(group=group, versions=tuple(earlier.values())), ReuseAnswer)
            if answer.oldest is not None:
                fresh = {key for key, version in earlier.items() if version >= answer.oldest}
                await self._use_spool(request, self._spool.move, group, sorted(fresh & stored.keys()), size)
                begun = [key for key in unfinished if key in fresh]
                await self._use_spool(request, self._spool.unfinished.move, group, begun)
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

    async def _oldest_versions(self, request: Request[AskSamples], size: int) -> tuple[Versions, Versions]:
        """The oldest versions in stored samples of the prompt, and in stored calls. If samples count only as a complete
        group (`all_or_none`), incomplete groups are left out, and each sample gets the oldest version in its group."""
        samples = await self._use_spool(request, self._spool.samples, request.message.prompt_index)
        unfinished = await self._use_spool(
            request, self._spool.unfinished.oldest_versions, request.message.prompt_index
        )
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
            check_holder(self._spool, request)
            self._spool.unfinished.put(*key, stored.prompt_index, stored.frame.data, stored.number)
            check_holder(self._spool, request)  # another gateway may have read the calls before these

        with explain(ValueError, f"group {stored.group}: {{why}}", RefusedError):
            await self._use_spool(request, put)
        return Done()

    @handles(AskCalls)
    async def ask_calls(self, request: Request[AskCalls]) -> StoredCalls:
        """The stored calls of a sample. A gateway that asks for a session becomes its holder: from then on no other
        gateway may store calls of the session."""
        key = request.message.group, request.message.place
        if request.sender.startswith("gateway/"):
            await self._use_spool(request, self._spool.unfinished.hold, key[0], request.sender)
        frame = await self._use_spool(request, self._spool.unfinished.calls, *key)
        return StoredCalls(frame=np.frombuffer(frame, np.uint8))


def check_holder(spool: Spool, request: Request[StoreSamples] | Request[StoreCalls]) -> None:
    """Raises RefusedError if another gateway holds the session, and so lacks the calls of this request."""
    if request.message.prompt_index < 0:
        group = request.message.group
        holder = spool.unfinished.holder(group)
        if holder not in ("", request.sender):
            raise RefusedError(f"{holder} goes on with {group}")
