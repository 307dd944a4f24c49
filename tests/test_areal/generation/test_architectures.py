"""The ten kinds of models that people train most: the engine's log-probs are the trainer's, before and after an update.

Whether a kind is trained exactly is the test of tests/test_areal/training/test_matrix.py.
"""

import numpy as np
import pytest
import torch
import transformers
from support.tiny_training import sampled, settings

from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.generation.generation_engine import GenerationEngine
from areal.samples.trajectory import Group
from areal.training.training_engine import TrainingEngine

SAMPLING = SamplingConfig(temperature=0.9, max_new_tokens=24)
CONFIG = GeneratorConfig(dtype="float32", max_concurrent_rollouts=8, kv_cache_gib=0.1, max_model_len=128)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 32}
EXPERTS = {**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "Gemma2": {**HEAD, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "Gemma3": {**HEAD, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "Glm4": HEAD,
    "Granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "Llama": {},
    "Mistral": {**HEAD, "sliding_window": 16},
    "Olmo2": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": HEAD,
    "Qwen3Moe": EXPERTS,
    "SmolLM3": {},
}


def config_of(kind):
    configure = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    return configure(**SIZES | MODELS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
async def test_the_engine_computes_a_model_as_the_trainer_does_before_and_after_an_update(kind, tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    trainer = TrainingEngine(folder, settings(max_tokens_per_microbatch=256), seed=0)
    engine = await GenerationEngine.start(folder, CONFIG, version=0)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 96, length, dtype=np.int32) for length in (5, 40)]
    for version in range(2):
        groups = []
        for number, prompt in enumerate(prompts):
            samples = [await sampled(engine, f"{number} {n}", prompt, SAMPLING) for n in range(2)]
            groups.append(Group(f"{number}", number, tuple(samples), "{}"))
        computed = trainer.logprobs(groups, temperature=SAMPLING.temperature)
        by_engine = np.concatenate([t.logprobs for group in groups for t in group.trajectories])
        was_sampled = np.concatenate([t.sampled for group in groups for t in group.trajectories])
        assert {t.versions[-1] for group in groups for t in group.trajectories} == {version}
        assert np.abs(computed - by_engine)[was_sampled].max() < 1e-4
        trainer.step(groups, version=version, temperature=SAMPLING.temperature)
        await engine.load(trainer.storage.publish(tmp_path / f"{version + 1}"), version + 1)
    await engine.close()
    trainer.close()
