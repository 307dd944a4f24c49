"""Whole runs of this system against TRL's GRPOTrainer and its experimental AsyncGRPOTrainer, on the quickstart's task.

    python tests/benchmarks/vs_trl.py --json vs_trl.json

Same model, prompts, reward, group size, batch, minibatches, learning rate and number of training steps, float32, two
cores. Ours is the quickstart as it stands. TRL's modes (`trl_runs.py` holds their settings and what makes them run on a
CPU):

  generate        GRPOTrainer, generation with transformers
  colocate        GRPOTrainer, vLLM in the trainer's process, two threads; with one: colocate-1
  async           AsyncGRPOTrainer with its defaults: samples older than 4 versions are thrown away
  async-unbiased  the same with room for old samples (256 in flight, 16 versions), so that hardly any is thrown away

GRPOTrainer with a vLLM server is left out: the server's core idles while the trainer's works, and the other way round,
where colocated vLLM has both. Runs follow one another, each contestant once a round, with the machine to themselves.
Samples per second are those trained in the steps after the first of them, which fill pipelines. A token is unused if it
was generated and never trained on. Accuracy is held out, after the last step.

`ratio` is ours over the fastest synchronous mode, `ratio_async` over the faster asynchronous one,
`ratio_async_unbiased` over the one that trains on all lengths alike.

The file is written after every run, and a run that is in it already is not made again: with the same command the
benchmark goes on where it was stopped, and with more rounds it adds them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from results import kept_runs, ratio, show, write
from runs import FILLING, Run, find_free_port, finish, run

from areal.data import quickstart

SYNCHRONOUS = ("generate", "colocate", "colocate-1")
ASYNCHRONOUS = ("async", "async-unbiased")
UNBIASED = ASYNCHRONOUS[-1:]
OURS = "ours"
MODES = (OURS, *SYNCHRONOUS, *ASYNCHRONOUS)
RUN_SECONDS = 3600
COLUMNS = ("samples_per_second", "unused_share", "generated_length", "trained_length", "accuracy_after")


def measure(mode: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `COLUMNS` name, of one run."""
    print(f"{mode}, seed {seed}", file=sys.stderr)
    if mode == OURS:
        settings = [f"seed={seed}", f"steps={options.steps}", f"data.eval_size={options.eval_size}"]
        return ours(run(options.model, folder, mode, settings))
    out = folder / f"{mode}-{seed}"
    start(mode, seed, out, options.model, "--steps", options.steps, "--eval-size", options.eval_size)
    return trls(out) | json.loads((out / "result.json").read_text())


def start(mode: str, seed: int, out: Path, model: Path, *arguments: Any) -> float:
    """A run of TRL in a new folder `out`. Returns its memory, as `finish` does. One that fails ends the benchmark."""
    out.mkdir()
    script = Path(__file__).with_name("trl_runs.py")
    own_command = [script, mode, "--seed", seed, "--port", find_free_port(), "--out", out, "--model", model.resolve()]
    command = [sys.executable, *map(str, (*own_command, *arguments))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return finish(command, environment, RUN_SECONDS)


def ours(run: Run) -> dict[str, Any]:
    length = run.mean("completion_tokens_mean")
    return {
        "samples_per_second": run.samples_per_second,
        "unused_share": run.summary["tokens_untrained_share"],
        "generated_length": None if run.summary["tokens_discarded"] else length,
        "trained_length": length,
        "accuracy_after": run.summary["accuracy_after"],
    }


def trls(folder: Path) -> dict[str, Any]:
    """What `COLUMNS` name but the accuracy."""
    steps = records(folder / "steps.jsonl")
    # Its records are totals at the beginning and at the end of each step.
    first, last = steps[min(int(len(steps) * FILLING), len(steps) - 2)], steps[-1]
    of = {key: last[key] - first[key] for key in last}
    return {
        "samples_per_second": of["samples_trained"] / of["time"],
        "unused_share": max(0.0, 1 - of["tokens_trained"] / of["tokens_generated"]),
        "generated_length": of["tokens_generated"] / of["samples_generated"],
        "trained_length": of["tokens_trained"] / of["samples_trained"],
    }


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All that are asked for, each with its mode and seed; those that the file lacks are made."""
    setting = {"steps": options.steps, "eval_size": options.eval_size}
    results = kept_runs(options.json, setting) if options.json else []
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or quickstart.ensure(Path(folder) / "models")
        for seed in range(options.rounds):
            for mode in MODES if seed < options.synchronous_rounds else (OURS, *ASYNCHRONOUS):
                if not any(result["mode"] == mode and result["seed"] == seed for result in results):
                    results.append({"mode": mode, "seed": seed} | measure(mode, seed, options, Path(folder)))
                    write({"setting": setting} | summary(results) | {"runs": results}, options.json)
    return results


def summary(runs_done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each contestant that has run beside ours of the same seeds."""
    speeds: dict[str, dict[int, float]] = {mode: {} for mode in MODES}
    for result in runs_done:
        speeds[result["mode"]][result["seed"]] = result["samples_per_second"]
    pairs = {mode: seeds for mode in MODES if (seeds := sorted(speeds[mode].keys() & speeds[OURS].keys()))}
    ratios = {
        mode: ratio([speeds[OURS][seed] for seed in seeds], [speeds[mode][seed] for seed in seeds])
        for mode, seeds in pairs.items()
    }
    figures: dict[str, Any] = {}
    for name, modes in {"": SYNCHRONOUS, "_async": ASYNCHRONOUS, "_async_unbiased": UNBIASED}.items():
        best = min((mode for mode in modes if mode in ratios), key=lambda mode: ratios[mode][0], default=None)
        if best is None:
            continue
        figures[f"ratio{name}"], figures[f"spread{name}"] = ratios[best]
        figures[f"best{name}"] = best
    return figures | {
        "rows": {
            mode: {"rounds": len(seeds)}
            | {key: middle(result[key] for result in runs_done if result["mode"] == mode) for key in COLUMNS}
            | {"ours_is_faster_by": ratios[mode][0]}
            for mode, seeds in pairs.items()
        }
    }


def middle(values: Any) -> float | None:
    known_values = [value for value in values if value is not None]
    return median(known_values) if known_values else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the quickstart's model (default: it is built, 80 s on two cores)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every contestant, each with a seed of its own")
    parser.add_argument("--synchronous-rounds", type=int, metavar="ROUNDS", help="fewer of TRL's synchronous modes")
    parser.add_argument("--steps", type=int, default=30, help="training steps of a run")
    parser.add_argument("--eval-size", type=int, default=512, help="held-out problems; 0: no accuracy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one round of three steps: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.eval_size = 1, 3, 16
    if options.synchronous_rounds is None:
        options.synchronous_rounds = options.rounds
    return options


if __name__ == "__main__":
    options = arguments()
    if not importlib.util.find_spec("trl"):
        sys.exit("This benchmark needs TRL, which is not installed: pip install -e '.[bench]'")
    found = summary(runs(options))
    show(
        f"{options.steps} training steps",
        [
            "",
            "rounds",
            "samples/s",
            "tokens unused",
            "tokens generated",
            "trained",
            "accuracy after",
            "ours is faster by",
        ],
        [[mode, *("–" if cell is None else cell for cell in row.values())] for mode, row in found["rows"].items()],
        [
            f"ours / {found[f'best{name}']}: {found[f'ratio{name}']:.2f}"
            for name in ("", "_async", "_async_unbiased")
            if f"ratio{name}" in found
        ],
    )
