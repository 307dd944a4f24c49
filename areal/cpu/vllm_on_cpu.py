"""vLLM's engine on the CPU: environment, arguments, and unsupported settings."""

import ctypes
import os
from typing import Any

from areal.base.errors import UserError, explain
from areal.config.engine_sections import GeneratorConfig
from areal.cpu.processor import avoid_broken_amx

# KV cache block size, in tokens. vLLM's default, 128, would share a group's prompt only from 128 tokens on.
BLOCK_SIZE = 32
KV_CACHE_GIB = 1.0


def set_environment(config: GeneratorConfig) -> None:
    """Set the environment variables that vLLM and its processes read at import."""
    # vLLM's own binding would pin every engine of a machine to the same first cores.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # Otherwise the sampler compiles a helper at the first request. The helper takes 3 to 28 s and is useless here.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Otherwise the system gives and takes the memory of each step. Long prefills would be a third slower.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 * 2**20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(256 * 2**20))
    # vLLM's latent attention on CPUs (DeepSeek, Kimi K2, GLM-4.7-Flash) computes latents of 576 alone, dies with other
    # sizes, and keeps no prefix cache. vLLM's ordinary attention computes these models, too.
    os.environ["VLLM_MLA_DISABLE"] = "1"
    if config.dtype == "bfloat16":
        avoid_broken_amx()


def check_settings(config: GeneratorConfig) -> None:
    """Raise UserError if a library is missing, for which vLLM only warns, or if the settings need GPUs."""
    check_libraries()
    if (ranks := config.engine_options.get("data_parallel_size", 1)) > 1:
        raise UserError(
            f"generator.engine_options.data_parallel_size is {ranks}, but vLLM's data-parallel ranks cannot exchange "
            f"tokens on a CPU: leave it out, and raise generator.count."
        )


def check_libraries() -> None:
    with explain(OSError, "vLLM needs libnuma on the CPU ({why}): install it, on Debian by apt-get install libnuma1."):
        ctypes.CDLL("libnuma.so.1")


def engine_arguments(config: GeneratorConfig) -> dict[str, Any]:
    """Return the engine's arguments that differ from a GPU's."""
    return {
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": int((config.kv_cache_gib or KV_CACHE_GIB) * 2**30),
        # share of RAM, without effect, since the size of the KV cache is given
        "gpu_memory_utilization": config.memory_share or 0.3,
        "enable_sleep_mode": False,  # vLLM can pause, but returns no memory
        "enforce_eager": True,  # compiling takes longer at start-up than it saves
        "ir_op_priority": {"rms_norm": ["cpu_kernel"], "fused_add_rms_norm": ["cpu_kernel"]},  # in the module `kernels`
    }
