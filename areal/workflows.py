"""Workflows: how one sample of a prompt comes about. A workflow is one async function of a session and a row.

    async def my_workflow(session: Session, row: Row) -> Trajectory: ...

is used by `rollout_manager.workflow: package.module:my_workflow`. Tokens go in and come out as the engine saw them;
text is only ever made for the reward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np

from areal.agents import agent
from areal.agents import check as check_agent
from areal.config import UserError
from areal.conversation import Generation
from areal.data import Row, encode_prompt
from areal.openai_api import Access
from areal.plugins import load
from areal.trajectory import NOT_SAMPLED, Trajectory

Keep = Callable[[np.ndarray], int | None]
"""Sees all tokens sampled so far: None to go on, or how many of them to end with."""


class Session(Protocol):
    """What a workflow may use. `generate` and `score` survive the loss of a generator or reward actor."""

    tokenizer: Any

    async def generate(
        self, tokens: Sequence[int], max_new_tokens: int | None = None, keep: Keep | None = None
    ) -> Generation:
        """Continue `tokens` with the policy, at the run's sampling settings, or with fewer new tokens than those say.
        Ended early, by `keep`, its `finish` is "stop"."""

    async def score(self, completion: str) -> float:
        """The mean of the row's reward functions on this completion."""

    def endpoint(self) -> AbstractAsyncContextManager[Access]:
        """This session for a program that speaks OpenAI's API, until the end of the block."""


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


BUILT_IN: dict[str, Callable[..., Awaitable[Trajectory]]] = {"single_turn": single_turn, "agent": agent}


def resolve_workflow(name: str, options: dict[str, Any]) -> Workflow:
    """A workflow by built-in name or `package.module:function`, with its keyword arguments. Raises UserError."""
    workflow = _workflow(name)
    try:
        inspect.signature(workflow).bind(None, None, **options)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(workflow).parameters)[2:]) or "no options"
        raise UserError(f"rollout_manager.workflow_options: workflow {name!r}: {error}: it takes {takes}.") from None
    if workflow is agent:
        check_agent(options)
    return functools.partial(workflow, **options)


def _workflow(name: str) -> Callable[..., Awaitable[Trajectory]]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise UserError(
            f"Unknown workflow {name!r} in rollout_manager.workflow: "
            f"known are {', '.join(BUILT_IN)}, or write package.module:function."
        )
    return load(name, "The workflow")
