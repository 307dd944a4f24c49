"""`areal check-recipe`: runs recipes with several seeds, compares the results, and writes records of the runs.

The runs of a recipe are a sweep over seeds in FOLDER/NAME: the same command leaves out finished runs, and resumes begun
runs. NAME.json has the figures of each seed, NAME.tar.zst the record of the first.
"""

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from areal.base.command_line import output
from areal.base.errors import UserError
from areal.config.reading import write_yaml
from areal.devices import visible_devices
from areal.extensions.desk.sweep import Sweep, SweptRun, read_sweep
from areal.extensions.recipes.machine import machine
from areal.extensions.recipes.recipe import RunRecipe, band_text, figures
from areal.extensions.recipes.run_export import export_run
from areal.models import name_of
from areal.storage.disk import replace
from areal.storage.record import Record

QUICK = ("steps=2", "evaluator.every=0", "evaluator.samples=1")
"""Changes to each recipe with --quick."""


def check(options: Namespace) -> int:
    """`areal check-recipe`. Returns 1 if a recipe has a fault, more than 128 after a signal."""
    table = Table("recipe", "seeds", "accuracy", "band", "staleness", "minutes", "result", title="Recipes")
    code = 0
    for recipe in map(RunRecipe.of, options.recipes):
        if (needs := recipe.run["needs"]) and not visible_devices():
            table.add_row(recipe.name, "", "", "", "", "", f"not run: it needs {needs}")
            continue
        folder = options.folder / "quick" if options.quick else options.folder
        runs = _sweep(recipe, folder.absolute(), options)
        if (ended := _run(recipe, runs, options.quick)) > 128:
            return ended
        finished = [Record(run.config.folder) for run in runs if run.finished]
        seeds = write_figures(recipe.name, finished, options.records or folder, options.most_mb)
        recipe = recipe.written(seeds) if options.write else recipe
        lines = [f"{run.name} did not end" for run in runs if not run.finished]
        lines += [f"seed {seed['seed']}: {line}" for seed in seeds for line in recipe.faults(seed, options.quick)]
        table.add_row(*_cells(recipe, seeds), "\n".join(lines) or "as expected", style="red" if lines else None)
        code |= bool(lines)
    output(160).print(table)
    return code


def _sweep(recipe: RunRecipe, folder: Path, options: Namespace) -> list[SweptRun]:
    """Return the runs of the recipe, and write the file of their sweep beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    file, seeds = folder / f"{recipe.name}.yaml", [*range(1 if options.quick else options.seeds)]
    values: dict[str, Any] = {"base": str(recipe.config.absolute()), "run_dir": str(folder), "grid": {"seed": seeds}}
    replace(file, write_yaml(values | {"name": recipe.name}))
    changes = [c.replace("{folder}", str(folder)) for c in recipe.run["quick" if options.quick else "overrides"]]
    return read_sweep(file, [*changes, *(QUICK if options.quick else ())])


def _run(recipe: RunRecipe, runs: list[SweptRun], quick: bool) -> int:
    """Do the unfinished runs. Returns the exit code of the sweep, or of the recipe's own command, which cannot resume a
    run. Raises UserError if a command before the runs fails."""
    todo, code = [run for run in runs if not run.finished], 0
    for command in recipe.run["before"] if todo else ():
        if _call(command):
            raise UserError(f"{recipe.file}: `{command}` failed.")
    if not recipe.run["command"]:
        return Sweep(runs).run() if todo else 0
    for run in todo:
        place = [f"run_dir={run.config.run_dir}", f"name={run.name}", f"seed={run.config.seed}"]
        code = code or _call(recipe.run["command"], *place, *(QUICK if quick else ()))
    return code


def _call(command: str, *changes: str) -> int:
    words = shlex.split(command)
    code = subprocess.run([sys.executable if words[0] == "python" else words[0], *words[1:], *changes]).returncode
    return code if code >= 0 else 128 - code  # ended by a signal


def write_figures(name: str, records: Sequence[Record], folder: Path, most_mb: float) -> list[dict[str, Any]]:
    """Write NAME.json with the figures of finished runs, and the record of the first. Returns the figures."""
    if not records:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    file, archive = folder / f"{name}.json", folder / f"{name}.tar.zst"
    earlier = {seed["run"]: seed for seed in json.loads(file.read_text())["seeds"]} if file.is_file() else {}
    seeds = []
    for record in records:
        identity = {"seed": record.configuration.load().seed, "run": record.metrics.records[-1]["run"]}
        seeds.append(earlier.get(identity["run"]) or identity | {"made_on": machine()} | figures(record))
    if not archive.exists():
        export_run(records[0].folder, archive, most_mb)
    config, model = records[0].configuration.load(), name_of(records[0].configuration.settings["model"])
    source = config.data.source or config.data.named
    data = Path(source).name if Path(source).is_absolute() else source
    what = {"recipe": name, "model": model, "data": data, "steps": config.steps}
    what |= {"samples": config.batch_size * config.group_size, "record": archive.name, "seeds": seeds}
    replace(file, json.dumps(what, indent=1) + "\n")
    return seeds


def _cells(recipe: RunRecipe, seeds: list[dict[str, Any]]) -> list[str]:
    """Return cells of the table: name, seeds, accuracy, band, staleness, minutes."""

    def of(name: str, form: str) -> str:
        return ", ".join("–" if seed[name] is None else format(seed[name], form) for seed in seeds)

    band = band_text(recipe.bands["accuracy"]) if "accuracy" in recipe.bands else "no band yet"
    return [recipe.name, of("seed", ""), of("accuracy", ".3f"), band, of("staleness", ""), of("minutes", ".1f")]
