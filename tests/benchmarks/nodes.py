"""A run over four hosts with keys, slow links and folders of their own, against the same run on one host.

    python tests/benchmarks/nodes.py --json nodes.json

The hosts are network namespaces of this machine (tests/support/hosts.py; needs root): all runs have the same
processors. What differs is the wire between the roles, encryption, and that weights are streamed. In the third run the
trainer's host is cut off half-way. Each run is the quickstart with fewer steps.

`ratio` is samples per second over four hosts, over those on one host; `partition_seconds` is how much longer the run
with the partition took than the one without.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from results import show, write
from runs import QUICKSTART, SMALL, Run, read, run

from areal.data import quickstart

# isort: split
from support.hosts import SpreadRun, wire  # of the tests, which `runs` makes known

ROLES = (("master",), ("trainer", "reward"), ("generator",), ("rollout_manager", "evaluator"))
TRAINER = 1
END_SECONDS = 3600.0


def run_over_hosts(folder: Path, name: str, options: argparse.Namespace, words: list[str], cut: float) -> Run:
    """The run with its roles on hosts. The trainer's is cut off for `cut` seconds half-way."""
    folder = folder / name
    folder.mkdir()
    configuration = ["--config", str(QUICKSTART), f"name={name}", *words]
    with (
        wire(len(ROLES), delay=options.delay, loss=options.loss) as network,
        closing(SpreadRun(network, ROLES, folder, configuration)) as spread,
    ):
        if cut:
            spread.wait_for_step(name, options.steps // 2)
            spread.cut_off(TRAINER, cut)
        if any(spread.wait(END_SECONDS)):
            sys.exit(f"the run over hosts failed:\n{spread.output}")
        return read(spread.folder(0, name))


def compare(options: argparse.Namespace) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        model = (options.model or quickstart.ensure(folder)).resolve()
        words = [f"model={model}", f"steps={options.steps}", *options.overrides]
        runs_by_hosts = {
            "one host": run(model, folder, "one", words),
            "four hosts": run_over_hosts(folder, "four", options, words, 0.0),
            f"and cut off for {options.cut:g} s": run_over_hosts(folder, "cut", options, words, options.cut),
        }
    first, four, cut = runs_by_hosts.values()
    results = {
        "ratio": four.samples_per_second / first.samples_per_second,
        "partition_seconds": cut.summary["seconds"] - four.summary["seconds"],
        "rows": [{"of": name} | numbers(first) for name, first in runs_by_hosts.items()],
    }
    show(
        f"{options.steps} steps; {options.delay * 1000:g} ms each way, {options.loss:.1%} of the packets lost",
        list(results["rows"][0]),
        [list(row.values()) for row in results["rows"]],
        [f"four hosts / one host: {results['ratio']:.2f}", f"the partition took {results['partition_seconds']:.1f} s"],
    )
    write(results, options.json)


def numbers(run: Run) -> dict[str, float]:
    return {
        "seconds": run.summary["seconds"],
        "samples/s": run.samples_per_second,
        "trainer waits": run.total("trainer_wait_seconds") / run.total("step_seconds"),
        "staleness": run.mean("staleness_mean"),
        "at most": float(run.summary["staleness_max"]),
        "lineages": float(run.summary["lineages"]),
        "accuracy": run.summary["accuracy_after"],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the quickstart's model (default: it is built, 80 s on two cores)")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--delay", type=float, default=0.02, metavar="SECONDS", help="of the wire, each way")
    parser.add_argument("--loss", type=float, default=0.01, metavar="SHARE", help="of the packets")
    parser.add_argument("--cut", type=float, default=30.0, metavar="SECONDS", help="that the partition lasts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the quickstart's configuration")
    parser.add_argument("--quick", action="store_true", help="small runs, cut for seconds: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.cut = 8, 3.0
        options.overrides = [*SMALL, "data.eval_size=4", *options.overrides]
    return options


if __name__ == "__main__":
    compare(arguments())
