"""GPUs and cores of one machine, dealt out to the actors of a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from threading import Event, Thread

import pytest
import torch
from conftest import ROOT
from support.small_runs import ten_steps

import areal.devices
from areal.base.errors import UserError
from areal.config import Config
from areal.config.engine_sections import ScorerConfig, WeightsConfig
from areal.config.roles import ROLES
from areal.devices import (
    CORES,
    ENGINE_CORES,
    SHARES,
    deal_out,
    deal_out_cores,
    deal_out_devices,
    engine_cores,
    free_memory,
    host_memory,
    listed_devices,
    settle,
    visible_devices,
)

ALL = ["trainer", "generator", "reward"]


def run_of(ranks: int = 1, count: int = 1, each: int = 1, threads: int = 1, options: dict | None = None) -> Config:
    generator = {"count": count, "tensor_parallel": each, "threads": threads, "engine_options": options or {}}
    return ten_steps(batch_size=4, trainer={"ranks": ranks, "minibatches": 1}, generator=generator)


def dealt(config: Config, devices: str, *others: str) -> dict[str, str]:
    """What the trainer, unless `others` are given, and the generators get."""
    roles = [*(others or ["trainer", "reward"]), *["generator"] * config.generator.count]
    return {name: own["CUDA_VISIBLE_DEVICES"] for name, own in deal_out_devices(config, roles, [*devices]).items()}


def test_ranks_and_generators_have_devices_of_their_own():
    assert dealt(run_of(ranks=2, count=3, each=2), "01234567") == {
        "trainer/0": "0,1",
        "generator/0": "2,3",
        "generator/1": "4,5",
        "generator/2": "6,7",
    }
    assert dealt(run_of(), "456") == {"trainer/0": "4", "generator/0": "5"}


def test_roles_without_a_trainer_leave_it_no_device():
    assert dealt(run_of(ranks=9, count=2, each=2), "0123", "reward") == {"generator/0": "0,1", "generator/1": "2,3"}
    assert deal_out_devices(run_of(ranks=2), ["trainer"], ["0", "1"]) == {"trainer/0": {"CUDA_VISIBLE_DEVICES": "0,1"}}


TRAINS = """
import os, sys
from types import SimpleNamespace
from actors.start import run_command as command
from actors.start import commands as parts
from areal.config import Config
from areal.extensions.selftest import child
from areal.extensions.desk import replay
from areal.extensions.fine_tuning import commands, sft

def say(*_):
    print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF"))

