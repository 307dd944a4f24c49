"""The tool `areal plan`: reads numbers from options or from a run, and prints the plan."""

import math
import re
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from areal.base import extensions
from areal.base.command_line import output
from areal.base.errors import UserError, explain
from areal.base.text import without_code
from areal.config import Config, load_config
from areal.extensions.desk.activations import measure_activations
from areal.extensions.desk.split import BYTES, GIB, ModelSizes, Plan, Planner, Workload
from areal.models import check_trainable, find_model
from areal.storage.record import Record, number_or_nan
from areal.training.flops import experts_of
from areal.training.optimizer import bucket_elements
from areal.weights.wrappers import text_config

SUMS = ("step_seconds", "train_seconds", "tokens_generated", "tokens_trained", "completion_tokens_mean")
FASTER = 1.05
"""The least throughput of a further plan, as a multiple of the first plan's, that is worth a line."""


def plan_run(options: Namespace) -> None:
    """`areal plan`: print the plan for the options."""
    if not (options.config or options.run):
        raise UserError("Say which run to plan: --config FILE.yaml, or --from RUN_FOLDER, which also has the rates.")
    record = Record(options.run) if options.run else None
    if options.config or record is None:
        config: Config = load_config(options.config, options.overrides)
    else:
        config = record.configuration.load(options.overrides)
    if config.colocate:
        raise UserError("A plan divides devices between trainer and generators, which colocate shares: colocate=false.")
    work = _workload(options, config, measure(record) if record else {})
    trainer = config.for_device(cuda=True).trainer  # but if checkpointing is auto, the plan decides
    trainer = trainer.model_copy(update={"gradient_checkpointing": config.trainer.gradient_checkpointing})
    config = config.for_device(cuda=True).model_copy(update={"trainer": trainer})
    scoring = sum(config.scorers[name].devices for name in config.scorer_uses.started)
    devices = max(0, options.devices - scoring)
    planner = Planner(config, read_model(config), work, devices, options.device_memory * GIB)
    split, console = planner.plan(), output(120)
    console.print(table(split, options.device_memory))
    if scoring:
        names = ", ".join(config.scorer_uses.started)
        console.print(f"The scorers ({names}) have {scoring} more devices of the {options.devices}.", highlight=False)
    if faster := [str(other) for other in planner.alternatives() if other.throughput > FASTER * split.throughput]:
        advice = f"At these rates faster: {', '.join(faster)}. Measure the rates with such keys."
        console.print(advice, highlight=False)
    console.print("\nWith these changes to the configuration:", highlight=False)
    changes = " ".join(f"{key}={value}" for key, value in split.overrides.items())
    console.print(f"  {changes}", highlight=False, soft_wrap=True)


def _workload(options: Namespace, config: Config, measured: dict[str, float]) -> Workload:
    """Return the numbers of the options, and for missing options the measured numbers. Raises UserError."""
    names = ("generation_rate", "training_rate", "mean_tokens", "prompt_tokens", "devices", "device_memory")
    numbers = measured | {name: n for name in names if (n := getattr(options, name)) is not None}
    if missing := [f"--{name.replace('_', '-')}" for name in names if name not in numbers]:
        raise UserError(f"Give {' and '.join(missing)}, or take them from a short run with --from RUN_FOLDER.")
    for name in names:
        if not (math.isfinite(numbers[name]) and numbers[name] > 0):
            raise UserError(f"--{name.replace('_', '-')} is {numbers[name]:g}, but must be more than 0.")
    generating, training, mean, prompt, *_ = (numbers[name] for name in names)
    if mean > (longest := config.sampling.max_new_tokens):
        raise UserError(
            f"The mean completion of {mean:g} tokens is longer than sampling.max_new_tokens, {longest}: correct one."
        )
    return Workload(generating, training, int(prompt), mean, longest)


def measure(run: Record) -> dict[str, float]:
    """Return the rates and the mean completion length of a run, over its steady steps (over all steps if the run ended
    before). Raises UserError."""
    config, steps = run.configuration.load(), run.metrics.steady or run.metrics.records
    seconds, training, generated, trained, tokens = (
        sum(number_or_nan(step.get(name)) for step in steps) for name in SUMS
    )
    if not (seconds > 0 and training > 0 and generated + trained + tokens >= 0):
        raise UserError(f"{run.folder} holds no finished training step to measure: let the run take a few, such as 20.")
    return {
        "generation_rate": generated / seconds / (config.generator.count * config.generator.tensor_parallel),
        "training_rate": trained / training / config.trainer.ranks,
        "mean_tokens": tokens / len(steps),
    }


