"""Fixtures for all tests: a tiny model, free ports, and runs of `run.py` as a user starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: the quickstart's architecture after a few steps of its warm start."""
    from areal import quickstart

    folder = tmp_path_factory.mktemp("models") / "tiny"
    quickstart.build(folder, recipe=quickstart.Recipe(steps=5, short_steps=5), threads=1)
    return folder


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Run:
    """A `run.py` process of its own, with everything below it."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout: float) -> str:
        """What it printed. Fails the test if it does not end in time."""
        try:
            return self.process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"run.py did not end within {timeout} s:\n{self.process.communicate()[0][-4000:]}")

    @property
    def code(self) -> int | None:
        return self.process.returncode


@pytest.fixture
def run(tmp_path: Path):
    """Start `run.py` with arguments, in an empty folder. What is left of it at the end is killed."""
    runs: list[Run] = []

    def start(*arguments: str) -> Run:
        runs.append(Run(list(arguments), tmp_path))
        return runs[-1]

    yield start
    for started in runs:
        if started.process.poll() is None:
            started.process.terminate()
            try:
                started.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(started.process.pid, signal.SIGKILL)
