"""Inside vLLM's own processes: loading weights in place, routes of experts, and exit with the generator.

vLLM imports this module by name (`worker_extension_cls`, `distributed_executor_backend`). Nothing else should import
the module: vLLM would be imported too.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from areal.base import extensions
from areal.base.errors import UserError
from areal.devices import ENGINE_CORES, settle
from areal.weights.folders import stored_tensors

ON_CPU = current_platform.is_cpu()

if gloo := extensions.own_entries().get(("direct", "engine")):
    WeightTransferEngineFactory.register_engine("gloo", *gloo.target.split(":"))

if ON_CPU:
    from areal.cpu import kernels


class PolicyWorker:
    """Mixin of vLLM's worker, called through `collective_rpc`: `open_policy`, then, while generation is paused,
    `load_policy`. With adapters, `start_adapter` comes first. `transfer` receives weights from a trainer instead."""

    model_runner: Any  # set by the worker
    weight_transfer_engine: Any
    vllm_config: Any
    _opened: Iterator[tuple[str, torch.Tensor]] | LoRAModel

    def start_adapter(self, number: int) -> None:
        """Create an adapter with this number that changes nothing."""
        manager = self.model_runner.lora_manager
        self._put_adapter(manager._adapter_manager.create_dummy_lora(number, 1, manager.embedding_modules))
        for module in self.model_runner.get_model().modules():
            if isinstance(module, LogitsProcessorWithLoRA):
                module._get_logits = partial(_logits_of_model, module)

    def capture_routes(self) -> None:
        """Have every step return the experts of its tokens, for `_set_routes` in the scheduler."""
        runner = self.model_runner
        capturer = RoutedExpertsCapturer(self.vllm_config.scheduler_config.max_num_batched_tokens, self.vllm_config)
        bind_routed_experts_capturer(runner.get_model(), capturer)
        runner.sample_tokens = partial(_sample_with_routes, runner.sample_tokens, runner, capturer)

    def open_policy(self, folder: str, adapter: int | None) -> str | None:
        """Open the files that `load_policy` loads: a whole model, or the adapter with this number. Returns the reason
        if a file cannot be opened, else None.

        A trainer may remove the folder later: open files are read to the end. If the folder was removed earlier, no
        rank has changed a weight.
        """
        try:
            if adapter is None:
                self._opened = stored_tensors(Path(folder))
            else:
                self._opened = self.model_runner.lora_manager._load_adapter(LoRARequest("policy", adapter, folder))
        except (LoRAAdapterNotFoundError, OSError, SafetensorError, UserError, ValueError) as error:
            return str(error)
        return None

    def load_policy(self) -> None:
        """Overwrite the weights (or the adapter) in place with the opened files, in Hugging Face's form."""
        tensors = self._opened
        if isinstance(tensors, LoRAModel):
            self._put_adapter(tensors)
            return
        model = self.model_runner.get_model()
        if self._unpacked is not None:
            kernels.load_and_pack(model, self._unpacked, tensors)
            return
        _prepare_reload(model)
        with set_current_vllm_config(self.vllm_config):  # some layers read the config when weights are processed
            self.model_runner.reload_weights(weights_iterator=tensors)
        _finish_reload(model)

    @cached_property
    def _unpacked(self) -> dict[torch.nn.Module, torch.nn.Parameter] | None:
        # A transfer takes layers apart. Afterwards the layers would have other parameters.
        reloads = not ON_CPU or self.weight_transfer_engine
        return None if reloads else kernels.unpacked_weights(self.model_runner.get_model())

    def transfer(self, call: str, info: dict[str, Any]) -> str | None:
        """Do a call of vLLM's weight transfer. call: the name of a method of the worker. info: its argument. Returns
        the reason of a failure, or None. After a failure, call `end_transfer` before any other load."""
        try:
            if call == "init_weight_transfer_engine":
                self.weight_transfer_engine.shutdown()  # the group with an earlier trainer
                self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]  # the worker's, as those below
            elif call == "start_weight_update":
                _prepare_reload(self.model_runner.get_model())
                self.start_weight_update()  # type: ignore[attr-defined]
            elif call == "update_weights":
                self.update_weights(info)  # type: ignore[attr-defined]
            else:
                self.finish_weight_update()  # type: ignore[attr-defined]
                _finish_reload(self.model_runner.get_model())
        except Exception as error:  # vLLM would lose the answers of the engine's other processes
            return f"{type(error).__name__}: {error}"
        return None

    def end_transfer(self) -> None:
        """Leave the group with the trainer, and put the layers together that a transfer has taken apart. The weights
        belong to no version until a whole version is loaded."""
        engine = self.weight_transfer_engine
        engine.shutdown()
        with set_current_vllm_config(self.vllm_config):
            engine.finish_weight_update()
        self._weight_update_active = False

    def _put_adapter(self, adapter: LoRAModel) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)


def _logits_of_model(module: LogitsProcessorWithLoRA, hidden: torch.Tensor, head: Any, *options: Any) -> Any:
    """Return the logits without an adapter of the head: the policy's adapters leave the head out. vLLM would add an
    adapter of zeros, and dies if a prompt is scored while other sequences are sampled, by counting sampled rows."""
    return module.base_layer._get_logits(hidden, getattr(head, "base_layer", head), *options)


def _sample_with_routes(
    sample: Callable[..., Any], runner: Any, capturer: RoutedExpertsCapturer, *arguments: Any
) -> ModelRunnerOutput | AsyncModelRunnerOutput:
    """Return the result of the model runner's own `sample`, with the experts of each token of the step's forward pass,
    [tokens, layers, chosen], request by request."""
    state = runner.execute_model_state
    result = sample(*arguments)
    if state is not None:
        scheduled: SchedulerOutput = state.scheduler_output
        routes = capturer.snapshot_routing_data(scheduled.total_num_scheduled_tokens).numpy()
        of_step = getattr(result, "_model_runner_output", result)  # an asynchronous step wraps its output
        of_step.aux_output_connector_output = routes
    return result


def _prepare_reload(model: torch.nn.Module) -> None:
    """Prepare a model for vLLM's own reload. `_finish_reload` comes after the reload."""
    # vLLM warns of every layer without weights, such as tied heads. The shapes in the files were checked before.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    if ON_CPU:
        kernels.forget_packed_experts(model)


def _finish_reload(model: torch.nn.Module) -> None:
    if ON_CPU:
        kernels.pack_heads(model)


class _DiesWithGenerator:
    """Kills vLLM's engine process when the generator ends. Otherwise the engine would keep its memory."""

    def _init_executor(self) -> None:
        generator = multiprocessing.parent_process()
        assert generator is not None  # the generator has started this process

        def die_with_generator() -> None:
            generator.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die_with_generator, daemon=True, name="die-with-generator").start()
        settle(ENGINE_CORES)
        super()._init_executor()  # type: ignore[misc]  # of the executor that this is mixed into


class OneProcessExecutor(_DiesWithGenerator, uniproc_executor.UniProcExecutor):
    """Runs the worker in the engine process. On the CPU vLLM would start another process and busy-wait for it."""


class ManyProcessExecutor(_DiesWithGenerator, multiproc_executor.MultiprocExecutor):
    """Runs a worker process per tensor-parallel rank. vLLM's death pipe ends the workers with the engine process."""
