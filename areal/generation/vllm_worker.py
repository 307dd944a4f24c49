"""Code that runs inside vLLM's own processes: loading weights in place, separating old from new KV cache, norms on the
CPU, and exit with the generator.

vLLM imports this module by name (`worker_extension_cls`, `scheduler_cls`, `distributed_executor_backend`). Nothing else
should import it, since that imports vLLM.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from vllm import ir
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.request import Request

from areal.amx import without_amx
from areal.devices import ENGINE_CORES, settle
from areal.weights.folders import ADAPTER_FILE
from areal.weights.lora import merged_tensors, stored_tensors

# The kernels' vectors hold 8 or 16 elements.
NORM_LANES = 16

# Up to this size, an engine on the CPU keeps its linear weights twice: as in the files, and packed.
SMALL_BYTES = 2**30

if without_amx():
    # vLLM's own kernels ask torch whether the processor announces AMX.
    torch.cpu._is_amx_tile_supported = lambda: False


def _kernel_takes(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % NORM_LANES == 0


# vLLM has CPU kernels for these norms, but uses its kernels on GPUs only. On the CPU it runs six torch operators per
# norm, which is a seventh of a small model's time. `areal.generation.engine` selects this provider by name.


@ir.ops.rms_norm.register_impl(
    "cpu_kernel",
    supported=current_platform.is_cpu(),
    supports_args=lambda x, weight, epsilon, variance_size=None: _kernel_takes(x, weight, variance_size),
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # the kernel assumes this
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


@ir.ops.fused_add_rms_norm.register_impl(
    "cpu_kernel",
    supported=current_platform.is_cpu(),
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


class PolicyWorker:
    """Mixin of vLLM's worker, called through `collective_rpc`: `open_policy`, then, while generation is paused,
    `load_policy`."""

    model_runner: Any  # set by the worker
    _opened: Iterator[tuple[str, torch.Tensor]]
    _unpacked: dict[torch.nn.Module, torch.nn.Parameter] | None = None

    def open_policy(self, folder: str, base: str) -> str | None:
        """Open the files that `load_policy` loads. Returns why they cannot be opened, or None if all are open.

        If the trainer removes the folder while weights are being overwritten, they are still read to the end. If it
        has removed the folder before, no weight has been touched, on any rank.
        """
        adapter = (Path(folder) / ADAPTER_FILE).is_file()
        try:
            self._opened = merged_tensors(Path(base), Path(folder)) if adapter else stored_tensors(Path(folder))
        except (OSError, SafetensorError) as error:
            return str(error)
        return None

    def load_policy(self) -> None:
        """Overwrite the weights in place with those in the folder that was opened (Hugging Face names and shapes). If
        it holds an adapter, this is merged into the weights of the model `base`."""
        tensors = self._opened
        model = self.model_runner.get_model()
        packed = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
        if self._unpacked is None:
            self._unpacked = _unpacked_weights(model)
        if self._unpacked:
            packed += self._unpacked
            for layer, weight in self._unpacked.items():
                layer.register_parameter("weight", weight)
            model.load_weights(tensors)
        else:
            # vLLM warns of every layer without weights in the files, such as rotary embeddings and tied heads. The
            # files have been compared with the model before.
            logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
            self.model_runner.reload_weights(weights_iterator=tensors)
        # On the CPU linear weights are packed when loaded. A tied head has no weights of its own in the file, so vLLM
        # does not pack it again, and the head would still multiply by the old embedding.
        for layer in packed:
            layer.quant_method.process_weights_after_loading(layer)


def _unpacked_weights(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Parameter]:
    """Parameters into which the weights of linear layers are loaded before they are packed, by layer. Empty if vLLM's
    own reload has to be used.

    vLLM's own reload takes every layer apart and puts it together again, in Python: 30 ms of a small model's update.
    Unquantized layers on the CPU do not need this, they only have to be packed again.
    """
    if not current_platform.is_cpu():
        return {}
    unpacked = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return {}
        if isinstance(method, UnquantizedLinearMethod):
            recorded = get_layerwise_info(layer).restore_metadata[0]["weight"]
            if recorded.ndim != 2:
                return {}
            if not layer.weight.numel():  # a packed layer's is empty
                unpacked[layer] = restore_layer_refs(materialize_meta_tensor(recorded), layer)
        elif method is not None and not isinstance(method, UnquantizedEmbeddingMethod):
            return {}
    return unpacked if sum(weight.nbytes for weight in unpacked.values()) <= SMALL_BYTES else {}


class KeepingScheduler(AsyncScheduler):
    """The scheduler for `kv_on_update: keep`. Each pause begins an epoch, whose number salts the hashes of prefixes. So
    a sequence without KV cache shares none of an earlier epoch. A salt inside the request would not do: it would be
    that of the time of sending, too old for a request that still waits in the engine's queue."""

    epoch = 0

    def add_request(self, request: Request) -> None:
        self._salt(request)
        super().add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.PAUSED_ALL:
            self.epoch += 1
            for request in self.waiting:
                self._salt(request)

    def _salt(self, request: Request) -> None:
        request.cache_salt = f"{self.epoch}"
        request.block_hashes.clear()
        request.update_block_hashes()


class _DiesWithGenerator:
    """Kills vLLM's engine process when the generator ends. Without this, the engine process would not notice that its
    parent was killed, and would keep its memory."""

    def _init_executor(self) -> None:
        generator = multiprocessing.parent_process()
        assert generator is not None  # this process is its child

        def die_with_generator() -> None:
            generator.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die_with_generator, daemon=True, name="die-with-generator").start()
        settle(ENGINE_CORES)
        super()._init_executor()  # type: ignore[misc]  # of the executor that this is mixed into


class OneProcessExecutor(_DiesWithGenerator, uniproc_executor.UniProcExecutor):
    """The worker runs in the engine process. On the CPU vLLM would start one more process and busy-wait for it."""


class ManyProcessExecutor(_DiesWithGenerator, multiproc_executor.MultiprocExecutor):
    """One worker process per tensor-parallel rank; vLLM's own death pipe ends them with the engine process."""
