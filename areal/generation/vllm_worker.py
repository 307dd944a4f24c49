"""Code that runs inside vLLM's own processes: loading weights in place, separating old from new KV cache, norms and
guessed tokens on the CPU, and exit with the generator.

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
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from vllm import ir
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.lora_model import LoRAModel
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample import rejection_sampler

from areal.devices import ENGINE_CORES, settle
from areal.processor import without_amx
from areal.weights.lora import stored_tensors

# The kernels' vectors hold 8 or 16 elements.
NORM_LANES = 16
NOTHING = np.zeros(0, np.float32)

# Up to this size, an engine on the CPU keeps its linear weights twice: as in the files, and packed.
SMALL_BYTES = 2**30
# fp32 weights of up to this number of elements are not packed.
SMALL_WEIGHT = 1 << 17

WeightTransferEngineFactory.register_engine("gloo", "areal.weights.transfer", "GlooEngine")

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


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value, once for each of its guessed tokens. cu_num_tokens: the sums of their numbers."""
    numbers = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(numbers)


if current_platform.is_cpu():
    # vLLM's own for the CPU (0.32) writes its result into a copy, and returns memory as it is. Guessed tokens would be
    # accepted at any temperature, with log-probs of that temperature.
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


_pack_for_cpu = utils.dispatch_cpu_unquantized_gemm


def choose_product(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Set the function that multiplies with a layer's weight on the CPU; vLLM calls this when the weights are loaded.

    vLLM's choice is oneDNN, with packed weights. For each new number of tokens in a step, oneDNN compiles a kernel,
    which takes 0.2 to 0.5 ms: longer than the product with a small matrix. MKL compiles nothing, and is as fast on
    these. With it the engine of the quickstart takes 6 to 14 % less CPU time.
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
    self: PunicaWrapperCPU, y: torch.Tensor, x: torch.Tensor, stacked: torch.Tensor, offset: int, size: int,
    add_inputs: bool = True,
) -> None:  # fmt: skip
    y[:, offset : offset + size] += x.to(y.dtype) @ stacked[0, 0].T


# vLLM's own operators on the CPU copy the factors for each token, since each may have another adapter. Here all tokens
# have the same one.
PunicaWrapperCPU._apply_shrink = _times_a
PunicaWrapperCPU._apply_expand = _add_times_b


class PolicyWorker:
    """Mixin of vLLM's worker, called through `collective_rpc`: `open_policy`, then, while generation is paused,
    `load_policy`. With adapters, `start_adapter` comes first. `transfer` has the weights sent by a trainer instead."""

    model_runner: Any  # set by the worker
    weight_transfer_engine: Any
    vllm_config: Any
    _opened: Iterator[tuple[str, torch.Tensor]] | LoRAModel

    def start_adapter(self, number: int) -> None:
        """Have an adapter with this number that changes nothing."""
        manager = self.model_runner.lora_manager
        self._put_adapter(manager._adapter_manager.create_dummy_lora(number, 1, manager.embedding_modules))

    def open_policy(self, folder: str, adapter: int | None) -> str | None:
        """Open the files that `load_policy` loads: those of a whole model, or of the adapter with this number. Returns
        why they cannot be opened, or None if all are open.

        If the trainer removes the folder while weights are being overwritten, they are still read to the end. If it
        has removed the folder before, no weight has been touched, on any rank.
        """
        try:
            if adapter is None:
                self._opened = stored_tensors(Path(folder))
            else:
                self._opened = self.model_runner.lora_manager._load_adapter(LoRARequest("policy", adapter, folder))
        except (LoRAAdapterNotFoundError, OSError, SafetensorError, ValueError) as error:
            return str(error)
        return None

    def load_policy(self) -> None:
        """Overwrite the weights in place with those in the folder that was opened (Hugging Face names and shapes), or
        the adapter with the one there."""
        tensors = self._opened
        if isinstance(tensors, LoRAModel):
            self._put_adapter(tensors)
            return
        model = self.model_runner.get_model()
        if self._unpacked is None:
            _prepare_reload(model)
            self.model_runner.reload_weights(weights_iterator=tensors)
        else:
            for layer, weight in self._unpacked.items():
                layer.register_parameter("weight", weight)
            model.load_weights(tensors)
        self._pack(*self._unpacked or ())

    @cached_property
    def _unpacked(self) -> dict[torch.nn.Module, torch.nn.Parameter] | None:
        # A transfer takes layers apart, after which these parameters would no longer be theirs.
        return None if self.weight_transfer_engine else _unpacked_weights(self.model_runner.get_model())

    def transfer(self, call: str, info: dict[str, Any]) -> str | None:
        """Do a call of vLLM's weight transfer: one of its methods of the worker, and the argument. Returns why it
        failed, or None. After a failure, and before any other load, `end_transfer` has to be called."""
        try:
            if call == "init_weight_transfer_engine":
                self.weight_transfer_engine.shutdown()  # the group with an earlier trainer
                self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]  # the worker's, as those below
            elif call == "start_weight_update":
                _prepare_reload(self.model_runner.get_model())
                self.start_weight_update()  # type: ignore[attr-defined]
            elif call == "update_weights":
                from areal.weights.transfer import with_handles

                self.update_weights(with_handles(info))  # type: ignore[attr-defined]
            else:
                self.finish_weight_update()  # type: ignore[attr-defined]
                self._pack()
        except Exception as error:  # vLLM would lose the answers of the engine's other processes
            return f"{type(error).__name__}: {error}"
        return None

    def end_transfer(self) -> None:
        """Leave the group with the trainer, and put the layers together that a transfer has taken apart. Their weights
        are no policy's until a whole version is loaded."""
        engine = self.weight_transfer_engine
        engine.shutdown()
        with set_current_vllm_config(self.vllm_config):
            engine.finish_weight_update()
        self._weight_update_active = False

    def _pack(self, *layers: torch.nn.Module) -> None:
        """Pack the weights of `layers` and of the head. On the CPU larger weights are packed when loaded. A tied head
        has no weights of its own in the file, so vLLM does not pack it again, and the head would still multiply by the
        old embedding."""
        heads = (module for module in self.model_runner.get_model().modules() if isinstance(module, ParallelLMHead))
        for layer in (*heads, *layers):
            layer.quant_method.process_weights_after_loading(layer)

    def _put_adapter(self, adapter: LoRAModel) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)


