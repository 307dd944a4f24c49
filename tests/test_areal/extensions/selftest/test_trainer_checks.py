"""The checks of a trainer: a checkpoint that another trainer loads, and the memory of one that was killed."""

import itertools

import numpy as np
import pytest
import torch

from areal.extensions.selftest import memory_peaks as memory
from areal.extensions.selftest.synthetic import tiny_config, write_tiny_model
from areal.extensions.selftest.trainer_checks import TrainingChecks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The arguments of `resume`, after a trainer has saved a checkpoint; and the model."""
    folder = tmp_path_factory.mktemp("selftest")
    write_tiny_model(folder / "model", "float32")
    trainer = TrainingChecks(tiny_config(folder / "model", "float32"))
    trainer.start()
    files = {"folder": str(folder / "checkpoint"), "file": str(folder / "values.npz")}
    facts = trainer.save(**files)
    trainer._engine.close()
    size = sum(path.stat().st_size for path in (folder / "checkpoint").rglob("*"))
    assert trainer.checkpoint_bytes()["bytes"] == pytest.approx(size, rel=0.1)
    return {**files, "seconds": facts["seconds"]}, folder / "model"


def resumed(saved, away=False, **changes):
    trainer = TrainingChecks(tiny_config(saved[1], "float32"))
    trainer.start_again()
    if away:
        trainer.offload()
        assert any(not tensor.untyped_storage().nbytes() for tensor in trainer._engine._resident())
        trainer.reload()
    (result,) = trainer.resume(**saved[0] | changes)
    trainer._engine.close()
    return result


def test_a_checkpoint_loads_in_another_trainer_and_one_that_is_wrong_fails(saved, tmp_path):
    results = resumed(saved, away=True)
    assert (results.name, results.result) == ("checkpoint", "ok")
    assert results.values["gap"] == results.values["gap_after_step"] == 0  # the same bits

    with np.load(saved[0]["file"]) as values:
        np.savez(tmp_path / "wrong.npz", before=values["after"], after=values["before"])
    assert resumed(saved, file=str(tmp_path / "wrong.npz")).result == "FAILED"


def test_a_trainer_without_the_moments_of_the_optimizer_fails(saved, monkeypatch):
    from areal.training.checkpoint import TrainingState

    load = TrainingState.load

    def forget(self, *arguments):
        load(self, *arguments)
        for state in self._engine.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    monkeypatch.setattr(TrainingState, "load", forget)
    results = resumed(saved)
    assert (results.result, results.values["gap"]) == ("FAILED", 0)


@pytest.mark.parametrize(
    ("free", "expected", "in_time"),
    [
        ([70e9, 20e9], None, True),  # on a CPU nothing is to be waited for
        ([20e9, 40e9, 69e9], 70e9, True),
        ([20e9], 70e9, False),  # a process that it has left still has the memory
    ],
)
def test_the_memory_of_a_killed_trainer_has_to_become_free(monkeypatch, free, expected, in_time):
    monkeypatch.setattr(memory, "ASK_SECONDS", 0.001)
    readings = itertools.chain(free, itertools.repeat(free[-1]))
    assert (memory.wait_for(lambda: next(readings), expected, 0.05) is not None) == in_time


def test_a_gpu_says_what_is_free_and_a_cpu_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 80))
    assert memory.free_memory(torch.device("cuda", 0)) == 7
    assert memory.free_memory(torch.device("cpu")) is None
