"""The experts that vLLM's engine gives with the tokens that it samples, against transformers in float64."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_training import settings
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.cpu.vllm_on_cpu import BLOCK_SIZE
from areal.extensions.routing.expert_routing import Routing, routing_of
from areal.generation.engine_process import EngineError
from areal.generation.generation_engine import GenerationEngine
from areal.samples.table import TokenTable, unsampled
from areal.samples.trajectory import Group, Trajectory
from areal.training.training_engine import TrainingEngine

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "eos_token_id": None,  # nothing ends a sequence early
    "mlp_only_layers": [0],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
}
BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK_SIZE  # layers, keys and values, heads, head size, fp32
SMALL = GeneratorConfig(
    dtype="float32",
    max_concurrent_rollouts=8,
    stream_interval=4,
    max_model_len=224,
    kv_cache_gib=20 * BLOCK_BYTES / 2**30,  # for five sequences at their end
    engine_options={"max_num_batched_tokens": 48},
)
SAMPLING = SamplingConfig(temperature=0.7, max_new_tokens=60)
PROMPT = list(range(2, 102))  # computed in three parts; three blocks are cached
SECONDS = 200.0
CLOSE = 1e-5
"""Experts whose logits are so near may be chosen otherwise in fp32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(f"version{version}") for version in range(2)]
    for version, folder in enumerate(folders):
        torch.manual_seed(version)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).save_pretrained(folder)
    return folders


async def collect(engine: GenerationEngine, name: str, prompt: list[int], table: TokenTable, remaining: int) -> None:
    async for part in engine.generate(name, prompt, SAMPLING, max_new_tokens=remaining):
        table.append(part)


def assert_experts_of_its_version(models: list[Path], prompt: list[int], table: TokenTable, routing: Routing) -> None:
    """Each token was sampled by the pass at the token before it, on a prefix that its version has computed."""
    routes = table.columns["routes"].reshape(len(table), routing.layers, routing.chosen)
    assert not routes[:, 0].any(), "a dense layer"
    ids = torch.tensor([[*prompt, *table.tokens.tolist()]])
    for version in set(table.versions.tolist()):
        model = AutoModelForCausalLM.from_pretrained(
            models[version], dtype=torch.float64, experts_implementation="eager"
        )
        with torch.no_grad():
            logits = model(ids, output_router_logits=True).router_logits
        part = table.versions == version
        for layer in (1, 2):
            of_pass = logits[layer - 1][len(prompt) - 1 : -1]
            best = of_pass.topk(routing.chosen + 1, -1)
            clear = (best.values[:, -2] - best.values[:, -1] > CLOSE).numpy() & part
            expected = best.indices[:, :-1].sort(-1).values.numpy()
            assert clear.sum() > 0.9 * part.sum()
            np.testing.assert_array_equal(np.sort(routes[:, layer])[clear], expected[clear])


def assert_replayed_as_sampled(model: Path, prompts: list[list[int]], tables: list[TokenTable]) -> None:
    """Trained with the weights that came in the middle, their tokens have the log-probs that they were sampled with."""
    samples = []
    for prompt, table in zip(prompts, tables, strict=True):
        whole = TokenTable()
        whole.append(unsampled(prompt))
        whole.append(table)
        samples.append(Trajectory(**whole.columns, reward=0.0, finish="length"))
    engine = TrainingEngine(model, settings(routing="replay", max_tokens_per_microbatch=1000), seed=0)
    computed = engine.logprobs([Group("0", 0, tuple(samples))], temperature=SAMPLING.temperature)
    engine.close()
    sampled, versions = (np.concatenate([getattr(s, name) for s in samples]) for name in ("logprobs", "versions"))
    newer = versions == 1
    assert newer.sum() > 50
    np.testing.assert_allclose(computed[newer], sampled[newer], atol=2e-5)


@pytest.mark.parametrize("guesses", [False, True])
async def test_sampled_tokens_have_the_experts_of_the_pass_that_sampled_them(models: list[Path], guesses: bool) -> None:
    """Through chunks of a prompt, prefixes that are cached, a full KV cache that preempts, new weights in the middle,
    and a sequence that goes on as another call; with guessed tokens, too."""
    config = SMALL
    if guesses:
        guessed = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        config = SMALL.model_copy(update={"engine_options": SMALL.engine_options | {"speculative_config": guessed}})
    engine = await GenerationEngine.start(models[0], config, version=0, routes=True)
    prompts = [PROMPT] * 4 + [PROMPT[i:] for i in range(1, 5)]
    tables = [TokenTable() for _ in prompts]
    new = SAMPLING.max_new_tokens
    try:
        async with asyncio.timeout(SECONDS):
            tasks = [
                asyncio.create_task(collect(engine, f"r{i}", prompt, table, new))
                for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
            ]
            while not engine.stats().preemptions:  # noqa: ASYNC110 - what is waited for has no event to offer
                await asyncio.sleep(0.005)
            await engine.load(models[1], 1)
            moved = min(range(len(tables)), key=lambda i: (len(tables[i]) == new, -len(tables[i])))
            engine.hand_over([f"r{moved}"])
            with pytest.raises(EngineError, match="handed over"):
                await tasks.pop(moved)
            beginning = [*prompts[moved], *tables[moved].tokens.tolist()]
            await collect(engine, "again", beginning, tables[moved], new - len(tables[moved]))
            await asyncio.gather(*tasks)
            stats = engine.stats()
    finally:
        await engine.close()
    assert stats.prefix_cache_hits > 0 and stats.preemptions > 0
    assert {version for table in tables for version in table.versions.tolist()} == {0, 1}
    for prompt, table in zip(prompts, tables, strict=True):
        assert len(table) == new
        assert_experts_of_its_version(models, prompt, table, routing_of(models[0]))
    assert_replayed_as_sampled(models[1], prompts, tables)
