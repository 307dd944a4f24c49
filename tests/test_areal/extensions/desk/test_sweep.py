"""`python -m areal sweep`: what its file means; runs that fail, that are stopped, and that have begun before."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.process_tree import processes_mentioning

from areal.__main__ import main
from areal.base.command_line import typed
from areal.base.errors import UserError
from areal.base.processes import ROOT
from areal.config import load_config
from areal.config.reading import read_values
from areal.config.trainer_section import TrainerConfig
from areal.extensions.desk.sweep import Sweep, read_sweep

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
GRID = {"max_staleness": [0, 4], "trainer.objective": ["ppo", "decoupled_ppo"]}


def written(folder: Path, grid=GRID, **changes) -> Path:
    """The file of a sweep over the quickstart, with its runs below `folder`."""
    file = folder / "eta.yaml"
    file.write_text(yaml.safe_dump({"base": str(QUICKSTART), "run_dir": str(folder / "runs"), "grid": grid} | changes))
    return file


def pretend(run, ok: bool | None) -> None:
    """A run that has begun and, unless `ok` is None, is over."""
    run.write()
    assert stat.S_IMODE(run.file.stat().st_mode) == 0o600  # it may hold secrets
    run.config.folder.mkdir(parents=True)
    (run.config.folder / "journal.db").touch()
    if ok is not None:
        (run.config.folder / "summary.json").write_text(json.dumps({"ok": ok, "steps": run.config.steps}))


def test_each_combination_is_a_run_with_a_folder_and_a_file_of_its_own(tmp_path):
    runs = read_sweep(written(tmp_path, steps=7), ["batch_size=8"])
    results = [(run.config.max_staleness, run.config.trainer.objective) for run in runs]
    assert results == [(0, "ppo"), (0, "decoupled_ppo"), (4, "ppo"), (4, "decoupled_ppo")]
    assert {(run.config.steps, run.config.batch_size, run.config.seed) for run in runs} == {(7, 8, 0)}
    assert runs[2].config.trainer.proximal == "interpolate"  # which belongs to ppo
    assert runs[0].config.folder == tmp_path / "runs" / "eta" / "max_staleness-0_trainer.objective-ppo"
    assert len({run.config.folder for run in runs}) == 4
    runs[2].write()
    assert load_config(runs[2].file) == runs[2].config


def test_small_numbers_and_nothing_are_values_too(tmp_path):
    runs = read_sweep(written(tmp_path, {"trainer.lr": [1e-5], "trainer.microbatches": [None, 32]}))
    assert [run.config.trainer.microbatches for run in runs] == [None, 32]
    runs[0].write()
    assert load_config(runs[0].file).trainer.lr == 1e-5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"grid": None}, "has no grid"),
        ({"grid": {"seed": 3}}, "has no grid"),
        ({"grid": {"seed": []}}, "has no grid"),
        ({"grid": {"sed": [1]}}, "did you mean 'seed'"),
        ({"grid": {"max_staleness": [0, -1]}}, "max_staleness is -1"),
        ({"grid": {"seed": [1, 1]}}, "has seed-1 twice"),
        ({"grid": {"seed.of": [1]}, "seed": 3}, "sets a key inside 'seed'"),
    ],
)
def test_a_mistake_gets_one_sentence(tmp_path, capsys, changes, sentence):
    assert main(["sweep", str(written(tmp_path, **changes))]) == 2
    out, error = capsys.readouterr()
    assert (out, len(error.splitlines())) == ("", 1)
    assert sentence in error
    assert not (tmp_path / "runs").exists()


def test_the_sweeps_of_the_paper_are_sweeps():
    files = sorted((ROOT / "configs" / "sweeps").glob("paper-*.yaml"))
    assert len(files) == 5
    assert all(len(read_sweep(file)) >= 2 for file in files)


def test_adam_has_the_epsilon_of_other_systems_and_in_the_runs_of_the_paper_the_papers():
    assert TrainerConfig().adam_eps == 1e-8
    bases = [yaml.safe_load(file.read_text())["base"] for file in (ROOT / "configs" / "sweeps").glob("paper-*.yaml")]
    assert all(
        read_values((ROOT / "configs" / "sweeps" / base).resolve())["trainer"]["adam_eps"] == 1e-5 for base in bases
    )


def test_the_state_of_each_run_is_printed_and_commands_for_those_that_are_not_finished(tmp_path, capsys):
    file = written(tmp_path)
    runs = read_sweep(file)
    pretend(runs[0], ok=True)
    pretend(runs[1], ok=False)
    pretend(runs[2], ok=None)
    assert main(["sweep", str(file), "--dry-run"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["finished", "begun", "begun", "new"]
    assert not runs[3].file.exists()
    assert main(["sweep", str(file), "--print"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    begun = [["--resume", str(run.config.folder), "--config", str(run.file)] for run in runs[1:3]]
    assert lines == [typed(shlex.join(["run", *words])).split() for words in (*begun, ["--config", str(runs[3].file)])]
    assert load_config(runs[3].file) == runs[3].config


def test_a_dry_run_checks_each_run_as_its_start_would_and_rows_that_they_share_once(tmp_path, capsys, monkeypatch):
    checked = []
    monkeypatch.setattr("actors.start.preflight.check_rows", lambda config, source: checked.append(config.name))
    assert main(["sweep", str(written(tmp_path)), "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 and len(checked) == 1
    assert main(["sweep", str(written(tmp_path, {"data.source": ["addition", "gone.jsonl"]})), "--dry-run"]) == 2
    out, error = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["new"]
    assert error.startswith("data.source-gone.jsonl: data.source 'gone.jsonl'") and len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_that_has_begun_is_not_continued_with_other_settings(tmp_path):
    file = written(tmp_path, {"seed": [0, 1]}, steps=5)
    finished, begun = read_sweep(file)
    pretend(finished, ok=True)
    pretend(begun, ok=None)
    assert [run.state for run in read_sweep(file, ["observe.tensorboard=false"])] == ["finished", "begun"]
    with pytest.raises(UserError, match=r"steps was 5 in the run .*seed-0 and is 6 now"):
        read_sweep(file, ["steps=6"])
    with pytest.raises(UserError, match=r"trainer.lr was .* in the run .*seed-0"):
        read_sweep(file, ["trainer.lr=0.5"])
    (finished.config.folder / "journal.db").unlink()
    assert len(read_sweep(file, ["steps=6"])) == 2  # one that is not over may get more steps
    with pytest.raises(UserError, match=r"batch_size was 16 in the run .*seed-1 and is 8 now"):
        read_sweep(file, ["batch_size=8"])


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = read_sweep(written(tmp_path, {"data.source": ["one.jsonl", "two.jsonl", "three.jsonl"]}))
    pretend(runs[1], ok=True)
    handlers_before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        assert Sweep(runs).run() == 1
    finally:
        signal.signal(signal.SIGINT, handlers_before[0])
        signal.signal(signal.SIGTERM, handlers_before[1])
    out, error = capfd.readouterr()
    assert "[2/3] data.source-two.jsonl is finished" in out
    assert "1 of 3 runs are finished; failed: data.source-one.jsonl, data.source-three.jsonl" in out
    for name in ("one", "three"):
        assert f"{name}.jsonl cannot be read" in error  # run.py's own sentence
        assert f"data.source-{name}.jsonl failed with exit code 2" in error


@pytest.mark.slow  # on whole runs what test_processes.py has of children that die with their parent
def test_a_killed_sweep_takes_its_run_along_and_goes_on_with_it_and_an_interrupted_one_ends_it(
    tmp_path, tiny_model, free_port
):
    small = ["batch_size=4", "group_size=4", "sampling.max_new_tokens=32", "data.eval_size=0", "steps=1000"]
    small.append(f"master.address=tcp://127.0.0.1:{free_port}")
    file = written(tmp_path, {"seed": [5, 6]}, model=str(tiny_model))

    def start(output: Path) -> subprocess.Popen:
        with output.open("w") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "areal", "sweep", str(file), *small],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    log = tmp_path / "runs" / "eta" / "seed-5" / "logs" / "master-0.jsonl"

    def masters() -> int:
        return log.read_text().count("master ready") if log.exists() else 0

    first = start(tmp_path / "first.txt")
    try:
        wait_for(lambda: masters() == 1, tmp_path / "first.txt")
        first.kill()
        first.wait(10)
        wait_for(lambda: not processes_mentioning(str(tmp_path)), tmp_path / "first.txt")
        (run, _) = read_sweep(file, small)
        assert (run.state, list(tmp_path.glob("runs/eta/*.1"))) == ("begun", [])
        second = start(tmp_path / "second.txt")
        try:
            wait_for(lambda: masters() == 2, tmp_path / "second.txt")
            second.send_signal(signal.SIGINT)
            assert second.wait(120) == 128 + signal.SIGINT
        finally:
            second.kill()
    finally:
        first.kill()
    output = (tmp_path / "second.txt").read_text()
    assert "seed-5 is resumed" in output
    assert "Stopped in seed-5: the same command goes on with it." in output
    assert "seed-6" not in output
    assert not processes_mentioning(str(tmp_path))
    assert os.listdir(tmp_path / "runs" / "eta" / "seed-5")  # nothing was moved aside or begun anew
    assert not list(tmp_path.glob("runs/eta/*.1"))


def wait_for(condition, output: Path) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
