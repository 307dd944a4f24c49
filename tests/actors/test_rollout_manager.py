"""What the rollout manager makes of a workflow's sample."""

import asyncio

import numpy as np
import pytest

from actors.evaluator import Evaluator
from actors.rollout_manager import RolloutManager
from areal.config import Config
from areal.trajectory import Trajectory

PROMPT, SAMPLED = 5, 9


async def workflow(session, row):
    n = PROMPT + SAMPLED
    versions = np.repeat(np.array([-1, 0], np.int32), [PROMPT, SAMPLED])
    return Trajectory(np.zeros(n, np.int32), np.zeros(n, np.float32), versions, 1.0, "length")


def run(role, overlong_tokens):
    """The sample that an actor of this role gets, without a cluster around it."""
    actor = object.__new__(role)
    actor._workflow = workflow
    actor.config = Config(
        model="m",
        steps=1,
        batch_size=4,
        group_size=2,
        data={"source": "addition"},
        sampling={"max_new_tokens": 10},
        reward={"functions": ["addition"], "overlong_tokens": overlong_tokens},
    )
    return asyncio.run(actor.run_workflow(None, None))


@pytest.mark.parametrize(("overlong_tokens", "reward"), [(0, 1.0), (4, 0.25), (1, 1.0)])
def test_a_sample_to_train_loses_reward_by_the_tokens_it_sampled(overlong_tokens, reward):
    assert run(RolloutManager, overlong_tokens).reward == reward


def test_evaluation_scores_the_same_sample_as_it_is():
    assert run(Evaluator, 4).reward == 1.0
