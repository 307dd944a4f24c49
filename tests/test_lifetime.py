"""When a run ends that is told to, or whose caller ends; here while its master makes the quickstart's model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from support.process_tree import Process, descendants

from actors.watching.machine_runs import run_in, runs_here, stop_run
from areal.base.processes import KEYS

CALLER = "import areal; areal.train(model='quickstart', steps=1)"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def making(process: subprocess.Popen) -> list[Process]:
    """What is below a process once a model is made there."""
    while process.poll() is None:
        below = descendants(process.pid)
        if any(" quickstart-model " in one.command for one in below):
            return below
        time.sleep(0.1)
    raise AssertionError("it has ended before")


def wait_for_end(processes: list[Process]) -> None:
    while any(Path(f"/proc/{process.pid}/cmdline").exists() for process in processes):
        time.sleep(0.1)


def test_a_run_of_areal_train_ends_with_its_caller_even_if_that_is_killed(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop(KEYS, None)
    caller = subprocess.Popen([sys.executable, "-c", CALLER], cwd=tmp_path, env=environment)
    below = making(caller)
    (here,) = [run for run in runs_here() if run.folder == tmp_path / "runs" / "quickstart"]
    assert here.process in [child.pid for child in below] and "import areal; areal.train" in here.starter
    caller.kill()
    caller.wait()
    wait_for_end(below)


@pytest.fixture
def heard_hangup():
    """Children hear SIGHUP, also if the tests themselves run below nohup."""
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old_handler)


@pytest.mark.usefixtures("heard_hangup")
def test_a_run_that_is_stopped_while_its_model_is_made_ends_at_once_and_can_be_resumed(run, tmp_path):
    folder = tmp_path / "runs" / "quickstart"
    started = run()
    below = making(started.process)
    assert stop_run(run_in(folder)) == []
    wait_for_end(below)
    assert "told to stop by SIGTERM" in started.wait(60) and started.code == 1
    assert "killed" not in started.output and not [*tmp_path.glob("runs/models/*")]
    again = run("--resume", str(folder))
    below = making(again.process)
    again.process.send_signal(signal.SIGHUP)
    assert "told to stop by SIGHUP" in again.wait(60) and again.code == 1
    wait_for_end(below)
