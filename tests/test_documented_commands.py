"""The commands of tests and benchmarks that pages, docstrings and the Makefile name work when they are typed."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGES = [ROOT / "Makefile", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [*sorted(ROOT.glob("areal/extensions/*/README.md")), ROOT / "configs" / "paper" / "README.md"]
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}
SCRIPTS = [path for path, text in TEXTS.items() if "\nimport argparse" in text and "\nif __name__ ==" in text]
BENCHMARKS = [path.stem for path in SCRIPTS if path.parent.name == "benchmarks" and path.stem != "trl_runs"]
# What needs TRL as it starts.
LACKING = set() if importlib.util.find_spec("trl") else {"trl_runs"}
COMMAND = re.compile(r"python (tests/[\w/]+\.py)([^`#\n]*(?:\\\n[^`#\n]*)*)")
# Forks a process for each script: imports take longer than the help.
HELP = """
import gc, json, os, runpy, sys, traceback
import actors.master.master, actors.runtime.supervisor, aiohttp, psutil, rich.console, rich.progress, rich.table, torch
import areal.data.sources, areal.extensions.desk.plan, areal.generation.generation_engine, areal.storage.record
import areal.training.training_engine
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM
gc.freeze()
for script in json.loads(sys.argv[1]):
    if not os.fork():
        sys.stdout = open(f"{sys.argv[2]}/{os.path.basename(script)}", "w")
        sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    if os.wait()[1]:
        sys.exit(f"{script} failed")
"""


def documented() -> list[tuple[str, list[str]]]:
    """The scripts that are to be typed, with the words after each."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    texts += [ast.get_docstring(ast.parse(TEXTS[path]), clean=False) or "" for path in SCRIPTS]
    matches = [match.groups() for text in texts for match in COMMAND.finditer(text)]
    return [(script, shlex.split(words.replace("\\\n", " "))) for script, words in matches]


