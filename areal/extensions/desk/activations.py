"""The memory that a model's layers take in training, counted in the model's own code.

A model of few layers makes one forward and backward pass with tensors that have shapes but no data (FakeTensorMode of
PyTorch), which takes seconds for any model. Memory is linear in the number of tokens and in the number of layers.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from areal.base import extensions
from areal.config.trainer_section import TrainerConfig
from areal.extensions.desk.bare_models import of_layers
from areal.training.attention import attention_kwargs, choose_attention
from areal.training.flops import experts_of
from areal.training.packed import empty_row

TOKENS = 1021  # a prime number: only gradients of parameters have the shapes of parameters


class Activations(NamedTuple):
    """Bytes per token. `saved`: kept by the layers from the forward to the backward pass. `peak`: the most that exists
    at once during the layers' backward pass, with `saved` and without gradients of parameters."""

    saved: float
    peak: float


def measure_activations(sizes: Any, trainer: TrainerConfig, *, checkpointing: bool) -> Activations:
    """The activations of one rank's layers, without the output layer. sizes: the model's config of transformers."""
    small, large, scale = of_layers(sizes, 2), of_layers(sizes, 4), 1
    if trainer.dtype == "float32" and any(experts_of(sizes)):  # without data torch multiplies experts in bf16 alone
        trainer, scale = trainer.model_copy(update={"dtype": "bfloat16"}), 2
    few, many = (_passes(layers, trainer, checkpointing) for layers in (small, large))
    layers, more = small.num_hidden_layers, large.num_hidden_layers
    times = (sizes.num_hidden_layers - layers) / (more - layers)
    return Activations(*(scale * (a + times * (b - a)) for a, b in zip(few, many, strict=True)))


def _passes(sizes: Any, trainer: TrainerConfig, checkpointing: bool) -> Activations:
    from transformers import AutoModelForCausalLM

    dtype, attention = getattr(torch, trainer.dtype), choose_attention("float32")
    how = {"trust_remote_code": False, "dtype": dtype, "attn_implementation": attention}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(sizes, **how).train()
        decoder = model.get_decoder()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if trainer.lora:
            model = extensions.need("lora", "add", "trainer.lora").load()(model, trainer.lora)
    for part in model.modules():
        if isinstance(getattr(part, "rope_type", None), str):
            part.rope_type = "default"  # others choose frequencies by the positions, which have no data here
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        row = empty_row(torch.device("cpu"), TOKENS)
        inputs = {"inputs_embeds": torch.zeros(1, TOKENS, sizes.hidden_size, dtype=dtype, requires_grad=True)}
        inputs |= {"position_ids": row.positions, **attention_kwargs(row, attention)}
        with _Count(model) as count:
            hidden = decoder(**inputs, use_cache=False).last_hidden_state
            saved = count.now
            hidden.backward(torch.zeros_like(hidden))
    return Activations(saved / TOKENS, count.peak / TOKENS)


class _Count(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make: `now`, and at their `peak`. Gradients of parameters do not
    count: they do not grow with the number of tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._shapes = {tuple(sorted(parameter.shape)) for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tuple(sorted(tensor.shape)) not in self._shapes:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        return output

    def _drop(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size
