"""Rewards for verl: what they get, and how they are refused."""

import asyncio

import pytest

from areal.base.errors import UserError
from areal.rewards.functions import Result, RewardError, as_result
from areal.rewards.lookup import check, resolve

FOR_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth) + 10 * extra_info.get("index", 0) + 100 * (data_source == "gsm8k")

async def later(solution_str, ground_truth, **others):
    return {"score": len(others), "acc": solution_str == ground_truth, "pred": solution_str}

class Judge:
    def __init__(self, scale=1.0):
        self.scale = scale

    def score(self, solution_str, ground_truth):
        return self.scale * (solution_str == ground_truth)

def needs_more(data_source, solution_str, ground_truth, tokenizer):
    return 0.0

def wrong(solution_str, ground_truth):
    return {"acc": 1.0}
"""


def test_a_reward_for_verl_gets_what_verl_gives_it(tmp_path):
    (file := tmp_path / "for_verl.py").write_text(FOR_VERL)
    row = {
        "data_source": "gsm8k",
        "prompt": "?",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 2},
        "answer": "8",
    }
    score = resolve(f"{file}:compute_score").function
    assert score("?", "7", row) == 121 and score("?", "8", row) == 120
    assert score("?", "8", {"prompt": "?", "answer": "8"}) == 1
    assert as_result(asyncio.run(resolve(f"{file}:later").function("?", "7", row))) == Result(2, {"acc": 1})
    assert resolve(f"{file}:Judge", {"scale": 0.5}).function("?", "7", row) == 0.5
    assert not resolve(f"{file}:compute_score").takes_tokens
    with pytest.raises(RewardError, match="neither a reward_model with a ground_truth nor an answer"):
        score("?", "8", {"prompt": "?"})
    with pytest.raises(RewardError, match="a dict without a 'score', only acc"):
        resolve(f"{file}:wrong").function("?", "7", row)


def test_a_reward_for_verl_that_needs_what_verl_does_not_give_is_refused(tmp_path):
    (file := tmp_path / "for_verl.py").write_text(FOR_VERL)
    with pytest.raises(UserError, match="missing a required argument: 'tokenizer'"):
        check(f"{file}:needs_more")
