"""The scores of completions, by reward actors, scorers or the policy itself."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from actors.sampling.flows import Job
from actors.sampling.jobs import ScoreJob, ScoringRules, TokensJob, score_with_retries
from areal.base import extensions
from areal.config import Config
from areal.rewards.result import Result
from areal.samples.trajectory import TokenScores


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
