"""Reads a model for training: places its weights, and makes every pass give the same log-probs."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from areal.base.errors import UserError, explain
from areal.base.processes import importing
from areal.base.text import without_code
from areal.config.trainer_section import TrainerConfig
from areal.training.optimizer import deepspeed_config
from areal.weights.model_files import model_files, only_model
from areal.weights.wrappers import arguments_for_text, published_shapes


def _make_frequencies(model: torch.nn.Module, rotary: torch.nn.Module) -> None:
    """Compute the rotary frequencies again in fp32: under ZeRO 3 a bf16 model is loaded with rounded frequencies."""
    if any(buffer.dtype != torch.float32 for buffer in rotary.buffers()):
        rotary.float()
        model._init_weights(rotary)


def _choose_frequencies(rotary: torch.nn.Module, longest: int | None) -> None:
    """Have all rows use LongRoPE's frequencies for long sequences if some sequence may be long, as vLLM does.
    transformers applies the frequencies of a row's longest sequence to the whole row."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes: Any = rotary.config
    limit = sizes.rope_parameters["original_max_position_embeddings"]
    if (longest or getattr(sizes, "original_max_position_embeddings", sizes.max_position_embeddings)) > limit:
        rotary.original_inv_freq = ROPE_INIT_FUNCTIONS["longrope"](sizes, rotary.inv_freq.device, seq_len=limit + 1)[0]


def _disable_noise(part: torch.nn.Module) -> None:
    """Set a module's dropout and jitter to 0, and have routers choose experts as outside training: pi_theta of a token
    must be the same number in every pass."""
    if isinstance(part, torch.nn.Dropout):
        part.p = 0.0
    if "Router" in type(part).__name__:  # a router's jitter may limit the choice of experts
        part.eval()
        return
    for name, value in vars(part).items():  # for example attention_dropout, applied by attention functions
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(part, name, 0.0)


def _check_shapes(folder: Path) -> None:
    """Raises UserError if a tensor has another shape than config.json describes."""
    stored = model_files(folder).shapes
    for name, shape in published_shapes(folder).items():
        if stored.get(name, shape) != shape:
            raise UserError(
                f"The model {folder} has no {name} of the shape that its config.json describes, {list(shape)}: its is "
                f"{list(stored[name])}."
            )


@dataclass(frozen=True, slots=True)
class ModelReader:
    """stage: of ZeRO. attention: its name in transformers. longest: tokens of a sequence; None: the model's limit."""

    config: TrainerConfig
    stage: int
    attention: str
    longest: int | None

    def read(self, folder: Path) -> torch.nn.Module:
        """Return the model in `folder`, in training mode (all ranks). Raises UserError if the model cannot be read.

        Under ZeRO 3 the model is partitioned at once, and no rank holds the whole model.
        """
        with importing():
            from transformers import modeling_utils
            from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

        _check_shapes(folder)
        with ExitStack() as stack:
            if self.stage == 3:
                known_while_it_lives = HfDeepSpeedConfig(deepspeed_config(self.config))  # noqa: F841
                stack.callback(unset_hf_deepspeed_config)
                if dist.get_rank():  # transformers takes the weights of rank 0, but copies experts on every rank
                    read = modeling_utils.load_state_dict
                    stack.callback(setattr, modeling_utils, "load_state_dict", read)
                    modeling_utils.load_state_dict = lambda *file, **how: {
                        name: tensor.to("meta") if tensor.ndim > 1 else tensor  # all ranks keep buffers, which are 1-D
                        for name, tensor in read(*file, **how).items()
                    }
            return self._read(folder)

    def _read(self, folder: Path) -> torch.nn.Module:
        with importing():
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        # If each rank has all weights, load them onto the GPU: host memory would need room for a model per rank.
        place = {"": torch.cuda.current_device()} if torch.cuda.is_available() and self.stage < 3 else None
        causes = ImportError, KeyError, OSError, SafetensorError, ValueError
        message = f"{folder} does not hold a model that transformers can load: {{why}}"
        with explain(causes, message), without_code(), only_model(folder) as view:
            module, report = AutoModelForCausalLM.from_pretrained(
                view,
                trust_remote_code=False,
                dtype=getattr(torch, self.config.dtype),
                attn_implementation=self.attention,
                device_map=place,
                output_loading_info=True,
                **arguments_for_text(folder),
            )
        if lacks := sorted(report["missing_keys"]):  # transformers fills missing keys with random values
            raise UserError(f"The model {folder} has no {lacks[0]}, which its config.json describes.")
        for part in module.train().modules():
            _disable_noise(part)
            if "RotaryEmbedding" in type(part).__name__:
                _make_frequencies(module, part)
                if getattr(part, "rope_type", None) == "longrope":
                    _choose_frequencies(part, self.longest)
        return module
