"""`python -m areal selftest` as a user starts it."""

import json
import subprocess
import sys

import pytest

from areal.__main__ import main
from areal.config.roles import ROLES
from areal.devices import deal_out_devices
from areal.extensions.selftest.selftest import CHECKS, COLD_SECONDS, cold_seconds, environment_of
from areal.extensions.selftest.synthetic import tiny_runs

CONFIG = """
name: mine
model: none
steps: 1
batch_size: 4
group_size: 2
data: {source: none.jsonl}
sampling: {max_new_tokens: 32}
reward: {functions: [math]}
"""


def selftest(folder, *arguments, timeout=280):
    """The exit code, what was printed, and the results by (model, check)."""
    process = subprocess.run(
        [sys.executable, "-m", "areal", "selftest", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    file = folder / "selftest.json"
    written = json.loads(file.read_text()) if file.exists() else {"findings": []}
    results = {(finding["model"], finding["name"]): finding["result"] for finding in written["findings"]}
    return process.returncode, process.stdout + process.stderr, results


def test_a_check_that_is_not_known_is_a_mistake(capsys):
    assert main(["selftest", "--only", "attentoin"]) == 2
    assert "There is no check 'attentoin': known are" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["steps=3", "--model-only"])
def test_changes_and_a_model_without_a_configuration_are_a_mistake(capsys, option):
    assert main(["selftest", option]) == 2
    assert "--config" in capsys.readouterr().err


@pytest.mark.slow
def test_some_checks_alone_pass_and_are_written_down(tmp_path):
    code, output, results = selftest(tmp_path, "--only", "attention", "--only", "devices", "--only", "stream")
    assert code == 0, output
    assert results == {("", "devices"): "ok", ("", "stream"): "ok", ("tiny", "attention"): "ok"}
    written = json.loads((tmp_path / "selftest.json").read_text())
    assert written["ok"] and written["machine"]["packages"]["torch"]
    assert [path.name for path in tmp_path.iterdir()] == ["selftest.json"]
    assert "Nothing failed" in output


@pytest.mark.parametrize(
    ("gpus", "apart", "turns"),  # transport, ranks, ZeRO stage and tensor parallelism
    [
        (1, ("folder", 1, 0, 1), ("folder", 1, 0, 1)),
        (2, ("direct", 1, 0, 1), ("folder", 2, 2, 2)),
        (3, ("direct", 1, 0, 2), ("folder", 3, 2, 2)),
        (8, ("direct", 6, 3, 2), ("folder", 8, 2, 2)),
    ],
)
def test_all_gpus_take_part_without_a_configuration(tmp_path, gpus, apart, turns):
    runs = tiny_runs(tmp_path, "bfloat16", gpus)
    parts = [
        (run.weights.transport, run.trainer.ranks, run.trainer.zero_stage, run.generator.tensor_parallel)
        for run in runs.values()
    ]
    assert (parts, [run.colocate for run in runs.values()]) == ([apart, turns], [False, True])
    for run in runs.values():
        dealt = deal_out_devices(run, ["trainer", "generator"], [*map(str, range(gpus))])
        used = {device for variables in dealt.values() for device in variables["CUDA_VISIBLE_DEVICES"].split(",")}
        assert len(used) == gpus


def test_parts_have_the_environment_of_the_roles_of_a_run(monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    dealt = {"generator/0": {"CUDA_VISIBLE_DEVICES": "3"}}
    generator = environment_of("generator", dealt)
    assert generator == {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "3", **ROLES["generator"].environment}
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    assert "OPENBLAS_NUM_THREADS" not in environment_of("generator", dealt)
    assert environment_of("receiver", dealt) == {"PYTHONHASHSEED": "0"}


def test_a_cpu_has_one_tiny_run(tmp_path):
    assert [run.weights.transport for run in tiny_runs(tmp_path, "float32", 0).values()] == ["direct"]


def test_a_first_start_has_more_time(tmp_path):
    here = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    for environment in (here, {"HOME": str(tmp_path / "nobody")}):
        assert cold_seconds(environment, gpus=True) == COLD_SECONDS
        assert cold_seconds(environment, gpus=False) == 0
    place = tmp_path / "vllm" / "torch_compile_cache"
    place.mkdir(parents=True)
    (place / "compiled").touch()
    assert cold_seconds(here, gpus=True) == 0


def test_what_stands_in_the_way_of_a_run_fails_with_a_sentence(tmp_path, tiny_model):
    (tmp_path / "mine.yaml").write_text(CONFIG)
    settings = [f"model={tiny_model}", "master.address=tcp://*:0", "network.keys=nowhere"]
    code, output, results = selftest(tmp_path, "--config", "mine.yaml", "--only", "keys", "--only", "port", *settings)
    assert code == 1, output
    assert results == {("", "keys"): "FAILED", ("", "port"): "ok"}
    (advice,) = (finding["advice"] for finding in json.loads((tmp_path / "selftest.json").read_text())["findings"][:1])
    assert "nowhere" in advice and "areal keys" in advice


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_of_it_is_green_here_with_a_configuration_of_two_ranks(tmp_path, tiny_model):
    (tmp_path / "mine.yaml").write_text(CONFIG)
    settings = [f"model={tiny_model}", "master.address=tcp://127.0.0.1:0", "trainer.ranks=2", "trainer.zero_stage=2"]
    settings += ["trainer.max_tokens_per_microbatch=512", "generator.kv_cache_gib=0.25", "generator.dtype=float32"]
    settings += ["colocate=true"]
    code, output, results = selftest(tmp_path, "--config", "mine.yaml", *settings, timeout=560)
    assert code == 0, output
    assert {name for _, name in results} == CHECKS - {"master", "clock", "shared folder", "interface"}
    assert set(results.values()) <= {"ok", "skipped"}
