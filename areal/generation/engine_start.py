"""The start of an engine: the environment, arguments and configuration of vLLM, and their checks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import setproctitle

from areal.base.errors import UserError, explain
from areal.base.processes import importing
from areal.config.engine_options import refuse_twice
from areal.config.engine_sections import GeneratorConfig
from areal.config.trainer_section import LoraConfig
from areal.cpu import vllm_on_cpu as cpu
from areal.cpu.fork_server import forked_engines, start_fork_server
from areal.devices import SHARES, visible_devices
from areal.generation.engine_process import EngineError
from areal.models import check_mixture, packages_of_vision
from areal.samples.tokenizer import tokenizer_in
from areal.weights.model_files import only_model

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import AsyncMPClient

# Shares of a GPU's memory for an engine: alone on the GPU, in turns with the trainer, and beside the trainer.
OWN, TURNS, SHARED = 0.9, 0.8, 0.3


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The features that an engine is started with, as in `GenerationEngine.start`."""

    seed: int = 0
    lora: LoraConfig | None = None
    sleeps: bool = False
    transfer: str | None = None
    routes: bool = False
    kept_words: int = 0


def prepare(config: GeneratorConfig) -> None:
    """Set the environment of an engine's process and, on CPUs, begin to import vLLM for the process. Call it while the
    process has a single thread: then vLLM is imported once for the caller and the engine."""
    set_environment(config)
    if not visible_devices():
        start_fork_server()


def set_environment(config: GeneratorConfig) -> None:
    """Set the environment variables that vLLM and its processes read at import."""
    setproctitle.getproctitle()  # finds the place of the title only before the environment is written
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if not visible_devices():
        cpu.set_environment(config)


def stop_tokens(model: Path, listed: int | Sequence[int] | None) -> list[int]:
    """Return the tokens that end a sequence: the tokens listed in the model's generation config and, as in vLLM's own
    front end, the tokenizer's end of sequence, which fine-tuning has trained."""
    own: Any = getattr(tokenizer_in(str(model)), "eos_token_id", None)
    return sorted({*([listed] if isinstance(listed, int) else listed or ()), own} - {None})


def check_options(model: Path, config: GeneratorConfig) -> None:
    """Raise UserError if vLLM refuses `config.engine_options` for the model in this folder. Imports vLLM."""
    set_environment(config)
    with importing():
        from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    checked_config(model, config, lambda: engine_arguments(model, config, EngineUse(), on_cpu), on_cpu)


def start_core(model: Path, config: GeneratorConfig, use: EngineUse) -> tuple[AsyncMPClient, list[int]]:
    """Start vLLM's engine process on the folder `model`. Returns its client and the tokens that end a sequence. Raises
    UserError if the folder or a setting is at fault, EngineError if the process does not start."""
    prepare(config)
    with importing():
        from vllm.platforms import current_platform
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        cpu.set_environment(config)
        cpu.check_settings(config)
    check_mixture(model, use.lora, cuda=not on_cpu)
    failure = f"vLLM did not start on {model}; its own log, above, says why: {{why}}"
    with only_model(model) as folder:
        vllm_config = checked_config(model, config, lambda: engine_arguments(folder, config, use, on_cpu), on_cpu)
        with explain(RuntimeError, failure, EngineError), forked_engines() if on_cpu else contextlib.nullcontext():
            core = EngineCoreClient.make_async_mp_client(vllm_config, Executor.get_class(vllm_config), log_stats=True)
        listed = vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    return core, stop_tokens(model, listed)


def checked_config(
    model: Path, config: GeneratorConfig, arguments: Callable[[], AsyncEngineArgs], on_cpu: bool
) -> VllmConfig:
    with explain(
        (AssertionError, NotImplementedError, TypeError, ValueError),
        f"vLLM cannot run the model in {model} with these generator settings: {{why}}",
    ):
        return _vllm_config(arguments(), config, on_cpu)


def _vllm_config(arguments: AsyncEngineArgs, config: GeneratorConfig, on_cpu: bool) -> VllmConfig:
    from vllm.usage.usage_lib import UsageContext

    # vLLM adapts the number of tokens in a step to the device only if a usage is given. LLM_CLASS stands for
    # throughput: 16,384 tokens on an H100. The default of 2,048 is enough on a CPU.
    vllm_config = arguments.create_engine_config(None if on_cpu else UsageContext.LLM_CLASS)
    scheduler = vllm_config.scheduler_config
    name = "AsyncGatheringScheduler" if scheduler.async_scheduling else "GatheringScheduler"
    name = "KeepingScheduler" if config.kv_on_update == "keep" else name
    scheduler.scheduler_cls = f"areal.generation.gathering_scheduler.{name}"
    return vllm_config


def engine_arguments(model: Path, config: GeneratorConfig, use: EngineUse, on_cpu: bool) -> Any:
    from vllm import AsyncEngineArgs

    options = config.engine_options
    # Every data-parallel rank has its own executor.
    workers = config.devices // options.get("data_parallel_size", 1)
    share = SHARED if SHARES in os.environ else TURNS if use.sleeps else OWN
    executor = "OneProcessExecutor" if workers == 1 else "ManyProcessExecutor"
    arguments = {
        "model": str(model),
        "skip_tokenizer_init": not packages_of_vision(model),  # vLLM makes a processor of pictures from the tokenizer
        "trust_remote_code": False,
        "dtype": config.dtype,
        "seed": use.seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_concurrent_rollouts,
        "tensor_parallel_size": config.tensor_parallel,
        "gpu_memory_utilization": config.memory_share or share,
        "enable_sleep_mode": use.sleeps,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(20, use.kept_words),  # 20 is vLLM's default
        "distributed_executor_backend": f"areal.generation.vllm_worker.{executor}",
        "stream_interval": config.stream_interval,
        "worker_extension_cls": "areal.generation.vllm_worker.PolicyWorker",
        "weight_transfer_config": {"backend": use.transfer} if use.transfer else None,
        "enable_return_routed_experts": use.routes and not on_cpu,  # vLLM's runner for CPUs returns no routes
    }
    if use.lora:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _max_lora_rank(use.lora.rank)}
    if config.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    refuse_twice("generator.engine_options", arguments, options)
    arguments |= {"enable_prefix_caching": True, "use_tqdm_on_load": False}
    if packages_of_vision(model):
        # vLLM would scale the pixels in the engine by preprocessor_config.json alone. If the file has no scale, as with
        # the defaults of transformers, the tower would get bytes. The files have no video.
        arguments |= {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"video": 0}}
    if on_cpu:
        arguments |= cpu.engine_arguments(config)
    return AsyncEngineArgs(**arguments | options)


def _max_lora_rank(rank: int) -> int:
    """Return vLLM's least max_lora_rank for adapters of this rank. Raises UserError."""
    from vllm.config.lora import MaxLoRARanks

    if larger := [choice for choice in get_args(MaxLoRARanks) if choice >= rank]:
        return min(larger)
    raise UserError(f"trainer.lora.rank is {rank}, but vLLM takes at most {max(get_args(MaxLoRARanks))}: lower it.")
