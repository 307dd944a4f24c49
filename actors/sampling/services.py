"""What the samples of an actor may use, as one object: generators, rewards, a sandbox, an endpoint for agents."""

import asyncio
import hashlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from actors.sampling.calls import Call
from areal.config import Config
from areal.data.rows import Row
from areal.extensions.agents.openai_api import Access
from areal.extensions.agents.parsers import Parsers
from areal.extensions.programs.slots import Programs
from areal.extensions.sandboxes.sandbox_owner import Sandboxes
from areal.rewards.result import Result, overlong_penalty
from areal.samples.table import Generation
from areal.samples.trajectory import TokenScores, Trajectory
from areal.staleness.standstills import UNKNOWN, Standstills
from areal.workflows.conversation import begin
from areal.workflows.session import Session

if TYPE_CHECKING:
    from actors.sampling.openai_endpoint import OpenAIEndpoint

P = TypeVar("P", bound=Parsers)
# The least limit of a workflow's own code, in `master.hang_seconds`. One sample may wait far longer than all before it.
OWN_CODE = 5.0


class Generators(Protocol):
    """What samples tokens."""

    async def sample(self, call: Call) -> Generation:
        """The completion of a call. Raises SampleFailed."""


class Rewards(Protocol):
    """What scores completions."""

    async def score(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: np.ndarray | None
    ) -> list[Result]:
        """The score by the reward `name` of one completion, or if it is one of groups of each of those of a group.
        Raises SampleFailed if the reward failed on every attempt."""

    async def score_tokens(self, name: str, tokens: np.ndarray) -> TokenScores:
        """What the scorer `name` gives int32 [T] tokens. Raises SampleFailed."""


class Endpoint:
    """The endpoint for agents, which starts for the first one. on_refusal: as of OpenAIEndpoint."""

    def __init__(self, config: Config, on_refusal: Callable[[str], None] = lambda request: None) -> None:
        self._config = config
        self._on_refusal = on_refusal
        self._endpoint: OpenAIEndpoint | None = None

    def serve(self, session: Session) -> AbstractAsyncContextManager[Access]:
        if self._endpoint is None:
            from actors.sampling.openai_endpoint import OpenAIEndpoint  # imports a web server, which few runs need

            host = self._config.rollout_manager.endpoint_host
            self._endpoint = OpenAIEndpoint(self._config.model, host, self._on_refusal)
        return self._endpoint.serve(session)

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()


@dataclass(eq=False)
class Services:
    """See the module. `place`: who samples, as in rollout_manager/0. `succeeded`: number of samples that were finished
    and scored. `own_code`: samples in their workflow's own code, and since when. `own_limits`: of how long one may be
    there."""

    config: Config
    tokenizer: Any
    parsers: Parsers
    generators: Generators
    rewards: Rewards
    programs: Programs
    endpoint: Endpoint
    place: str = "trial"
    succeeded: int = 0
    own_code: dict[object, float] = field(default_factory=dict)
    own_limits: Standstills = field(init=False)
    sandboxes: Sandboxes = field(init=False)

    def __post_init__(self) -> None:
        self.sandboxes = Sandboxes(_label(self.config, self.place), self.programs)
        seconds = self.config.master.hang_seconds
        self.own_limits = Standstills(OWN_CODE * seconds, UNKNOWN * seconds)

    @property
    def sample_seconds(self) -> float:
        """The limit of one stretch of a workflow's own code."""
        return self.config.rollout_manager.sample_seconds or self.own_limits.limit("sample")

    def weights(self, row: Row, changes: Mapping[str, float]) -> Mapping[str, float]:
        """The weights of the row's rewards, by name. changes: those that replace or join the configuration's."""
        return row.reward or {**self.config.reward.functions, **changes}

    def of_groups(self, rewards: Iterable[str]) -> list[str]:
        """Those of these rewards that score all completions of a group at once."""
        return [name for name in rewards if name in self.config.reward.groups]

    def too_long(self, row: Row) -> str | None:
        """A sentence if the row's prompt has more tokens than `data.max_prompt_tokens`; None if it has not, or if no
        tokens can be made of it."""
        limit = self.config.data.max_prompt_tokens
        if limit is None:
            return None
        talk, messages = begin(self.tokenizer, row.prompt)
        try:
            tokens = len(talk.prompt(messages))
        except Exception:  # chat templates raise anything; it fails the sample, in the workflow
            return None
        return f"the prompt has {tokens} tokens, and data.max_prompt_tokens is {limit}" if tokens > limit else None

    def overlong(self, sample: Trajectory) -> float:
        """The penalty for a completion that is too long (`reward.overlong_tokens`)."""
        limit, buffer = self.config.sampling.max_new_tokens, self.config.reward.overlong_tokens
        return overlong_penalty(int(sample.sampled.sum()), limit, buffer) if buffer else 0.0

    async def close(self) -> None:
        await self.endpoint.close()
        await self.sandboxes.close()
        await self.programs.close()


def _label(config: Config, place: str) -> str:
    """What marks sandboxes of this place in the run, whichever process has it."""
    names = f"{socket.gethostname()}:{config.folder.absolute()}:{place}"
    return f"{config.name}-{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"


async def load_parsers(config: Config, tokenizer: Any, make: type[P]) -> P:
    """The parsers of the run; those that the configuration names are loaded. Raises UserError."""
    settings = config.rollout_manager
    parsers = make(tokenizer, settings.tool_call_parser, settings.reasoning_parser, config.data.chat_template_kwargs)
    if settings.names_parsers:
        await asyncio.to_thread(parsers.load)
    return parsers
