"""Checks before torch and DeepSpeed load: whether a model's experts or tensors can be divided over ranks."""

from pathlib import Path

from areal.base.errors import UserError
from areal.config.trainer_section import TrainerConfig
from areal.models import mixture_of, sizes_of

PRESETS = {
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
"""AutoEP's name for a kind of model, by its model_type."""
DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Kinds of models known to `divided_tensors`."""


def check_experts(config: TrainerConfig, folder: Path, ranks: int) -> None:
    """Raise UserError if the model in `folder` cannot be divided as configured. ranks: number of trainer ranks."""
    if (size := config.expert_parallel) > 1:
        kind, experts = mixture_of(folder)
        why = None
        if kind not in PRESETS:
            known = ", ".join(PRESETS)
            why = f"DeepSpeed divides no experts of the model {folder}, of the kind {kind}: it knows {known}"
        elif experts % size:
            why = f"the model {folder} has {experts} experts a layer: set it to a divisor of {experts}"
        _refuse("expert_parallel", size, why, ranks)


def check_tensors(config: TrainerConfig, folder: Path, ranks: int) -> None:
    """Raise UserError if the model in `folder` cannot be divided as configured. ranks: number of trainer ranks."""
    if (size := config.tensor_parallel) > 1:
        kind, sizes = mixture_of(folder)[0], sizes_of(folder)
        keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        uneven = next((key for key in keys if (sizes.get(key) or 0) % size), None)
        why = None
        if kind not in DENSE or sizes.get("attention_bias") or sizes.get("mlp_bias"):
            biased = " with biases" if kind in DENSE else ""
            why = f"the model {folder} of the kind {kind}{biased} is none that is divided: {', '.join(DENSE)} are"
        elif uneven:
            why = f"the model {folder} has {uneven} {sizes[uneven]}: set it to a divisor of that"
        _refuse("tensor_parallel", size, why, ranks)


def _refuse(key: str, size: int, why: str | None, ranks: int) -> None:
    """Raise UserError for the reason `why`, or if the ranks cannot be divided."""
    if why is None and ranks % size:
        why = f"the number of the trainer's ranks is {ranks}: make that a multiple of it"
    if why:
        raise UserError(f"trainer.{key} is {size}, but {why}.")
