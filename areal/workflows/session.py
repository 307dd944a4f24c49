"""A session: what a workflow may use for one sample."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np

from areal.extensions.agents.openai_api import Access, CallsPolicy
from areal.extensions.sandboxes.sandbox_owner import Sandboxes
from areal.samples.table import Generation, Tokens
from areal.samples.trajectory import Trajectory


class Session(CallsPolicy, Protocol):
    """What a workflow may use for one sample. If the actor that serves a call is lost, another one takes it over.

    A workflow may make several calls of `generate` at the same time.
    """

    @property
    def sandboxes(self) -> Sandboxes:
        """The owner of the sandboxes of tasks: `async with session.sandboxes.opened(...)`."""

    @property
    def calls(self) -> Sequence[Generation]:
        """All completions so far that have tokens, in the order in which they came."""

    def reward(self, call: Generation, value: float) -> None:
        """Set the reward of a call, beside the sample's. `reward.credit` says what it counts for. Raises ValueError if
        `call` is none of `calls`."""

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """All calls of the sample: each sampled token once, whether they are turns of one conversation or of many.

        reward: that of the sample, to which the rewards of its calls are added; None: there are only these. Raises
        ValueError if nothing was sampled, if there is no reward, or if it is not a valid score.
        """

    async def score(self, completion: str, tokens: Tokens | None = None, reward: str | None = None) -> float:
        """The weighted sum of the row's rewards on this completion; `tokens` are for rewards that take them. reward:
        the name of one that the run has, whose score this is alone, and which counts for nothing else."""

    async def logprobs(self, scorer: str, tokens: Tokens) -> np.ndarray:
        """Log-probs of these tokens but the first, float32 [n - 1], by a frozen model of the run: the name of one in
        `scorers` that gives log-probs. They count for nothing by themselves."""

    async def run_python(self, code: str) -> str:
        """Runs code in a sandbox. Returns its output, errors included."""

    def endpoint(self) -> AbstractAsyncContextManager[Access]:
        """An endpoint for agents that samples in this session, open until the end of the block."""
