"""A long run of a tiny model with a fault every two minutes: is anything lost, does anything grow, what does it cost?

    python tests/benchmarks/soak.py --hours 2 --figure soak.svg

A run of `run.py` on the quickstart's task, with very short sums so that steps are quick, and two ranks of the trainer.
It evaluates and saves often, and its reward fails for one call in fifty. The faults are drawn from a seed
(soak_run.py): kills, SIGTERM, hangs and pauses of processes, a full disk, a reward that is down, Ctrl-C and the loss of
the machine, both with `--resume`. The run folder is on a small disk that the script mounts; where it may not, no disk
fills up. At the end the run is ended in order, and its record is checked. Every few seconds the script reads the memory
and the descriptors of every role, with its child processes, and the size of each part of the run folder.

Exits with 1 if a prompt was lost or trained twice, the bound was broken, memory or descriptors have grown, a process or
a file was left behind, or the run ended or stood still.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
from results import show, write
from runs import QUICKSTART, find_free_port
from soak_run import TARGETS, SoakRun, children, small_disk

from areal.data import quickstart
from areal.storage.run_folder import read_summary
from areal.storage.stored_groups import batches

REWARD = Path(__file__).resolve().with_name("soak_reward.py")
BOUND, BATCH = 4, 4
SETTING = (
    "steps=10000000",
    f"batch_size={BATCH}",
    "group_size=4",
    f"max_staleness={BOUND}",
    "data.eval_size=64",
    "data.options={max_digits: 4}",
    "sampling.max_new_tokens=32",
    "trainer.lr=1.0e-6",
    "trainer.minibatches=1",
    "trainer.checkpoint_every=50",
    "trainer.ranks=2",
    "evaluator.every=200",
    f"reward.functions={REWARD}:reward",
    "guard.effective_sample_size=0",
    "master.hang_seconds=20",
    "master.lease_seconds=20",
)
SAMPLE_SECONDS = 5.0
# Without a step for so long, the run is stuck.
STUCK_SECONDS = 600.0
# A process that is younger is still filling its caches and pools.
STARTING_SECONDS = 60.0
# A process whose parent has not waited for it for so long is left behind.
ZOMBIE_SECONDS = 120.0
WEIGHTS_KEPT, CHECKPOINTS_KEPT = 5, 3
# By how much the last tenth may exceed the first.
GROWTH = {"memory": (1.25, 50e6), "descriptors": (1.25, 10)}
# Files of the run folder: each line of the table adds up those whose path begins so.
UNFINISHED: dict[str, Any] = {"ok": False, "steps": None, "discarded": [], "prompts_open": []}
# What the table has, and what is printed after it.
ELSEWHERE = (*GROWTH, "files", "faults", "violations")
MEGABYTES = ("memory", "files")
COLUMNS = ("at", "seconds", "next_step", "standstill", "redone")
PARTS = (
    "journal.db",
    "spool.db",
    "events",
    "metrics.jsonl",
    "evaluations.jsonl",
    "logs",
    "tensorboard",
    "rollouts",
    "weights",
    "checkpoints",
)


def main() -> int:
    options = parse()
    if not options.only_report:
        if options.folder.exists():
            sys.exit(f"{options.folder} exists: give another --folder, or remove it.")
        model = (options.model or quickstart.ensure(options.folder / "models")).resolve()
        live(options.folder.resolve(), model, options.hours * 3600, options.every, options.seed)
    results = summarise(options.folder)
    tell(results)
    write(results, options.json or options.folder / "results.json")
    if options.figure:
        draw(records(options.folder / "samples.jsonl"), options.figure)
    return 1 if results["violations"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("soak"), help="where the run and the readings go")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--model", type=Path, help="of the quickstart's task (default: it is made)")
    parser.add_argument("--figure", type=Path, help="where the plot goes")
    parser.add_argument("--json", type=Path, help="where the numbers go (default: results.json in the folder)")
    parser.add_argument("--only-report", action="store_true", help="from the readings in the folder")
    parser.add_argument("--quick", action="store_true", help="two minutes with four faults: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.hours, options.every = 1 / 30, 30.0
    return options


def live(folder: Path, model: Path, seconds: float, every: float, seed: int) -> None:
    """Run for `seconds`, and write down readings, faults and violations. A run that ends by itself, or is stuck, ends
    this. What the run has left on its disk is copied into `folder`."""
    with small_disk(folder / "disk") as mounted:
        if not mounted:
            print("This user may not mount a disk: none will fill up.")
        kinds = [kind for kind in TARGETS if mounted or kind != "full disk"]
        overrides = [
            "--config",
            str(QUICKSTART),
            f"run_dir={folder / 'disk'}",
            "name=run",
            f"model={model}",
            f"master.address=tcp://127.0.0.1:{find_free_port()}",
            *SETTING,
        ]
        run = SoakRun(folder, overrides, kinds, seed)
        try:
            if error := endure(run, folder, seconds, every):
                run.violations.append(error)
                run.kill()
            else:
                run.stop(signal.SIGTERM)
            run.end()
            run.violations += leftovers(run.folder)
        finally:
            run.kill()
            (folder / "violations.json").write_text(json.dumps(run.violations))
            shutil.copytree(run.folder, folder / "run")


def endure(run: SoakRun, folder: Path, seconds: float, every: float) -> str | None:
    """Let faults befall a run, each after a step since the one before. Returns why it did not last so long."""
    began = time.monotonic()
    zombies: dict[str, float] = {}
    steps, stepped, struck, due = 0, 0.0, 0, every
    with (folder / "samples.jsonl").open("w") as readings, (folder / "faults.jsonl").open("w") as faults:
        while (now := time.monotonic() - began) < seconds or run.steps <= struck:
            if run.supervisor.poll() is not None:
                return f"the run ended by itself with {run.supervisor.returncode} after {now:.0f} s: see out.txt"
            if run.steps > steps:
                steps, stepped = run.steps, now
            if now - stepped > STUCK_SECONDS:
                return f"no step was committed for {STUCK_SECONDS:g} s: see out.txt"
            run.replace_who_left()
            readings.write(json.dumps({"seconds": now, **read(run)}) + "\n")
            readings.flush()
            zombies = {name: zombies.get(name, now) for name in run.zombies()}
            for name, since in zombies.items():
                if now - since > ZOMBIE_SECONDS:
                    run.violations.append(f"{ZOMBIE_SECONDS:g} s after its end nobody has waited for {name}")
                    zombies[name] = math.inf  # it is said once
            if now >= due and now < seconds and steps > struck and (fault := run.befall()):
                faults.write(json.dumps(asdict(fault)) + "\n")
                faults.flush()
                struck = run.steps
                due = max(due + every, time.monotonic() - began + every / 4)
            time.sleep(SAMPLE_SECONDS)
    return None


def read(run: SoakRun) -> dict[str, Any]:
    """Memory in bytes and descriptors of each actor with its child processes, bytes of files by part, and steps."""
    actors = []
    for role, process in [("supervisor", psutil.Process(run.supervisor.pid)), *run.actors()]:
        memory = descriptors = 0
        below = children(process.pid, recursive=True) if role != "supervisor" else []
        for item in (process, *below):
            with suppress(psutil.NoSuchProcess):
                memory += item.memory_info().rss
                descriptors += item.num_fds()
        with suppress(psutil.NoSuchProcess):
            age = time.time() - process.create_time()
            actors.append({"role": role, "age": age, "memory": memory, "descriptors": descriptors})
    sizes = dict.fromkeys(PARTS, 0)
    for parent, _, names in os.walk(run.folder):
        for name in names:
            path = Path(parent, name)
            part = next((part for part in PARTS if path.relative_to(run.folder).as_posix().startswith(part)), None)
            with suppress(FileNotFoundError):
                if part:
                    sizes[part] += path.stat().st_size
    return {"actors": actors, "files": sizes, "steps": run.steps}


def leftovers(folder: Path) -> list[str]:
    """What a run that has ended should not have left in its folder, in words."""
    hidden = [path for path in folder.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]
    stored = {"weights": WEIGHTS_KEPT, "checkpoints": CHECKPOINTS_KEPT}
    for part, count in stored.items():  # a run that ended before its first step has neither
        hidden += sorted((folder / part).glob("*"), key=lambda path: path.stat().st_mtime)[:-count]
    return [f"{path.relative_to(folder)} was left behind in the run folder" for path in hidden]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summarise(folder: Path) -> dict[str, Any]:
    samples, run = records(folder / "samples.jsonl"), folder / "run"
    metrics, summary = records(run / "metrics.jsonl"), read_summary(run) or UNFINISHED
    growth = {what: ends_by_role(samples, what) for what in GROWTH}
    gaps = [later["time"] - earlier["time"] for earlier, later in pairwise(metrics)]
    return {
        "hours": samples[-1]["seconds"] / 3600,
        "steps": metrics[-1]["step"],
        "evaluations": sum(1 for _ in (run / "evaluations.jsonl").open()),
        "staleness_max": max(record["staleness_max"] for record in metrics),
        **{name: summary.get(name) for name in ("masters", "lineages", "groups_requeued", "groups_discarded")},
        "seconds_a_step": median(gaps),
        "share_of_time_lost": 1 - median(gaps) * len(gaps) / sum(gaps),
        "loop_delay": delays(run),
        "faults": costs(folder, metrics),
        **growth,
        "files": {part: ends([sample["files"][part] for sample in samples]) for part in PARTS},
        "violations": [
            *json.loads((folder / "violations.json").read_text()),
            *check_accounts(metrics, summary),
            *check_rollouts(run / "rollouts", metrics),
            *grown(growth),
        ],
    }


def ends(values: Sequence[float]) -> list[float]:
    """The median of the first tenth, that of the last tenth, and the greatest."""
    tenth = max(1, len(values) // 10)
    return [median(values[:tenth]), median(values[-tenth:]), max(values)]


def ends_by_role(samples: Sequence[Mapping[str, Any]], what: str) -> dict[str, list[float]]:
    results = defaultdict(list)
    for earlier, sample in pairwise(samples):
        for actor in sample["actors"]:
            # While no step is committed, some role is still starting.
            if sample["steps"] > earlier["steps"] and actor["age"] > STARTING_SECONDS:
                results[actor["role"]].append(actor[what])
    return {role: ends(values) for role, values in results.items()}


def grown(growth: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    for what, by_role in growth.items():
        factor, extra = GROWTH[what]
        for role, (first, last, _) in by_role.items():
            if last > factor * first + extra:
                yield f"{what} of {role} grew from {first:,.0f} to {last:,.0f}"


def check_accounts(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fates of the prompts and with the staleness."""
    if [record["step"] for record in metrics] != list(range(1, len(metrics) + 1)):
        yield "metrics.jsonl does not have each step once"
    if not summary["ok"] or summary["steps"] != len(metrics):
        yield f"metrics.jsonl has {len(metrics)} steps, summary.json {summary['steps']}, ok: {summary['ok']}"
    for record in metrics:
        if record["staleness_max"] > BOUND or len(record["prompts"]) != BATCH:
            yield f"step {record['step']}: staleness {record['staleness_max']}, prompts {record['prompts']}"
    trained = [prompt for record in metrics for prompt in record["prompts"]]
    losses = [loss for source in (*metrics, summary) for loss in source["discarded"]]
    yield from (f"prompt {prompt} was discarded without a reason" for prompt, reason in losses if not reason)
    fates = Counter([*trained, *(prompt for prompt, _ in losses), *summary["prompts_open"]])
    yield from (f"prompt {prompt} has {count} fates" for prompt, count in fates.items() if count > 1)
    yield from (f"prompt {prompt} was lost" for prompt in range(max(trained) + 1) if prompt not in fates)


