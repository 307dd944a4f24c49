"""Writes docs/results.md from the files in docs/records; run it after every change to them.

A recipe's row comes from NAME.json, which `areal check-recipe --records docs/records` writes, a benchmark's from
benchmarks/NAME.json, which tests/benchmarks/NAME.py writes. A figure without such a file does not appear.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from areal.extensions.recipes.recipe import RunRecipe, band_text

ROOT = Path(__file__).parents[2]
PAGE, RECORDS = ROOT / "docs" / "results.md", ROOT / "docs" / "records"
REPOSITORY = "records"
RECIPES = [ROOT / "configs" / "quickstart.yaml", ROOT / "configs" / "smollm2.yaml"]
RECIPES += sorted(path for path in (ROOT / "configs" / "examples").iterdir() if (path / "run.yaml").exists())
RECIPES += sorted(ROOT.glob("configs/examples/*/*_small.yaml")) + sorted(ROOT.glob("configs/paper/small/*_small.yaml"))
MACHINE = "2×AMD EPYC, AVX-512"
"""The machine of rows that name no machine."""
BARS = "▁▂▃▄▅▆▇█"
RATIOS: dict[str, dict[str, list[Any]]] = yaml.safe_load((ROOT / "tests/benchmarks/ratios.yaml").read_text())
INTRODUCTION = f"""\
# Results

This page lists the recipes that ran whole, and says how to check them.

<!-- Written by docs/site/results_page.py from docs/records/: run it, do not edit. -->

Recipes are in `configs`. *result* is the held-out accuracy after the last step, as the mean over the seeds with its
standard error; *before* is the accuracy before the first step; *band* is where a further seed ends with a probability
of 95 % (`expect.yaml` beside the recipe); *staleness* is mean, largest/bound; *curve* is the reward of the first seed;
*minutes* include the start; *commit* is the commit of the program that read the figures from the runs. A row without a
machine was made on {MACHINE}. `NAME_small` is a smaller sibling of NAME, and its file says
what is smaller.

```
.venv/bin/areal audit docs/records/quickstart.tar.zst                # the same weights, bit by bit?
.venv/bin/areal replay docs/records/quickstart.tar.zst --sweep trainer.objective=ppo,gspo
.venv/bin/areal check-recipe configs/quickstart.yaml --seeds 3       # does it end like this here?
make recipes                                # all recipes that download nothing
```

| recipe | result | before | band | staleness | minutes | curve | model, data | steps×samples×seeds | commit | files |
|---|---|---|---|---|---|---|---|---|---|---|
"""
RECORD = """
## What a record is

