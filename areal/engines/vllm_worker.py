"""What runs inside vLLM's own processes: loading weights in place, telling old KV cache from new, norms on the CPU, and
dying with the generator.

vLLM imports this module by name (`worker_extension_cls`, `scheduler_cls`, `distributed_executor_backend`); nothing
else should, since importing it imports vLLM.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from vllm import ir
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.request import Request

from areal.devices import ENGINE_CORES, keep_to
from areal.engines.amx import without_amx
from areal.engines.lora import merged_tensors, stored_tensors
from areal.weights import ADAPTER_FILE

# The kernels' vectors hold 8 or 16 elements.
NORM_LANES = 16

if without_amx():
    # vLLM's own kernels ask torch what the processor announces.
    torch.cpu._is_amx_tile_supported = lambda: False


def _kernel_takes(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % NORM_LANES == 0


# vLLM brings kernels for these on the CPU and uses them on GPUs alone: elsewhere it takes six torch operators each,
# which is a seventh of a small model's time. `generation` names this provider.


@ir.ops.rms_norm.register_impl(
    "cpu_kernel",
    supported=current_platform.is_cpu(),
    supports_args=lambda x, weight, epsilon, variance_size=None: _kernel_takes(x, weight, variance_size),
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # as the kernel takes it to be
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
    """Mixed into vLLM's worker: `load_policy` is called through `collective_rpc` while generation is paused."""

    model_runner: Any  # the worker's

    def load_policy(self, folder: str, base: str) -> None:
        """Overwrite the weights in place with those in `folder`, or with those of the model `base` and the adapter that
        lies there (Hugging Face names and shapes)."""
        # vLLM warns of every layer without weights in the files, as rotary embeddings and tied heads are; they have
        # been compared with the model before.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        adapter = (Path(folder) / ADAPTER_FILE).is_file()
        tensors = merged_tensors(Path(base), Path(folder)) if adapter else stored_tensors(Path(folder))
        self.model_runner.reload_weights(weights_iterator=tensors)
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                # On the CPU linear weights are packed when loaded. A tied head has no weights of its own in the file,
                # so vLLM does not pack it again, and it would go on multiplying by the old embedding.
                module.quant_method.process_weights_after_loading(module)


class KeepingScheduler(AsyncScheduler):
    """For `kv_on_update: keep`. Each pause begins an epoch that salts the hashes of prefixes: what has no KV cache yet
    shares none of an earlier epoch's. Salts that requests bring along would be those of the time at which they were
    sent: too old for the ones that wait in the engine's queue."""

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
    """vLLM's engine process does not notice that the process which started it was killed: it would keep its memory."""

    def _init_executor(self) -> None:
        generator = multiprocessing.parent_process()
        assert generator is not None  # this is a child of it

        def die_with_generator() -> None:
            generator.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die_with_generator, daemon=True, name="die-with-generator").start()
        keep_to(ENGINE_CORES)
        super()._init_executor()  # type: ignore[misc]  # of the executor that this is mixed into


class OneProcessExecutor(_DiesWithGenerator, uniproc_executor.UniProcExecutor):
    """The worker lives in the engine process. On the CPU vLLM itself would start one more process and spin on it."""


class ManyProcessExecutor(_DiesWithGenerator, multiproc_executor.MultiprocExecutor):
    """One worker process a tensor-parallel rank; vLLM's own death pipe ends them with the engine process."""
