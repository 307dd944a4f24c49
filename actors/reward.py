"""The reward actor: named functions, each call with a deadline, in worker processes. Its failure is never a score."""

from __future__ import annotations

import structlog

from actors.runtime import Actor, handles
from areal.reward_pool import RewardFailed, RewardPool
from protocols.errors import RefusedError
from protocols.messages import Score, Scored
from protocols.transport import Request, ZmqBus

log = structlog.get_logger()


class Reward(Actor):
    """Serves the functions named on its command line, or the run's."""

    role = "reward"
    _pool: RewardPool | None = None

    def __init__(
        self, bus: ZmqBus, master: str, index: int | None = None, host: str | None = None,
        functions: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(bus, master, index, host)
        self._functions = functions
        self._scored = self._failed = 0

    def serves(self) -> tuple[str, ...]:
        return self._functions or tuple(self.config.reward.functions)

    async def setup(self) -> None:
        reward = self.config.reward
        self._pool = RewardPool(list(self.serves()), reward.workers, reward.timeout_seconds)
        await self._pool.__aenter__()

    async def main(self) -> None:
        self.state = "healthy"
        self.activity = f"scoring with {', '.join(self.serves())}"

    async def teardown(self) -> None:
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)

    def stats(self) -> dict[str, float]:
        return {"scored": self._scored, "failed": self._failed}

    @handles(Score)
    async def score(self, request: Request) -> Scored:
        asked: Score = request.message
        try:
            score = await self._pool.score(asked.function, asked.prompt, asked.completion, asked.row)
        except RewardFailed as error:
            self._failed += 1
            log.warning("reward failed", function=asked.function, error=str(error))
            raise RefusedError(str(error)) from None
        self._scored += 1
        return Scored(score=score)
