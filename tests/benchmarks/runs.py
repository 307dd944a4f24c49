"""What the benchmarks of whole runs share: `run.py` as a process of its own, and what it wrote about itself."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
# What run.py beside them imports, even where another clone is installed; and what benchmarks share with tests.
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from support.networks import find_free_port  # noqa: E402

from areal.config import Config  # noqa: E402
from areal.data.rows import Prompt, prompt_text  # noqa: E402
from areal.rewards.lookup import resolve  # noqa: E402

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
# Steps before this share of a run fill the pipeline: they say nothing of its throughput.
FILLING = 0.4
# A run of seconds, of which --quick makes: it says whether a benchmark works, and nothing about speed.
SMALL = ("batch_size=4", "group_size=4", "sampling.max_new_tokens=32")
LOOK_SECONDS = 10


@dataclass(frozen=True)
class Run:
    """summary: of summary.json; steps: the lines of metrics.jsonl; memory: as `finish` returns it."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    memory: float = 0.0

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
    """A whole run below `folder`: of the quickstart's configuration with changes, or of the file that is the first of
    them. Its own folder is removed unless `keep`. A run that fails ends the benchmark."""
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        f"run_dir={folder}",
        f"name={name}",
        f"model={model.resolve()}",
        f"master.address=tcp://127.0.0.1:{find_free_port()}",
        *overrides,
    ]
    memory = finish(command, os.environ | {"HF_HUB_OFFLINE": "1"})
    results = replace(read(folder / name), memory=memory)
    if not keep:
        shutil.rmtree(folder / name)
    return results


resolved = lru_cache(resolve)


def reward_of(config: Config) -> str:
    """The name of its only reward."""
    (name,) = config.reward.functions
    return name


def score(name: str, row: dict[str, Any], prompt: Prompt, completion: str) -> float:
    """Of a completion, by the reward called `name`."""
    reward = resolved(name)
    return reward.results(reward.call(prompt_text(prompt), [completion], row), [completion])[0].score


def finish(command: Sequence[str], environment: dict[str, str], timeout: float | None = None) -> float:
    """Runs a command to its end. Returns the most GB that its processes had at once (proportional set size, looked at
    every few seconds). One that fails, or needs more than `timeout` seconds, ends the benchmark."""
    deadline = time.monotonic() + timeout if timeout else None
    memory = 0.0
    with tempfile.TemporaryFile("w+") as log:
        process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        while (code := waited(process)) is None:
            memory = max(memory, memory_of(process))
            if deadline and time.monotonic() > deadline:
                process.terminate()
        if code:
            log.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{log.read()[-3000:]}")
    return memory


def waited(process: psutil.Popen) -> int | None:
    """The exit status; None: it still runs after some seconds."""
    with suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
        return process.wait(LOOK_SECONDS)
    return None


def memory_of(process: psutil.Process) -> float:
    total = 0
    with suppress(psutil.NoSuchProcess):
        for item in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += item.memory_full_info().pss
    return total / 1e9


def read(folder: Path) -> Run:
    """The numbers of a run that has ended."""
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run(summary, steps)
