"""A long run of a tiny model: does anything grow without bound, and does the run survive what a day brings?

    python tests/benchmarks/soak.py --hours 2 --folder soak --figure soak.svg

A run of `run.py` on the quickstart's task, with very short sums so that steps are quick. It evaluates and saves often.
Its reward fails now and then, for one call in fifty and for some seconds in every ten minutes. The master is killed
some times in the first and in the last minutes. At the end SIGTERM stops the run. Every few seconds the script reads
the memory of every role, with its child processes, and the size of each part of the run folder.

The table compares the median of the first tenth after the start-up with that of the last tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
from results import show, write
from runs import QUICKSTART, ROOT, free_port

from areal.data import quickstart

REWARD = Path(__file__).resolve().with_name("soak_reward.py")
SETTING = (
    "steps=10000000", "batch_size=4", "group_size=4", "data.eval_size=64", "data.options={max_digits: 4}",
    "sampling.max_new_tokens=32", "trainer.lr=1.0e-6", "trainer.minibatches=1", "trainer.checkpoint_every=50",
    "evaluator.every=200", f"reward.functions={REWARD}:reward", "guard.effective_sample_size=0",
)  # fmt: skip
SAMPLE_SECONDS = 5.0
KILLS = 5
# From one kill of the master to the next.
KILL_SECONDS = 45.0
# Actors start, and their caches and pools fill.
STARTING_SECONDS = 300.0
ROLES = ("master", "trainer", "generator", "rollout_manager", "reward", "evaluator")
# Files of the run folder: each line of the table adds up those whose path begins so.
PARTS = ("journal.db", "spool.db", "events", "metrics.jsonl", "evaluations.jsonl", "logs", "tensorboard", "weights",
         "checkpoints")  # fmt: skip


def main() -> None:
    options = parse()
    folder = options.folder / "run"
    if not options.only_report:
        if folder.exists():
            sys.exit(f"{folder} exists: give another --folder, or remove it.")
        live(options.folder, options.hours * 3600)
    samples = [json.loads(line) for line in (options.folder / "samples.jsonl").read_text().splitlines()]
    kills = json.loads((options.folder / "kills.json").read_text())
    results = summarise(folder, samples, kills)
    tell(results)
    write(results, options.json)
    if options.figure:
        draw(samples, options.figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the run and the readings go")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--figure", type=Path, help="where the plot goes")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--only-report", action="store_true", help="from the readings in the folder")
    return parser.parse_args()


def live(folder: Path, seconds: float) -> None:
    """Run for `seconds`, and write down the readings and the kills. A run that ends by itself ends the benchmark."""
    folder.mkdir(parents=True, exist_ok=True)
    model = quickstart.ensure(folder / "models")
    command = [
        sys.executable, str(ROOT / "run.py"), "--config", str(QUICKSTART), f"run_dir={folder}", "name=run",
        f"model={model.resolve()}", f"master.address=tcp://127.0.0.1:{free_port()}", *SETTING,
    ]  # fmt: skip
    kills: list[dict[str, Any]] = []
    with (folder / "out.txt").open("w") as out, (folder / "samples.jsonl").open("w") as readings:
        run = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        began = time.monotonic()
        due = [STARTING_SECONDS + i * KILL_SECONDS for i in range(KILLS)]
        due += [seconds - (KILLS - i) * KILL_SECONDS for i in range(KILLS)]
        while (now := time.monotonic() - began) < seconds:
            if run.poll() is not None:
                sys.exit(f"The run ended with {run.returncode} after {now:.0f} s: see {folder / 'out.txt'}")
            readings.write(json.dumps({"seconds": now, **read(run.pid, folder / "run")}) + "\n")
            readings.flush()
            if due and now >= due[0]:
                due.pop(0)
                kills.append({"seconds": now, "back": kill_master(run.pid, folder / "run")})
            time.sleep(SAMPLE_SECONDS)
        (folder / "kills.json").write_text(json.dumps(kills))
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=300)


def read(pid: int, run: Path) -> dict[str, Any]:
    """Bytes of memory by role, bytes of files by part, and steps committed."""
    memory = {role: 0 for role in ROLES}
    for role, process in roles(pid):
        for each in (process, *process.children(recursive=True)):
            try:
                memory[role] += each.memory_info().rss
            except psutil.NoSuchProcess:
                pass
    sizes = dict.fromkeys(PARTS, 0)
    for parent, _, names in os.walk(run):
        for name in names:
            path = Path(parent, name)
            part = next((part for part in PARTS if path.relative_to(run).as_posix().startswith(part)), None)
            try:
                if part:
                    sizes[part] += path.stat().st_size
            except FileNotFoundError:
                pass
    return {"memory": memory, "files": sizes, "steps": steps(run)}


def roles(pid: int) -> list[tuple[str, psutil.Process]]:
    """The processes of the supervisor's roles."""
    found = []
    for process in psutil.Process(pid).children():
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "--role" in words:
            found.append((words[words.index("--role") + 1], process))
    return found


