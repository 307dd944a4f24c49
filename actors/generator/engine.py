"""The interface of the engine that samples tokens."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from areal.config.engine_sections import SamplingConfig
from areal.generation.engine_process import EngineStats
from areal.generation.engine_weights import LoadTimes
from areal.samples.table import Generation
from areal.samples.trajectory import TokenScores


class Engine(Protocol):
    """The interface of the engine that samples tokens (areal.generation.generation_engine.GenerationEngine)."""

    @property
    def version(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingConfig,
        *,
        first_version: int | None = None,
        pictures: Sequence[Any] = (),
        cache_salt: str = "",
        whole: bool = False,
    ) -> AsyncGenerator[Generation, None]: ...
    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores: ...
    def drained(self) -> AbstractAsyncContextManager[None]: ...
    async def load(self, folder: Path, version: int) -> LoadTimes: ...
    async def receive(
        self, version: int, calls: AsyncGenerator[tuple[str, dict[str, Any]], None], lost: asyncio.Event
    ) -> LoadTimes: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    def hand_over(self, request_ids: Collection[str] | None = None) -> None: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...
