"""The policy that users get: sampling settings, serving generators, and log-probs of texts."""

import asyncio
from functools import partial
from typing import Any

import numpy as np

from actors.gateway.user_sessions import UNAVAILABLE
from actors.runtime.membership import Membership
from actors.sampling.sampling import Sampling
from areal.base.errors import explain
from areal.config.engine_sections import SamplingConfig
from areal.extensions.agents.openai_api import ApiError
from areal.samples.trajectory import TokenScores
from protocols.bus_errors import BusError, RefusedError
from protocols.membership_messages import Member
from protocols.training_messages import AskLogprobs, Logprobs

# Time to find a generator for the log-probs of a prompt, and time to compute them.
SCORE_SECONDS = 60.0


class ServedPolicy:
    """See the module."""

    def __init__(self, member: Membership, sampling: Sampling) -> None:
        self._member, self._sampling = member, sampling

    @property
    def tokenizer(self) -> Any:
        return self._sampling.services.tokenizer

    @property
    def sampling(self) -> SamplingConfig:
        """The run's settings."""
        return self._member.config.sampling

    def generators(self) -> list[Member]:
        """Return the generators of users. Raises ApiError if no version is served."""
        if self._member.state == "draining":
            raise ApiError("this gateway is leaving: ask another gateway", "leaving", 503)
        users, generators = self._sampling.dispatch.users, self._member.directory.with_role("generator")
        serving = [member for member in generators if member.serving or not users]
        if users and not serving:
            raise ApiError("no evaluated version is served now: try again later", "no_version", 503)
        return serving

    async def score(self, tokens: list[int], top_k: int) -> TokenScores:
        """Return the log-probs of these tokens, and the `top_k` likeliest tokens at each place. Raises ApiError."""
        self.generators()
        none_yet = partial(ApiError, code="no_version", status=503)
        with explain(TimeoutError, "no generator is there now: try again later", none_yet):
            async with asyncio.timeout(SCORE_SECONDS):
                generator = await self._sampling.dispatch.choose("generator")
        ask = AskLogprobs(lineage=0, version=0, tokens=np.array(tokens, np.int32), top_k=top_k)
        with (
            explain(RefusedError, "the prompt cannot be scored: {why}", ApiError),
            explain(BusError, UNAVAILABLE, partial(ApiError, code="unavailable", status=503)),
        ):
            answer = await self._member.ask(generator.address, ask, Logprobs, SCORE_SECONDS)
        shape = len(answer.logprobs), -1
        columns = answer.top_tokens.reshape(shape), answer.top_logprobs.reshape(shape)
        return TokenScores(answer.logprobs, *columns, answer.version)
