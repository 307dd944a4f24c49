"""Layers divided over ranks, against one rank that has all of them: clipped steps, published weights, checkpoints.

Run by ranks.py, this file is also the worker of the ranks.
"""

import sys

import pytest
from support.divided_training import assert_as_one_rank, configuration, few_and_all, make_kinds, train_divided
from support.tiny_training import make_kind, run_worker, settings

from areal.base.errors import UserError
from areal.extensions.parallel.checks import check_tensors
from areal.training.training_engine import TrainingEngine

MODELS = {
    "Qwen3": {"head_dim": 8},
    "Qwen2": {"tie_word_embeddings": True},
    "Llama": {},
    "Mistral": {"sliding_window": 7, "head_dim": 8},
    "SmolLM3": {},
}
TP2 = {"tensor_parallel": 2}
CASES = {
    2: {
        **{f"zero{stage}": ("Qwen3", {**TP2, "zero_stage": stage}) for stage in range(4)},
        "recomputed": ("Qwen3", {**TP2, "zero_stage": 2, "gradient_checkpointing": True}),
        "critic": ("Qwen2", {**TP2, "critic": {"lr": 0.01}, "kl_coef": 0.1}),
        "offloaded": ("Llama", {**TP2, "zero_stage": 3, "offload": "optimizer"}),
        "window": ("Mistral", {**TP2, "zero_stage": 1}),
        "smollm": ("SmolLM3", TP2),
    },
    4: {f"data{stage}": ("Qwen3", {**TP2, "zero_stage": stage}) for stage in range(4)},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_kinds(MODELS, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("ranks", "cases"), few_and_all(CASES, ["zero0", "recomputed", "critic", "offloaded"]))
def test_ranks_that_divide_layers_train_publish_and_resume_as_one_rank(models, tmp_path, ranks, cases):
    run_worker(__file__, models, tmp_path, *cases, ranks=ranks)
    assert_as_one_rank(models, tmp_path, {case: CASES[ranks][case] for case in cases}, goes_on_alone=False)
    engine = TrainingEngine(models / CASES[ranks][cases[0]][0], configuration({}), seed=0)
    with pytest.raises(UserError, match="belongs to another model .* or they have another trainer.tensor_parallel"):
        engine.storage.load(tmp_path / cases[0] / "checkpoint")
    engine.close()


@pytest.mark.parametrize(
    "size, ranks, changes, message",
    [
        (4, 4, {}, "has num_key_value_heads 2: set it to a divisor of that"),
        (2, 3, {}, "number of the trainer's ranks is 3: make that a multiple of it"),
        (2, 2, {"attention_bias": True}, "of the kind qwen3 with biases is none that is divided"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(tmp_path, size, ranks, changes, message):
    folder = make_kind("Qwen3", tmp_path / "model", head_dim=8, **changes)
    with pytest.raises(UserError, match=f"trainer.tensor_parallel is {size}, but .*{message}"):
        check_tensors(settings(tensor_parallel=size), folder, ranks)


def test_models_of_other_kinds_are_refused(tmp_path):
    folder = make_kind("Granite", tmp_path / "model")
    with pytest.raises(UserError, match="of the kind granite is none that is divided: llama, mistral"):
        check_tensors(settings(tensor_parallel=2), folder, 2)


@pytest.mark.parametrize(
    "beside, message",
    [
        ({"lora": {}}, "does not go with trainer.lora: leave out one of the two"),
        ({"compile": True}, "does not go with trainer.compile: leave out one of the two"),
        ({"sequence_parallel": 2}, "does not go with trainer.sequence_parallel: leave out one of the two"),
        ({"expert_parallel": 2}, "does not go with trainer.expert_parallel: leave out one of the two"),
        ({"zero_stage": 3, "kl_coef": 0.1}, "at ZeRO 3 has no room for a reference model: lower trainer.zero_stage"),
    ],
)
def test_what_does_not_go_with_divided_layers_is_refused(beside, message):
    with pytest.raises(ValueError, match=f"trainer.tensor_parallel {message}"):
        settings(tensor_parallel=2, **beside)


def test_a_scorer_may_have_the_reference_model_of_divided_layers():
    settings(tensor_parallel=2, zero_stage=3, kl_coef=0.1, reference="scorer:it")


if __name__ == "__main__":
    train_divided(sys.argv[1:], CASES)
