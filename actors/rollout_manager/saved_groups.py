"""The unfinished groups at the trainer: scored samples, and the calls so far of unfinished samples.

If a rollout manager dies, another manager asks for both, and samples only the rest.
"""

import asyncio
import functools
import math

import numpy as np
import structlog

from actors.runtime.membership import Spawn
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Sampling
from actors.sampling.sessions import SampleSession
from areal.base.errors import explain
from areal.storage.saved_calls import SavedCall, packed, unpacked
from protocols.attempt_messages import AskCalls, AskSamples, StoreCalls, StoredCalls, StoredSamples
from protocols.bus_errors import RefusedError
from protocols.messages import Done, Permit

# The most samples with a save of calls in progress.
SAVES = 4

log = structlog.get_logger()


class SavedGroups:
    """See the module."""

    def __init__(self, sampling: Sampling, spawn: Spawn) -> None:
        self._sampling = sampling
        self._spawn = spawn
        self._saves = asyncio.Semaphore(SAVES)

    async def ask(self, permit: Permit, all_or_none: bool) -> StoredSamples:
        """The stored samples of a group, empty if the permit is not resumed. all_or_none: whether samples count only as
        a complete group. Raises SampleFailed if the trainer refuses the group."""
        if not permit.resumed:
            return StoredSamples(places=(), start_version=None)
        request = AskSamples(group=permit.group, prompt_index=permit.prompt_index, all_or_none=all_or_none)
        with explain(RefusedError, "the trainer refused the group: {why}", functools.partial(SampleFailed, "trainer")):
            return await self._sampling.ask_trainer(request, StoredSamples)

    async def calls(self, permit: Permit, place: int) -> list[SavedCall]:
        """The saved calls of a sample. Without calls the sample begins anew."""
        try:
            stored = await self._sampling.ask_trainer(AskCalls(group=permit.group, place=place), StoredCalls)
        except RefusedError as error:
            log.warning("the trainer gives no calls of a sample", group=permit.group, error=str(error))
            return []
        return unpacked(stored.frame.data) if len(stored.frame) else []

    def save_regularly(self, permit: Permit, place: int, session: SampleSession) -> None:
        """Have the session save calls after every `rollout_manager.save_every_tokens` sampled tokens."""
        session.save = lambda: self._spawn(self._save(permit, place, session), "save calls")
        session.save_every = self._sampling.services.config.rollout_manager.save_every_tokens or math.inf

    async def _save(self, permit: Permit, place: int, session: SampleSession) -> None:
        """Have the trainer store the calls so far of a sample. If the trainer refuses, the sample saves no more."""
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
