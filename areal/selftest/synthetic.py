"""What a self-test runs on: a tiny model, and groups of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal.config import Config
from areal.trajectory import NOT_SAMPLED, Group, Trajectory

TINY = {
    "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.05,
}  # fmt: skip
"""Its head is tied to its embedding, and its heads are of a size that all kernels take."""


def write_tiny_model(folder: Path, dtype: str | None = None) -> None:
    """A random Qwen2 of 1.4M parameters. dtype: bfloat16 on GPUs, else float32, unless it is given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    dtype = dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def tiny_config(model: Path, dtype: str, transport: str = "folder") -> Config:
    """A run that trains the tiny model."""
    return Config.model_validate(
        {
            "name": "selftest",
            "model": str(model),
            "steps": 1,
            "batch_size": 1,
            "group_size": 2,
            "data": {"source": "none.jsonl", "max_prompt_tokens": 512},
            "reward": {"functions": ["math"]},
            "sampling": {"max_new_tokens": 1536},
            "generator": {"dtype": dtype, "kv_cache_gib": 0.5},
            "trainer": {"dtype": dtype, "minibatches": 1, "max_tokens_per_microbatch": 4096},
            "weights": {"transport": transport},
        }
    )


def random_groups(
    vocabulary: int, lengths: Sequence[Sequence[int]], *, shared: int = 0, version: int = 0, seed: int = 0
) -> list[Group]:
    """A group for each item of `lengths`, which has the lengths of its samples in tokens. All tokens but a sample's
    first are sampled, by `version`. shared: number of first tokens that the samples of a group have in common."""
    random = np.random.default_rng(seed)
    groups = []
    for number, of_group in enumerate(lengths):
        prefix = random.integers(0, vocabulary, shared)
        samples = []
        for index, length in enumerate(of_group):
            tokens = random.integers(0, vocabulary, length)
            tokens[: min(shared, length)] = prefix[:length]
            versions = np.repeat([NOT_SAMPLED, version], [1, length - 1]).astype(np.int32)
            logprobs = np.where(versions == NOT_SAMPLED, 0, -np.log(vocabulary)).astype(np.float32)
            samples.append(Trajectory(tokens.astype(np.int32), logprobs, versions, float(index % 2), "stop"))
        groups.append(Group(f"{number}", number, tuple(samples)))
    return groups


def sizes_of(model: str) -> Any:
    """The model's config, as transformers has it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config()
