"""Workflows: how one sample of a prompt comes about. A workflow is one async function of a session and a row.

    async def my_workflow(session: Session, row: Row) -> Trajectory: ...

is used by `rollout_manager.workflow: package.module:my_workflow`. Tokens go in and come out as the engine saw them;
text is only ever made for the reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import numpy as np

from areal.config import UserError
from areal.conversation import Generation
from areal.data import Row, encode_prompt
from areal.plugins import load
from areal.trajectory import NOT_SAMPLED, Trajectory


class Session(Protocol):
    """What a workflow may use. Both calls survive the loss of a generator or reward actor."""

    tokenizer: Any

    async def generate(self, tokens: Sequence[int]) -> Generation:
        """Continue `tokens` with the policy, at the run's sampling settings."""

    async def score(self, completion: str) -> float:
        """The mean of the row's reward functions on this completion."""


Workflow = Callable[[Session, Row], Awaitable[Trajectory]]


async def single_turn(session: Session, row: Row) -> Trajectory:
    """One completion of the prompt, scored."""
    prompt = encode_prompt(session.tokenizer, row)
    sampled = await session.generate(prompt)
    reward = await session.score(session.tokenizer.decode(sampled.tokens, skip_special_tokens=True))
    return trajectory(prompt, sampled, reward)


def trajectory(prompt: Sequence[int], sampled: Generation, reward: float) -> Trajectory:
    """A prompt and what was sampled after it."""
    n = len(prompt)
    return Trajectory(
        tokens=np.concatenate([np.asarray(prompt, np.int32), sampled.tokens]),
        logprobs=np.concatenate([np.zeros(n, np.float32), sampled.logprobs]),
        versions=np.concatenate([np.full(n, NOT_SAMPLED, np.int32), sampled.versions]),
        reward=reward,
        finish=sampled.finish,
    )


BUILT_IN: dict[str, Workflow] = {"single_turn": single_turn}


def resolve_workflow(name: str) -> Workflow:
    """A workflow by built-in name or `package.module:function`. Raises UserError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise UserError(
            f"Unknown workflow {name!r} in rollout_manager.workflow: "
            f"known are {', '.join(BUILT_IN)}, or write package.module:function."
        )
    return load(name, "The workflow")
