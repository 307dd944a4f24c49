"""Options for vLLM and DeepSpeed: `generator.engine_options`, `trainer.deepspeed_options`, vLLM's parsers.

An option that would train wrongly is refused with the reason, an unknown option with the closest name. The names that a
library knows are read from the library's source, because an import would take seconds and load torch. On a machine
without the library the names are not checked; the actor that has the library checks them again. Options that this
system sets are refused at the place that sets them (`refuse_twice`).
"""

import ast
import difflib
import importlib.util
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from areal.base.errors import UserError

# Options of vLLM under which a run would train on wrong tokens, log-probs or weights, by reason.
_WRONG = {
    "it changes what tokens are drawn from, and the trainer would not know": (
        "logits_processors", "watermark_config", "generation_config", "override_generation_config",
    ),
    "generators and trainer have to compute the same model: change its config.json": (
        "hf_overrides", "hf_config_path", "model_class_overrides", "model_weights", "load_format",
    ),
    "new weights are loaded by code of this system, inside this part": (
        "worker_cls", "scheduler_cls", "enable_eplb", "eplb_config", "enable_elastic_ep",
    ),
    "a KV cache outside of the engine would be that of old weights": (
        "kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config",
    ),
    "sequences are routed by the engine's statistics": ("disable_log_stats",),
    "devices are counted by generator.tensor_parallel": ("pipeline_parallel_size", "nnodes"),
}  # fmt: skip
_VLLM = {name: reason for reason, names in _WRONG.items() for name in names}
# Options of DeepSpeed's `zero_optimization`. At the top of DeepSpeed's configuration, only `_PASSED` is taken.
_ZERO = {name: "set trainer.offload" for name in ("cpu_offload", "cpu_offload_param", "zenflow")}
_ZERO |= {"stage": "set trainer.zero_stage", "leaf_module": "the experts of a layer are one module"}
# Options of vLLM that multiply the number of devices.
_SIZES = ("data_parallel_size", "prefill_context_parallel_size")
# Further keys at the top of DeepSpeed's configuration, which has no schema.
_PASSED = (
    "zero_optimization", "zero_force_ds_cpu_optimizer", "communication_data_type",
    "seq_parallel_communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor",
    "disable_allgather", "disable_python_gc", "aio", "comms_logger", "flops_profiler",
    "wall_clock_breakdown", "memory_breakdown", "steps_per_print", "dump_state", "log_level", "timers",
)  # fmt: skip

# The tables of vLLM's parsers, by the keys of `rollout_manager` that name a parser.
_PARSERS = {
    "tool_call_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}


def refuse_twice(place: str, own: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise UserError if an option at `place` is an argument that this system sets."""
    if twice := next((name for name in options if name in own), None):
        raise UserError(f"{place}.{twice} cannot be set: a key does that (`areal config generator` lists them).")


def vllm_conflicts(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why options cannot be passed on to vLLM."""
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
    """Return the number by which these options multiply the `generator.tensor_parallel` devices of an engine."""
    return math.prod(options.get(name, 1) for name in _SIZES)


def deepspeed_conflicts(options: Mapping[str, Any], offload: str) -> Iterator[str]:
    """Yield the reasons why options cannot be passed on to DeepSpeed. offload: `trainer.offload`."""
    place = "trainer.deepspeed_options"
    yield from _conflicts(options, place, {}, _PASSED)
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
            close = difflib.get_close_matches(str(name), names, 1, 0.0)[0]
            yield f"{place} does not take {name!r}: the closest option that it takes is {close!r}"


@cache
def _fields(library: str, file: str, *classes: str) -> frozenset[str]:
    """Return the fields of classes in a file of an installed library, by all their names; empty without the file."""
    bodies = [node.body for node in _source(library, file) if isinstance(node, ast.ClassDef) and node.name in classes]
    fields = [field for body in bodies for field in body if isinstance(field, ast.AnnAssign)]
    names = {field.target.id for field in fields if isinstance(field.target, ast.Name)}
    words = [word for field in fields if isinstance(field.value, ast.Call) for word in field.value.keywords]
    aliases = {str(word.value.value) for word in words if word.arg == "alias" and isinstance(word.value, ast.Constant)}
    return frozenset(name for name in names | aliases if not name.startswith("_"))


@cache
def _keys(library: str, file: str, table: str) -> tuple[str, ...]:
    """Return the keys of a dictionary in a file of an installed library, sorted; empty without the dictionary."""
    for node in _source(library, file):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == table:
            return tuple(sorted(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)))
    return ()


def _source(library: str, file: str) -> list[ast.stmt]:
    """Return the statements of a file of an installed library; empty without the file."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None or not (path := Path(spec.origin).parent / file).is_file():
        return []
    return ast.parse(path.read_text()).body
