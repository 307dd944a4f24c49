"""All benchmarks of docs/benchmarks.md, one after another, on a machine that does nothing else: `make bench`.

    python tests/benchmarks/bench.py                          # several hours; goes on where it was stopped
    python tests/benchmarks/bench.py --only bus weights
    python tests/benchmarks/bench.py --rounds 1
    python tests/benchmarks/bench.py --quick                  # minutes: does each of them run?

Each benchmark writes FOLDER/NAME.json; what is there is not measured again. FOLDER/bench.json has the machine and all
results, and the table shows each ratio with its spread and its goal (ratios.yaml).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from results import show

from areal.data import quickstart
from areal.extensions.recipes.machine import machine

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RATIOS: dict[str, dict[str, list[Any]]] = yaml.safe_load((HERE / "ratios.yaml").read_text())
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
    here = machine()
    (options.folder / "bench.json").write_text(json.dumps({"made_on": here, "results": results}, indent=2) + "\n")
    show(
        f"{here['processor']}, {here['cores']} cores, commit {here['commit'] or 'unknown'}",
        ["", "ratio", "least", "greatest", "goal"],
        [row(figures, key, *of) for name, figures in results.items() for key, of in RATIOS[name].items()],
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


def row(figures: dict[str, Any], key: str, what: str, goal: float | None) -> list[object]:
    if figures.get(key) is None:
        return [what, "not measured", "", "", goal or ""]
    low, high = figures.get(key.replace("ratio", "spread")) or ("", "")
    return [what, figures[key], low, high, goal or ""]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="where the results go")
    parser.add_argument("--only", nargs="+", choices=RATIOS, default=list(RATIOS), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="of each benchmark, in place of its own number")
    parser.add_argument("--quick", action="store_true", help="each in small: do they run?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
