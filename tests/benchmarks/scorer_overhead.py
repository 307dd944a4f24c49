"""Samples per second, and CPU time of a sample, of the quickstart with and without a scorer that answers at once.

    python tests/benchmarks/scorer_overhead.py --model runs/models/quickstart-... --rounds 3

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
from runs import QUICKSTART, ROOT, find_free_port, read

from areal.samples.trajectory import TokenScores

STEPS, FIRST = 32, 8


class AtOnce:
    """An engine that gives zeros."""

    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores:
        return TokenScores(np.zeros(len(tokens) - 1, np.float32))

    def stats(self) -> Any:
        from areal.generation.generation_engine import EngineStats

        return EngineStats(0, 0, 0.0, 0, 0)

    async def close(self) -> None:
        pass


def serve(folder: str) -> None:
    """Be the scorer of the run in the folder."""
    from actors.runtime.bound_addresses import ListenAddress, find_master, new_bus, open_network
    from actors.runtime.membership import Membership
    from actors.scorer import Scorer
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


def measure(model: Path, folder: Path, name: str, overrides: Sequence[str]) -> dict[str, float]:
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
        servers = [] if not overrides else [psutil.Popen([sys.executable, __file__, "--serve", str(folder / name)])]
        while started.poll() is None:
            step_count = len(records.read_text().splitlines()) if records.is_file() else 0
            if step_count in (FIRST, STEPS - 4) and step_count not in looks:
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
    parser.add_argument("--model", type=Path, help="the quickstart's model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    scorer = ["trainer.teacher=idle", f"scorers.idle={{model: {options.model.resolve()}, count: 0}}"]
    results: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for kind, rounds in results.items():
                overrides = scorer if kind == "with" else []
                rounds.append(measure(options.model, Path(folder), f"{kind}-{number}", overrides))
                print(kind, {name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
    for kind, rounds in results.items():
        print(f"{kind}, medians:", {name: round(median(item[name] for item in rounds), 2) for name in rounds[0]})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    main()
