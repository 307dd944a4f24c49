"""Final accuracy and throughput as staleness grows, with the plain and with the decoupled objective.

    python tests/benchmarks/staleness_ablation.py --json ablation.json

Each cell is a whole run of `run.py`, the same task, model and steps, with as much run-ahead as `max_staleness` (eta)
allows. The file is written after every run, and a run that is in it already is not made again: a benchmark that was
stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent.parent
OBJECTIVES = ("ppo", "decoupled_ppo")
SETTING = [
    "run_ahead=max",
    "batch_size=16",
    "trainer.minibatches=2",
    "trainer.lr=1.0e-4",
]
# Steps before this share of the run fill the pipeline: they say nothing of its throughput.
FILLING = 0.25


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    setting = {"overrides": [*SETTING, f"steps={options.steps}", f"data.eval_size={options.eval_size}"]}
    if results and results["setting"] != setting:
        sys.exit(f"{options.json} holds results of another setting: give another file, or remove it.")
    results = {"setting": setting, "runs": results.get("runs", [])}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(Path(folder))
        for cell in cells(options):
            if not any(cell.items() <= run.items() for run in results["runs"]):
                console.print(
                    f"eta {cell['eta']:2}, {cell['objective']}, seed {cell['seed']}", end=" ", highlight=False
                )
                results["runs"].append(cell | measure(cell, setting["overrides"], model, Path(folder)))
                console.print("{accuracy:.3f}, {samples_per_second:.1f} samples/s".format(**results["runs"][-1]))
                write(options.json, results | summarise(results["runs"]))
    write(options.json, results | summarise(results["runs"]))
    console.print(table(results["runs"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--etas", type=lambda text: [int(eta) for eta in text.split(",")], default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-size", type=int, default=512, help="held-out problems")
    parser.add_argument("--model", type=Path, help="the quickstart's model, if it is there already")
    return parser.parse_args()


def cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seed by seed, so that what is there of a stopped benchmark covers all of the table."""
    return [
        {"eta": eta, "objective": objective, "seed": seed}
        for seed in range(options.seeds)
        for eta in options.etas
        for objective in OBJECTIVES
    ]


def make_model(folder: Path) -> Path:
    """The same warm start for every run."""
    command = [sys.executable, "-m", "areal", "quickstart-model", str(folder / "models")]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.splitlines()[-1])


def measure(cell: dict[str, Any], setting: list[str], model: Path, folder: Path) -> dict[str, float]:
    name = "eta{eta}-{objective}-{seed}".format(**cell)
    command = [
        sys.executable, str(ROOT / "run.py"), f"run_dir={folder}", f"name={name}", f"model={model.resolve()}",
        f"max_staleness={cell['eta']}", f"trainer.objective={cell['objective']}", f"seed={cell['seed']}", *setting,
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    summary = json.loads((folder / name / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steady = steps[int(len(steps) * FILLING) :]
    samples = summary["samples_trained"] / len(steps)
    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy": summary["accuracy_after"],
        "samples_per_second": samples * len(steady) / sum(step["step_seconds"] for step in steady),
        "staleness_mean": statistics.fmean(step["staleness_mean"] for step in steady),
        "staleness_max": summary["staleness_max"],
        "weight_max": max(step["weight_max"] for step in steps),
        "clip_fraction": statistics.fmean(step["clip_fraction"] for step in steps),
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each cell over its seeds, and throughput over that of eta 0 with the same objective."""
    rows = []
    for eta in sorted({run["eta"] for run in runs}):
        for objective in OBJECTIVES:
            if found := of(runs, eta, objective):
                accuracies = [run["accuracy"] for run in found]
                rows.append(
                    {
                        "eta": eta,
                        "objective": objective,
                        "seeds": len(found),
                        "accuracy": statistics.fmean(accuracies),
                        "accuracy_error": statistics.stdev(accuracies) / len(found) ** 0.5 if len(found) > 1 else None,
                        "samples_per_second": median(found, "samples_per_second"),
                        "throughput_ratio": ratio(runs, eta, objective),
                        "staleness_mean": median(found, "staleness_mean"),
                        "weight_max": max(run["weight_max"] for run in found),
                        "clip_fraction": median(found, "clip_fraction"),
                    }
                )
    return {"rows": rows}


def of(runs: list[dict[str, Any]], eta: int, objective: str) -> list[dict[str, Any]]:
    return [run for run in runs if (run["eta"], run["objective"]) == (eta, objective)]


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def ratio(runs: list[dict[str, Any]], eta: int, objective: str) -> float | None:
    synchronous = of(runs, 0, objective)
    if not synchronous:
        return None
    return median(of(runs, eta, objective), "samples_per_second") / median(synchronous, "samples_per_second")


def table(runs: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"held-out accuracy before: {statistics.fmean(run['accuracy_before'] for run in runs):.3f}")
    for name in ("eta", "objective", "seeds", "accuracy", "± s.e.", "samples/s", "over eta 0", "staleness", "max w"):
        shown.add_column(name, justify="left" if name == "objective" else "right")
    for row in summarise(runs)["rows"]:
        values = (
            "accuracy",
            "accuracy_error",
            "samples_per_second",
            "throughput_ratio",
            "staleness_mean",
            "weight_max",
        )
        digits = (3, 3, 1, 2, 1, 1)
        numbers = ["–" if row[v] is None else f"{row[v]:.{d}f}" for v, d in zip(values, digits, strict=True)]
        shown.add_row(str(row["eta"]), row["objective"], str(row["seeds"]), *numbers)
    return shown


def write(file: Path, results: dict[str, Any]) -> None:
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
