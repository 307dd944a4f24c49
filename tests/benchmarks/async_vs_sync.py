"""Samples trained per second: the asynchronous system against the best synchronous mode of the same system.

    python tests/benchmarks/async_vs_sync.py --json async_vs_sync.json

Synchronous is `max_staleness=0`: the phases take turns, no sequence is ever interrupted, and whichever phase runs has
both cores. The settings of each mode are found first, for every row of the table: the fastest of those in GENERATION,
then the fastest of those in TRAINING. Then both modes run in pairs, with as many steps, the same seed and the same
model and task.

The rows differ in tail and batch. Answers have 5 tokens a digit and at most 40 digits, n of them with probability
n^-`exponent`: the longest is 3 times the mean at exponent 1, 5 times at 1.5 (the quickstart's), 10 times at 2.5. A
batch of 64 samples is what a generator runs at once, one of 256 four times that. The headline `ratio` is that of
exponent 2.5 and 64 samples.

The file is written after every run, and a run that is in it already is not made again: a benchmark that was stopped
goes on with the same command.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import kept_runs, ratio, write
from rich.console import Console
from rich.table import Table
from runs import SMALL, run

from areal.data import quickstart

HEADLINE = {"exponent": 2.5, "samples": 64}
EXPONENTS, BATCHES = (2.5, 1.0, 1.5), (64, 256)
GROUP_SIZE = 8
CONCURRENT = 64
GENERATION = {
    "1 thread": ("generator.threads=1",),
    "2 threads": ("generator.threads=2",),
    "2 generators": ("generator.count=2",),
}
TRAINING = {"1 thread": ("trainer.threads=1",), "2 threads": ("trainer.threads=2",), "2 ranks": ("trainer.ranks=2",)}
# The settings that are tried. In the asynchronous mode either side has its core; a second generator takes what the
# trainer leaves of the other.
TRIED = {"sync": (tuple(GENERATION), tuple(TRAINING)), "async": (("1 thread", "2 generators"), ("1 thread",))}
MODES = {"sync": ("max_staleness=0",), "async": ("max_staleness=4",)}


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory() as folder:
        bench = Benchmark(options, options.model or quickstart.ensure(Path(folder) / "models"), Path(folder), console)
        for cell in bench.cells:
            settings = {mode: bench.best_setting(cell, mode) for mode in MODES}
            for seed in range(options.rounds):
                for mode in ("sync", "async") if seed % 2 else ("async", "sync"):
                    bench.measured(cell, mode, *settings[mode], seed=seed)
    console.print(bench.table())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs for each row")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--trial-steps", type=int, default=15, help="steps of the runs that find the best settings")
    parser.add_argument("--eval-size", type=int, default=512, help="held-out problems")
    parser.add_argument("--headline", action="store_true", help="that row only")
    parser.add_argument("--model", type=Path, help="the quickstart's model, if it is there already")
    parser.add_argument("--quick", action="store_true", help="one pair of small runs in one setting: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.trial_steps, options.eval_size, options.headline = 1, 4, 4, 4, True
    return options


class Benchmark:
    def __init__(self, options: argparse.Namespace, model: Path, folder: Path, console: Console) -> None:
        self._options, self._model, self._folder, self._console = options, model, folder, console
        self._setting = {"steps": options.steps, "trial_steps": options.trial_steps, "eval_size": options.eval_size}
        remainder = [{"exponent": exponent, "samples": samples} for exponent in EXPONENTS for samples in BATCHES]
        self.cells = [HEADLINE] + [cell for cell in remainder if cell != HEADLINE and not options.headline]
        self._runs = kept_runs(options.json, self._setting)

    def best_setting(self, cell: dict[str, Any], mode: str) -> tuple[str, str]:
        """How the mode generates and trains fastest. In the synchronous mode the phases do not touch each other, so
        that each can be chosen by itself."""
        generation, training = TRIED[mode]
        if self._options.quick:
            return generation[0], training[0]

        def speed(*setting: str) -> float:
            return self.measured(cell, mode, *setting, seed=None)["samples_per_second"]

        generates = max(generation, key=lambda name: speed(name, training[0]))
        trains = max(training, key=lambda name: speed(generates, name))
        return generates, trains

    def measured(
        self, cell: dict[str, Any], mode: str, generation: str, training: str, seed: int | None
    ) -> dict[str, Any]:
        """The numbers of one run; seed None: a short one, to find settings."""
        key = cell | {"mode": mode, "generation": generation, "training": training, "seed": seed}
        for known_values in self._runs:
            if key.items() <= known_values.items():
                return known_values
        trial = seed is None
        outcome = run(
            self._model,
            self._folder,
            mode,
            [
                f"seed={seed or 0}",
                f"steps={self._options.trial_steps if trial else self._options.steps}",
                f"data.eval_size={0 if trial else self._options.eval_size}",
                f"data.options={{length_exponent: {cell['exponent']}}}",
                f"batch_size={cell['samples'] // GROUP_SIZE}",
                f"group_size={GROUP_SIZE}",
                f"generator.max_concurrent_rollouts={CONCURRENT}",
                *(SMALL if self._options.quick else ()),
                *MODES[mode],
                *GENERATION[generation],
                *TRAINING[training],
            ],
        )
        results = key | {
            "samples_per_second": outcome.samples_per_second,
            "accuracy": outcome.summary["accuracy_after"],
            "trainer_waits": outcome.total("trainer_wait_seconds") / outcome.total("step_seconds"),
            "tokens_mean": outcome.mean("completion_tokens_mean"),
            "tokens_max": max(step["completion_tokens_max"] for step in outcome.steps),
            "staleness_mean": outcome.mean("staleness_mean"),
        }
        self._keep(results)
        return results

    def _keep(self, figures: dict[str, Any]) -> None:
        self._runs.append(figures)
        write({"setting": self._setting, **self._summary(), "runs": self._runs}, self._options.json)
        self._console.print(", ".join(f"{key} {show(value)}" for key, value in figures.items()), soft_wrap=True)

    def _summary(self) -> dict[str, Any]:
        rows = [row for cell in self.cells if (row := self._row(cell))]
        headline = next((row for row in rows if HEADLINE.items() <= row.items()), {})
        return {"ratio": headline.get("ratio"), "spread": headline.get("spread"), "rows": rows}

    def _row(self, cell: dict[str, Any]) -> dict[str, Any] | None:
        """Medians over the pairs that are complete."""
        item = [r for r in self._runs if cell.items() <= r.items() and r["seed"] is not None]
        by_mode = {mode: {r["seed"]: r for r in item if r["mode"] == mode} for mode in MODES}
        seeds = sorted(by_mode["sync"].keys() & by_mode["async"].keys())
        if not seeds:
            return None
        sync, concurrent = ([by_mode[mode][seed] for seed in seeds] for mode in ("sync", "async"))
        faster_by, spread = ratio(*([r["samples_per_second"] for r in runs] for runs in (concurrent, sync)))
        pair = sync + concurrent
        return cell | {
            "tail": max(r["tokens_max"] for r in pair) / statistics.fmean(r["tokens_mean"] for r in pair),
            "sync_setting": f"{sync[0]['generation']} / {sync[0]['training']}",
            "async_setting": f"{concurrent[0]['generation']} / {concurrent[0]['training']}",
            "sync": statistics.median(r["samples_per_second"] for r in sync),
            "async": statistics.median(r["samples_per_second"] for r in concurrent),
            "ratio": faster_by,
            "spread": spread,
            "sync_accuracy": statistics.fmean(r["accuracy"] for r in sync),
            "async_accuracy": statistics.fmean(r["accuracy"] for r in concurrent),
            "trainer_waits": statistics.median(r["trainer_waits"] for r in concurrent),
            "staleness_mean": statistics.fmean(r["staleness_mean"] for r in concurrent),
            "pairs": len(seeds),
        }

    def table(self) -> Table:
        columns = {
            "exponent": "exponent",
            "samples": "batch",
            "tail": "longest / mean",
            "sync_setting": "sync: gen / train",
            "async_setting": "async: gen / train",
            "sync": "sync samples/s",
            "async": "async",
            "ratio": "ratio",
            "spread": "least, most",
            "sync_accuracy": "sync acc.",
            "async_accuracy": "async",
            "trainer_waits": "waits",
            "staleness_mean": "staleness",
            "pairs": "pairs",
        }
        shown = Table(title="asynchronous against synchronous, the same system on the same two cores")
        for title in columns.values():
            shown.add_column(title, justify="right")
        for row in self._summary()["rows"]:
            shown.add_row(*(show(row[key]) for key in columns))
        return shown


def show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(show, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
