"""Inside vLLM's processes on the CPU: packed weights, and kernels that replace vLLM's when this module is imported.

`areal.generation.vllm_worker` imports this module. Nothing else should, since the import includes vLLM.
"""

from collections.abc import Iterator

import torch
from vllm import ir
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.v1.sample import rejection_sampler

from areal.cpu.processor import without_amx

# The kernels' vectors hold 8 or 16 elements.
NORM_LANES = 16
# Up to this size, an engine keeps its linear weights twice: as in the files, and packed.
SMALL_BYTES = 2**30
# fp32 weights with at most this number of elements are not packed.
SMALL_WEIGHT = 1 << 17

if without_amx():
    # vLLM's own kernels ask torch whether the processor announces AMX.
    torch.cpu._is_amx_tile_supported = lambda: False


class RestartingGenerator(torch.Generator):
    """The random numbers of a request with a seed. vLLM takes a draw back if its step sampled no token, as in the midst
    of a long prompt. torch cannot do so on the CPU. Here the numbers begin anew: no token was drawn before."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.manual_seed(self.initial_seed())


# vLLM makes generators by this name alone.
torch.Generator = RestartingGenerator


def _kernel_takes(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % NORM_LANES == 0


# vLLM has CPU kernels for these norms, but calls them on GPUs only. On the CPU vLLM runs six torch operators per norm,
# a seventh of a small model's time. `engine_arguments` selects this provider by name.


@ir.ops.rms_norm.register_impl(
    "cpu_kernel", supports_args=lambda x, weight, epsilon, variance_size=None: _kernel_takes(x, weight, variance_size)
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # the kernel assumes contiguous rows
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


@ir.ops.fused_add_rms_norm.register_impl(
    "cpu_kernel",
    supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
        _kernel_takes(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()
    ),
    inplace=True,
)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat the value of a request for each of its guessed tokens. cu_num_tokens: cumulative numbers of tokens."""
    numbers = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(numbers)


# vLLM's function for the CPU (0.32) writes its result into a copy, and returns uninitialised memory. Guessed tokens
# would be accepted at any temperature, with log-probs of the wrong temperature.
rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


_pack_for_cpu = utils.dispatch_cpu_unquantized_gemm


def choose_product(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Set the function that multiplies with a layer's weight. vLLM calls this when the weights are loaded.

    vLLM's choice is oneDNN, with packed weights. For each new number of tokens in a step, oneDNN compiles a kernel,
    which takes 0.2 to 0.5 ms: longer than the product with a small matrix. MKL compiles nothing, and is as fast on
    small matrices. With MKL the engine of the quickstart takes 6 to 14 % less CPU time.
    """
    weight = layer.weight
    small = weight.ndim == 2 and weight.numel() <= SMALL_WEIGHT
    if small and weight.dtype == torch.float32 and torch.backends.mkl.is_available():
        layer.cpu_linear = torch.nn.functional.linear
    else:
        _pack_for_cpu(layer, remove_weight)


utils.dispatch_cpu_unquantized_gemm = choose_product


def _times_a(self: PunicaWrapperCPU, y: torch.Tensor, x: torch.Tensor, stacked: torch.Tensor, scale: float) -> None:
    y.copy_((x @ stacked[0, 0].T).mul_(scale))


def _add_times_b(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    stacked: torch.Tensor,
    offset: int,
    size: int,
    add_inputs: bool = True,
) -> None:
    y[:, offset : offset + size] += x.to(y.dtype) @ stacked[0, 0].T


# vLLM's own operators on the CPU copy the factors for each token. Here all tokens have the same adapter.
PunicaWrapperCPU._apply_shrink = _times_a
PunicaWrapperCPU._apply_expand = _add_times_b


_rotate_flat = RotaryEmbedding.forward_cpu


def rotate(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    flat = [None if part is None else part.flatten(1) for part in (query, key)]
    query_out, key_out = _rotate_flat(self, positions, *flat)
    return query_out.view(query.shape), key_out if key is None else key_out.view(key.shape)


# vLLM's function for the CPU (0.32) takes a query with an axis of heads, as in latent attention, for a single head.
# Log-probs of DeepSeek-V3 were 0.4 to 1.3 nats off.
RotaryEmbedding.forward_cpu = rotate


Unpacked = dict[torch.nn.Module, torch.nn.Parameter]


def unpacked_weights(model: torch.nn.Module) -> Unpacked | None:
    """Return, by layer, the parameters that receive the weights of packed linear layers before packing. None if vLLM's
    own reload has to be used.

    vLLM's own reload takes every layer apart and puts it together again, in Python: 30 ms of a small model's update.
    Unquantized layers only have to be packed again.
    """
    unpacked = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return None
        if isinstance(method, UnquantizedLinearMethod):
            recorded = get_layerwise_info(layer).restore_metadata[0]["weight"]
            if recorded.ndim != 2:
                return None
            if not layer.weight.numel():  # a packed layer's is empty
                unpacked[layer] = restore_layer_refs(materialize_meta_tensor(recorded), layer)
        elif method is not None and not isinstance(method, UnquantizedEmbeddingMethod):
            return None
    return unpacked if sum(weight.nbytes for weight in unpacked.values()) <= SMALL_BYTES else None


def load_and_pack(model: torch.nn.Module, unpacked: Unpacked, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load weights without vLLM's reload. unpacked: `unpacked_weights(model)`."""
    for layer, weight in unpacked.items():
        layer.register_parameter("weight", weight)
    model.load_weights(tensors)
    pack_heads(model)
    for layer in unpacked:
        layer.quant_method.process_weights_after_loading(layer)


def pack_heads(model: torch.nn.Module) -> None:
    """Pack tied heads after a load. The file has no weights for a tied head, so vLLM's reload does not pack the head
    again, and the head would still multiply by the old embedding."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Forget packed experts before vLLM's reload. vLLM (0.32) packs the weights of experts only with its first kernel.
    A later kernel would multiply by unpacked weights."""
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None