def environment() -> dict[str, str]:
    """That of a user in a fresh clone, whose packages `make setup` has installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def typed(script: str, words: list[str], folder: Path, timeout: float = 580.0) -> None:
    """The script is run with `--quick`. Files that the words name are in `folder`."""
    command = [sys.executable, str(ROOT / script), *words, "--quick"]
    process = subprocess.Popen(command, cwd=folder, env=environment(), start_new_session=True)
    try:
        assert process.wait(timeout) == 0, command
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a run of it that is left


def test_every_script_that_is_named_starts_and_knows_its_options(tmp_path):
    scripts = {str(path) for path in SCRIPTS if path.stem not in LACKING}
    command = [sys.executable, "-c", HELP, json.dumps(sorted(scripts)), str(tmp_path)]
    process = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr[-3000:]
    commands = documented()
    assert len(commands) > 30
    any_benchmark = [words for script, words in commands if script == "tests/benchmarks/NAME.py"]
    commands += [(f"{name}.py", [*words, "--quick"]) for name in (*FAST, *SLOW) for words in any_benchmark]
    for script, words in commands:
        options = set(re.findall(r"--[a-z][\w-]*", " ".join(words)))
        if (file := tmp_path / Path(script).name).exists():
            assert options <= set(re.findall(r"--[a-z][\w-]*", file.read_text())), script
        else:
            assert Path(script).stem in {"NAME", "size", *LACKING}


def simulations() -> list[tuple[str, list[str]]]:
    """Those that are documented. Of several whose first option is the same, the last."""
    commands = [
        (script, words) for script, words in documented() if script in ("tests/simulate.py", "tests/scaling.py")
    ]
    kinds = {(script, words[0]): (script, words) for script, words in commands}
    return [*kinds.values()]


@pytest.mark.parametrize(
    ("script", "words"), simulations(), ids=lambda item: item if isinstance(item, str) else " ".join(item)
)
def test_a_simulation_of_the_pages_runs(script, words, monkeypatch):
    """In this process: the imports take longer than the simulation of `--quick`."""
    monkeypatch.setattr(sys, "argv", [script, *words, "--quick"])
    monkeypatch.setattr("simulate._garbage_kept", contextlib.nullcontext)  # it goes through all objects of this process
    assert not importlib.import_module(Path(script).stem).main()


# What the file of each has, among others. `make test` runs what takes seconds.
FAST = {"bus": {"ratio", "ratio_arrays", "spread"}, "journal": {"rows"}, "sandbox": {"ratio", "spread"}}
SLOW = {
    "async_vs_sync": {"ratio", "spread"},
    "generator_overhead": {"baseline", "ratio", "spread", "tokens_per_second"},
    "hostile_key": {"hostile", "seconds_attacked", "seconds_quiet", "users"},
    "interrupt": {"ratio", "spread", "with", "without"},
    "memory": {"tiny, areal.training.head", "tiny, whole logits"},
    "nodes": {"partition_seconds", "ratio"},
    "packing": {"forward_backward_share", "prefix_tree_ratio", "prefix_tree_tokens_saved", "ratio", "spread"},
    "scorer_overhead": {"with", "without"},
    "time_to_accuracy": {"runs"},
    "trainer_overhead": {"proximal_seconds_per_step", "ratio", "spread", "zero_seconds_per_step"},
    "versus_commit": {"ratio", "rows", "spread"},
    "weights": {"ratio", "spread"},
}
WORDS = {"versus_commit": ["HEAD"]}
# The benchmark that `bench.py` runs here, which starts it by the command of its page.
BY_BENCH = "sandbox"


def results_of(name: str, folder: Path, model: Path) -> dict[str, Any]:
    """What a benchmark writes that is run as docs/benchmarks.md has it."""
    script = f"tests/benchmarks/{name}.py"
    takes_model = "--model" in (ROOT / script).read_text() or name in ("packing", "trainer_overhead")
    words = [*WORDS.get(name, []), "--json", "results.json", *(["--model", str(model)] if takes_model else [])]
    typed(script, words, folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [*(name for name in FAST if name != BY_BENCH), *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_a_benchmark_runs_and_writes_its_results(name, tmp_path, request):
    if name == "nodes" and os.geteuid():
        pytest.skip("needs root")
    model = request.getfixturevalue("tiny_model") if name in SLOW else Path()
    check_results(name, results_of(name, tmp_path, model))


def check_results(name: str, results: dict[str, Any]) -> None:
    keys = (FAST | SLOW)[name]
    assert keys <= results.keys()
    if "spread" in keys:
        assert results["ratio"] > 0 and len(results["spread"]) == 2
    CHECKS.get(name, lambda results: None)(results)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_objective_makes_a_step_at_each_age(tmp_path):
    typed("tests/benchmarks/ages.py", ["--json", "ages.json"], tmp_path)
    rows = json.loads((tmp_path / "ages.json").read_text())
    assert {row["age"] for row in rows} == {1, 4, 8} and len({row["objective"] for row in rows}) > 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_the_first_faults_of_the_soak(tmp_path):
    # With the quickstart's model: `tiny_model` earns no reward to train on.
    typed("tests/benchmarks/soak.py", [], tmp_path)
    assert not json.loads((tmp_path / "soak" / "results.json").read_text())["violations"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_users_are_told_in_a_storm_is_true_at_its_end(tmp_path):
    typed("tests/benchmarks/storm.py", ["--json", "storm.json"], tmp_path, 880.0)
    results = json.loads((tmp_path / "storm.json").read_text())
    assert not results["untruths"] and results["figures"]["acknowledged"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_door_stands_the_first_malformed_frames(tmp_path):
    typed("tests/fuzz.py", [], tmp_path)


def check_bus(results: dict[str, Any]) -> None:
    assert {"ours", "pyzmq asyncio"} <= results["rows"][0]["rates"].keys()


def check_sandbox(results: dict[str, Any]) -> None:
    assert {row["of"] for row in results["rows"]} == {"Python, stdin", "Python, 10 asserts", "bash, stdin"}


def check_memory(results: dict[str, Any]) -> None:
    """A training step takes the memory that `areal plan` says."""
    steps = {name: figures["bytes"] / figures["planned"] for name, figures in results.items() if "planned" in figures}
    assert len(steps) == 3 and all(0.85 < ratio < 1.15 for ratio in steps.values()), steps
    assert results.keys() - steps.keys() == SLOW["memory"]


def check_versus_commit(results: dict[str, Any]) -> None:
    """The tree is compared with its own last commit."""
    from versus_commit import COMMIT, CPU, HERE

    assert results["rows"][CPU].keys() == {HERE, COMMIT, "ratio", "spread"}
    assert {"trainer", "rollout_manager"} <= results["rows"].keys()


CHECKS = {"bus": check_bus, "memory": check_memory, "sandbox": check_sandbox, "versus_commit": check_versus_commit}


def test_all_benchmarks_but_those_that_have_tests_of_their_own_are_run():
    assert {*FAST, *SLOW, "ages", "bench", "paper_mini", "paper_tables", "soak", "storm", "vs_trl"} == {*BENCHMARKS}


def test_all_benchmarks_are_run_by_one_command(tmp_path):
    typed("tests/benchmarks/bench.py", ["--only", BY_BENCH, "--folder", "bench"], tmp_path)
    check_results(BY_BENCH, json.loads((tmp_path / "bench" / "bench.json").read_text())["results"][BY_BENCH])