def check_rollouts(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the rollouts differ from the metrics, or have tokens that are too old."""
    prompts = {}
    for step, groups in batches(folder):
        prompts[step] = [group.prompt_index for group in groups]
        for group in groups:
            oldest = min(int(sample.versions[sample.versions >= 0].min()) for sample in group.trajectories)
            if step - 1 - oldest > BOUND:
                yield f"step {step}: group {group.id} has tokens of version {oldest}"
    for record in metrics:
        if prompts.get(record["step"]) != record["prompts"]:
            yield f"step {record['step']} of the rollouts has other prompts: {prompts.get(record['step'])}"


def costs(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each fault: seconds until the next step, the longest time without one before the next fault, the steps that
    the trainer redid, and what the console said."""
    faults = records(folder / "faults.jsonl")
    output = (folder / "out.txt").read_bytes()
    times = [record["time"] for record in metrics]
    redone = restorations(folder / "run" / "logs")
    results = []
    for fault, following in pairwise([*faults, {"time": math.inf, "output": len(output)}]):
        begin, end = fault["time"], following["time"]
        lines = output[fault["output"] : following["output"]].decode(errors="replace").splitlines()
        results.append(
            {
                **fault,
                "at": begin - times[0],
                "next_step": next((moment - begin for moment in times if moment > begin), math.inf),
                "standstill": max((b - a for a, b in pairwise(times) if begin < b <= end), default=math.inf),
                "redone": sum(steps for moment, steps in redone if begin < moment <= end),
                "lines": [line for line in lines if not line.startswith("step ")],
            }
        )
    return results


def restorations(logs: Path) -> list[tuple[float, int]]:
    """When trainers were restored, in seconds since 1970, and the steps that they redid for it."""
    lines = [json.loads(line) for path in logs.glob("trainer-*.jsonl*") for line in path.read_text().splitlines()]
    restored = [line for line in lines if line["event"] == "restored"]
    return [(datetime.fromisoformat(line["timestamp"]).timestamp(), line["redone"]) for line in restored]


def delays(run: Path) -> dict[str, dict[str, float]]:
    """By role: quantiles over the seconds of the run of the longest delay of an event loop within the second."""
    results = defaultdict(list)
    for name in ("events.1.jsonl", "events.jsonl"):
        for line in (run / name).open() if (run / name).exists() else ():
            event = json.loads(line)
            if "loop_delay" in event.get("stats", {}):
                results[event["actor"].split("/")[0]].append(event["stats"]["loop_delay"])
    several = {role: values for role, values in results.items() if len(values) > 1}
    cuts = {role: quantiles(values, n=1000, method="inclusive") for role, values in several.items()}
    return {role: {"p50": item[499], "p99": item[989], "p99.9": item[998]} for role, item in cuts.items()}


def tell(results: Mapping[str, Any]) -> None:
    show(
        f"{results['steps']:,} steps in {results['hours']:.2f} hours, {results['seconds_a_step']:.2f} s each",
        ["fault", "at", "lasted", "next step", "longest without a step", "steps redone", "lines"],
        [
            [f"{fault['kind']}, {fault['target']}", *(fault[name] for name in COLUMNS), len(fault["lines"])]
            for fault in results["faults"]
        ],
        [],
    )
    show(
        "first tenth, last tenth, most",
        ["", "first", "last", "most"],
        [
            [f"{what} of {name}", *(end / 1e6 if what in MEGABYTES else end for end in figures)]
            for what in (*GROWTH, "files")
            for name, figures in results[what].items()
        ],
        [f"{name}: {value}" for name, value in results.items() if name not in ELSEWHERE],
    )
    print("\n".join(results["violations"]) or "No violation.")


def draw(samples: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Memory by role, sizes of files and steps over the hours."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    memory = defaultdict(list)
    for sample in samples:
        for actor in sample["actors"]:
            memory[actor["role"]].append((sample["seconds"] / 3600, actor["memory"] / 1e6))
    for role, points in memory.items():
        axes[0].plot(*zip(*points, strict=True), label=role, linewidth=1)
    hours = [sample["seconds"] / 3600 for sample in samples]
    for part in PARTS:
        axes[1].plot(hours, [max(sample["files"][part] / 1e6, 1e-3) for sample in samples], label=part, linewidth=1)
    for axis, name in zip(axes, ("memory", "files"), strict=False):
        axis.set_yscale("log")
        axis.set_ylabel(f"{name}, MB")
        axis.legend(fontsize="x-small", ncols=3)
    axes[2].plot(hours, [sample["steps"] for sample in samples], linewidth=1)
    axes[2].set_ylabel("steps committed")
    axes[2].set_xlabel("hours")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
