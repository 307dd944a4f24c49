"""The tool `python -m areal plan`: reads its numbers, from options or a run, and prints the plan."""

import math
import re
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from areal.base.command_line import output
from areal.base.errors import UserError, explain
from areal.base.text import without_code
from areal.config import Config, load_config
from areal.extensions.desk.activations import measure_activations
from areal.extensions.desk.split import (
    BYTES,
    GENERATOR_OTHER,
    GENERATOR_SHARE,
    GIB,
    ModelSizes,
    Plan,
    Rates,
    TokenLengths,
    alternatives,
    balanced_share,
    plan,
    step_tokens,
)
from areal.models import check_trainable, find_model
from areal.storage.record import Record, number_or_nan
from areal.training.flops import experts_of
from areal.training.optimizer import bucket_elements
from areal.weights.lora import add_adapters
from areal.weights.wrappers import text_config

MEASURED = (
    "step_seconds",
    "train_seconds",
    "tokens_generated",
    "tokens_trained",
    "completion_tokens_mean",
    "starved_seconds",
)
FASTER = 1.05
"""So many times the throughput makes other keys worth a line."""
STARVED = 0.05
"""If the trainer waited for generation less than this share of the time, generators may have waited for the trainer."""


def plan_run(options: Namespace) -> None:
    """`areal plan`: print the plan that the options ask for."""
    if not (options.config or options.run):
        raise UserError("Say which run to plan: --config FILE.yaml, or --from RUN_FOLDER, which also has the rates.")
    record = Record(options.run) if options.run else None
    if options.config:
        config: Config = load_config(options.config, options.overrides)
    else:
        assert record is not None
        config = record.config_with(options.overrides)
    if config.colocate:
        raise UserError("A plan divides devices between trainer and generators, which colocate shares: colocate=false.")
    checkpointing = config.trainer.gradient_checkpointing  # if it is auto, the plan says whether
    config = config.for_device(cuda=True)
    trainer = config.trainer.model_copy(update={"gradient_checkpointing": checkpointing})
    config = config.model_copy(update={"trainer": trainer})
    measured = measure(record) if record else {}
    arguments = {name: getattr(options, name) for name in ("generation_rate", "training_rate", "mean_tokens")}
    numbers = measured | {name: value for name, value in arguments.items() if value is not None}
    if missing := [f"--{name.replace('_', '-')}" for name in arguments if name not in numbers]:
        raise UserError(f"Give {' and '.join(missing)}, or take them from a short run with --from RUN_FOLDER.")
    for name in (*arguments, "devices", "device_memory", "prompt_tokens"):
        value = numbers.get(name, getattr(options, name))
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name.replace('_', '-')} is {value:g}, but must be more than 0.")
    lengths = TokenLengths(options.prompt_tokens, numbers["mean_tokens"], config.sampling.max_new_tokens)
    if lengths.mean > lengths.longest:
        raise UserError(
            f"The mean completion of {lengths.mean:g} tokens is longer than sampling.max_new_tokens, "
            f"{lengths.longest}: correct one of them."
        )
    rates = Rates(numbers["generation_rate"], numbers["training_rate"])
    scoring = check_scorers(config, options.device_memory * GIB)
    devices = max(0, options.devices - scoring)
    asked = config, read_model(config), rates, lengths, devices, options.device_memory * GIB
    split, console = plan(*asked), output(120)
    console.print(table(split, rates, options.device_memory))
    if scoring:
        names = ", ".join(config.started_scorers)
        console.print(f"The scorers ({names}) have {scoring} more devices of the {options.devices}.", highlight=False)
    faster = [other for other in alternatives(*asked) if other.throughput > FASTER * split.throughput]
    for note in notes(split, faster, numbers.get("starved")):
        console.print(note, highlight=False)
    console.print("\nWith these changes to the configuration:", highlight=False)
    changes = " ".join(f"{key}={value}" for key, value in split.overrides.items())
    console.print(f"  {changes}", highlight=False, soft_wrap=True)


def check_scorers(config: Config, device_bytes: float) -> int:
    """The number of devices that the run's scorers have. Raises UserError if one does not fit."""
    for name in dict.fromkeys(config.started_scorers):
        scorer = config.scorers[name]
        if scorer.model == "quickstart":
            continue
        sizes, module = read_modules(scorer.model)
        weights = BYTES[scorer.dtype] * sum(p.numel() for p in module.parameters()) / scorer.tensor_parallel
        tokens = scorer.engine_options.get("max_num_batched_tokens") or step_tokens(device_bytes)
        logits = 8 * tokens * sizes.vocab_size * (scorer.kind == "logprobs")  # with their log-probs, in fp32
        room = (scorer.memory_share or GENERATOR_SHARE) * device_bytes - GENERATOR_OTHER
        if weights + logits > room:
            raise UserError(
                f"The scorer {name} has no room for the weights ({weights / GIB:.1f} GiB on each device) and the "
                f"logits of a step of {tokens} tokens ({logits / GIB:.1f} GiB) in {room / GIB:.1f} GiB: raise "
                f"scorers.{name}.tensor_parallel, or set engine_options={{max_num_batched_tokens: 2048}}."
            )
    return sum(config.scorers[name].devices for name in config.started_scorers)


