"""Experts divided over ranks, against one rank that has all of them: clipped steps, published weights, checkpoints.

Run by ranks.py, this file is also the worker of the ranks.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_training import (
    EXPERTS,
    LINEAR,
    MIXED,
    TEMPERATURE,
    make_batch,
    make_kind,
    run_worker,
    settings,
    weights_of,
)
from test_areal.training.test_routes import DENSE_FIRST, GROUPED, LATENT, with_routes

from areal.base.errors import UserError
from areal.extensions.parallel.checks import PRESETS, check_experts
from areal.models import routing_of
from areal.training.training_engine import TrainingEngine

MODELS = {
    "Qwen3Moe": {"head_dim": 8, **EXPERTS, "num_experts": 8},
    "Qwen3_5Moe": {"head_dim": 8, **EXPERTS, **LINEAR, "layer_types": MIXED, "shared_expert_intermediate_size": 24},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "DeepseekV3": {**GROUPED, **DENSE_FIRST, **LATENT, "num_key_value_heads": 4},
}
EP2, EP4 = {"expert_parallel": 2}, {"expert_parallel": 4}
CASES = {
    2: {
        **{f"zero{stage}": ("Qwen3Moe", {**EP2, "zero_stage": stage}) for stage in range(4)},
        "recomputed": ("Qwen3Moe", {**EP2, "zero_stage": 2, "gradient_checkpointing": True}),
        "together": ("Qwen3Moe", {**EP2, "sequence_parallel": 2, "zero_stage": 3}),
        "critic": ("Qwen3Moe", {**EP2, "critic": {"lr": 0.01}, "kl_coef": 0.1}),
        "offloaded": ("Qwen3Moe", {**EP2, "zero_stage": 3, "offload": "optimizer", "kl_coef": 0.1}),
        "routes": ("Qwen3Moe", {**EP2, "routing": "replay"}),
        "shared": ("Qwen2Moe", EP2),
        "linear": ("Qwen3_5Moe", {**EP2, "zero_stage": 1}),
        "mixtral": ("Mixtral", {**EP2, "zero_stage": 3}),
        "grouped": ("DeepseekV3", {**EP2, "zero_stage": 2, "routing": "replay"}),
    },
    4: {
        **{f"data{stage}": ("Qwen3Moe", {**EP2, "zero_stage": stage}) for stage in range(4)},
        **{f"four{stage}": ("Qwen3Moe", {**EP4, "zero_stage": stage}) for stage in (0, 2, 3)},
    },
}
ROUNDING = 1e-5


def configuration(changes):
    return settings(minibatches=2, grad_clip=0.05, weight_decay=0.05, **changes)


def batch_of(number, folder, changes):
    batch = make_batch(seed=number)
    if changes.get("routing") != "replay":
        return batch
    sparse = [0, 1] if "Qwen3Moe" in str(folder) else [1]
    return with_routes(batch, routing_of(folder), sparse, number)


def train(engine, folder, changes, numbers):
    """The norms of the gradients of steps on the batches with these numbers, before they were clipped."""
    norms = []
    for number in numbers:
        batch = batch_of(number, folder, changes) if engine.rank == 0 else None
        norms.append(engine.step(batch, version=3, temperature=TEMPERATURE).grad_norm)
    return norms


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind, changes in MODELS.items():
        make_kind(kind, folder / kind, **changes)
    return folder


def assert_as_one_rank(models, out, ranks):
    done = json.loads((out / "norms.json").read_text())
    for case, (kind, changes) in CASES[ranks].items():
        alone = {key: value for key, value in changes.items() if key in ("critic", "kl_coef", "routing")}
        engine = TrainingEngine(models / kind, configuration(alone), seed=0)
        norms = train(engine, models / kind, alone, range(3))
        assert_same(weights_of(out / case / "published"), weights_of(engine.publish(out / case / "alone")), case)
        norms += train(engine, models / kind, alone, [3])
        assert done[case] == pytest.approx(norms, rel=1e-4), case
        assert min(norms) > 0.05, "the gradients were clipped"
        expected = weights_of(engine.publish(out / case / "alone after"))
        assert_same(weights_of(out / case / "resumed"), expected, case)
        engine.close()
        resumed = TrainingEngine(models / kind, configuration(alone), seed=1)
        resumed.load(out / case / "checkpoint")
        train(resumed, models / kind, alone, [3])
        assert_same(weights_of(resumed.publish(out / case / "one rank")), expected, f"{case} resumed by one rank")
        resumed.close()


def assert_same(tensors, expected, case):
    assert tensors.keys() == expected.keys(), case
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=ROUNDING, msg=f"{case}: {name}")


def test_two_ranks_that_divide_experts_train_publish_and_resume_as_one_rank(models, tmp_path):
    run_worker(__file__, models, tmp_path, ranks=2)
    assert_as_one_rank(models, tmp_path, 2)


@pytest.mark.slow
def test_four_ranks_that_divide_experts_train_publish_and_resume_as_one_rank(models, tmp_path):
    run_worker(__file__, models, tmp_path, ranks=4)
    assert_as_one_rank(models, tmp_path, 4)


@pytest.mark.parametrize(
    "size, ranks, kind, message",
    [
        (4, 4, "Mixtral", "has 6 experts a layer: set it to a divisor of 6"),
        (2, 3, "Mixtral", "number of the trainer's ranks is 3: make that a multiple of it"),
        (2, 2, "Qwen3", "DeepSpeed divides no experts of the model .*, of the kind qwen3"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(models, size, ranks, kind, message):
    if kind == "Qwen3":
        make_kind(kind, models / kind)
    with pytest.raises(UserError, match=f"trainer.expert_parallel is {size}, but .*{message}"):
        check_experts(settings(expert_parallel=size), models / kind, ranks)


def test_the_kinds_of_models_are_those_of_deepspeed():
    from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS

    known = {kind: name for name, preset in PRESET_MODELS.items() for kind in preset.hf_model_types}
    assert known.items() >= PRESETS.items()


def work(models, out):
    norms = {}
    for case, (kind, changes) in CASES[int(os.environ["WORLD_SIZE"])].items():
        engine = TrainingEngine(models / kind, configuration(changes), seed=0)
        norms[case] = train(engine, models / kind, changes, range(3))
        engine.publish(out / case / "published")
        engine.save(out / case / "checkpoint")
        engine.close()
        engine = TrainingEngine(models / kind, configuration(changes), seed=1)
        engine.load(out / case / "checkpoint")
        norms[case] += train(engine, models / kind, changes, [3])
        engine.publish(out / case / "resumed")
        engine.close()
    if engine.rank == 0:
        (out / "norms.json").write_text(json.dumps(norms))


if __name__ == "__main__":
    work(*map(Path, sys.argv[1:]))
