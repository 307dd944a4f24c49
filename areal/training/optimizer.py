"""DeepSpeed's configuration and the learning-rate schedule of a run."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from areal.config.reading import merged
from areal.config.trainer_section import TrainerConfig

# By default DeepSpeed gathers the mixtures of experts of some models as a whole under ZeRO 3, and reduces their
# gradients in hooks that also run when no parameter gets a gradient, as in `separation`. In transformers, the experts
# of a layer are one module with stacked weights: all ranks call the same modules, whichever experts their tokens take.
_NO_LEAVES: dict[str, Any] = {"leaf_module": {"classes": []}}


CRITIC = "critic"
"""The name of the critic's group of parameters."""
# Elements of a bucket of gradients: enough to be sent at full speed, and DeepSpeed's own number.
BUCKET, LARGEST_BUCKET = 50_000_000, 500_000_000


def bucket_elements(sizes: Mapping[str, int]) -> int:
    """Return the number of elements in the buffer of gradients that ZeRO sends: the largest weight of a layer. Larger
    parameters, embeddings, are sent alone. DeepSpeed's own number takes 2 GB of any GPU. sizes: of the trained
    parameters, by name.

        >>> bucket_elements({"model.layers.0.q": 4096, "lm_head": 8192})
        12288"""
    in_layers = max((size for name, size in sizes.items() if re.search(r"\.\d+\.", name)), default=0)
    return min(max(in_layers, BUCKET), LARGEST_BUCKET, sum(sizes.values()))


def parameter_groups(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters as groups for Adam. Norms and biases (1-D) do not decay, as in Megatron."""
    if not weight_decay:
        return [{"params": list(parameters)}]
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) > 1].append(parameter)
    return [
        {"params": group, "weight_decay": weight_decay if decays else 0.0} for decays, group in groups.items() if group
    ]


def value_head_group(head: torch.nn.Module, lr: float) -> dict[str, Any]:
    """Return the critic's parameters as the last group for Adam, without decay."""
    return {"params": list(head.parameters()), "lr": lr, "weight_decay": 0.0, "name": CRITIC}


def deepspeed_config(config: TrainerConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a run. config: without `auto`.

    DeepSpeed's own gradient accumulation stays at 1, since the number of micro-batches changes with every step. bf16
    and offload use at least ZeRO 1, where DeepSpeed keeps fp32 master weights: bf16 weights lose updates of a small
    learning rate. At ZeRO 0 `TrainingEngine` clips gradients, because DeepSpeed then reports no gradient norm.
    `deepspeed_options` come on top.
    """
    bf16, offload = config.dtype == "bfloat16", config.offload != "none"
    stage = max(config.zero_stage, 1) if bf16 or offload else config.zero_stage
    zero: dict[str, Any] = {"stage": stage, **(_NO_LEAVES if stage == 3 else {})}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's Adam on the CPU is fused, too
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # else sums over ranks would be rounded to bf16 at every addition
        "gradient_clipping": config.grad_clip if stage else 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": config.lr,
                "betas": list(config.betas),
                "eps": config.adam_eps,
                "weight_decay": config.weight_decay,
                "torch_adam": True,  # DeepSpeed's own kernels would be compiled at start-up
                "fused": True,  # a single pass over memory
            },
        },
        "steps_per_print": None,
    }
    return merged(settings, config.deepspeed_options)


@contextmanager
def held(engine: Any) -> Iterator[None]:
    """In the block, a step of DeepSpeed's `engine` clears the gradients, but moves neither Adam nor the schedule."""
    parts = engine.basic_optimizer, engine.lr_scheduler
    steps = [part.step for part in parts]
    for part in parts:
        part.step = lambda *_, **__: None
    try:
        yield
    finally:
        for part, step in zip(parts, steps, strict=True):
            part.step = step


def learning_rates(optimizer: Optimizer, config: TrainerConfig, optimizer_steps: int) -> LambdaLR:
    """Return the learning-rate schedule of `optimizer_steps` steps (TrainerConfig.lr_share). A rate depends on the step
    count alone, so the schedule can be set to any step. The rate of a critic is constant."""

    def of_policy(step: int) -> float:
        return config.lr_share(step, optimizer_steps)

    def of_critic(step: int) -> float:
        return 1.0

    critic = [group.get("name") == CRITIC for group in optimizer.param_groups]
    return LambdaLR(optimizer, [of_critic if of else of_policy for of in critic])
