"""Judges that are the policy: what generators are asked, and what becomes of their answers."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.scripted_policy import Characters
from support.small_runs import ten_steps

from actors.sampling.jobs import SampleFailed, ScoringRules
from actors.sampling.services import Rewards
from actors.scorer.policy_judges import PolicyJudges
from areal.base.errors import UserError
from areal.samples.table import Generation

ROW = {"answer": "4"}


class AnsweringPolicy:
    """Answers with these texts in turn, and keeps the calls."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.finish = [*answers], "stop"
        self.calls = []

    async def run(self, call) -> Generation:
        self.calls.append(call)
        tokens = np.array(Characters().encode(self.answers.pop(0), add_special_tokens=False), np.int32)
        return Generation(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), self.finish)


def judged_by(policy: AnsweringPolicy, refusals: list, retries: int = 1, **options) -> Rewards:
    reward = {"functions": ["math", *options], "options": options, "retries": retries}
    config = ten_steps(sampling={"max_new_tokens": 5}, reward=reward)
    assert (config.policy_judges, config.own_rewards) == ([*options], ["math"])
    judges = PolicyJudges(config, policy, Characters())
    rules = ScoringRules(config.reward, set(), lambda *refusal: refusals.append(refusal))
    return Rewards(policy, rules, {}, judges)


async def test_the_policy_is_asked_as_the_options_say_and_its_verdict_is_the_score():
    policy = AnsweringPolicy("8", "4")
    options = {"template": "{{ row.answer }}={{ completion }}?", "samples": 2, "sampling": {"temperature": 0.5}}
    rewards = judged_by(policy, [], judge={"url": "policy", "max_tokens": 7, **options})
    (result,) = await rewards.score("judge", "2+2", ["4"], ROW, None)
    assert (result.score, result.parts) == (pytest.approx(0.6), {"tokens": 2 * len("4=4?") + 2})
    for call in policy.calls:
        assert Characters().decode(call.tokens.tolist(), skip_special_tokens=True) == "4=4?"
        assert (call.sampling.max_new_tokens, call.sampling.temperature, call.min_version) == (7, 0.5, 0)


async def test_the_policy_ranks_a_group():
    rewards = judged_by(AnsweringPolicy("[2, 1]"), [], group_judge={"url": "policy", "template": "{{ completions }}"})
    first, second = await rewards.score("group_judge", "2+2", ["5", "4"], ROW, None)
    assert (first.score, second.score) == (0, 1)


async def test_a_verdict_that_cannot_be_read_is_asked_again_and_then_fails_the_sample():
    refusals = []
    rewards = judged_by(
        AnsweringPolicy("well", "10", "what?", "hm"), refusals, judge={"url": "policy", "template": "?"}
    )
    (result,) = await rewards.score("judge", "2+2", ["4"], ROW, None)
    assert result.score == 1
    with pytest.raises(SampleFailed, match="reward 'judge': the judge's answer has no verdict: 'hm'"):
        await rewards.score("judge", "2+2", ["4"], ROW, None)
    assert [cause for cause, _ in refusals] == ["reward", "reward"]


async def test_an_answer_that_was_cut_is_no_verdict():
    policy = AnsweringPolicy("8", "7")
    policy.finish = "length"
    with pytest.raises(SampleFailed, match="reward 'judge': the judge's answer was cut at its max_tokens, 512"):
        await judged_by(policy, [], judge={"url": "policy", "template": "?"}).score("judge", "2+2", ["4"], ROW, None)


def test_the_policy_is_sampled_with_settings_that_it_has():
    with pytest.raises(UserError, match="reward 'judge': Unknown key 'seed' in its option sampling"):
        judged_by(AnsweringPolicy(), [], judge={"url": "policy", "sampling": {"seed": 1}})
