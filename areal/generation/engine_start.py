"""How an engine is started: its environment, its arguments and vLLM's configuration, and the checks of all of them."""

from __future__ import annotations

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
from areal.cpu.fork_server import start_fork_server
from areal.devices import SHARES, visible_devices
from areal.models import packages_of_vision
from areal.samples.tokenizer import tokenizer_in

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig

# Shares of a GPU's memory: of an engine alone on it, of one in turns with the trainer, and of one beside the trainer.
OWN, TURNS, SHARED = 0.9, 0.8, 0.3


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What an engine is started for, as `GenerationEngine.start` has it."""

    seed: int = 0
    lora: LoraConfig | None = None
    sleeps: bool = False
    transfer: str | None = None
    routes: bool = False
    kept_words: int = 0


def prepare(config: GeneratorConfig) -> None:
    """Set the environment of an engine's process and, on CPUs, begin to import vLLM for it. Call it while this process
    has a single thread, then vLLM is imported once for both."""
    set_environment(config)
    if not visible_devices():
        start_fork_server()


def set_environment(config: GeneratorConfig) -> None:
    """Set the environment variables that vLLM and its processes read at import."""
    setproctitle.getproctitle()  # it finds the place of the title only while the environment has not been written
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if not visible_devices():
        cpu.set_environment(config)


def stop_tokens(model: Path, listed: int | Sequence[int] | None) -> list[int]:
    """The tokens that end a sequence: those that the model's generation config lists and, as in vLLM's own front end,
    its tokenizer's end of sequence, which fine-tuning has trained."""
    own: Any = getattr(tokenizer_in(str(model)), "eos_token_id", None)
    return sorted({*([listed] if isinstance(listed, int) else listed or ()), own} - {None})


def check_options(model: Path, config: GeneratorConfig) -> None:
    """Raises UserError if vLLM does not take `config.engine_options` for the model in this folder. It is imported."""
    set_environment(config)
    with importing():
        from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    checked_config(model, config, lambda: engine_arguments(model, config, EngineUse(), on_cpu), on_cpu)


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

    # vLLM chooses the most tokens of a step by the device only for a named use. This one is for throughput: 16,384 on
    # an H100. Without a name it takes 2,048, which is enough on a CPU.
    vllm_config = arguments.create_engine_config(None if on_cpu else UsageContext.LLM_CLASS)
    scheduler = vllm_config.scheduler_config
    name = "AsyncGatheringScheduler" if scheduler.async_scheduling else "GatheringScheduler"
    name = "KeepingScheduler" if config.kv_on_update == "keep" else name
    scheduler.scheduler_cls = f"areal.generation.vllm_worker.{name}"
    return vllm_config


def engine_arguments(model: Path, config: GeneratorConfig, use: EngineUse, on_cpu: bool) -> Any:
    from vllm import AsyncEngineArgs

    options = config.engine_options
    # Data-parallel ranks have an executor each.
    workers = config.devices // options.get("data_parallel_size", 1)
    share = SHARED if SHARES in os.environ else TURNS if use.sleeps else OWN
    executor = "OneProcessExecutor" if workers == 1 else "ManyProcessExecutor"
    arguments = {
        "model": str(model),
        "skip_tokenizer_init": not packages_of_vision(model),  # vLLM makes a processor of pictures, which needs it
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
        "enable_return_routed_experts": use.routes and not on_cpu,  # vLLM's runner for CPUs does not have it
    }
    if use.lora:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _max_lora_rank(use.lora.rank)}
    if config.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    refuse_twice("generator.engine_options", arguments, options)
    arguments |= {"enable_prefix_caching": True, "use_tqdm_on_load": False}
    if packages_of_vision(model):
        # vLLM would bring the pixels to the model's range in the engine, by preprocessor_config.json alone: where it
        # does not say how, as transformers' defaults need not, the tower would get bytes. The files have no video.
        arguments |= {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"video": 0}}
    if on_cpu:
        arguments |= cpu.engine_arguments(config)
    return AsyncEngineArgs(**arguments | options)


def _max_lora_rank(rank: int) -> int:
    """The least max_lora_rank of vLLM for adapters of this rank. Raises UserError."""
    from vllm.config.lora import MaxLoRARanks

    if larger := [choice for choice in get_args(MaxLoRARanks) if choice >= rank]:
        return min(larger)
    raise UserError(f"trainer.lora.rank is {rank}, but vLLM takes at most {max(get_args(MaxLoRARanks))}: lower it.")