def measure(run: Record) -> dict[str, float]:
    """The rates and the mean completion length of a run, and the share of the time that its trainer was
    starved, over its steady steps (over all steps if it ended before them). Raises UserError."""
    config, steps = run.config, run.steady or run.records
    seconds, training, generated, trained, tokens, starved = (
        sum(number_or_nan(step.get(name)) for step in steps) for name in MEASURED
    )
    if not (seconds > 0 and training > 0 and generated + trained + tokens + starved >= 0):
        raise UserError(f"{run.folder} holds no finished training step to measure: let the run take a few, such as 20.")
    devices = config.generator.count * config.generator.tensor_parallel
    return {
        "generation_rate": generated / seconds / devices,
        "training_rate": trained / training / config.trainer.ranks,
        "mean_tokens": tokens / len(steps),
        "starved": starved / seconds,
    }


def read_model(config: Config) -> ModelSizes:
    """Sizes of the run's model, counted in the model's modules and passes without loading weights. Raises UserError."""
    if config.model == "quickstart":
        raise UserError("The model quickstart is created by its first run: plan with --from runs/quickstart.")
    folder = Path(config.model).expanduser()
    check_trainable(
        folder if folder.is_dir() else find_model(config.model, "model", weights=False),
        config.trainer.sequence_parallel,
        config.generator.max_model_len,
    )
    sizes, module = read_modules(config.model)
    try:
        activations = [measure_activations(sizes, config.trainer, checkpointing=on) for on in (False, True)]
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The model {config.model} cannot be trained: {first}.") from None
    heads = sizes.num_attention_heads
    numbers = {name: p.numel() for name, p in module.named_parameters()}
    parameters = sum(numbers.values())
    size, lora = BYTES[config.trainer.dtype], config.trainer.lora
    adapted = add_adapters(module, lora) if lora else module
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    experts = (getattr(sizes, "moe_intermediate_size", None) or 0) * experts_of(sizes)[1]
    in_layers = [part for name, part in module.named_modules() if re.search(r"\.\d+\.", name)]
    of_parts = [[p.numel() for p in part.parameters(recurse=False)] for part in in_layers]
    return ModelSizes(
        parameters=parameters,
        trained=trained,
        layers=sizes.num_hidden_layers,
        hidden=sizes.hidden_size,
        vocabulary=sizes.vocab_size,
        heads=heads,
        kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
        head_size=getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
        activations=activations[0],
        checkpointed=activations[1],
        intermediate=max(getattr(sizes, "intermediate_size", None) or 0, experts),
        bucket=bucket_elements(numbers),
        pinned=0 if lora else sum(1 << (size * number - 1).bit_length() for number in numbers.values()),
        largest=max(numbers.values()),
        part=max(map(sum, of_parts), default=0),
        part_tensor=max((max(part, default=0) for part in of_parts), default=0),
        merged=0 if lora else sum(n for name, n in numbers.items() if name.endswith("experts.gate_up_proj")),
    )


def read_modules(model: str) -> tuple[Any, Any]:
    """The configuration, as transformers has it, and the modules of a model, without weights. Raises UserError."""
    import torch
    from transformers import AutoModelForCausalLM

    message = f"The model {model} cannot be read ({{why}}): set model=FOLDER."
    with explain((OSError, ValueError), message), without_code():
        sizes = text_config(model)
        with torch.device("meta"):
            return sizes, AutoModelForCausalLM.from_config(sizes, trust_remote_code=False)


def count_parameters(model: str) -> int:
    """The number of parameters of a model. Raises UserError."""
    return sum(parameter.numel() for parameter in read_modules(model)[1].parameters())


def table(split: Plan, rates: Rates, device_gib: float) -> Table:
    """The plan as a table."""
    result = Table("", "generation", "training", title="Plan", title_justify="left")
    size, ideal, generation, training = split.tensor_parallel, balanced_share(rates), split.generation, split.training
    engines = f"{split.generators} x {size} devices" if size > 1 else "of 1 device each"
    checkpointing = ", checkpointing" if split.gradient_checkpointing else ""
    result.add_row("devices", f"{split.generating_devices} ({split.share:.0%}; ideal {ideal:.0%})", f"{split.ranks}")
    result.add_row("as", f"generators {engines}", f"ranks, ZeRO {split.zero_stage}{checkpointing}")
    result.add_row("tokens/s, at most", f"{split.generated:,.0f}", f"{split.trained:,.0f}")
    result.add_row("in use", *(f"{split.throughput / most:.0%}" for most in (split.generated, split.trained)))
    result.add_row("sequences at once", f"{generation.sequences}, {generation.sequences_longest} at full length", "")
    parts = asdict(generation), asdict(training) | {"together": training.total}
    used = {"weights": "weights", "room": "room for the KV cache", "full_kv": "KV cache, all at full length"}
    used |= {
        name: name for name in ("gradients", "optimizer", "reference", "activations", "step", "buckets", "overhead")
    }
    for name, text in (used | {"together": "together", "host": "host memory of a rank"}).items():
        cells = (f"{part[name] / GIB:.1f} GiB" if part.get(name) else "" for part in parts)
        result.add_row(f"of {device_gib:g} GiB: {text}" if name == "weights" else text, *cells)
    return result


def notes(split: Plan, faster: list[Plan], starved: float | None) -> list[str]:
    """Notes on the numbers of a plan."""
    lines = []
    if split.generation.share < GENERATOR_SHARE:
        lines.append("Trainer and generator share the device, so each has what the other leaves of its time.")
    if starved is not None and starved < STARVED:
        lines.append(
            f"The trainer of that run was starved for {starved:.0%} of the time: its generators may be faster than "
            f"measured. Measure with more trainer ranks or run_ahead=max."
        )
    if split.generation.sequences > split.generation.sequences_longest:
        lines.append("Not all sequences would fit at full length: some are preempted when many get that long.")
    if faster:
        lines.append(f"At these rates faster: {', '.join(map(str, faster))}. Measure the rates with such keys.")
    return lines
