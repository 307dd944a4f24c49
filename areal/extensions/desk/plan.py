"""The tool `areal plan`: reads its numbers from options and from the model, and prints the plan."""

import math
import re
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from areal.base import extensions
from areal.base.command_line import output
from areal.base.errors import UserError
from areal.config import Config, load_config
from areal.extensions.desk.activations import measure_activations
from areal.extensions.desk.bare_models import read_modules
from areal.extensions.desk.split import GIB, ModelSizes, Plan, Planner, Workload
from areal.models import check_trainable, find_model
from areal.training.flops import experts_of
from areal.training.optimizer import bucket_elements


def plan_run(options: Namespace) -> None:
    """`areal plan`: print the plan that the options ask for."""
    config: Config = load_config(options.config, options.overrides)
    if config.colocate:
        raise UserError("A plan divides devices between trainer and generators, which colocate shares: colocate=false.")
    work = _workload(options, config)
    checkpointing = {"gradient_checkpointing": config.trainer.gradient_checkpointing}  # if auto, the plan decides
    config = config.for_device(cuda=True)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=checkpointing)})
    scoring = sum(config.scorers[name].devices for name in config.scorer_uses.started)
    left = max(0, options.devices - scoring)
    split = Planner(config, read_model(config), work, left, options.device_memory * GIB).plan()
    console = output(120)
    console.print(table(split, options.device_memory))
    if scoring:
        names = ", ".join(config.scorer_uses.started)
        console.print(f"The scorers ({names}) have {scoring} more devices of the {options.devices}.", highlight=False)
    changes = " ".join(f"{key}={value}" for key, value in split.overrides.items())
    console.print(f"\nWith these changes to the configuration:\n  {changes}", highlight=False, soft_wrap=True)


def _workload(options: Namespace, config: Config) -> Workload:
    """Return the numbers of the options. Raises UserError."""
    for name in ("generation_rate", "training_rate", "mean_tokens", "prompt_tokens", "devices", "device_memory"):
        if not (math.isfinite(number := getattr(options, name)) and number > 0):
            raise UserError(f"--{name.replace('_', '-')} is {number:g}, but must be more than 0.")
    mean, longest = options.mean_tokens, config.sampling.max_new_tokens
    if mean > longest:
        raise UserError(f"--mean-tokens is {mean:g}, longer than sampling.max_new_tokens, {longest}: correct one.")
    return Workload(options.generation_rate, options.training_rate, options.prompt_tokens, mean, longest)


def read_model(config: Config) -> ModelSizes:
    """Return the sizes of the run's model, from its modules and passes without weights. Raises UserError."""
    if config.model == "quickstart":
        raise UserError("The model quickstart is created by its first run: name its folder by model=FOLDER.")
    folder, trainer = Path(config.model).expanduser(), config.trainer
    folder = folder if folder.is_dir() else find_model(config.model, "model", weights=False)
    check_trainable(folder, trainer.sequence_parallel, config.generator.max_model_len)
    for check in extensions.find_own("model_check"):
        check(trainer, folder, trainer.expert_parallel * trainer.tensor_parallel)
    sizes, module = read_modules(config.model)
    try:
        activations = [measure_activations(sizes, trainer, checkpointing=on) for on in (False, True)]
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"The model {config.model} cannot be trained: {str(error).strip().splitlines()[0]}.") from None
    heads, experts = sizes.num_attention_heads, getattr(sizes, "moe_intermediate_size", None) or 0
    numbers = {name: p.numel() for name, p in module.named_parameters()}
    in_layers = [part for name, part in module.named_modules() if re.search(r"\.\d+\.", name)]
    parts = [[p.numel() for p in part.parameters(recurse=False)] for part in in_layers]
    if trainer.lora:
        module = extensions.need("lora", "add", "trainer.lora").load()(module, trainer.lora)
    return ModelSizes(
        parameters=sum(numbers.values()),
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        layers=sizes.num_hidden_layers,
        hidden=sizes.hidden_size,
        vocabulary=sizes.vocab_size,
        kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
        head_size=getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
        activations=activations[0],
        checkpointed=activations[1],
        intermediate=max(getattr(sizes, "intermediate_size", None) or 0, experts * experts_of(sizes)[1]),
        bucket=bucket_elements(numbers),
        largest=max(numbers.values()),
        part=max(map(sum, parts), default=0),
        part_tensor=max((max(part, default=0) for part in parts), default=0),
        experts=sum(n for name, n in numbers.items() if ".experts." in name),
        inner=sum(n for name, n in numbers.items() if re.search(r"\.([qkvo]|gate|up|down)_proj\.", name)),
    )


def table(split: Plan, device_gib: float) -> Table:
    """Return the plan as a table."""
    result = Table("", "generation", "training", title="Plan", title_justify="left")
    size, share = split.tensor_parallel, split.generating_devices / (split.generating_devices + split.ranks)
    engines = f"{split.generators} x {size} devices" if size > 1 else "of 1 device each"
    result.add_row("devices", f"{split.generating_devices} ({share:.0%})", f"{split.ranks}")
    way = f"ZeRO {split.zero_stage}{', checkpointing' * split.gradient_checkpointing}"
    result.add_row("as", f"generators {engines}", f"ranks, {way}")
    result.add_row("tokens/s, at most", f"{split.generated:,.0f}", f"{split.trained:,.0f}")
    result.add_row("sequences at once", f"{split.sequences}", "")
    parts = split.generation, asdict(split.training) | {f"together, of {device_gib:g}": split.training.total}
    for name in dict.fromkeys([*parts[0], *parts[1]]):
        result.add_row(name, *(f"{part[name] / GIB:.1f} GiB" if part.get(name) else "" for part in parts))
    return result
