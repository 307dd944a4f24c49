"""A session: what a workflow may use for one sample."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np

from areal.config.engine_sections import SamplingConfig
from areal.samples.table import Generation, Tokens
from areal.samples.trajectory import Trajectory
from areal.workflows.chat_templates import Message
from areal.workflows.conversation import Keep


class Session(Protocol):
    """What a workflow may use for one sample. If the actor that serves a call is lost, another one takes it over.

    A workflow may make several calls of `generate` at the same time. `sampling`: how the policy is sampled. `shown`:
    parts of messages with pictures, by their digests: those of the row, and what `show` gave.
    """

    tokenizer: Any
    shown: Mapping[str, Message]

    @property
    def sampling(self) -> SamplingConfig: ...

    @property
    def calls(self) -> Sequence[Generation]:
        """All completions so far that have tokens, in the order in which they came."""

    def show(self, content: bytes) -> Message:
        """A part of a message that shows the picture in a file. Raises ValueError."""

    async def generate(
        self,
        tokens: Tokens,
        max_new_tokens: int | None = None,
        keep: Keep | None = None,
        pictures: Sequence[Message] | None = None,
    ) -> Generation:
        """Continue `tokens` with the policy, at the run's sampling settings. pictures: the parts of its messages whose
        placeholders are the first among the tokens, in order; None: those of the row, or none.

        All calls of a sample share `sampling.max_new_tokens`; `max_new_tokens` limits this call further. If nothing of
        it is left, or the conversation is too long for the model, the generation is empty and its finish is "length".
        If `keep` ended the generation, its finish is "stop".
        """

    def reward(self, call: Generation, value: float) -> None:
        """Set the reward of a call, beside the sample's. `reward.credit` says what it counts for. Raises ValueError if
        `call` is none of `calls`."""

    def credit(self, calls: Sequence[Generation], value: float | None, agent: str = "") -> None:
        """Credit these calls with `value` in place of the sample's rewards: the reward of an agent, one of several, and
        a part of the sample's reward by the name `agent`. None: they are not trained. Raises as `reward`."""

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

    def tool(self, name: str) -> Any:
        """The tool of this name, which all samples of the actor share (areal.workflows.tools). Raises UserError."""

    async def run_python(self, code: str) -> str:
        """Run code in a sandbox, the tool `python`. Returns its output, errors included."""

    @property
    def sandboxes(self) -> Any:
        """The tool `sandboxes`, the owner of the sandboxes of tasks: `async with session.sandboxes.opened(...)`."""

    def endpoint(self) -> AbstractAsyncContextManager[Any]:
        """An endpoint for agents that samples in this session, open until the end of the block: the tool `endpoint`."""