def steps(run: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def kill_master(pid: int, run: Path) -> float:
    """Kill the master. Returns the seconds until the next step is committed."""
    next(process for role, process in roles(pid) if role == "master").kill()
    before, killed = steps(run), time.monotonic()
    while steps(run) == before:
        if time.monotonic() - killed > STARTING_SECONDS:
            sys.exit("No step was committed after a kill of the master.")
        time.sleep(0.05)
    return time.monotonic() - killed


def summarise(run: Path, samples: Sequence[Mapping[str, Any]], kills: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """First and last tenth of each reading; delays of the event loops; how long the master's absence was."""
    steady = [sample for sample in samples if sample["seconds"] > STARTING_SECONDS + KILLS * KILL_SECONDS]
    tenth = max(1, len(steady) // 10)

    def ends(kind: str, name: str) -> list[float]:
        values = [sample[kind][name] / 1e6 for sample in steady]
        return [median(values[:tenth]), median(values[-tenth:]), max(values)]

    summary = json.loads((run / "summary.json").read_text())
    half = len(kills) // 2
    return {
        "hours": samples[-1]["seconds"] / 3600,
        "steps": samples[-1]["steps"],
        "evaluations": sum(1 for _ in (run / "evaluations.jsonl").open()),
        "staleness_max": summary["staleness_max"],
        "masters": summary["masters"],
        "groups_requeued": summary["groups_requeued"],
        "groups_discarded": summary["groups_discarded"],
        "memory_mb": {role: ends("memory", role) for role in ROLES},
        "files_mb": {part: ends("files", part) for part in PARTS},
        "loop_delay": delays(run),
        "seconds_without_a_step": {
            "first kills": [kill["back"] for kill in kills[:half]],
            "last kills": [kill["back"] for kill in kills[half:]],
        },
    }


def delays(run: Path) -> dict[str, dict[str, float]]:
    """By role: quantiles over the seconds of the run of the longest delay of an event loop within the second."""
    found = defaultdict(list)
    for name in ("events.1.jsonl", "events.jsonl"):
        for line in (run / name).open() if (run / name).exists() else ():
            event = json.loads(line)
            if "loop_delay" in event.get("stats", {}):
                found[event["actor"].split("/")[0]].append(event["stats"]["loop_delay"])
    cuts = {role: quantiles(values, n=1000, method="inclusive") for role, values in found.items()}
    return {role: {"p50": each[499], "p99": each[989], "p99.9": each[998]} for role, each in cuts.items()}


def tell(results: Mapping[str, Any]) -> None:
    show(
        f"{results['steps']:,} steps in {results['hours']:.1f} hours",
        ["MB", "first tenth", "last tenth", "most"],
        [[name, *ends] for kind in ("memory_mb", "files_mb") for name, ends in results[kind].items()],
        [f"{name}: {value}" for name, value in results.items() if not name.endswith("_mb")],
    )


def draw(samples: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Memory by role and sizes of files over the hours."""
    from matplotlib import pyplot

    hours = [sample["seconds"] / 3600 for sample in samples]
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    for axis, kind, names in zip(axes, ("memory", "files"), (ROLES, PARTS), strict=False):
        for name in names:
            axis.plot(hours, [max(sample[kind][name] / 1e6, 1e-3) for sample in samples], label=name, linewidth=1)
        axis.set_yscale("log")
        axis.set_ylabel(f"{kind}, MB")
        axis.legend(fontsize="x-small", ncols=3)
    axes[2].plot(hours, [sample["steps"] for sample in samples], linewidth=1)
    axes[2].set_ylabel("steps committed")
    axes[2].set_xlabel("hours")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
