"""The policy as a judge of completions: rewards with `url: policy`.

The actor that samples asks the run's generators, at their current versions. Answers of the judge are not trained.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.sampling.jobs import Call, SampleState
from actors.sampling.services import Dispatcher
from actors.scorer.run_judges import judge_by
from areal.config import Config
from areal.config.engine_sections import SamplingConfig
from areal.rewards.functions import Result
from areal.samples.table import Generation
from areal.workflows.conversation import Conversation, user


class PolicyJudges:
    """The judges of the configuration that ask the policy. Raises UserError if options do not fit."""

    def __init__(self, config: Config, dispatch: Dispatcher, tokenizer: Any) -> None:
        self._dispatch = dispatch
        self._tokenizer = tokenizer
        options = config.reward.options
        self._judges = {name: judge_by(self._answer, name, options[name]) for name in config.policy_judges}

    def __contains__(self, name: str) -> bool:
        return name in self._judges

    async def score(self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> list[Result]:
        """As `Rewards.score`, but raises RewardError if a verdict cannot be read."""
        judge = self._judges[name]
        return judge.results(await judge.call(prompt, completions, row), completions)

    async def _answer(self, sampling: SamplingConfig, text: str) -> tuple[str, int, bool]:
        """As areal.extensions.judges.judge.Answer. Raises SampleFailed."""
        talk = Conversation(self._tokenizer)
        prompt = np.asarray(talk.prompt([user(text)]), np.int32)
        sample = SampleState(sampling, min_version=0, home=None, slot=None, on_start=lambda version: None)
        sampled: Generation = await self._dispatch.run(Call(sample, prompt, sampling.max_new_tokens, None))
        return talk.text(sampled), len(prompt) + len(sampled.tokens), sampled.finish == "length"
