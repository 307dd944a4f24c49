"""Options for vLLM and DeepSpeed: `generator.engine_options`, `trainer.deepspeed_options`, vLLM's parsers.

An option that this system sets itself is refused with what to do instead, an unknown one with the name that is closest.
The names that a library knows are read from its source, since importing it would take seconds, and would import torch.
On a machine without the library they are not checked; the actor that has the library checks them again.
"""

import ast
import difflib
import importlib.util
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


def _by_name(instead: Mapping[str, str]) -> dict[str, str]:
    """What to do instead, by the names of the options."""
    return {name: reason for reason, names in instead.items() for name in names.split()}


_VLLM, _DEEPSPEED, _ZERO = map(
    _by_name, yaml.safe_load(Path(__file__).with_name("refused_options.yaml").read_text()).values()
)
# Options of vLLM that multiply the number of devices.
_SIZES = ("data_parallel_size", "prefill_context_parallel_size")
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
