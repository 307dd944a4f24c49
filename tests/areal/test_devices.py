"""GPUs and cores of one machine, dealt out to the actors of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Event, Thread

import pytest

from areal.config import Config, UserError
from areal.devices import (
    CORES,
    ENGINE_CORES,
    deal_out_cores,
    deal_out_devices,
    engine_cores,
    settle,
    visible_devices,
)


def run_of(ranks: int = 1, count: int = 1, each: int = 1, threads: int = 1) -> Config:
    return Config.model_validate(
        {
            "model": "m", "steps": 1, "batch_size": 4, "group_size": 1, "data": {"source": "addition"},
            "sampling": {"max_new_tokens": 8}, "reward": {"functions": ["addition"]},
            "trainer": {"ranks": ranks}, "generator": {"count": count, "tensor_parallel": each, "threads": threads},
        }
    )  # fmt: skip


def dealt(config: Config, devices: list[str]) -> dict[str, str]:
    return {name: own["CUDA_VISIBLE_DEVICES"] for name, own in deal_out_devices(config, devices).items()}


def test_ranks_and_generators_have_devices_of_their_own_where_there_are_enough():
    assert dealt(run_of(ranks=2, count=3, each=2), list("01234567")) == {
        "trainer/0": "0,1",
        "generator/0": "2,3",
        "generator/1": "4,5",
        "generator/2": "6,7",
    }


def test_too_few_devices_are_shared_evenly():
    owned = dealt(run_of(ranks=1, count=4), ["4", "5"])
    assert owned == {"trainer/0": "4", "generator/0": "5", "generator/1": "4", "generator/2": "5", "generator/3": "4"}


def test_an_evaluation_alone_leaves_no_device_to_a_trainer():
    alone = run_of(count=2, each=2).model_copy(update={"steps": 0})
    assert dealt(alone, list("0123")) == {"generator/0": "0,1", "generator/1": "2,3"}
    assert dealt(run_of(ranks=9).model_copy(update={"steps": 0}), ["0"]) == {"generator/0": "0"}


def test_a_single_device_is_everybodys():
    assert set(dealt(run_of(count=2), ["GPU-1"]).values()) == {"GPU-1"}


def test_without_devices_nothing_is_said():
    assert deal_out_devices(run_of(ranks=2, count=2), []) == {}


@pytest.mark.parametrize(("key", "config"), [("trainer.ranks", run_of(ranks=3)), ("tensor_parallel", run_of(each=3))])
def test_an_actor_that_takes_more_than_there_are_is_a_users_mistake(key, config):
    with pytest.raises(UserError, match=rf"{key} is 3, but the number of GPUs here is 2 \(0,1\): lower it"):
        deal_out_devices(config, ["0", "1"])


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
    assert visible_devices() == ["0", "1"]
    driver.unlink()
    assert visible_devices() == []


ALL = ["trainer", "generator", "reward"]


def test_where_every_core_is_somebodys_each_engine_keeps_its_own():
    two = ["generator", *ALL]
    assert engine_cores(run_of(threads=2), two, {9, 4, 5, 6, 7}) == {"generator/0": [4, 5], "generator/1": [6, 7]}
    assert engine_cores(run_of(ranks=2, each=2), ALL, range(4)) == {"generator/0": [0, 1]}
    assert engine_cores(run_of(ranks=2), ["generator", "reward"], range(2)) == {"generator/0": [0]}


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
