"""Options that are passed on to vLLM and DeepSpeed: `generator.engine_options`, `trainer.deepspeed_options`, and the
names of vLLM's parsers.

An option that this system sets itself is refused with what to do instead, an unknown one with the name that is closest.
The names that a library knows are read from its source, since importing it would take seconds, and would import torch.
On a machine without the library they are not checked; the actor that has the library checks them again.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any


def _by_name(instead: Mapping[str, str]) -> dict[str, str]:
    """What to do instead, by the names of the options."""
    return {name: reason for reason, names in instead.items() for name in names.split()}


_VLLM = _by_name(
    {
        "set model": "model model_weights hf_config_path config_format revision code_revision load_format",
        "set generator.dtype": "dtype",
        "set seed": "seed",
        "set generator.max_model_len": "max_model_len",
        "set generator.max_concurrent_rollouts": "max_num_seqs",
        "set generator.tensor_parallel": "tensor_parallel_size pipeline_parallel_size",
        "set generator.memory_share": "gpu_memory_utilization",
        "set generator.kv_cache_gib": "kv_cache_memory_bytes",
        "set generator.enforce_eager": "enforce_eager",
        "set generator.stream_interval": "stream_interval",
        "set sampling.temperature and the other keys of sampling": "generation_config override_generation_config",
        "set trainer.lora": (
            "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype "
            "lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
            "enable_moe_shared_loras max_lora_cls_labels"
        ),
        "training needs the log-probs that tokens were drawn with": "logprobs_mode",
        "it changes what tokens are drawn from, and the trainer would not know": "logits_processors watermark_config",
        "generators and trainer have to compute the same model: change its config.json": (
            "hf_overrides model_class_overrides trust_remote_code"
        ),
        "the engine gets and returns tokens": (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init runner convert pooler_config"
        ),
        "new weights are loaded by code of this system, inside these parts": (
            "worker_cls worker_extension_cls scheduler_cls distributed_executor_backend weight_transfer_config"
        ),
        "new weights are loaded into the places where the experts were at the start": "enable_eplb eplb_config",
        "a generator has its memory until it ends": (
            "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
        ),
        "a KV cache outside of the engine would be that of old weights": (
            "kv_transfer_config kv_events_config kv_offloading_size kv_offloading_backend ec_transfer_config"
        ),
        "sequences are routed by the engine's statistics": "disable_log_stats",
        "an engine runs on one machine, and a generator that dies is replaced as a whole: set generator.count": (
            "nnodes node_rank master_addr master_port data_parallel_rank data_parallel_start_rank "
            "data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
            "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend enable_elastic_ep "
            "elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config"
        ),
        "set CUDA_VISIBLE_DEVICES": "device_ids",
    }
)
# Options of vLLM that multiply the number of devices.
_SIZES = ("data_parallel_size", "prefill_context_parallel_size")

_DEEPSPEED = _by_name(
    {
        "set batch_size": "train_batch_size",
        "set trainer.max_tokens_per_microbatch": (
            "train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation"
        ),
        "set trainer.lr, betas, adam_eps and weight_decay": "optimizer",
        "set trainer.lr_schedule and warmup_steps": "scheduler",
        "set trainer.grad_clip": "gradient_clipping",
        "set trainer.dtype": "bf16 bfloat16 fp16 torch_autocast",
        "set trainer.gradient_checkpointing": "activation_checkpointing",
        "set trainer.sequence_parallel": "sequence_parallel_size",
        "the loss is a sum over all ranks": "gradient_allreduce_op",
        "weights are gathered and published as ZeRO partitions them": (
            "tensor_parallel expert_parallel pipeline hybrid_engine use_data_before_expert_parallelism"
        ),
        "checkpoints are this system's own: set trainer.checkpoint_every": "checkpoint",
        "batches come from the master": "data_efficiency curriculum_learning dataloader_drop_last",
        "see docs/observe.md for what writes metrics": "tensorboard wandb csv_monitor comet",
        "it changes the model that is published": "weight_quantization",
    }
)
_ZERO = _by_name(
    {
        "set trainer.zero_stage": "stage",
        "set trainer.offload": "cpu_offload cpu_offload_param cpu_offload_use_pin_memory zenflow",
        "grad_norm is a metric of every step": "compute_grad_norm",
        "the experts of a layer are one module": "leaf_module",
    }
)
# Other keys at the top of DeepSpeed's configuration, which has no schema.
_PASSED = (
    "zero_optimization", "zero_force_ds_cpu_optimizer", "communication_data_type",
    "seq_parallel_communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor",
    "disable_allgather", "disable_python_gc", "aio", "comms_logger", "flops_profiler",
    "wall_clock_breakdown", "memory_breakdown", "steps_per_print", "dump_state", "log_level", "timers",
)  # fmt: skip

# The tables of vLLM's parsers, by the keys of `rollout_manager` that name one.
_PARSERS = {
    "tool_call_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}


def vllm_conflicts(options: Mapping[str, Any]) -> Iterator[str]:
    """Why some options cannot be passed on to vLLM."""
    place = "generator.engine_options"
    if options:
        yield from _conflicts(
            options, place, _VLLM, _fields("vllm", "engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs")
        )
    for name in _SIZES:
        if type(options.get(name, 1)) is not int or options.get(name, 1) < 1:
            yield f"{place}.{name} is {options[name]!r}: set it to a number of devices"
    speculation = options.get("speculative_config")
    if isinstance(speculation, dict) and speculation.get("rejection_sample_method") == "synthetic":
        yield (
            f"{place}.speculative_config.rejection_sample_method is synthetic, which accepts tokens that the model has "
            f"not drawn: leave it out"
        )


def parser_conflicts(key: str, name: str | None) -> Iterator[str]:
    """Whether vLLM has no parser `name`. key: `tool_call_parser` or `reasoning_parser`."""
    names = () if name is None else _keys("vllm", *_PARSERS[key])
    if names and name not in names:
        yield f"Unknown parser {name!r} in rollout_manager.{key}: known are {', '.join(names)}"


def devices_of(options: Mapping[str, Any]) -> int:
    """How many times `generator.tensor_parallel` devices an engine with these options has."""
    return math.prod(options.get(name, 1) for name in _SIZES)


def deepspeed_conflicts(options: Mapping[str, Any], offload: str) -> Iterator[str]:
    """Why some options cannot be passed on to DeepSpeed. offload: `trainer.offload`."""
    place = "trainer.deepspeed_options"
    yield from _conflicts(options, place, _DEEPSPEED, _PASSED)
    zero = options.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"{place}.zero_optimization is {zero!r:.80}: write keys and values"
    if zero:
        fields = _fields("deepspeed", "runtime/zero/config.py", "DeepSpeedZeroConfig")
        yield from _conflicts(zero, f"{place}.zero_optimization", _ZERO, fields)
    for part, moved in (("offload_optimizer", offload != "none"), ("offload_param", offload == "all")):
        if part in zero and (not moved or not isinstance(zero[part], dict) or "device" in zero[part]):
            yield (
                f"{place}.zero_optimization.{part} may have keys beside `device`, which trainer.offload sets, and only "
                f"if that is in use: set trainer.offload"
            )


def _conflicts(
    options: Mapping[str, Any], place: str, reserved: Mapping[str, str], names: Collection[str]
) -> Iterator[str]:
    for name in options:
        if name in reserved:
            yield f"{place}.{name} cannot be set: {reserved[name]}"
        if names and name not in names:
            close = difflib.get_close_matches(str(name), [*names, *reserved], 1, 0.0)[0]
            yield f"Unknown option {name!r} in {place}: the closest one that is known is {close!r}"


@cache
def _fields(library: str, file: str, *classes: str) -> frozenset[str]:
    """The fields of classes in a file of an installed library, by all names that they have; empty if there is none."""
    bodies = [node.body for node in _source(library, file) if isinstance(node, ast.ClassDef) and node.name in classes]
    fields = [field for body in bodies for field in body if isinstance(field, ast.AnnAssign)]
    names = {field.target.id for field in fields if isinstance(field.target, ast.Name)}
    words = [word for field in fields if isinstance(field.value, ast.Call) for word in field.value.keywords]
    aliases = {str(word.value.value) for word in words if word.arg == "alias" and isinstance(word.value, ast.Constant)}
    return frozenset(name for name in names | aliases if not name.startswith("_"))


@cache
def _keys(library: str, file: str, table: str) -> tuple[str, ...]:
    """The keys of a dictionary in a file of an installed library, sorted; empty if there is none."""
    for node in _source(library, file):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == table:
            return tuple(sorted(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)))
    return ()


def _source(library: str, file: str) -> list[ast.stmt]:
    """The statements of a file of an installed library; none if there is no such file."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None or not (path := Path(spec.origin).parent / file).is_file():
        return []
    return ast.parse(path.read_text()).body
