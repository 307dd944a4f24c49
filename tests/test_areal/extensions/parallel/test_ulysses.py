"""Rows that several ranks compute together, against plain transformers in float64, one sequence at a time.

Run by ranks.py, this file is also the worker of the ranks.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.tiny_training import (
    TEMPERATURE,
    assert_same_gradients,
    exact_gradients,
    make_batch,
    make_kind,
    make_tree,
    run_worker,
    settings,
    step_and_gradients,
)

from areal.base.errors import UserError
from areal.samples.table import TOP
from areal.training.training_engine import TrainingEngine

BATCHES = {"many": make_batch(), "tree": make_tree(), "one": make_batch(1)}
"""The single sequence of `one` leaves other sequence groups without work."""
OF_RANKS = {2: ("tree", "one"), 4: tuple(BATCHES)}
CHECKPOINTED = {"zero_stage": 3, "gradient_checkpointing": True}
CASES = {
    2: {
        "zero0": ("Qwen3", {"sequence_parallel": 2}),
        "zero3": ("Qwen3", {"sequence_parallel": 2, **CHECKPOINTED}),
        "window": ("GptOss", {"sequence_parallel": 2}),  # whose sinks are those of heads
    },
    4: {  # more ranks than the 2 heads of keys and values, or two groups
        "zero0": ("Qwen3", {"sequence_parallel": 4, "prefix_tree": False}),
        "zero3": ("Qwen3Moe", {"sequence_parallel": 4, "zero_stage": 3}),
        "groups": ("Qwen3", {"sequence_parallel": 2, "zero_stage": 3}),
    },
}
LOOKS_AT_SEQUENCES = {
    "objective": "gspo",
    "sequence_mask": "geometric",
    "kl_coef": 0.1,
    "kl_in": "reward",
    "minibatches": 2,
    "lr": 0.01,
    "critic": {"lam": 0.9},
    "teacher": "wise",
    "teacher_coef": 0.1,
    "teacher_top_k": 2,
}
"""Settings whose losses and metrics need the log-probs of a whole sequence, and of all minibatches."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind in ("Qwen3", "Qwen3Moe", "GptOss", "Qwen3_5", "Lfm2"):
        make_kind(kind, folder / kind)
    make_kind("Qwen3", folder / "eight heads", num_attention_heads=8)
    return folder


def assert_exact_gradients(models, written, ranks):
    for case, (kind, _) in CASES[ranks].items():
        for name in OF_RANKS[ranks]:
            assert_same_gradients(load_file(written / f"{case}-{name}"), exact_gradients(models / kind, BATCHES[name]))


def test_two_ranks_have_the_gradients_of_whole_sequences_alone_or_refuse_the_model(models, tmp_path):
    run_worker(__file__, models, tmp_path, ranks=2)
    assert_exact_gradients(models, tmp_path, 2)
    report = json.loads((tmp_path / "told.json").read_text())
    assert "the number of the trainer's ranks is 2" in report.pop("eight heads")
    assert "not only attention mixes the tokens of a sequence in it" in report["Qwen3_5"]


@pytest.mark.slow
def test_four_ranks_have_the_gradients_of_whole_sequences_alone_and_the_metrics_of_one(models, tmp_path):
    run_worker(__file__, models, tmp_path, ranks=4)
    assert_exact_gradients(models, tmp_path, 4)
    report = json.loads((tmp_path / "told.json").read_text())
    assert "not only attention mixes the tokens of a sequence in it" in report.pop("Lfm2")
    alone = measured(TrainingEngine(models / "Qwen3", settings(**LOOKS_AT_SEQUENCES), seed=0))
    assert report == pytest.approx(alone, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_the_ranks_cannot_divide_are_refused(models, size):
    with pytest.raises(UserError, match=f"trainer.sequence_parallel is {size}, but the model .* has 4 attention heads"):
        TrainingEngine(models / "Qwen3", settings(sequence_parallel=size), seed=0)


def measured(engine):
    """The metrics of a step, without what depends on time or the number of ranks, and the loss after it."""
    first = engine.rank == 0
    metrics = asdict(engine.step(taught(BATCHES["tree"]) if first else None, version=3, temperature=TEMPERATURE))
    remainder = ("_seconds", "_computed", "tflops", "mfu")
    results = {name: value for name, value in metrics.items() if value is not None and not name.endswith(remainder)}
    results["after"] = engine.loss(BATCHES["many"] if first else None, temperature=TEMPERATURE)
    engine.close()
    return results


def taught(batch):
    """The same batch, with a teacher for which the tokens 3 and 5 are likeliest everywhere."""
    return [replace(group, trajectories=tuple(map(with_teacher, group.trajectories))) for group in batch]


def with_teacher(sample):
    rows = [np.zeros(len(sample) - 1, np.float32)]
    tokens, logps = ([np.tile(pair, (len(sample) - 1, 1))] for pair in (np.int32([3, 5]), np.float32([-0.7, -1.5])))
    for name, branches in zip((*TOP, "teacher_logprobs"), (tokens, logps, rows), strict=True):
        sample = sample.with_scores(name, branches)
    return sample


def refused(folder, size):
    with pytest.raises(UserError) as error:
        TrainingEngine(folder, settings(sequence_parallel=size), seed=0)
    return str(error.value)


def work(models, out):
    ranks = int(os.environ["WORLD_SIZE"])
    for case, (kind, changes) in CASES[ranks].items():
        engine = TrainingEngine(models / kind, settings(max_tokens_per_microbatch=100, lr=1e-9, **changes), seed=0)
        for name in OF_RANKS[ranks]:
            _, gradients = step_and_gradients(engine, BATCHES[name] if engine.rank == 0 else None)
            if engine.rank == 0:
                save_file(gradients, out / f"{case}-{name}")
        engine.close()
    if ranks == 2:
        message = {kind: refused(models / kind, size) for kind, size in {"eight heads": 8, "Qwen3_5": 2}.items()}
    else:
        together = settings(sequence_parallel=2, **LOOKS_AT_SEQUENCES)
        message = measured(TrainingEngine(models / "Qwen3", together, seed=0))
        message["Lfm2"] = refused(models / "Lfm2", 2)
    if dist.get_rank() == 0:
        (out / "told.json").write_text(json.dumps(message))


if __name__ == "__main__":
    work(*map(Path, sys.argv[1:]))
