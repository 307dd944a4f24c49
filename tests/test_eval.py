"""`python -m areal eval` as a user starts it, on the real engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from support.process_tree import processes_mentioning

from actors.start.run_command import main
from areal import __main__ as tools
from areal.base.processes import START

SUMS = "source: addition\nreward: addition\nsize: 24\nsamples: 2\nmax_new_tokens: 48\n"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def keys(file: Path) -> list[tuple[int, int]]:
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    samples = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [(sample["row"], sample["sample"]) for sample in samples]


def kill_and_tear(first: subprocess.Popen, file: Path, output: Path, port: int) -> bytes:
    """Kill an evaluation once it has some samples, and leave half a line in their file. Returns the file's lines."""
    deadline = time.monotonic() + 200
    try:
        while len(keys(file)) < 10:
            assert first.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.01)
    finally:
        first.kill()
        first.wait()
    while processes_mentioning(f"127.0.0.1:{port}"):  # they end with their parent
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert 10 <= len(keys(file)) < 48
    complete_lines = file.read_bytes().rpartition(b"\n")[0]
    with file.open("ab") as torn:
        torn.write(b'{"row": 23, "sample"')
    return complete_lines


def test_the_command_starts_a_run_without_steps_that_passes_the_checks_of_a_start(
    tmp_path, tiny_model, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.yaml").write_text(SUMS)
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append((program, words)))
    assert tools.main(["eval", str(tiny_model), "--benchmarks", "sums.yaml", "name=mine", "reward.workers=1"]) == 0
    ((program, (python, start, *words)),) = started
    assert (program, python, start) == (sys.executable, sys.executable, START)
    monkeypatch.setattr(sys, "argv", ["areal run", *words, "--dry-run"])
    assert main() == 0
    out, error = capsys.readouterr()
    config = yaml.safe_load(out)
    assert (config["steps"], config["name"], config["model"]) == (0, "mine", str(tiny_model))
    assert config["evaluator"]["benchmarks"]["sums"]["size"] == 24 and "the run can be started" in error
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "journal.db").touch()
    tools.main(["eval", str(tiny_model), "--benchmarks", "sums.yaml", "name=mine"])
    assert started[-1][1][2:4] == ["--resume", "runs/mine"]


@pytest.mark.slow  # test_chaos.py has a run with evaluations; the simulator kills evaluators and masters in evaluations
@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "killed"])
def test_an_evaluation_is_whole_and_one_that_was_killed_goes_on_without_making_a_sample_again(
    tmp_path, tiny_model, free_port, monkeypatch, capsys, killed
):
    (tmp_path / "sums.yaml").write_text(SUMS)
    command = [
        sys.executable,
        "-m",
        "areal",
        "eval",
        str(tiny_model),
        "--benchmarks",
        "sums.yaml",
        "name=mine",
        "generator.max_concurrent_rollouts=2",
        "generator.kv_cache_gib=0.25",
        "generator.memory_share=0.1",
        "generator.dtype=float32",
        "reward.workers=1",
        f"master.address=tcp://127.0.0.1:{free_port}",
    ]
    folder = tmp_path / "runs" / "mine"
    file = folder / "benchmarks" / "sums-0.jsonl"

    def start() -> subprocess.Popen:
        out = (tmp_path / "out.txt").open("a")
        return subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=out, stderr=out)

    lines_before = kill_and_tear(start(), file, tmp_path / "out.txt", free_port) if killed else b""
    assert start().wait(200) == 0, (tmp_path / "out.txt").read_text()
    samples = keys(file)
    assert sorted(samples) == [(row, number) for row in range(24) for number in range(2)]
    assert file.read_bytes().startswith(lines_before)
    (evaluation,) = json.loads((folder / "summary.json").read_text())["evaluations"]
    scores = [json.loads(line)["score"] for line in file.read_text().splitlines()]
    assert evaluation["benchmarks"]["sums"]["scored"] == 48
    assert evaluation["benchmarks"]["sums"]["accuracy"] == pytest.approx(sum(scores) / 48)
    assert (tmp_path / "out.txt").read_text().count("24 × 2") == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", None)  # it is complete, and only shown
    assert tools.main(command[3:]) == 0
    assert capsys.readouterr().out.count("24 × 2") == 1
    command[command.index("sums.yaml")] += ",gsm8k"
    assert tools.main(command[3:]) == 2
    assert "has an evaluation with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--benchmarks", "gms8k"], "There is no benchmark 'gms8k' .*: known are aime24, .*math500; write the path"),
        (["--benchmarks", "{}/bare.yaml"], "the benchmark bare has no reward: set evaluator.benchmarks.bare.reward"),
        (["--benchmarks", "gsm8k", "--source", "aime24=rows.jsonl"], "--source 'aime24=rows.jsonl' is not of the form"),
        (["--benchmarks", "gsm8k", "evaluator.benchmarks.gsm8k.sampels=2"], "did you mean 'evaluator.benchmarks."),
        (["--benchmarks", "gsm8k", "evaluator.benchmarks.gsm8k.samples=2"], "at temperature 0 they are all the same"),
    ],
)
def test_a_mistake_gets_one_sentence(capsys, tmp_path, arguments, sentence):
    (tmp_path / "bare.yaml").write_text("source: rows.jsonl\n")
    assert tools.main(["eval", "model", *(word.format(tmp_path) for word in arguments)]) == 2
    error_text = capsys.readouterr().err
    assert re.search(sentence, error_text) and len(error_text.splitlines()) == 1
