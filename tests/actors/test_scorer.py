"""The scorer as a reward model, on vLLM's pooling runner, against transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import network
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from actors.runtime.addresses import Door
from actors.scorer import Scorer
from areal.config import Config
from areal.data.addition import ALPHABET
from protocols.errors import RefusedError
from protocols.messages import Completion
from protocols.transport import Bus

TEMPLATE = "{% for m in messages %}{{ {'user': 0, 'assistant': 1, 'system': 2}[m.role] }}{{ m.content }}={% endfor %}"
ROWS = [(f"a{n}b{7 * n}=", "".join(ALPHABET[-1 - i % 12] for i in range(3 * n))) for n in range(1, 20)]
SYSTEM = {"prompt": [{"role": "system", "content": "34"}, {"role": "user", "content": "a1"}]}


@pytest.fixture(scope="module")
def classifier(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with three outputs, and with a chat template of its own."""
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = json.loads((tiny_model / "config.json").read_text())
    config = Qwen3Config(
        **{name: sizes[name] for name in ("vocab_size", "max_position_embeddings")}, hidden_size=64, head_dim=32,
        intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_labels=3,
        initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def scorer(classifier: Path):
    """An actor without a run around it."""

    def make(**settings: object) -> Scorer:
        actor = Scorer(
            Bus("scorer/0#1", network()), "tcp://127.0.0.1:1", 0, Door("127.0.0.1", "127.0.0.1"), name="liked"
        )
        engine = {"dtype": "float32", "kv_cache_gib": 0.25, "engine_options": {"max_num_batched_tokens": 512}}
        liked = {"model": str(classifier), "kind": "reward_model", **engine, **settings}
        values = {"model": "m", "steps": 1, "batch_size": 4, "group_size": 2, "data": {"source": "addition"}}
        reward = {"functions": {"addition": 1, "liked": 0.5}}
        actor.config = Config.model_validate(
            values | {"sampling": {"max_new_tokens": 8}, "scorers": {"liked": liked}, "reward": reward}
        )
        return actor

    return make


async def results_of(actor: Scorer, rows: list[tuple[str, str, dict]]) -> list[tuple[float, float]]:
    """Scores and numbers of tokens, by the code that a flow calls."""
    added: dict[int, tuple[float, float]] = {}
    jobs = [
        actor._score_text(
            f"{job}", Completion(job=job, function="liked", prompt=prompt, completion=completion, row=0), row,
            lambda scored: added.update({scored.job: (scored.score, scored.parts["tokens"])}),
        )
        for job, (prompt, completion, row) in enumerate(rows)
    ]  # fmt: skip
    await asyncio.gather(*jobs)
    return [added[job] for job in range(len(rows))]


async def test_a_reward_model_scores_the_chat_in_its_own_template_as_transformers_does(classifier, scorer):
    actor = scorer(output=1, repeatable=True)
    await actor.setup()
    try:
        rows = [*((prompt, completion, {}) for prompt, completion in ROWS), ("34a1", "b=", SYSTEM)]
        results = await results_of(actor, rows)
        alone = [(await results_of(actor, [row]))[0] for row in reversed(rows)]
        refused = "has no token|cannot take|cannot read|takes 1 to"
        with pytest.raises(RefusedError, match=refused):
            await results_of(actor, [("a1", "b" * 600, {})])
    finally:
        await actor.teardown()
    assert alone[::-1] == results  # repeatable: to the last bit, whatever else is scored

    model = Qwen3ForSequenceClassification.from_pretrained(classifier, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    texts = [*(f"0{prompt}=1{completion}=" for prompt, completion in ROWS), "234=0a1=1b=="]
    for text, (score, count) in zip(texts, results, strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        with torch.no_grad():
            outputs = model(torch.tensor([tokens])).logits[0].numpy()
        assert count == len(tokens)
        assert np.abs(outputs - outputs[1]).max() > 1e-2  # the number of the output matters
        assert score == pytest.approx(outputs[1], abs=1e-5)
