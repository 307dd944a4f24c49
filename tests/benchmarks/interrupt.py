"""Samples trained per second with sequences interrupted for new weights, against finishing them first.

    python tests/benchmarks/interrupt.py --json interrupt.json

Both are whole runs of the quickstart's setting: same model, seed and steps; `generator.interrupt` alone differs. They
are made in pairs, one after the other, with the machine to themselves, in turns as to which goes first.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from results import ratio, write
from rich.console import Console
from rich.table import Table
from runs import SMALL, run

from areal.data import quickstart

PARTS = ("pause", "load", "resume")


def main() -> None:
    options = parse()
    console = Console(width=max(100, Console().width))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or quickstart.ensure(Path(folder) / "models")
        for pair in range(options.rounds):
            for interrupt in (True, False) if pair % 2 == 0 else (False, True):
                runs.append(measure(options, model, Path(folder), pair, interrupt))
                console.print(runs[-1], soft_wrap=True)
    results = summarise(runs)
    console.print(table(results))
    write(results | {"runs": runs}, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--model", type=Path, help="the quickstart's model, if it is there already")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="one pair of small runs: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 4
    return options


def measure(options: argparse.Namespace, model: Path, folder: Path, pair: int, interrupt: bool) -> dict[str, Any]:
    overrides = [f"seed={pair}", f"steps={options.steps}", "data.eval_size=0", f"generator.interrupt={interrupt}"]
    outcome = run(model, folder, "run", [*overrides, *(SMALL if options.quick else ())])
    reloads = max(1, outcome.total("reloads"))
    return {
        "pair": pair,
        "interrupt": interrupt,
        "samples_per_second": outcome.samples_per_second,
        "staleness_mean": outcome.mean("staleness_mean"),
        "trainer_wait_share": outcome.total("trainer_wait_seconds") / outcome.total("step_seconds"),
        **{f"{part}_seconds_per_reload": outcome.total(f"{part}_seconds") / reloads for part in PARTS},
        "sequences_interrupted_per_reload": outcome.total("sequences_interrupted") / reloads,
        "tokens_recomputed_per_reload": outcome.total("tokens_recomputed") / reloads,
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """`ratio`: the median over the pairs of the throughput with interruption over that without; `spread`: the least and
    the greatest. `with` and `without`: medians of all that was measured."""
    kinds = {True: "with", False: "without"}
    of = {kind: [run for run in runs if run["interrupt"] is on] for on, kind in kinds.items()}
    on_over_off, spread = ratio(*([run["samples_per_second"] for run in of[kind]] for kind in ("with", "without")))
    names = [name for name in runs[0] if name not in ("pair", "interrupt")]
    medians = {kind: {name: median(run[name] for run in results) for name in names} for kind, results in of.items()}
    return {"ratio": on_over_off, "spread": spread, **medians}


def table(results: dict[str, Any]) -> Table:
    low, high = results["spread"]
    shown = Table(title=f"with interruption / without: {results['ratio']:.3f} ({low:.3f} to {high:.3f})")
    for column in ("median", "with", "without"):
        shown.add_column(column, justify="left" if column == "median" else "right")
    for name, value in results["with"].items():
        shown.add_row(name, f"{value:,.4g}", f"{results['without'][name]:,.4g}")
    return shown


if __name__ == "__main__":
    main()
