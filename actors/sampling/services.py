"""The services for the samples of an actor: generators, rewards, scorers, tools."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from actors.sampling.flows import Job
from actors.sampling.jobs import ScoreJob, ScoringRules, score_with_retries
from actors.sampling.tokens_job import TokensJob
from areal.base import extensions
from areal.config import Config
from areal.data.rows import Row
from areal.rewards.functions import Result, overlong_penalty
from areal.samples.trajectory import TokenScores, Trajectory
from areal.staleness.standstills import UNKNOWN, Standstills
from areal.workflows.conversation import begin
from areal.workflows.tools import Tools

# The least limit of a workflow's own code, in `master.hang_seconds`. A sample may wait far longer than all before.
OWN_CODE = 5.0


class Dispatcher(Protocol):
    """The interface that does jobs (actors.sampling.dispatch.Dispatch)."""

    async def run(self, job: Job) -> Any:
        """Return the result of a job. Raises SampleFailed."""


def judges_of(config: Config, dispatch: Dispatcher, tokenizer: Any) -> Any:
    """Return the rewards that ask the policy itself (actors.scorer.policy_judges). Raises UserError if options do not
    fit."""
    if not config.policy_judges:
        return {}
    return extensions.need("scorer", "policy_judges", "url: policy").load()(config, dispatch, tokenizer)


class Rewards:
    """The rewards and the scorers of a run. scorers: the scorers that give rewards, by the reward's name. judges: from
    `judges_of`."""

    def __init__(self, dispatch: Dispatcher, rules: ScoringRules, scorers: Mapping[str, str], judges: Any) -> None:
        self._dispatch = dispatch
        self._rules = rules
        self._scorers = scorers
        self._judges = judges

    async def score(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: np.ndarray | None
    ) -> list[Result]:
        """Return the scores by the reward `name` for a completion, or for all completions of a group. Raises
        SampleFailed if the reward failed on every attempt."""
        if name in self._judges:
            judged = partial(self._judges.score, name, prompt, completions, row)
            return await score_with_retries(name, self._rules.config.retries, judged, self._rules.on_refusal)
        job = ScoreJob(self._rules, name, prompt, completions, row, tokens, self._scorers.get(name))
        results: list[Result] = await self._dispatch.run(job)
        return results

    async def score_tokens(self, name: str, tokens: np.ndarray) -> TokenScores:
        """Return the scores of the scorer `name` for tokens, int32 [T]. Raises SampleFailed."""
        scores: TokenScores = await self._dispatch.run(TokensJob(self._rules, name, tokens))
        return scores


@dataclass(eq=False)
class Services:
    """All services. `place`: role and index of the actor, as in rollout_manager/0. `succeeded`: number of finished and
    scored samples. `own_code`: samples in their workflow's own code, and since when. `own_limits`: limits on the time
    there."""

    config: Config
    tokenizer: Any
    dispatch: Dispatcher
    rewards: Rewards
    place: str = "trial"
    succeeded: int = 0
    own_code: dict[object, float] = field(default_factory=dict)
    own_limits: Standstills = field(init=False)
    tools: Tools = field(init=False)

    def __post_init__(self) -> None:
        self.tools = Tools(self.config, self.tokenizer, self.place)
        seconds = self.config.master.hang_seconds
        self.own_limits = Standstills(OWN_CODE * seconds, UNKNOWN * seconds)

    @property
    def sample_seconds(self) -> float:
        """The limit of a stretch of a workflow's own code."""
        return self.config.rollout_manager.sample_seconds or self.own_limits.limit("sample")

    def weights(self, row: Row, changes: Mapping[str, float]) -> Mapping[str, float]:
        """Return the weights of the row's rewards, by name. changes: replace or join the configuration's."""
        return row.reward or {**self.config.reward.functions, **changes}

    def of_groups(self, rewards: Iterable[str]) -> list[str]:
        """Return the rewards among `rewards` that score all completions of a group at once."""
        return [name for name in rewards if name in self.config.reward.groups]

    def too_long(self, row: Row) -> str | None:
        """Return a sentence if the row's prompt has more tokens than `data.max_prompt_tokens`, else None; also None if
        the prompt cannot be turned into tokens."""
        limit = self.config.data.max_prompt_tokens
        if limit is None:
            return None
        talk, messages = begin(self.tokenizer, row.prompt, row.tools)
        try:
            tokens = len(talk.prompt(messages))
        except Exception:  # chat templates raise anything; the workflow fails the sample later
            return None
        return f"the prompt has {tokens} tokens, and data.max_prompt_tokens is {limit}" if tokens > limit else None

    def overlong(self, sample: Trajectory) -> float:
        """Return the penalty for a completion that is too long (`reward.overlong_tokens`)."""
        limit, buffer = self.config.sampling.max_new_tokens, self.config.reward.overlong_tokens
        return overlong_penalty(int(sample.sampled.sum()), limit, buffer) if buffer else 0.0

    async def load_parsers(self) -> None:
        """Load the parsers of turns if they are needed for sure, which takes seconds. Raises UserError."""
        if self.config.rollout_manager.needs_parsers:
            await asyncio.to_thread(self.tools["parsers"].load)

    async def close(self) -> None:
        await self.tools.close()
