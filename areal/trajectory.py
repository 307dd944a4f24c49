"""Trajectories and groups: what travels from generation to training.

A token the policy did not sample (the prompt, a tool's answer) has version -1 and takes no part in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

NOT_SAMPLED = -1

Finish = Literal["stop", "length"]
Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample of a group. All arrays have the same length T.

    tokens: int32, prompt and completion as the engine saw them (never re-tokenised).
    logprobs: float32, log pi_behav of each sampled token after temperature; 0 where not sampled.
    versions: int32, the policy version that sampled each token; -1 where not sampled.
    reward: the score of the whole trajectory.
    finish: "stop" (the policy ended it) or "length" (cut at `max_new_tokens`).
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    finish: Finish

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"tokens, logprobs and versions differ in length: "
                f"{len(self.tokens)}, {len(self.logprobs)}, {len(self.versions)}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sampled(self) -> np.ndarray:
        """bool [T]: the tokens that the policy sampled."""
        return self.versions != NOT_SAMPLED

    @property
    def start_version(self) -> int:
        """The oldest version among the sampled tokens: that of the first one, unless a generator that went on with
        the sequence was behind. Raises ValueError where nothing was sampled."""
        return int(self.versions[self.sampled].min())


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G samples: the unit of admission, readiness and training."""

    id: str
    prompt_index: int
    trajectories: tuple[Trajectory, ...]

    @property
    def start_version(self) -> int:
        """The oldest version among all sampled tokens of the group."""
        return min(t.start_version for t in self.trajectories)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ: where all are the same, nothing tells a good sample from a bad one."""
        return len({t.reward for t in self.trajectories}) > 1
