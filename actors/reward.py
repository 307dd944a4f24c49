"""The reward actor: runs named reward functions in worker processes, each call with a deadline.

A call that fails gives an error, never a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import structlog

from actors.sampling.flows import PART_BYTES
from actors.sampling.serving import Serving
from areal.result import Result
from areal.rewards.functions import NO_OPTIONS
from areal.rewards.pool import RewardPool
from areal.rewards.processes import RewardFailed
from areal.sampled import Tokens
from protocols.errors import HarmfulError, RefusedError
from protocols.messages import Completion, Scored

log = structlog.get_logger()


class Pool(Protocol):
    """The interface of the pool that scores (areal.rewards.pool.RewardPool)."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *raised: object) -> None: ...
    async def score_all(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: Tokens | None = None
    ) -> list[Result]: ...


class Reward(Serving):
    """Serves the rewards named on its command line; if none are named, those of the configuration.

    options: keyword arguments by name of the reward, which replace those of the configuration."""

    role = "reward"
    _pool: Pool = None  # type: ignore[assignment]  # set by `setup`

    def __init__(
        self, *args: Any, functions: tuple[str, ...] = (), options: Mapping[str, Mapping[str, Any]] = NO_OPTIONS,
        make_pool: Callable[..., Pool] = RewardPool, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self._functions = functions
        self._options = options
        self._make_pool = make_pool

    def serves(self) -> tuple[str, ...]:
        return self._functions or tuple(self.config.own_rewards)

    async def setup(self) -> None:
        self.settle()  # before the pool starts its workers, which inherit the cores
        served = self.config.served_rewards
        options = {name: served.options.get(name, {}) for name in self.serves()}
        merged = {name: {**of_run, **self._options.get(name, {})} for name, of_run in options.items()}
        self._pool = self._make_pool(self.serves(), served.model_copy(update={"options": merged}))
        await self._pool.__aenter__()

    async def main(self) -> None:
        await self.become_healthy()
        self.activity = f"scoring with {', '.join(self.serves())}"

    async def teardown(self) -> None:
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)

    async def score_completions(
        self, key: str, completion: Completion, row: Mapping[str, Any], add: Callable[[Scored], None]
    ) -> None:
        """Raises RefusedError."""
        self.check_served(completion.function)
        try:
            with self.working(f"scoring with {completion.function}"):
                results = await self._pool.score_all(
                    completion.function, completion.prompt, completion.completions, row, completion.tokens
                )
        except RewardFailed as error:
            self._failed += 1
            log.warning("reward failed", function=completion.function, error=str(error))
            harmful = error.kind in ("timeout", "died", "quarantined")
            raise (HarmfulError if harmful else RefusedError)(str(error)) from None
        scores, parts = zip(*results, strict=True)
        scored = Scored(job=completion.job, scores=scores, parts=parts)
        if self.size(scored) > PART_BYTES:
            raise RefusedError(f"its {sum(map(len, parts))} parts are too large to be sent")
        self._scored += 1
        add(scored)

    def size(self, result: Scored) -> int:
        return sum(64 + sum(16 + 4 * len(part) for part in parts) for parts in result.parts)
