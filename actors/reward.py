"""The reward actor: runs named reward functions in worker processes, with a deadline for every call.

A failed call gives an error, never a score.

| loop, besides the loops of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| per worker | a completion, then the score or the deadline | the flow of the asker |
| per flow | scores | the samples of a manager |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import structlog

from actors.runtime.membership import Membership
from actors.sampling.flows import PART_BYTES
from actors.sampling.serving import Serving
from areal.rewards.functions import Result
from areal.rewards.lookup import NO_OPTIONS
from areal.rewards.pool import RewardPool
from areal.rewards.worker import RewardFailed
from areal.samples.table import Tokens
from protocols.bus_errors import HarmfulError, RefusedError
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
    """Serves the rewards named on the command line, or else the rewards of the configuration."""

    role = "reward"

    @classmethod
    async def start(
        cls,
        member: Membership,
        functions: tuple[str, ...] = (),
        options: Mapping[str, Mapping[str, Any]] = NO_OPTIONS,
        make_pool: Callable[..., Pool] = RewardPool,
    ) -> Self:
        """options: keyword arguments by name of the reward, which replace the configuration's."""
        member.settle()  # before the pool starts workers, which inherit the cores
        served, names = member.config.served_rewards, functions or tuple(member.config.own_rewards)
        merged = {name: {**served.options.get(name, {}), **options.get(name, {})} for name in names}
        pool = make_pool(names, served.model_copy(update={"options": merged}))
        return cls(member, names, await member.used.enter_async_context(pool))

    def __init__(self, member: Membership, names: tuple[str, ...], pool: Pool) -> None:
        super().__init__(member, names)
        self._pool = pool
        self._in_hand = 0  # completions in progress
        self._says = [f"{doing} with {', '.join(names)}" for doing in ("waiting to score", "scoring")]

    async def main(self) -> None:
        await self.member.become_healthy()
        self._take(0)

    def _take(self, count: int) -> None:
        """Count completions in progress, and set the activity: a fast reward spends most of its time waiting."""
        self._in_hand += count
        self.member.activity = self._says[self._in_hand > 0]

    async def score_completions(
        self, key: str, completion: Completion, row: Mapping[str, Any], add: Callable[[Scored], None]
    ) -> None:
        """Raises RefusedError."""
        self.check_served(completion.function)
        self._take(1)
        try:
            with self.member.working(f"scoring with {completion.function}"):
                results = await self._pool.score_all(
                    completion.function, completion.prompt, completion.completions, row, completion.tokens
                )
        except RewardFailed as error:
            self._failed += 1
            log.warning("reward failed", function=completion.function, error=str(error))
            harmful = error.kind in ("timeout", "died", "quarantined")
            raise (HarmfulError if harmful else RefusedError)(str(error)) from None
        finally:
            self._take(-1)
        scores, parts = zip(*results, strict=True)
        scored = Scored(job=completion.job, scores=scores, parts=parts)
        if self.size(scored) > PART_BYTES:
            raise RefusedError(f"its {sum(map(len, parts))} parts are too large to be sent")
        self._scored += 1
        add(scored)

    def size(self, result: Scored) -> int:
        return sum(64 + sum(16 + 4 * len(part) for part in parts) for parts in result.parts)
