"""The generator: one vLLM engine. Every token it streams carries its log-prob and the version that sampled it.

A generator is STALE until it has loaded the newest published policy, and HEALTHY from then on. It loads each new policy
without waiting for other generators: it interrupts the running sequences, replaces the weights, and continues the
sequences. With `generator.interrupt: false` it lets the running sequences finish first, and requests that arrive
meanwhile wait. A generator that *holds* a policy, because that policy is evaluated on it, loads no newer one until the
master ends the hold. A generator knows nothing about tasks or rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import structlog

from actors.parts.weight_service import WeightFetcher
from actors.runtime.actor import Actor, Signal, handles
from areal.config import SamplingConfig
from areal.generation.engine import Chunk, EngineError, EngineStats, GenerationEngine, LoadTimes, WeightLoadError
from areal.generation.routing import Concurrency
from areal.weights.chunks import TornWeights
from protocols.errors import BusyError, RefusedError, StreamBrokenError
from protocols.messages import Done, Engagement, FetchWeights, Generate, HandOver, Message, Policy, TokenChunk
from protocols.transport import Request

RETRY_LOAD_SECONDS = 1.0
# A generator that has loaded no version for so long ends, and is started again.
LOADS_FAIL_SECONDS = 60.0

log = structlog.get_logger()


class Engine(Protocol):
    """The interface of the engine that samples tokens (areal.generation.engine.GenerationEngine)."""

    @property
    def version(self) -> int: ...
    def generate(
        self, request_id: str, tokens: Sequence[int], sampling: SamplingConfig
    ) -> AsyncGenerator[Chunk, None]: ...
    def drained(self) -> AbstractAsyncContextManager[None]: ...
    async def load(self, folder: Path, version: int) -> LoadTimes: ...
    def hand_over(self, request_ids: Collection[str] | None = None) -> None: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...


class Generator(Actor):
    role = "generator"
    _started: Engine | None = None
    _fetcher: WeightFetcher | None = None

    def __init__(
        self, *args: Any, start_engine: Callable[..., Awaitable[Engine]] = GenerationEngine.start,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self._start_engine = start_engine

    async def setup(self) -> None:
        self.activity = "starting the engine"
        self._fetcher = WeightFetcher(self)
        self._loaded = Signal()
        self._idle = Signal()
        self._sequences: dict[str, str] = {}  # identity of the asking actor, by the request id in the engine
        self._leaving: set[str] = set()
        self._concurrency = Concurrency(self.config.generator.max_concurrent_rollouts)
        self._lineage = 0
        self._reloads: Counter[str] = Counter()
        self._started = await self._start_engine(
            Path(self.config.model), self.config.generator, version=0, seed=self.config.seed + (self.index or 0)
        )
        if self._is_behind():
            await self._load_wanted()

    async def main(self) -> None:
        await self.become_healthy()
        while True:
            self.activity = f"generating at version {self._engine.version}"
            await self.until(self._is_behind)
            await self._load_wanted()
            if self.state == "stale":
                self.state = "healthy"
                await self._beat()

    async def hand_over(self) -> None:
        """Hand over every sequence: its asker continues it on another generator, from the tokens sampled so far."""
        self._engine.hand_over()
        self._loaded.notify()
        await self._idle.until(lambda: not self._sequences)

    async def teardown(self) -> None:
        if self._fetcher is not None:
            await asyncio.to_thread(self._fetcher.close)
        if self._started is not None:
            await self._started.close()

    def stats(self) -> dict[str, float]:
        if self._started is None:
            return {}
        stats = self._engine.stats()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_use": stats.kv_use,
            "preemptions": stats.preemptions,
            "limit": self._concurrency.limit,
            "tokens_generated": stats.tokens_generated,
            "version": self._engine.version,
            **self._reloads,
            "fetch_seconds": self._weights.seconds,
            "weight_bytes_received": self._weights.bytes_received,
            "weight_bytes_sent": self._weights.bytes_sent,
        }

    def engagement(self) -> Engagement | None:
        """The load of the engine, for the heartbeat. Each call also adapts the limit of concurrent sequences."""
        if self._started is None:
            return None
        stats = self._engine.stats()
        self._concurrency.look(stats.running, stats.waiting, stats.kv_use, stats.preemptions)
        return Engagement(
            sequences=Counter(self._sequences.values()), limit=self._concurrency.limit, version=self._engine.version
        )

    @property
    def _engine(self) -> Engine:
        assert self._started is not None  # `setup` runs first and sets it
        return self._started

    @property
    def _weights(self) -> WeightFetcher:
        assert self._fetcher is not None
        return self._fetcher

    @handles(HandOver)
    async def hand_over_some(self, request: Request[HandOver]) -> Done:
        if self._started is None:
            return Done()
        names = {_name(request.sender, sequence) for sequence in request.message.sequences}
        self._leaving |= names & self._sequences.keys()
        self._engine.hand_over(names)
        self._loaded.notify()
        return Done()

    @handles(Generate)
    async def generate(self, request: Request[Generate]) -> AsyncIterator[TokenChunk]:
        asked = request.message
        if self._started is None or self.state == "draining":
            raise BusyError("this generator accepts no sequences: it is starting or draining")
        sampling = SamplingConfig(temperature=asked.temperature, top_p=asked.top_p, max_new_tokens=asked.max_new_tokens)
        name = _name(request.sender, asked.sequence)
        if name in self._sequences:
            raise RefusedError(f"sequence {asked.sequence!r} of {request.sender} is already running on this generator")
        self._sequences[name] = request.sender
        try:
            await self._loaded.until(
                lambda: self._engine.version >= asked.min_version or self._leaves(name) or self.state == "stale"
            )
            if self._leaves(name):
                raise StreamBrokenError("the generator handed the sequence over before it started")
            if self._engine.version < asked.min_version:
                raise StreamBrokenError("the generator could not load newer weights, and tries again")
            parts = self._engine.generate(name, asked.tokens.tolist(), sampling)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    yield TokenChunk(
                        tokens=part.tokens, logprobs=part.logprobs, versions=part.versions, finish=part.finish
                    )
        except ValueError as error:
            raise RefusedError(str(error)) from None
        except EngineError as error:
            if not self._leaves(name):
                raise
            raise StreamBrokenError(str(error)) from None
        finally:
            del self._sequences[name]
            self._leaving.discard(name)
            self._idle.notify()

    @handles(FetchWeights)
    def send_weights(self, request: Request[FetchWeights]) -> AsyncIterator[Message]:
        if self._fetcher is None:
            raise BusyError("this generator is still starting and has no weights yet")
        return self._weights.serve(request)

    def _leaves(self, name: str) -> bool:
        return self.state == "draining" or name in self._leaving

    async def _fall_behind(self) -> None:
        """After a load that failed: accept no new sequences, and send away those that wait for newer weights."""
        if self.state == "healthy":
            self.state = "stale"
            self._loaded.notify()
            await self._beat()

    def _is_behind(self) -> bool:
        return self._wanted().identity > self._loaded_policy()

    def _loaded_policy(self) -> tuple[int, int]:
        # Version 0 is the initial model of the run, in every lineage.
        return self._lineage if self._engine.version else self.policy.lineage, self._engine.version

    def _wanted(self) -> Policy:
        """The policy that this generator should have: the one it holds, or else the newest published one. A held policy
        older than the loaded one is ignored, because running sequences cannot go back to older weights."""
        me = self.directory.get(self.bus.identity.name)
        if me is None or me.held is None:
            return self.policy
        # Version 0 is the initial model of the run, in every lineage.
        passed = me.held.identity < self._loaded_policy() if me.held.version else self._engine.version > 0
        return self.policy if passed else me.held

    async def _load_wanted(self) -> None:
        """Load the wanted policy. If its files are missing or torn, retry, alternating between the newest published
        policy and the wanted one. Sequences continue to run while the weights are fetched."""
        alternate = False
        began = asyncio.get_running_loop().time()
        while True:
            try:
                if not self.config.generator.interrupt:
                    self.activity = "finishing the running sequences before it loads new weights"
                async with self._engine.drained():
                    if not self._is_behind():
                        return
                    policy = self.policy if alternate else self._wanted()
                    self.activity = f"fetching version {policy.version}"
                    with self.working(self.activity):
                        folder = await self._weights.fetch(policy)
                    self.activity = f"loading version {policy.version}"
                    with self.working(self.activity):
                        times = await self._engine.load(folder, policy.version)
                break
            except (TornWeights, WeightLoadError) as error:
                log.warning("weights did not load", version=policy.version, error=str(error))
                alternate = not alternate
                if asyncio.get_running_loop().time() - began > LOADS_FAIL_SECONDS:
                    raise EngineError(f"no version has loaded for {LOADS_FAIL_SECONDS:g} s: {error}") from None
                await self._fall_behind()
                await asyncio.sleep(RETRY_LOAD_SECONDS)
        self._lineage = policy.lineage
        self._reloads.update({"reloads": 1, **asdict(times)})
        parts = {"pause": times.pause_seconds, "load": times.load_seconds, "resume": times.resume_seconds}
        began = asyncio.get_running_loop().time() - sum(parts.values())
        for part, seconds in parts.items():
            self.took(part, began, seconds)
            began += seconds
        self._loaded.notify()


def _name(asker: str, sequence: str) -> str:
    return f"{asker} {sequence}"
