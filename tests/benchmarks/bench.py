"""All benchmarks of docs/benchmarks.md, one after another, on a machine that does nothing else: `make bench`.

    python tests/benchmarks/bench.py                          # several hours; goes on where it was stopped
    python tests/benchmarks/bench.py --only bus weights
    python tests/benchmarks/bench.py --rounds 1
    python tests/benchmarks/bench.py --quick                  # minutes: does each of them run?

Each benchmark writes FOLDER/NAME.json; what is there is not measured again. FOLDER/bench.json has the machine and all
results, and the table shows each ratio with its spread and its goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from results import show

from areal.data import quickstart

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# By benchmark: what each of its ratios compares, the name of that ratio in its JSON, and the goal.
RATIOS = {
    "async_vs_sync": [("asynchronous / synchronous", "ratio", 2.8)],
    "vs_trl": [
        ("ours / TRL synchronous, the fastest mode", "ratio", 2.5),
        ("ours / TRL asynchronous, its defaults", "ratio_async", 1.2),
        ("ours / TRL asynchronous, without the bias", "ratio_async_unbiased", 1.5),
    ],
    "time_to_accuracy": [
        ("seconds to accuracy 0.65, max_staleness 0 / 4", "ratio", None),
        ("seconds to accuracy 0.65, TRL asynchronous / ours", "ratio_trl", None),
    ],
    "generator_overhead": [("through the actors / bare vLLM", "ratio", 0.95)],
    "bus": [
        ("ours / bare pyzmq asyncio", "ratio", 0.6),
        ("arrays, ours / pyzmq with CURVE", "ratio_arrays", 0.6),
        ("ours / Ray actors", "ratio_ray", 3),
    ],
    "interrupt": [("interruption on / off", "ratio", 1.12)],
    "packing": [("prefix trees / padding", "ratio", 1.3)],
    "trainer_overhead": [("a step / a bare PyTorch loop", "ratio", 0.9)],
    "weights": [("a plain copy / fetching by stream", "ratio", 0.8)],
    "sandbox": [("programs in the sandbox / bare", "ratio", None)],
    "nodes": [("four hosts / one host", "ratio", None)],
}
WITH_A_MODEL = {
    "async_vs_sync",
    "vs_trl",
    "time_to_accuracy",
    "generator_overhead",
    "interrupt",
    "packing",
    "trainer_overhead",
    "nodes",
}
WITH_ROUNDS = set(RATIOS) - {"nodes"}


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.only if not measured(name, options)]
    results = {
        name: json.loads(file.read_text()) for name in RATIOS if (file := options.folder / f"{name}.json").exists()
    }
    (options.folder / "bench.json").write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    show(
        ", ".join(f"{value}" for value in machine().values()),
        ["", "ratio", "least", "greatest", "goal"],
        [row(figures, *ratio) for name, figures in results.items() for ratio in RATIOS[name]],
        [f"{name} failed: its output is above." for name in failed],
    )
    sys.exit(bool(failed))


def measured(name: str, options: argparse.Namespace) -> bool:
    """Measure a benchmark, unless its results are there. False if it fails."""
    file = options.folder.resolve() / f"{name}.json"
    if file.exists():
        return True
    unfinished = file.with_suffix(".part")  # some benchmarks write while they run, and go on from there
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(unfinished)]
    if name in WITH_A_MODEL:
        command += ["--model", str(quickstart.ensure(options.folder.resolve() / "models"))]
    if name in WITH_ROUNDS and options.rounds:
        command += ["--rounds", str(options.rounds)]
    command += ["--quick"] if options.quick else []
    print(f"== {name}", flush=True)
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        return False
    unfinished.rename(file)
    return True


def row(figures: dict[str, Any], what: str, key: str, goal: float | None) -> list[object]:
    if figures.get(key) is None:
        return [what, "not measured", "", "", goal or ""]
    low, high = figures.get(key.replace("ratio", "spread")) or ("", "")
    return [what, figures[key], low, high, goal or ""]


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": model,
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "torch": f"torch {version('torch')}",
        "commit": commit.stdout.strip() or "no commit",
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="where the results go")
    parser.add_argument("--only", nargs="+", choices=RATIOS, default=list(RATIOS), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="of each benchmark, in place of its own number")
    parser.add_argument("--quick", action="store_true", help="each in small: do they run?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
