"""Whether the experts of a model can be divided over ranks: checked before torch and DeepSpeed are imported."""

from pathlib import Path

from areal.base.errors import UserError
from areal.config.trainer_section import TrainerConfig
from areal.models import mixture_of

PRESETS = {
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
"""AutoEP's name for a kind of model, by its model_type."""


def check_experts(config: TrainerConfig, folder: Path, ranks: int) -> None:
    """Raises UserError if the model in `folder` cannot be divided as the configuration says. ranks: of the trainer."""
    size = config.expert_parallel
    if size == 1:
        return
    kind, experts = mixture_of(folder)
    if kind not in PRESETS:
        why = f"DeepSpeed divides no experts of the model {folder}, of the kind {kind}: it knows {', '.join(PRESETS)}"
    elif experts % size:
        why = f"the model {folder} has {experts} experts a layer: set it to a divisor of {experts}"
    elif ranks % size:
        why = f"the number of the trainer's ranks is {ranks}: make that a multiple of it"
    else:
        return
    raise UserError(f"trainer.expert_parallel is {size}, but {why}.")
