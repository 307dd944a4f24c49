"""The tiny model of a self-test, and its runs."""

from pathlib import Path
from typing import Any

from areal.config import Config

TINY = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.05,
}
"""The head is tied to the embedding, and the attention heads have a size for which all kernels work."""


def write_tiny_model(folder: Path, dtype: str | None = None) -> None:
    """Write a random Qwen2 of 1.4M parameters. dtype: by default bfloat16 on GPUs, else float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    dtype = dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def tiny_config(model: Path, dtype: str, transport: str = "folder", **changes: Any) -> Config:
    """Return a run of the tiny model. changes: keys to change, by section of the configuration."""
    sections: dict[str, Any] = {
        "generator": {"dtype": dtype, "kv_cache_gib": 0.5, "kv_on_update": "keep"},
        "trainer": {"dtype": dtype, "minibatches": 1, "max_tokens_per_microbatch": 4096},
    }
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
            "weights": {"transport": transport},
            **{name: values | changes.pop(name, {}) for name, values in sections.items()},
            **changes,
        }
    )


def tiny_runs(model: Path, dtype: str, gpus: int) -> dict[str, Config]:
    """Return the runs of the tiny model for a machine with `gpus` GPUs, by name. All GPUs take part, and both engines
    are divided if there are enough GPUs. On GPUs a second run has trainer and generator in turns."""
    if not gpus:
        return {"tiny": tiny_config(model, dtype, "direct")}
    parallel = 2 if gpus > 2 else 1
    ranks = max(1, gpus - parallel)
    trainer = {"ranks": ranks, "zero_stage": 3 if ranks > 1 else 0}
    transport = "direct" if gpus > 1 else "folder"  # NCCL refuses two ranks on the same GPU
    apart = tiny_config(model, dtype, transport, trainer=trainer, generator={"tensor_parallel": parallel})
    parallel = min(2, gpus)
    everywhere = {"ranks": gpus, "zero_stage": 2 if gpus > 1 else 0}
    taking_all = {"tensor_parallel": parallel, "kv_cache_gib": None}
    turns = tiny_config(model, dtype, trainer=everywhere, generator=taking_all, colocate=True)
    return {"tiny": apart, "tiny in turns": turns}


def sizes_of(model: str) -> Any:
    """Return the model's config from transformers."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