`areal export-record runs/NAME --out NAME.tar.zst` writes the record of a finished run as a file of at most 10 MB
(`--most-mb`): configuration, versions and commit, metrics, evaluations, events, journal, the first model, rollouts,
and checkpoints as far as they fit. To train the run again, an audit needs the model and all rollouts. Secrets and
paths of the machine are replaced; prompts and completions stay: publish no record of private data
([security](security.md#what-a-configuration-and-a-run-folder-may-do)).

An audit that finds other weights names the differences in processor and packages, and the step up to which the losses
agree.

`areal check-recipe FOLDER` compares runs with their `expect.yaml`: accuracy and its rise (`gain`), reward,
`engine_gap`, minutes on the same processor, staleness, alerts. The exit code is 1 if a run leaves its band. `--write`
writes the bands.
"""
BENCHMARKS = """
## Benchmarks

Ratios are medians over rounds, with the least and the greatest. `python tests/benchmarks/NAME.py --json
docs/records/benchmarks/NAME.json` writes the linked file.

| benchmark | compares | ratio | rounds | commit |
|---|---|---|---|---|
"""


def page() -> str:
    """The text of docs/results.md."""
    recipes = [*_recipes()]
    rows = [f"| {' | '.join(_cells(recipe, figures))} |\n" for recipe, figures in recipes if figures]
    names = [f"`{recipe.name}`" for recipe, figures in recipes if not figures]
    not_run = f"\nRecipes that did not run here ([their needs](examples.md)): {', '.join(names)}.\n" if names else ""
    return "".join([INTRODUCTION, *rows, not_run, *_miniatures(), RECORD, *_benchmarks()])


def _recipes() -> Iterator[tuple[RunRecipe, dict[str, Any] | None]]:
    for path in RECIPES:
        recipe = RunRecipe.of(path)
        file = RECORDS / f"{recipe.name}.json"
        yield recipe, json.loads(file.read_text()) if file.exists() else None
    names = {RunRecipe.of(path).name for path in RECIPES}
    for file in sorted(file for file in RECORDS.glob("*.json") if file.stem not in names):  # runs of the kit for GPUs
        yield RunRecipe(file.stem, Path(file.stem), file, {}, {}, {}), json.loads(file.read_text())


def _cells(recipe: RunRecipe, figures: Mapping[str, Any]) -> Iterator[str]:
    seeds = figures["seeds"]
    made_on = seeds[0]["made_on"]
    yield recipe.name
    yield mean_text([seed["accuracy"] for seed in seeds])
    yield mean_text([seed["accuracy_before"] for seed in seeds])
    yield band_text(recipe.bands["accuracy"]).replace(" to ", "–") if "accuracy" in recipe.bands else "none"
    mean = statistics.fmean(seed["staleness_mean"] for seed in seeds)
    yield f"{mean:.1f}, {max(seed['staleness'] for seed in seeds)}/{seeds[0]['bound']}"
    minutes = [seed["minutes"] for seed in seeds]
    yield f"{min(minutes):.1f}–{max(minutes):.1f}"
    yield curve(seeds[0]["curve"])
    yield f"{figures['model']}, {figures['data']}"
    yield f"{figures['steps']}×{figures['samples']}×{len(seeds)}"
    yield _commit(made_on)
    links = [f"[figures]({REPOSITORY}/{recipe.name}.json)"]
    if figures["record"] and (RECORDS / figures["record"]).exists():
        links.append(f"[record]({REPOSITORY}/{figures['record']})")
    yield ", ".join(links)


def _commit(made_on: Mapping[str, Any]) -> str:
    return made_on["commit"] + (f", {here}" if (here := _machine(made_on)) != MACHINE else "")


def _machine(made_on: Mapping[str, Any]) -> str:
    return f"{made_on['gpus'] or str(made_on['cores']) + '×' + made_on['processor']}, {made_on['instructions']}"


def mean_text(values: Sequence[float | None]) -> str:
    """The mean, and its standard error over the seeds."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    error = f"±{statistics.stdev(numbers) / len(numbers) ** 0.5:.3f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.3f}{error}"


def curve(values: Sequence[float]) -> str:
    """A curve as a row of bars, from the lowest to the highest value. A flat curve has no bars."""
    if not (span := max(values) - (low := min(values))):
        return "–"
    return "".join(BARS[min(int((value - low) / span * len(BARS)), len(BARS) - 1)] for value in values)


def _miniatures() -> Iterator[str]:
    file = RECORDS / "benchmarks" / "paper_mini.json"
    if file.exists():
        figures = json.loads(file.read_text())
        runs = [run for runs in figures["files"].values() for run in runs]
        expected = RunRecipe(file.stem, file, file, {"alerts": []}, {}, {})
        within = sum(not expected.faults(run, quick=True) for run in runs)
        share = f"All {within}" if within == len(runs) else f"Only {within} of {len(runs)}"
        yield f"\n`make paper-mini` runs the {len(figures['files'])} experiments of `configs/paper` with random models."
        yield f" {share} runs ended within\ntheir bound ([figures]({REPOSITORY}/benchmarks/{file.name}),"
        yield f" {_commit(figures['made_on'])}).\n"


def _benchmarks() -> Iterator[str]:
    rows = []
    for name, ratios in RATIOS.items():
        file = RECORDS / "benchmarks" / f"{name}.json"
        figures = json.loads(file.read_text()) if file.exists() else {}
        for key, (what, _) in ratios.items():
            if figures.get(key) is not None:
                low, high = figures.get(key.replace("ratio", "spread")) or ("", "")
                spread = f" ({low:.2f} to {high:.2f})" if low != high else ""
                link = f"[{name}]({REPOSITORY}/benchmarks/{name}.json)"
                commit = _commit(figures["made_on"])
                rows.append(f"| {link} | {what} | {figures[key]:.2f}{spread} | {_rounds(figures, key)} | {commit} |\n")
    if rows:
        yield BENCHMARKS
        yield from rows


def _rounds(figures: Mapping[str, Any], key: str) -> str:
    """How often a ratio was measured, where its file says so."""
    if key != "ratio" or "best" in figures:  # each ratio of `vs_trl` has its own rounds
        best = figures.get(key.replace("ratio", "best"))
        return str(figures["rows"][best]["rounds"]) if best else str(figures.get("rounds", ""))
    seeds = {run["seed"] for run in figures.get("runs") or () if run.get("seed") is not None}
    lists = figures.get("tokens_per_second") or figures.get("cpu_seconds") or {"": ()}
    return str(figures.get("rounds") or len(seeds) or len(next(iter(lists.values()))) or "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