def _prepare_reload(model: torch.nn.Module) -> None:
    """To call before vLLM's own reload."""
    # It warns of every layer without weights in the files, such as rotary embeddings and tied heads. The files have
    # been compared with the model before.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    if current_platform.is_cpu():
        _forget_packed_experts(model)


def _unpacked_weights(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Parameter] | None:
    """Parameters into which the weights of packed linear layers are loaded before they are packed, by layer. None if
    vLLM's own reload has to be used.

    vLLM's own reload takes every layer apart and puts it together again, in Python: 30 ms of a small model's update.
    Unquantized layers on the CPU do not need this, they only have to be packed again.
    """
    if not current_platform.is_cpu():
        return None
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


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """vLLM (0.32) packs the weights of experts for the CPU only with the first kernel that it makes of them. With the
    next ones it would multiply as they are in the files."""
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None


class _Gathers:
    """A scheduler that sends the tokens of a sequence once there are `stream_interval` of them, or the last one. All
    log-probs of a step's message are in its first output, one after another: an array each would cost more than they.

    vLLM labels what it sends with the version of the last step. Weights change only in a pause, so tokens from before
    the last pause go in outputs of their own, whose request id ends in `@VERSION`. A pause preempts every sequence;
    the events that tell of it are left out, so that those which remain tell of a KV cache that was full.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[_Held]] = {}
        self._seen: dict[str, int] = {}  # pauses before the last output, by request
        self._pauses = 0

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if pause_state == PauseState.UNPAUSED:  # and not when it begins: steps in flight are finished in it
            self._pauses += 1

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        steps: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for step in steps.values():
            ready = [part for output in step.outputs for part in self._ready(output, step)]
            step.outputs = [output for output, _ in ready]
            if logprobs := [array for _, arrays in ready for array in arrays]:
                step.outputs[0].new_logprobs = LogprobsLists(NOTHING, np.concatenate(logprobs), NOTHING)
        return steps

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        ended: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._held.pop(request.request_id, None)
            self._seen.pop(request.request_id, None)
        return ended

    def _ready(
        self, output: EngineCoreOutput, step: EngineCoreOutputs
    ) -> Iterator[tuple[EngineCoreOutput, list[np.ndarray]]]:
        """What to send of this output's sequence now, and the log-probs of its tokens."""
        if self._seen.get(output.request_id) != self._pauses:
            output.events = None
        self._seen[output.request_id] = self._pauses
        held = self._held.setdefault(output.request_id, [])
        held.append(_Held(output, step, self._pauses))
        tokens = sum(len(entry.output.new_token_ids) for entry in held)
        if output.finish_reason is None and tokens < self.scheduler_config.stream_interval:  # type: ignore[attr-defined]
            return
        del self._held[output.request_id]
        if output.finish_reason is not None:
            del self._seen[output.request_id]
        for pauses, group in groupby(held, key=lambda entry: entry.pauses):
            parts = list(group)
            outputs = [entry.output for entry in parts]
            if pauses == self._pauses:
                combined = output
            else:  # vLLM has labelled these steps
                combined = EngineCoreOutput(f"{output.request_id}@{parts[0].step.weight_version}", [])
            logprobs = [piece.new_logprobs.logprobs[:, 0] for piece in outputs if piece.new_logprobs is not None]
            combined.new_token_ids = [token for piece in outputs for token in piece.new_token_ids]
            combined.events = [event for piece in outputs for event in piece.events or ()] or None
            combined.new_logprobs = None
            yield combined, logprobs


class _Held(NamedTuple):
    """An output that is not sent yet, of a step after so many pauses."""

    output: EngineCoreOutput
    step: EngineCoreOutputs
    pauses: int


class GatheringScheduler(_Gathers, Scheduler):
    """Without asynchronous scheduling."""


class AsyncGatheringScheduler(_Gathers, AsyncScheduler):
    """With asynchronous scheduling."""


class KeepingScheduler(AsyncGatheringScheduler):
    """The scheduler for `kv_on_update: keep`. A request's salt, that of the weights which began its sample, keeps it
    from KV cache of older weights. A request that still waits in the engine's queue after a pause may have been sent
    too early for that: it gets another salt."""

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            for request in self.waiting:
                request.cache_salt = f"after pause {self._pauses}"
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
