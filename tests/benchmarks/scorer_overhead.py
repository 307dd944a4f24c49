"""Samples per second, and CPU time of a sample, of the quickstart with and without a scorer that answers at once.

    python tests/benchmarks/scorer_overhead.py --json scorer_overhead.json

The scorer is the real actor in a process of its own, with an engine that gives zeros: what remains is the way of the
tokens to it and of the log-probs back, through spool and rollouts into the step, which measures them and learns nothing
from them.
"""

from __future__ import annotations

import argparse
import asyncio
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

import numpy as np
import psutil
import uvloop
from results import write
from runs import QUICKSTART, ROOT, SMALL, find_free_port, read

from areal.data import quickstart
from areal.samples.trajectory import TokenScores

STEPS, FIRST, LAST = 32, 8, 28


class AtOnce:
    """An engine that gives zeros."""

    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores:
        return TokenScores(np.zeros(len(tokens) - 1, np.float32))

    def stats(self) -> Any:
        from areal.generation.engine_process import EngineStats

        return EngineStats(0, 0, 0.0, 0, 0)

    async def close(self) -> None:
        pass


def serve(folder: str) -> None:
    """Be the scorer of the run in the folder."""
    from actors.runtime.bound_addresses import ListenAddress, find_master, new_bus, open_network
    from actors.runtime.membership import Membership
    from actors.scorer.scorer import Scorer
    from protocols.addresses import host_of

    async def start(*_: Any, **__: Any) -> AtOnce:
        return AtOnce()

    async def run() -> None:
        master = find_master(folder, 300.0)
        listen_address = ListenAddress.towards(master)
        bus = new_bus("scorer/?", open_network(host_of(master), listen_address.bind))
        await Membership(Scorer, bus, master, None, listen_address, name="idle", start_engine=start).run()

    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())


def cpu_seconds(root: psutil.Process) -> Counter[str]:
    """CPU seconds so far of a run's processes, by role."""
    results = Counter[str]()
    for role in [root, *root.children()]:
        words = role.cmdline()
        name = words[words.index("--role") + 1] if "--role" in words else "supervisor"
        for process in [role, *(role.children(recursive=True) if name != "supervisor" else ())]:
            times = process.cpu_times()
            results[name] += times.user + times.system
    return results


def measure(model: Path, folder: Path, name: str, overrides: Sequence[str], *, scored: bool) -> dict[str, float]:
    """Samples/s, and CPU milliseconds of a sample by role."""
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        "--config",
        str(QUICKSTART),
        f"run_dir={folder}",
        f"name={name}",
        f"model={model.resolve()}",
        f"master.address=tcp://127.0.0.1:{find_free_port()}",
        f"steps={STEPS}",
        "data.eval_size=0",
        "observe.tensorboard=false",
        *overrides,
    ]
    records, looks = folder / name / "metrics.jsonl", {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as started:
        servers = [] if not scored else [psutil.Popen([sys.executable, __file__, "--serve", str(folder / name)])]
        while started.poll() is None:
            step_count = len(records.read_text().splitlines()) if records.is_file() else 0
            if step_count in (FIRST, LAST) and step_count not in looks:
                looks[step_count] = cpu_seconds(psutil.Process(started.pid))
                looks[step_count].update({"scorer": sum(sum(process.cpu_times()[:2]) for process in servers)})
            time.sleep(0.05)
        for process in servers:
            process.wait()
    (begin, look_before), (end, look_after) = looks.items()
    samples = 128 * (end - begin)
    costs = {role: 1000 * (look_after[role] - look_before[role]) / samples for role in look_after}
    return {"samples/s": read(folder / name).samples_per_second, "all": sum(costs.values())} | costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--model", type=Path, help="the quickstart's model (default: it is built, 80 s on two cores)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of small steps: does it run?")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    results: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        model = (options.model or quickstart.ensure(Path(folder) / "models")).resolve()
        scorer = ["trainer.teacher=idle", f"scorers.idle={{model: {model}, count: 0}}"]
        small = SMALL if options.quick else ()
        for number in range(1 if options.quick else options.rounds):
            for kind, rounds in results.items():
                overrides = [*small, *(scorer if kind == "with" else ())]
                rounds.append(measure(model, Path(folder), f"{kind}-{number}", overrides, scored=kind == "with"))
                print(kind, {name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
    medians = {
        kind: {name: median(of[name] for of in rounds) for name in rounds[0]} for kind, rounds in results.items()
    }
    for kind, values in medians.items():
        print(f"{kind}, medians:", {name: round(value, 2) for name, value in values.items()})
    write(medians, options.json)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
