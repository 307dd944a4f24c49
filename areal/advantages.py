"""Advantages from rewards, without a critic.

The reward falls on the last token. With gamma = lambda = 1 and no value function, every sampled token of a trajectory
then has the same advantage: the trajectory's normalised reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from areal.trajectory import Group

EPS = 1e-6
"""Added to the standard deviation: where all rewards are equal, advantages are 0 and not NaN."""


def normalise(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + EPS), float64 [N]; std of the population, so that one sample alone has 0."""
    rewards = np.asarray(rewards, dtype=np.float64)
    return (rewards - rewards.mean()) / (rewards.std() + EPS)


def advantages(groups: Sequence[Group], norm: Literal["batch", "group"]) -> list[np.ndarray]:
    """The advantage of every trajectory: one float64 [G] array a group, in the order given.

    norm: "batch" normalises over all trajectories of the global batch (the paper), "group" over each group's own.
    Groups may differ in size. Raises ValueError where a reward is not finite.
    """
    rewards = [np.array([t.reward for t in group.trajectories], dtype=np.float64) for group in groups]
    for group, r in zip(groups, rewards, strict=True):
        if not np.isfinite(r).all():
            raise ValueError(f"group {group.id} has a reward that is not finite: {r.tolist()}")
    if norm == "group":
        return [normalise(r) for r in rewards]
    ends = np.cumsum([len(r) for r in rewards])
    return np.split(normalise(np.concatenate(rewards)), ends[:-1])
