"""Experts divided over ranks, against one rank that has all of them: clipped steps, published weights, checkpoints.

Run by ranks.py, this file is also the worker of the ranks.
"""

import sys

import pytest
from support.divided_training import assert_as_one_rank, few_and_all, make_kinds, train_divided
from support.tiny_training import EXPERTS, LINEAR, MIXED, make_kind, run_worker, settings
from test_areal.extensions.routing.test_routes import DENSE_FIRST, GROUPED, LATENT

from areal.base.errors import UserError
from areal.extensions.parallel.checks import PRESETS, check_experts

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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_kinds(MODELS, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("ranks", "cases"), few_and_all(CASES, ["zero0", "together", "grouped"]))
def test_ranks_that_divide_experts_train_publish_and_resume_as_one_rank(models, tmp_path, ranks, cases):
    run_worker(__file__, models, tmp_path, *cases, ranks=ranks)
    assert_as_one_rank(models, tmp_path, {case: CASES[ranks][case] for case in cases}, goes_on_alone=True)


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

    presets = {kind: name for name, preset in PRESET_MODELS.items() for kind in preset.hf_model_types}
    assert presets.items() >= PRESETS.items()


if __name__ == "__main__":
    train_divided(sys.argv[1:], CASES)
