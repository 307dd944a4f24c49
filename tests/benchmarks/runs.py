"""What the benchmarks of whole runs share: `run.py` as a process of its own, and what it wrote about itself."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
# Steps before this share of a run fill the pipeline: they say nothing of its throughput.
FILLING = 0.4


@dataclass(frozen=True)
class Run:
    """summary: of summary.json; steps: the lines of metrics.jsonl."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def steady(self) -> list[dict[str, Any]]:
        return self.steps[int(len(self.steps) * FILLING) :]

    @property
    def samples_per_second(self) -> float:
        """Samples trained per second, once the pipeline is full."""
        samples = self.summary["samples_trained"] / len(self.steps) * len(self.steady)
        return samples / self.total("step_seconds")

    def mean(self, metric: str) -> float:
        return statistics.fmean(step[metric] for step in self.steady)

    def total(self, metric: str) -> float:
        return sum(step[metric] for step in self.steady)


def run(model: Path, folder: Path, name: str, overrides: Sequence[str], *, keep: bool = False) -> Run:
    """A whole run of the quickstart's configuration, changed, below `folder`. Its own folder is removed unless `keep`.
    A run that fails ends the benchmark."""
    command = [
        sys.executable, str(ROOT / "run.py"), f"run_dir={folder}", f"name={name}", f"model={model.resolve()}",
        f"master.address=tcp://127.0.0.1:{free_port()}", *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    found = read(folder / name)
    if not keep:
        shutil.rmtree(folder / name)
    return found


def read(folder: Path) -> Run:
    """The numbers of a run that has ended."""
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run(summary, steps)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
