"""Fixtures for all tests: a tiny model, free ports, and runs of `run.py` as a user starts them."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest
from support.networks import find_free_port, keys_folder
from support.small_runs import made_once

from areal.base.processes import cache_folder
from areal.cpu.processor import avoid_broken_amx

# A busy machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
# The same examples each time: whether a change passes does not depend on luck. `make test-all` draws new ones.
hypothesis.settings.register_profile("brief", deadline=None, max_examples=25, derandomize=True)

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=0, help="kill this many processes of the whole quickstart")
    parser.addoption("--chaos-seed", type=int, help="what is killed when (default: something else each time)")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected
    hypothesis.settings.load_profile("brief" if config.option.markexpr == "not slow" else "untimed")

    # A process that has computed in fp32 can be kept from a broken AMX no more, and here one does fp32 and bf16.
    avoid_broken_amx()
    keys_folder()  # before any process is started that is to have it

    # The quickstart's model is kept in the user's cache: tests share one of their own. Other libraries keep theirs.
    if "CACHE_OF_TESTS" not in os.environ:
        users = cache_folder()
        os.environ["CACHE_OF_TESTS"] = os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        for variable, name in {"HF_HOME": "huggingface", "VLLM_CACHE_ROOT": "vllm"}.items():
            os.environ.setdefault(variable, str(users / name))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: the quickstart's architecture after a few steps of its warm start."""
    from areal.data.warm_start import Recipe, build

    recipe = Recipe(steps=2, short_steps=2)
    models = made_once(tmp_path_factory, "models", lambda models: build(models / "tiny", recipe=recipe, threads=1))
    return models / "tiny"


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@pytest.fixture
def another_free_port() -> int:
    return find_free_port()


class Run:
    """A `run.py` process of its own, with everything below it."""

    def __init__(self, arguments: list[str], launcher: list[str], folder: Path, output: Path) -> None:
        self.folder = folder
        self._output = output
        with output.open("w") as out:  # a pipe that nobody reads would fill up in a long run
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(ROOT / "run.py"), *arguments],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(folder)},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout: float) -> str:
        """What it printed. Fails the test if it does not end in time."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"run.py did not end within {timeout} s:\n{self.output[-4000:]}")
        return self.output

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    @property
    def code(self) -> int | None:
        return self.process.poll()


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    """Start `run.py` with arguments, in an empty folder; `launcher` are Python's own before them. What is left of it
    at the end is killed."""
    runs: list[Run] = []
    outputs = tmp_path_factory.mktemp("output")

    def start(*arguments: str, launcher: Sequence[str] = ()) -> Run:
        runs.append(Run(list(arguments), list(launcher), tmp_path, outputs / f"{len(runs)}.txt"))
        return runs[-1]

    yield start
    for started in runs:
        if started.process.poll() is None:
            started.process.terminate()
            try:
                started.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(started.process.pid, signal.SIGKILL)


# Whole runs and what else takes a minute. Begun last, they would be what one process of pytest does at the end alone.
LONG = {"test_chaos.py", "test_redo.py", "test_eval.py", "test_run.py", "test_hosts.py"}
# What has an engine in a process of pytest. It stands together, so that one of its processes alone need import vLLM and
# DeepSpeed, which takes longer than most tests.
ENGINES = (
    *(f"test_areal/{room}/" for room in ("cpu", "generation", "training", "weights")),
    *(f"test_areal/extensions/{name}/" for name in ("critic", "lora", "parallel", "routing", "selftest")),
    "test_areal/extensions/agents/test_parsers",
    "test_areal/extensions/desk/test_audit",
    "test_areal/extensions/desk/test_replay",
    "test_areal/extensions/pictures/test_pictured_batches",
    "test_actors/direct/",
    "test_actors/scorer/",
    "test_actors/weights/",
    "test_examples",
)


def _turn(item: pytest.Item) -> int:
    """When a test begins: those with smaller numbers are the first."""
    if item.path.name in LONG:
        return 0
    return 1 if item.path.relative_to(TESTS).as_posix().startswith(ENGINES) else 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)  # with 700 it takes longer than reading all files does
    gc.enable()
