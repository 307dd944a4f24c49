"""A session: the services to a workflow for a sample."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np

from areal.config.engine_sections import SamplingConfig
from areal.samples.table import Generation, Tokens
from areal.samples.trajectory import Trajectory
from areal.workflows.chat_templates import Message
from areal.workflows.turn_ends import Keep


class Session(Protocol):
    """The services to a workflow for a sample. If an actor is lost during a call, another actor takes over.

    A workflow may make several calls of `generate` at the same time. `sampling`: the sampling settings. `shown`:
    message parts with pictures, by digest: pictures of the row, and of `show`.
    """

    tokenizer: Any
    shown: Mapping[str, Message]

    @property
    def sampling(self) -> SamplingConfig: ...

    @property
    def calls(self) -> Sequence[Generation]:
        """All completions so far with tokens, in order of arrival."""

    def show(self, content: bytes) -> Message:
        """Return a message part that shows the picture in a file's `content`. Raises ValueError."""

    async def generate(
        self,
        tokens: Tokens,
        max_new_tokens: int | None = None,
        keep: Keep | None = None,
        pictures: Sequence[Message] | None = None,
    ) -> Generation:
        """Continue `tokens` with the policy, at the run's sampling settings. pictures: message parts for the first
        placeholders among the tokens, in order; None: the row's pictures, if any.

        All calls of a sample share `sampling.max_new_tokens`; `max_new_tokens` limits this call further. If no tokens
        are left, or if the conversation is too long for the model, the generation is empty and has the finish "length".
        If `keep` ended the generation, the finish is "stop".
        """

    def reward(self, call: Generation, value: float) -> None:
        """Set the reward of a call, in addition to the sample's reward; `reward.credit` says how both count. Raises
        ValueError if `call` is not in `calls`."""

    def credit(self, calls: Sequence[Generation], value: float | None, agent: str = "") -> None:
        """Credit `calls` with `value` instead of the sample's rewards; None: do not train the calls. agent: the name of
        an agent among several, and of a part of the sample's reward. Raises ValueError if a call is not in
        `self.calls`."""

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """Return all calls of the sample with every sampled token once, for turns of one conversation or of many.

        reward: the reward of the sample, besides the rewards of calls; None: only calls have rewards. Raises ValueError
        if nothing was sampled, if there is no reward, or if a reward is not a valid score.
        """

    async def score(self, completion: str, tokens: Tokens | None = None, reward: str | None = None) -> float:
        """Return the weighted sum of the row's rewards for this completion. tokens: for rewards of tokens. reward:
        return the score of this reward of the run alone, which then does not count for the sample."""

    async def logprobs(self, scorer: str, tokens: Tokens) -> np.ndarray:
        """Return the log-probs of all tokens but the first, float32 [n - 1], by the frozen model `scorer`, a name in
        `scorers`. The log-probs alone do not change a reward or a loss."""

    def tool(self, name: str) -> Any:
        """Return a tool, which all samples of the actor share (areal.workflows.tools). Raises UserError."""

    async def run_python(self, code: str) -> str:
        """Run code in a sandbox, the tool `python`. Return the output, errors included."""

    @property
    def sandboxes(self) -> Any:
        """The tool `sandboxes`, the owner of the sandboxes of tasks: `async with session.sandboxes.opened(...)`."""

    def endpoint(self) -> AbstractAsyncContextManager[Any]:
        """The tool `endpoint`: agents sample in this session through it, until the end of the block."""
