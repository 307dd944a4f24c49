"""Sessions: one sample's way through generators and rewards, whatever becomes of them.

A session keeps every token it was sent, so that a sequence whose generator dies goes on elsewhere from where it was.
Used by the rollout manager and the evaluator.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog

from actors.runtime import Actor
from areal.config import SamplingConfig
from areal.data import Row, open_source, prompt_text
from areal.tokens import load_tokenizer
from areal.workflows import Generation, resolve_workflow
from protocols.errors import BusError, RefusedError
from protocols.messages import Generate, Member, Score, Scored, TokenChunk

# A sequence may take this long; silence is noticed far earlier, by the stream itself.
SEQUENCE_SECONDS = 24 * 3600.0
# What a scoring request may wait in a reward actor's queue, on top of its own deadline.
SCORE_QUEUE_SECONDS = 60.0
NO_REWARD_SECONDS = 60.0
# An actor that just failed a request is avoided for this long, where there is another.
AVOID_SECONDS = 5.0

log = structlog.get_logger()


class SampleFailed(Exception):
    """A sample that cannot be finished or scored. Never a score of 0."""


class Router:
    """Chooses among actors of a role: the least loaded that has not just failed."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.load: Counter[str] = Counter()
        self._avoid: dict[str, float] = {}

    async def choose(self, role: str, serves: str | None = None) -> Member:
        """Waits for a healthy one."""
        found: list[Member] = []

        def some() -> bool:
            found[:] = [m for m in self.actor.with_role(role) if serves is None or serves in m.serves]
            return bool(found)

        await self.actor.until(some)
        now = asyncio.get_running_loop().time()
        return min(found, key=lambda m: (self._avoid.get(m.identity, 0.0) > now, self.load[m.identity]))

    @contextmanager
    def using(self, member: Member) -> Iterator[None]:
        """Counts towards the member's load."""
        self.load[member.identity] += 1
        try:
            yield
        finally:
            self.load[member.identity] -= 1
            if not self.load[member.identity]:
                del self.load[member.identity]

    def avoid(self, member: Member) -> None:
        self._avoid[member.identity] = asyncio.get_running_loop().time() + AVOID_SECONDS


class SampleSession:
    """What a workflow gets for one sample (areal.workflows.Session).

    `home`: the generator that the group's samples share, for its prompt prefix. `on_start` is called with the version
    that sampled the first token. `min_version` rises to the group's start version once that is known, so that no
    later token is older.
    """

    def __init__(
        self, router: Router, tokenizer: Any, row: Row, sampling: SamplingConfig, min_version: int, home: Member,
        on_start: Callable[[int], None] = lambda version: None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self._router = router
        self._row = row
        self._sampling = sampling
        self.min_version = min_version
        self._home: Member | None = home
        self._on_start = on_start
        self._started = False

    async def generate(self, tokens: Sequence[int]) -> Generation:
        """Raises SampleFailed where a generator refuses the prompt."""
        prompt = np.asarray(tokens, np.int32)
        parts: list[TokenChunk] = []
        while True:
            generator = self._home or await self._router.choose("generator")
            try:
                with self._router.using(generator):
                    return await self._continue_on(generator, prompt, parts)
            except RefusedError as error:
                raise SampleFailed(f"the generator refused the prompt: {error}") from None
            except BusError as error:
                sampled = sum(len(part.tokens) for part in parts)
                log.warning("goes on elsewhere", generator=generator.identity, sampled=sampled, error=str(error))
                self._router.avoid(generator)
                self._home = None

    async def _continue_on(self, generator: Member, prompt: np.ndarray, parts: list[TokenChunk]) -> Generation:
        sampled = sum(len(part.tokens) for part in parts)
        request = Generate(
            tokens=np.concatenate([prompt, *(part.tokens for part in parts)]),
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            max_new_tokens=self._sampling.max_new_tokens - sampled,
            min_version=self.min_version,
        )
        async for part in self._router.actor.bus.peer(generator.address).stream(request, SEQUENCE_SECONDS):
            if not isinstance(part, TokenChunk):
                raise BusError(f"{generator.identity} streamed {part.kind!r}")
            parts.append(part)
            if not self._started and len(part.versions):
                self._started = True
                self._on_start(int(part.versions[0]))
        if not parts or parts[-1].finish is None:
            raise BusError(f"{generator.identity} ended a sequence without a finish")
        return Generation(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            finish=parts[-1].finish,
        )

    async def score(self, completion: str) -> float:
        """Raises SampleFailed where a function failed on every attempt."""
        functions = self._row.reward or self._router.actor.config.reward.functions
        scores = [await self._score_by(function, completion) for function in functions]
        return sum(scores) / len(scores)

    async def _score_by(self, function: str, completion: str) -> float:
        reward = self._router.actor.config.reward
        request = Score(
            function=function, prompt=prompt_text(self._row.prompt), completion=completion, row=self._row.fields
        )
        problem = ""
        for _ in range(reward.retries + 1):
            try:
                async with asyncio.timeout(NO_REWARD_SECONDS):
                    member = await self._router.choose("reward", function)
            except TimeoutError:
                raise SampleFailed(f"no reward actor serves {function!r}") from None
            try:
                with self._router.using(member):
                    timeout = reward.timeout_seconds + SCORE_QUEUE_SECONDS
                    return (await self._router.actor.ask(member.address, request, Scored, timeout)).score
            except BusError as error:
                problem = str(error)
                self._router.avoid(member)
        raise SampleFailed(f"reward {function!r}: {problem}")


class Sampler(Actor):
    """Base of the roles that run the workflow on rows of the run's data."""

    async def setup(self) -> None:
        self._router = Router(self)
        self._source = await asyncio.to_thread(open_source, self.config.data, self.config.seed)
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self.config.model)
        self._workflow = resolve_workflow(self.config.rollout_manager.workflow)
