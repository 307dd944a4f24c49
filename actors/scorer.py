"""The scorer: one frozen model by name, on a vLLM engine, that gives the log-probs of tokens which the policy sampled.

Teachers and references are scorers. Like rewards they join and leave at any time, and their jobs come on flows. A row
that an engine cannot take is refused, never given made-up log-probs; if the engine dies, the actor ends with it, and
its rows are scored by another one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from actors.parts.serving import Serving
from actors.runtime.actor import handles
from areal.config import UserError
from areal.generation.engine import EngineStats, GenerationEngine, TokenScores
from protocols.errors import RefusedError
from protocols.messages import Done, OpenFlow, ScoreTokens, TokensScored, slices
from protocols.transport import Request


class FrozenModel(Protocol):
    """The interface of the engine of a scorer (areal.generation.engine.GenerationEngine)."""

    async def score(self, request_id: str, tokens: Sequence[int]) -> TokenScores: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...


class Scorer(Serving):
    """name: what it serves, one of the run's `scorers`."""

    role = "scorer"
    _engine: FrozenModel | None = None

    def __init__(
        self, *args: Any, name: str, start_engine: Callable[..., Awaitable[FrozenModel]] = GenerationEngine.start,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, size=lambda row: 16 + 4 * len(row.logprobs), **kwargs)
        self._name = name
        self._start_engine = start_engine

    def serves(self) -> tuple[str, ...]:
        return (self._name,)

    async def setup(self) -> None:
        scorer = self.config.scorers.get(self._name)
        if scorer is None:
            raise UserError(f"The run has no scorer {self._name!r} (--scorer): its configuration names others.")
        self._moves = self._works.unless_other("score", self._steps)  # one for all rows
        self.activity = "starting the engine"
        self._engine = await self._start_engine(Path(scorer.model), scorer.engine, version=0, seed=self.config.seed)

    async def main(self) -> None:
        await self.become_healthy()
        self.activity = f"scoring as {self._name}"

    async def teardown(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    @handles(OpenFlow)
    async def open_flow(self, request: Request[OpenFlow]) -> AsyncIterator[TokensScored]:
        async with contextlib.aclosing(self._flows.serve(request)) as parts:
            async for rows, failed in parts:
                yield TokensScored(
                    jobs=np.array([row.job for row in rows], np.int64),
                    counts=np.array([len(row.logprobs) for row in rows], np.int32),
                    logprobs=np.concatenate([np.zeros(0, np.float32), *(row.logprobs for row in rows)]),
                    failed=tuple(failed),
                )

    @handles(ScoreTokens)
    async def score_tokens(self, request: Request[ScoreTokens]) -> Done:
        message = request.message
        self.check_served(message.scorer)
        rows = {
            job: functools.partial(self._score, f"{request.owner} {job}", job, message.tokens[places].tolist())
            for job, places in zip(message.jobs.tolist(), slices(message.counts), strict=True)
        }
        return self.begin(request, message.flow, rows)

    async def _score(self, key: str, job: int, tokens: list[int], add: Callable[[_Row], None]) -> None:
        """Score a row. key: its name in the engine. Raises RefusedError, or EngineError if the engine died."""
        assert self._engine is not None  # it is healthy
        try:
            with self.working("computing log-probs", "score", self._moves):
                scores = await self._engine.score(key, tokens)
        except ValueError as error:
            self._failed += 1
            raise RefusedError(str(error)) from None
        self._scored += 1
        add(_Row(job, scores.logprobs))

    def _steps(self) -> float:
        """Moves while the engine computes."""
        return float(self._engine.stats().steps) if self._engine else 0.0


class _Row(NamedTuple):
    """The log-probs of a row."""

    job: int
    logprobs: np.ndarray