def read_model(config: Config) -> ModelSizes:
    """Count the sizes of the run's model in its modules and passes, without loading weights. Raises UserError."""
    if config.model == "quickstart":
        raise UserError("The model quickstart is created by its first run: plan with --from runs/quickstart.")
    folder, trainer = Path(config.model).expanduser(), config.trainer
    folder = folder if folder.is_dir() else find_model(config.model, "model", weights=False)
    check_trainable(folder, trainer.sequence_parallel, config.generator.max_model_len)
    for check in extensions.find_own("model_check"):
        check(trainer, folder, trainer.expert_parallel * trainer.tensor_parallel)
    sizes, module = read_modules(config.model)
    try:
        activations = [measure_activations(sizes, trainer, checkpointing=on) for on in (False, True)]
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The model {config.model} cannot be trained: {first}.") from None
    heads, experts = sizes.num_attention_heads, getattr(sizes, "moe_intermediate_size", None) or 0
    numbers = {name: p.numel() for name, p in module.named_parameters()}
    adapted = module
    if trainer.lora:
        adapted = extensions.need("lora", "add", "trainer.lora").load()(module, trainer.lora)
    whole = {} if trainer.lora else numbers  # trained weights are published and saved whole
    in_layers = [part for name, part in module.named_modules() if re.search(r"\.\d+\.", name)]
    parts = [[p.numel() for p in part.parameters(recurse=False)] for part in in_layers]
    return ModelSizes(
        parameters=sum(numbers.values()),
        trained=sum(p.numel() for p in adapted.parameters() if p.requires_grad),
        layers=sizes.num_hidden_layers,
        hidden=sizes.hidden_size,
        vocabulary=sizes.vocab_size,
        heads=heads,
        kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
        head_size=getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
        activations=activations[0],
        checkpointed=activations[1],
        intermediate=max(getattr(sizes, "intermediate_size", None) or 0, experts * experts_of(sizes)[1]),
        bucket=bucket_elements(numbers),
        pinned=sum(1 << (BYTES[trainer.dtype] * number - 1).bit_length() for number in whole.values()),
        largest=max(numbers.values()),
        part=max(map(sum, parts), default=0),
        part_tensor=max((max(part, default=0) for part in parts), default=0),
        merged=sum(n for name, n in whole.items() if name.endswith("experts.gate_up_proj")),
        experts=sum(n for name, n in numbers.items() if ".experts." in name),
        inner=sum(n for name, n in numbers.items() if re.search(r"\.([qkvo]|gate|up|down)_proj\.", name)),
        chosen=experts_of(sizes)[1],
    )


def read_modules(model: str) -> tuple[Any, Any]:
    """Return the model's transformers config and its modules, without weights. Raises UserError."""
    import torch
    from transformers import AutoModelForCausalLM

    message = f"The model {model} cannot be read ({{why}}): set model=FOLDER."
    with explain((OSError, ValueError), message), without_code():
        sizes = text_config(model)
        with torch.device("meta"):
            return sizes, AutoModelForCausalLM.from_config(sizes, trust_remote_code=False)


def count_parameters(model: str) -> int:
    """Return the number of a model's parameters. Raises UserError."""
    return sum(parameter.numel() for parameter in read_modules(model)[1].parameters())


def table(split: Plan, device_gib: float) -> Table:
    """Return the plan as a table."""
    result = Table("", "generation", "training", title="Plan", title_justify="left")
    size, share = split.tensor_parallel, split.generating_devices / (split.generating_devices + split.ranks)
    engines = f"{split.generators} x {size} devices" if size > 1 else "of 1 device each"
    checkpointing = ", checkpointing" if split.gradient_checkpointing else ""
    result.add_row("devices", f"{split.generating_devices} ({share:.0%})", f"{split.ranks}")
    result.add_row("as", f"generators {engines}", f"ranks, ZeRO {split.zero_stage}{checkpointing}")
    result.add_row("tokens/s, at most", f"{split.generated:,.0f}", f"{split.trained:,.0f}")
    result.add_row("in use", *(f"{split.throughput / most:.0%}" for most in (split.generated, split.trained)))
    result.add_row("sequences at once", f"{split.sequences}, {split.longest_sequences} at full length", "")
    result.add_row("received by a rank for a micro-batch", "", f"{split.received / 1e9:.1f} GB")
    parts = split.generation, asdict(split.training) | {f"together, of {device_gib:g}": split.training.total}
    for name in dict.fromkeys([*parts[0], *parts[1]]):
        cells = (f"{part[name] / GIB:.1f} GiB" if part.get(name) else "" for part in parts)
        result.add_row(name.replace("host", "host memory of a rank"), *cells)
    return result
