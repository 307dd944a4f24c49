"""The quickstart of this working tree against that of a commit, in pairs: what a change costs, or gains.

    python tests/benchmarks/versus_commit.py e85d01b --rounds 5

Both use the installed packages, the same model and the same settings, and no accuracy is measured. The order changes
from pair to pair. Overrides after `--` hold for both: `-- group_size=4`. A ratio is this tree's figure over the
commit's, the median over the pairs, so below 1 is better. CPU seconds are those of all processes of a role in a step
of the middle of a run. They depend less than seconds on what else the machine does; still, measure with the machine
alone: caches and clocks are shared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from bench import machine
from results import ratio, show, write
from runs import FILLING, ROOT, SMALL, find_free_port

from areal.data import quickstart

HERE, COMMIT = "this tree", "the commit"
SECONDS, CPU = "seconds a step", "CPU seconds a step"
# CPU seconds of a role in a step: less than this says nothing.
LEAST = 0.01
LOOK_SECONDS, RUN_SECONDS = 0.2, 900.0


def check_out(commit: str, folder: Path) -> Path:
    """The files of a commit, with the compiled parts of this tree."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(archive.stderr.decode().strip())
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    for compiled in (ROOT / "areal" / "cpu").glob("*.so"):
        if (folder / "areal" / "cpu").is_dir():
            (folder / "areal" / "cpu" / compiled.name).write_bytes(compiled.read_bytes())
    return folder


def measure(tree: Path, folder: Path, model: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and CPU seconds of a step, from step FILLING * steps to the last but one. A run that fails ends the
    benchmark."""
    command = [sys.executable, "run.py", f"run_dir={folder}", "name=run", f"steps={options.steps}"]
    command += [f"model={model.resolve()}", f"master.address=tcp://127.0.0.1:{find_free_port()}", "data.eval_size=0"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tree)}
    with tempfile.TemporaryFile("w+") as log:
        process = psutil.Popen([*command, *options.overrides], cwd=tree, env=environment, stdout=log, stderr=log)
        metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + RUN_SECONDS
        marks = []
        for step in (int(FILLING * options.steps), options.steps - 1):
            while steps_of(metrics) < step and process.poll() is None and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
            marks.append((time.monotonic(), steps_of(metrics), cpu_by_role(process)))
        if process.poll() is None and time.monotonic() >= deadline:
            process.terminate()
        if process.wait():
            log.seek(0)
            sys.exit(f"{' '.join(command)} in {tree} failed:\n{log.read()[-3000:]}")
    (began, first, cpu_before), (ended, last, cpu_after) = marks
    steps = last - first
    roles = {role: (seconds - cpu_before[role]) / steps for role, seconds in cpu_after.items()}
    return {SECONDS: (ended - began) / steps, CPU: sum(roles.values())} | roles


def steps_of(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def cpu_by_role(process: psutil.Process) -> Counter[str]:
    """CPU seconds so far of the processes of a run, by role; an engine and the workers of a reward by their names."""
    seconds: Counter[str] = Counter()
    for child in process.children(recursive=True):
        try:
            words, times = child.cmdline(), child.cpu_times()
            name = words[words.index("--role") + 1] if "--role" in words else child.name()
        except psutil.Error:  # it has ended
            continue
        seconds[name] += times.user + times.system
    return seconds


def summary(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """By figure: the median of each tree, and of the ratios of the pairs, with the least and the greatest."""
    names = [
        name for name in rounds[0][HERE] if all(pair[tree].get(name, 0.0) > LEAST for pair in rounds for tree in pair)
    ]
    rows = {}
    for name in names:
        here, there = ([pair[tree][name] for pair in rounds] for tree in (HERE, COMMIT))
        of, spread = ratio(here, there)
        rows[name] = {HERE: median(here), COMMIT: median(there), "ratio": of, "spread": spread}
    return {"ratio": rows[SECONDS]["ratio"], "spread": rows[SECONDS]["spread"], "rows": rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what this tree is compared with")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of both runs")
    parser.add_argument("--model", type=Path, help="the quickstart's model (default: it is built, 80 s on two cores)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one pair of small runs: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.overrides = 1, 6, [*SMALL, *options.overrides]
    return options


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        model = options.model or quickstart.ensure(folder / "models")
        trees = {HERE: ROOT, COMMIT: check_out(options.commit, folder / "commit")}
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(options.rounds):
            pair = {}
            for name in (HERE, COMMIT) if number % 2 else (COMMIT, HERE):
                pair[name] = measure(trees[name], folder / f"{name.split()[-1]}-{number}", model, options)
                print(f"pair {number + 1}, {name}: {pair[name][SECONDS]:.2f} s a step", file=sys.stderr)
            rounds.append(pair)
            write({"machine": machine(), "commit": options.commit} | summary(rounds) | {"rounds": rounds}, options.json)
    show(
        f"{options.rounds} pairs of {options.steps} steps, {', '.join(map(str, machine().values()))}",
        ["", HERE, options.commit, "ratio", "least", "greatest"],
        [[name, row[HERE], row[COMMIT], row["ratio"], *row["spread"]] for name, row in summary(rounds)["rows"].items()],
        [f"The load of the last 15 minutes was {os.getloadavg()[2]:.1f}: these runs alone make about 2."],
    )


if __name__ == "__main__":
    main()
