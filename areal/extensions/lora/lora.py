"""Low-rank adapters (LoRA, arXiv 2106.09685), in peft's files: W' = W + alpha / rank * B A.

An adapter is a folder with the factors A and B of every adapted weight, and a description of the adapted layers.
Trainers write adapters, and generators apply them. Programs that load checkpoints need full weights, from
`merged_tensors`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from areal.base.errors import UserError, explain
from areal.config.trainer_section import LoraConfig
from areal.weights.folders import stored_tensors, write_tensors
from areal.weights.model_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, model_files

_ROOT = "base_model.model."  # prefix of all tensor names in peft
_NAME = ".default"  # name of the only adapter: part of its parameters' names, but not of the names in files


def add_adapters(module: torch.nn.Module, config: LoraConfig, folder: Path | None = None) -> torch.nn.Module:
    """Return the model with new adapters, and all other parameters frozen. Untrained adapters change no output.

    folder: the model's folder, if adapters will be merged into its weights. Raises UserError if the model has no layers
    named in `config.target_modules`, or if `merged_tensors` would leave a named layer unchanged.
    """
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=config.target_modules, task_type="CAUSAL_LM"
    )
    with explain(ValueError, "trainer.lora.target_modules does not fit the model: {why}"):
        adapted = peft.get_peft_model(module, settings, autocast_adapter_dtype=False)
    stored = model_files(folder).shapes if folder else None
    for name, layer in adapted.named_modules():
        if isinstance(layer, BaseTunerLayer):
            name, base = name.removeprefix(_ROOT), layer.get_base_layer()
            if not isinstance(base, torch.nn.Linear) or (stored is not None and f"{name}.weight" not in stored):
                raise UserError(
                    f"trainer.lora.target_modules includes {name}, of type {type(base).__name__}, which is no linear "
                    f"layer with weights of that name in the model's files: leave it out, or trainer.lora."
                )
    return adapted


def write_adapter(module: torch.nn.Module, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained `parameters`, by their names in `module`, into an existing folder. Equal parameters give equal
    files, as a version's stamp requires."""
    write_tensors({name.replace(_NAME, ""): tensor for name, tensor in parameters.items()}, folder / ADAPTER_FILE)
    module.peft_config["default"].save_pretrained(str(folder))
    # peft keeps the layers in a set, and the set's order differs between processes.
    settings = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
    settings["target_modules"].sort()
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True))


def merged_tensors(
    base: Path, adapter: Path, shard: int = 0, shards: int = 1, *, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Return name and tensor of the model folder `base`, with `adapter` applied. Changed tensors have `dtype`, or their
    type in `base` if wider; all further tensors are unchanged. shard, shards: as in `stored_tensors`.
    """
    settings = json.loads((adapter / ADAPTER_CONFIG_FILE).read_text())
    scale = settings["lora_alpha"] / settings["r"]
    factors = load_file(adapter / ADAPTER_FILE)

    def merged(name: str, tensor: Tensor) -> Tensor:
        key = _ROOT + name.removesuffix(".weight")
        if f"{key}.lora_A.weight" not in factors:
            return tensor
        A, B = (factors[f"{key}.lora_{factor}.weight"].float() for factor in "AB")
        return (tensor.float() + scale * (B @ A)).to(torch.promote_types(tensor.dtype, dtype))

    return ((name, merged(name, tensor)) for name, tensor in stored_tensors(base, shard, shards))
