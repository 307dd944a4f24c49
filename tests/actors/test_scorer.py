"""The scorer as a reward model, on vLLM's pooling runner, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scorers import scorer_of, scores_of, write_classifier
from transformers import AutoTokenizer, Qwen3ForSequenceClassification

from areal.config import Config
from areal.data.addition import ALPHABET
from protocols.errors import RefusedError

ROWS = [(f"a{n}b{7 * n}=", "".join(ALPHABET[-1 - i % 12] for i in range(3 * n))) for n in range(1, 20)]
SYSTEM = {"prompt": [{"role": "system", "content": "34"}, {"role": "user", "content": "a1"}]}


def config_of(model: Path) -> Config:
    engine = {"dtype": "float32", "kv_cache_gib": 0.25, "engine_options": {"max_num_batched_tokens": 512}}
    liked = {"model": str(model), "kind": "reward_model", "output": 1, "repeatable": True, **engine}
    values = {"model": "m", "steps": 1, "batch_size": 4, "group_size": 2, "data": {"source": "addition"}}
    reward = {"functions": {"addition": 1, "liked": 0.5}}
    return Config.model_validate(
        values | {"sampling": {"max_new_tokens": 8}, "scorers": {"liked": liked}, "reward": reward}
    )


async def test_a_reward_model_scores_the_chat_in_its_own_template_as_transformers_does(tiny_model, tmp_path):
    write_classifier(tmp_path, tiny_model)
    asked = [*((prompt, completion, {}) for prompt, completion in ROWS), ("34a1", "b=", SYSTEM)]
    async with scorer_of(config_of(tmp_path), "liked") as actor:
        results = await scores_of(actor, asked)
        alone = [(await scores_of(actor, [each]))[0] for each in reversed(asked)]
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
