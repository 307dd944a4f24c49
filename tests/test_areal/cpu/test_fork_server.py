"""vLLM's engine process is forked where it can be, and has the environment of the process that starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal.base.processes import ROOT
from areal.cpu import fork_server
from areal.cpu.fork_server import forked_engines, start_fork_server
from areal.extensions.selftest.synthetic import write_tiny_model

SCRIPT = """
import asyncio, os, psutil, signal, sys
from pathlib import Path
from areal.generation.engine_start import prepare
from areal.generation.generation_engine import GenerationEngine
from areal.extensions.selftest.synthetic import tiny_config

async def main(model, config):
    engine = await GenerationEngine.start(model, config, version=0)
    (core,) = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    server = core.parent()
    print(core.pid, server.pid)
    print(" ".join(server.cmdline()))
    if "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    await engine.close()

if __name__ == "__main__":
    model = Path(sys.argv[1])
    config = tiny_config(model, "float32").generator
    if "prepared" in sys.argv:
        prepare(config)
        assert "vllm.v1.engine.core" in sys.modules
    asyncio.run(main(model, config))
"""


@pytest.mark.slow  # as the engines of runs in test_chaos.py
@pytest.mark.parametrize(
    ("words", "server"),
    [([], "multiprocessing.forkserver"), (["prepared", "killed"], "areal forkserver of vLLM")],
    ids=["by a new process", "by a fork of this one"],
)
def test_the_first_engine_of_a_process_is_forked(tmp_path, words, server):
    """Whatever vLLM and its packages do to the environment when they are imported. All ends with the process."""
    write_tiny_model(tmp_path / "model", "float32")
    (tmp_path / "start.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "start.py"), str(tmp_path / "model"), *words]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300)
    assert process.returncode == (-signal.SIGKILL if "killed" in words else 0)
    facts, title = process.stdout.splitlines()[-2:]
    assert server in title
    remaining = [psutil.Process(int(pid)) for pid in facts.split()[:2] if psutil.pid_exists(int(pid))]
    assert not psutil.wait_procs(remaining, timeout=60)[1]


def write_facts(file: str) -> None:
    Path(file).write_text(json.dumps([os.getppid(), os.environ.get("AREAL_LATE")]))


def facts_of_a_process(file: Path) -> list:
    """The parent and the variable AREAL_LATE of a process that is started as vLLM starts its engine."""
    from vllm.v1.engine import utils

    process = utils.get_mp_context().Process(target=write_facts, name="engine", kwargs={"file": str(file)})
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return json.loads(file.read_text())


def test_an_engine_process_is_forked_unless_the_environment_has_changed(tmp_path, monkeypatch):
    from vllm.v1.engine import utils

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    start_fork_server()
    monkeypatch.setattr(fork_server, "_environment", fork_server._read_early())
    monkeypatch.setenv("AREAL_LATE", "set after the fork server was started")
    usual = utils.get_mp_context
    with forked_engines():
        parent, late = facts_of_a_process(tmp_path / "forked")
    assert parent != os.getpid()
    assert late == "set after the fork server was started"
    assert utils.get_mp_context is usual

    for name, value in {"OMP_NUM_THREADS": "3", "LD_PRELOAD": ""}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            with forked_engines():
                assert facts_of_a_process(tmp_path / name) == [os.getpid(), late]


SPAWNING = """
import multiprocessing, sys
from areal.cpu import fork_server

def start(method, *functions):
    process = multiprocessing.get_context(method).Process(target=functions[0], args=functions[1:])
    process.start()
    process.join()
    sys.exit(process.exitcode)

if __name__ == "__main__":
    fork_server.IMPORTED = []
    fork_server.start_fork_server()
    start("forkserver", start, "spawn", print, "spawned")
"""


def test_an_engine_of_several_devices_spawns_its_workers(tmp_path):
    (tmp_path / "start.py").write_text(SPAWNING)
    process = subprocess.run(
        [sys.executable, str(tmp_path / "start.py")], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert (process.returncode, process.stdout) == (0, "spawned\n")


BEGINNING = """
import os
from actors.start import run_command as command

command.run_role = lambda *arguments: print(len(os.listdir("/proc/self/task")))
command.main()
"""


def test_a_generator_has_one_thread_when_it_asks_for_its_configuration():
    """In a user's environment: `make test` sets OMP_NUM_THREADS, by which numpy starts no threads."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    command = [sys.executable, "-c", BEGINNING, "--role", "generator", "--master", "tcp://127.0.0.1:1"]
    threads = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert threads.stdout == "1\n"
