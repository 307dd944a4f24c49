"""The scorer as a reward model, on vLLM's pooling runner, and as a judge, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.scorers import Asked, scorer_of, scores_of, write_brief, write_classifier
from support.small_runs import ten_steps
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForSequenceClassification

from areal.config import Config
from areal.data.addition import ALPHABET
from protocols.bus_errors import RefusedError

ROWS = [(f"a{n}b{7 * n}=", "".join(ALPHABET[-1 - i % 12] for i in range(3 * n))) for n in range(1, 20)]
SYSTEM = {"prompt": [{"role": "system", "content": "34"}, {"role": "user", "content": "a1"}]}


def config_of(model: Path, name: str, reward: str, options: Any, **scorer: Any) -> Config:
    engine = {"dtype": "float32", "kv_cache_gib": 0.25, "engine_options": {"max_num_batched_tokens": 512}}
    reward = {"functions": {"addition": 1, reward: 0.5}, "options": options}
    return ten_steps(scorers={name: {"model": str(model), **engine, **scorer}}, reward=reward)


async def test_a_reward_model_scores_the_chat_in_its_own_template_as_transformers_does(tiny_model, tmp_path):
    write_classifier(tmp_path, tiny_model)
    questions = [*((prompt, completion, {}) for prompt, completion in ROWS), ("34a1", "b=", SYSTEM)]
    config = config_of(tmp_path, "liked", "liked", {}, kind="reward_model", output=1, repeatable=True)
    async with scorer_of(config, "liked") as actor:
        results = await scores_of(actor, questions)
        alone = [(await scores_of(actor, [question]))[0] for question in reversed(questions)]
        with pytest.raises(RefusedError, match="the prompt has 606 tokens: the model takes 1 to 511"):
            await scores_of(actor, [("a1", "b" * 600, {})])
    assert alone[::-1] == results  # repeatable: to the last bit, whatever else is scored

    model = Qwen3ForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*(f"0{prompt}=1{completion}=" for prompt, completion in ROWS), "234=0a1=1b=="]
    for text, (score, count) in zip(texts, results, strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        with torch.no_grad():
            outputs = model(torch.tensor([tokens])).logits[0].numpy()
        assert count == len(tokens)
        assert np.abs(outputs - outputs[1]).max() > 1e-2  # the number of the output matters
        assert score == pytest.approx(outputs[1], abs=1e-5)


async def test_a_judge_reads_what_its_own_model_writes_at_the_end_of_its_template(tiny_model, tmp_path):
    """Greedy, so that transformers writes the same. The model ends with any digit."""
    tokenizer, folder = AutoTokenizer.from_pretrained(tiny_model), tmp_path / "model"
    write_brief(folder, tiny_model)
    options = {
        "url": "scorer:big",
        "template": "{{ prompt }}{{ completion }}={{ row.hint }}",
        "low": -1,
        "high": 1e99,
        "max_tokens": 12,
        "sampling": {"temperature": 0},
        "samples": 2,
    }
    questions = [(prompt, completion, {"hint": str(n)}) for n, (prompt, completion) in enumerate(ROWS[:8])]
    mild = options | {"low": -3}
    config = config_of(folder, "big", "judge", {"judge": options, "judge/mild": mild}, kind="judge")
    async with scorer_of(config, "big") as actor:
        results = [await outcome(actor, question) for question in questions]
        mild_results = [await outcome(actor, question, "judge/mild") for question in questions]
        with pytest.raises(RefusedError, match="the prompt has 6"):
            await scores_of(actor, [("a1", "b" * 600, {"hint": ""})], "judge")
        with pytest.raises(RefusedError, match="does not serve scorer 'judge/strict', only big"):
            await scores_of(actor, questions, "judge/strict")
        with pytest.raises(RefusedError, match="the scorer 'big' is of kind judge"):
            await scores_of(actor, questions)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    read = 0
    for (prompt, completion, row), result, other in zip(questions, results, mild_results, strict=True):
        tokens = tokenizer.encode(f"{prompt}{completion}={row['hint']}", return_tensors="pt")
        written = model.generate(tokens, max_new_tokens=12, do_sample=False)[0, tokens.shape[1] :]
        digit = tokenizer.decode(written[-1:])
        if not digit.isdigit():
            assert result == other == "the judge's answer was cut at its max_tokens, 12: raise them"
            continue
        assert result == ((int(digit) + 1) / (1e99 + 1), 2 * (tokens.shape[1] + len(written)))
        assert other[0] == (int(digit) + 3) / (1e99 + 3)
        read += 1
    assert read


async def outcome(actor: Any, question: Asked, reward: str = "judge") -> tuple[float, float] | str:
    """A score and its tokens, or why there is none."""
    try:
        return (await scores_of(actor, [question], reward))[0]
    except RefusedError as error:
        return str(error)
