"""The reward actor: runs named reward functions in worker processes, each call with a deadline.

A call that fails gives an error, never a score.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, Self

import structlog

from actors.runtime.actor import Actor, Signal, handles
from areal.devices import CORES, settle
from areal.rewards.pool import RewardFailed, RewardPool
from areal.rewards.result import Result
from areal.trajectory import Tokens
from protocols.errors import BusyError, HarmfulError, RefusedError
from protocols.messages import Score, Scored
from protocols.transport import Request

log = structlog.get_logger()


class Pool(Protocol):
    """The interface of the pool that scores (areal.rewards.pool.RewardPool)."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *raised: object) -> None: ...
    async def score(
        self, name: str, prompt: str, completion: str, row: Mapping[str, Any], tokens: Tokens | None = None
    ) -> Result: ...


class Reward(Actor):
    """Serves the rewards named on its command line; if none are named, those in `reward.functions`."""

    role = "reward"
    _pool: Pool | None = None

    def __init__(
        self, *args: Any, functions: tuple[str, ...] = (), make_pool: Callable[..., Pool] = RewardPool,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self._functions = functions
        self._make_pool = make_pool
        self._idle = Signal()
        self._scoring = self._scored = self._failed = 0

    def serves(self) -> tuple[str, ...]:
        return self._functions or tuple(self.config.rewards)

    async def setup(self) -> None:
        settle(CORES)  # before the pool starts its workers, which inherit the cores
        self._pool = self._make_pool(self.serves(), self.config.served_rewards)
        await self._pool.__aenter__()

    async def main(self) -> None:
        await self.become_healthy()
        self.activity = f"scoring with {', '.join(self.serves())}"

    async def hand_over(self) -> None:
        await self._idle.until(lambda: not self._scoring)

    async def teardown(self) -> None:
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)

    def stats(self) -> dict[str, float]:
        return {"scored": self._scored, "failed": self._failed}

    @handles(Score)
    async def score(self, request: Request[Score]) -> AsyncIterator[Scored]:
        """One part, the score. It is a stream because a stream has no deadline while this actor is alive, however long
        its queue is, and because an asker that gives up cancels it, and so removes the job from the queue."""
        asked = request.message
        if self._pool is None or self.state != "healthy":
            raise BusyError("this reward actor accepts no completions: it is starting or draining")
        if asked.function not in self.serves():
            raise RefusedError(
                f"this reward actor does not serve reward {asked.function!r}, only {', '.join(self.serves())}"
            )
        self._scoring += 1
        try:
            with self.working(f"scoring with {asked.function}"):
                score, parts = await self._pool.score(
                    asked.function, asked.prompt, asked.completion, asked.row, asked.tokens
                )
        except RewardFailed as error:
            self._failed += 1
            log.warning("reward failed", function=asked.function, error=str(error))
            harmful = error.kind in ("timeout", "died", "quarantined")
            raise (HarmfulError if harmful else RefusedError)(str(error)) from None
        finally:
            self._scoring -= 1
            self._idle.notify()
        self._scored += 1
        yield Scored(score=score, parts=parts)
