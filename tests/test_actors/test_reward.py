"""What a reward says of itself."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from actors.reward import Reward
from areal.rewards.functions import Result
from areal.rewards.worker import RewardFailed
from protocols.bus_errors import RefusedError
from protocols.messages import Completion


class Pool:
    """Scores once it is let. failure: raised instead of a score."""

    def __init__(self) -> None:
        self.let, self.failure = asyncio.Event(), None

    async def score_all(self, *_) -> list[Result]:
        await self.let.wait()
        if self.failure:
            raise self.failure
        return [Result(1.0, {})]


async def test_a_reward_says_that_it_scores_only_while_it_does():
    member = SimpleNamespace(
        config=None, spawn=None, activity="", become_healthy=lambda: asyncio.sleep(0), working=lambda _: nullcontext()
    )
    pool = Pool()
    reward = Reward(member, ("exact",), pool)
    await reward.main()
    assert member.activity == "waiting to score with exact"
    job = Completion(job=0, function="exact", prompt="", completions=("",), row=0)
    scoring = [asyncio.ensure_future(reward.score_completions("", job, {}, lambda _: None)) for _ in range(2)]
    await asyncio.sleep(0)
    assert member.activity == "scoring with exact"
    pool.let.set()
    await asyncio.gather(*scoring)
    assert member.activity == "waiting to score with exact"
    pool.failure = RewardFailed("raised", "no")
    with pytest.raises(RefusedError):
        await reward.score_completions("", job, {}, lambda _: None)
    assert member.activity == "waiting to score with exact"