config = Config.model_validate_json(sys.argv[1])
environment = dict(os.environ)
sys.modules["areal.extensions.selftest.trainer_checks"] = SimpleNamespace(TrainingChecks=say)
child.serve = lambda checks: None
parts.selftest_part(SimpleNamespace(part="trainer", path=SimpleNamespace(read_bytes=lambda: sys.argv[1])))
os.environ.clear()
os.environ.update(environment)
command.join_ranks(SimpleNamespace(master="tcp://127.0.0.1:1"), config)
assert "torch" not in sys.modules  # it reads them when it is imported
say()
"""


@pytest.mark.parametrize(
    ("transport", "own", "allocator"),
    [
        ("folder", {}, "expandable_segments:True None"),
        ("direct", {"PYTORCH_ALLOC_CONF": "backend:native"}, "None backend:native"),
        ("stream", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native None"),
    ],
)
def test_a_trainer_and_the_one_of_the_self_test_have_segments_that_grow_unless_the_user_says_so(
    transport, own, allocator
):
    config = run_of().model_copy(update={"weights": WeightsConfig(transport=transport)})
    names = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    environment = {name: value for name, value in os.environ.items() if name not in names} | own
    command = [sys.executable, "-c", TRAINS, config.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout == f"{allocator}\n{allocator}\n", done.stderr


def test_options_of_the_engine_may_multiply_its_devices():
    options = {"prefill_context_parallel_size": 2, "data_parallel_size": 3, "enable_expert_parallel": True}
    assert dealt(run_of(each=2, options=options), "0123456789abc")["generator/0"] == "1,2,3,4,5,6,7,8,9,a,b,c"


def test_only_a_trainer_of_one_rank_and_one_generator_share_a_single_device(capsys, monkeypatch):
    monkeypatch.setattr(areal.devices, "listed_devices", lambda: ["0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    own = {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert deal_out(run_of(), ALL) == {name: {**own, SHARES: "1"} for name in ("trainer/0", "generator/0")}
    assert capsys.readouterr().err == "Note: trainer and generator share the only GPU here.\n"
    assert deal_out(run_of(), ["generator", "reward"]) == {"generator/0": own}
    assert deal_out(run_of(), ["reward"]) == {}
    assert capsys.readouterr().err == ""


def test_two_on_one_device_cannot_send_weights_directly():
    config = run_of().model_copy(update={"weights": WeightsConfig(transport="direct")})
    with pytest.raises(
        UserError, match=r"weights\.transport=direct .* refuses two ranks on a device: set it to folder"
    ):
        deal_out_devices(config, ["trainer", "generator"], ["0"])
    assert dealt(config, "01") == {"trainer/0": "0", "generator/0": "1"}
    assert deal_out_devices(config, ["generator"], ["0"]) == {"generator/0": {"CUDA_VISIBLE_DEVICES": "0"}}


def test_those_who_take_turns_have_the_same_devices():
    def run(**sizes) -> Config:
        return run_of(**sizes).model_copy(update={"colocate": True})

    assert dealt(run(ranks=4, count=2, each=2), "0123") == {
        "trainer/0": "0,1,2,3",
        "generator/0": "0,1",
        "generator/1": "2,3",
    }
    assert dealt(run(), "7") == {"trainer/0": "7", "generator/0": "7"}
    assert engine_cores(run(), ["trainer", "generator"], [0, 1]) == {}
    with pytest.raises(UserError, match="which is 4 in turns, but there are 3"):
        dealt(run(ranks=2, count=2, each=2), "012")


def test_scorers_have_devices_of_their_own_each_as_many_as_its_engine_needs():
    config = run_of(ranks=2, each=2)
    scorers = {"small": {"model": "m", "count": 2}, "large": {"model": "m", "tensor_parallel": 2}}
    trainer = {"ranks": 2, "teacher": "small", "teacher_key": "t"}
    config = Config.model_validate(config.model_dump() | {"scorers": scorers, "trainer": trainer})
    expected = {"generator/0": "2,3", "scorer/0": "4", "scorer/1": "5", "scorer/2": "6,7"}
    assert dealt(config, "01234567", "trainer", *["scorer"] * 3) == {"trainer/0": "0,1"} | expected
    assert [ROLES["scorer"].options(config, index)[1] for index in range(3)] == ["small", "small", "large"]
    turns = config.model_copy(update={"colocate": True})
    assert dealt(turns, "012345", "trainer", *["scorer"] * 3)["scorer/0"] == "2"  # its engine does not sleep
    with pytest.raises(UserError, match=re.escape("3 scorers need 1 or 2 each (scorers.NAME.tensor_parallel)")):
        dealt(config, "0123456", "trainer", *["scorer"] * 3)


def test_without_devices_nothing_is_said():
    assert dealt(run_of(ranks=2, count=2), "") == {}


@pytest.mark.parametrize(
    ("config", "devices", "others", "sentence"),
    [
        (
            run_of(ranks=2, count=4, each=2),
            "01234567",
            (),
            "too few GPUs here: the trainer needs 2 (trainer.ranks) and 4 generators need 2 each "
            "(generator.tensor_parallel), which is 10, but there are 8 (0,1,2,3,4,5,6,7): lower these numbers",
        ),
        (run_of(count=2), "5", (), "the trainer needs 1 (trainer.ranks) and 2 generators need 1 each"),
        (run_of(count=3), "01", ("reward",), "too few GPUs here: 3 generators need 1 each"),
        (run_of(options={"data_parallel_size": 2}), "01", (), "1 generators need 2 each"),
    ],
)
def test_no_device_is_dealt_twice(config, devices, others, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        dealt(config, devices, *others)


@pytest.mark.parametrize(("value", "devices"), [("2, 5", ["2", "5"]), ("", []), ("-1", [])])
def test_what_the_environment_allows_is_what_there_is(monkeypatch, value, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_devices() == devices


def test_else_the_driver_tells(monkeypatch, tmp_path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf 'GPU 0: X (UUID: a)\\n  MIG 1g: (UUID: b)\\nGPU 1: X (UUID: c)\\n'\n")
    driver.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    listed_devices.cache_clear()
    assert visible_devices() == ["0", "1"]
    driver.unlink()
    assert visible_devices() == ["0", "1"]  # it is asked once
    monkeypatch.setattr(areal.devices, "DEVICE_FILES", tmp_path)
    listed_devices.cache_clear()
    assert visible_devices() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    listed_devices.cache_clear()
    assert visible_devices() == ["0"]  # torch is loaded
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    listed_devices.cache_clear()
    assert visible_devices() == ["0", "1", "2"]  # as in a container that has three of eight, and no tool
    listed_devices.cache_clear()


def test_where_every_core_is_somebodys_each_engine_keeps_its_own():
    two = ["generator", *ALL]
    assert engine_cores(run_of(threads=2), two, {9, 4, 5, 6, 7}) == {"generator/0": [4, 5], "generator/1": [6, 7]}
    assert engine_cores(run_of(ranks=2, each=2), ALL, range(4)) == {"generator/0": [0, 1]}
    assert engine_cores(run_of(ranks=2), ["generator", "reward"], range(2)) == {"generator/0": [0]}
    teacher = {"scorers": {"wise": ScorerConfig(model="m", threads=2)}}
    taught = run_of().model_copy(update=teacher | {"trainer": run_of().trainer.model_copy(update={"teacher": "wise"})})
    assert engine_cores(taught, ["scorer", *ALL], range(4)) == {"generator/0": [0]}
    assert engine_cores(taught, ["scorer", *ALL], range(2)) == {}


@pytest.mark.parametrize("cores", [set(), {0}, {0, 1, 2}])
def test_with_more_or_fewer_cores_nobody_keeps_any(cores):
    assert engine_cores(run_of(), ALL, cores) == {}
    assert engine_cores(run_of(), ["reward"], {0, 1}) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has processes keep to cores")
def test_without_gpus_all_else_gets_the_cores_that_the_engines_leave(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv(CORES, "")  # for it to be taken back
    assert deal_out_cores(run_of(), ALL) == {}
    assert os.environ[CORES] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert deal_out_cores(run_of(), ALL) == {"generator/0": {ENGINE_CORES: "3"}}
    assert os.environ[CORES] == "5"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has processes keep to cores")
def test_a_process_moves_with_its_threads_and_what_it_starts(monkeypatch):
    before = os.sched_getaffinity(0)
    core = max(before)
    go_on = Event()
    thread = Thread(target=go_on.wait)
    thread.start()
    try:
        settle(ENGINE_CORES)
        assert os.sched_getaffinity(0) == before
        monkeypatch.setenv(ENGINE_CORES, f"{core}")
        settle(ENGINE_CORES)
        assert {*os.sched_getaffinity(0), *os.sched_getaffinity(thread.native_id)} == {core}
        child = subprocess.run([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], capture_output=True)
        assert child.stdout.decode().strip() == f"{ {core} }"
    finally:
        monkeypatch.setenv(ENGINE_CORES, ",".join(map(str, before)))
        settle(ENGINE_CORES)
        go_on.set()
        thread.join()


@pytest.mark.parametrize(
    "line, top, files",
    [
        ("0::/slurm/job_7/step_0", "", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/job_7", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        ("0::/a/path/of/the/host", "", ("memory.max", "memory.current", "inactive_file")),  # of a container's group
    ],
)
def test_the_memory_that_is_left_is_that_of_the_smallest_group_of_this_process(line, top, files, tmp_path, monkeypatch):
    limit, use, cache = files
    monkeypatch.setattr(areal.devices, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(areal.devices, "OWN_GROUPS", tmp_path / "own")
    free, whole = free_memory(), host_memory()
    (tmp_path / "own").write_text(f"7:cpu:/x\n{line}\n")
    job = tmp_path / "groups" / top / ("" if "host" in line else line.split("/")[1])
    job.mkdir(parents=True)
    (job / limit).write_text("max")
    assert host_memory() == whole and free_memory() > free / 2
    (job / limit).write_text(f"{1 << 20}\n")
    (job / use).write_text("700000\n")
    (job / "memory.stat").write_text(f"inactive 3\n{cache} 100000\nactive_file 5\n")
    assert host_memory() == 1 << 20
    assert free_memory() == (1 << 20) - 600_000
    (job / use).write_text("9000000\n")
    assert free_memory() == 0
