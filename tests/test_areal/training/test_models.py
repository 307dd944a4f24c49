"""Kinds of models: the trainer's gradients against plain transformers in float64, one sequence at a time.

Run by ranks.py, this file is also the worker of the test of two ranks.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_training import (
    KINDS,
    MIXES,
    TEMPERATURE,
    VOCAB,
    WINDOWS,
    assert_same_gradients,
    eager,
    exact_gradients,
    make_batch,
    make_forest,
    make_kind,
    make_tree,
    run_worker,
    settings,
    step_and_gradients,
)
from torch.nn.functional import pad
from transformers import modeling_utils

from areal.base.errors import UserError
from areal.extensions.selftest import references
from areal.training.model_checks import random_groups, what_is_missing
from areal.training.training_engine import TrainingEngine
from areal.weights.wrappers import published_shapes

PARTITIONED = {"Qwen3Moe", "Qwen3Next", "Gemma3"}
"""What ZeRO 3 has to gather differs in them: experts, layers of other sorts. There the other kinds are slow."""
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}


@pytest.mark.parametrize(
    ("kind", "stage"),
    [(kind, 0) for kind in KINDS]
    + [pytest.param(kind, 3, marks=[] if kind in PARTITIONED else pytest.mark.slow) for kind in KINDS],
)
def test_gradients_are_those_of_each_sequence_alone(tmp_path, kind, stage):
    folder = make_kind(kind, tmp_path / "model")
    engine = TrainingEngine(folder, settings(zero_stage=stage), seed=0)
    result, gradients = step_and_gradients(engine, make_batch())
    engine.close()
    assert_same_gradients(gradients, exact_gradients(folder))
    assert result.tokens_computed > 0
    assert not any(getattr(part, "attention_dropout", 0) for part in engine.model.module.modules())
    assert engine.passes.one_a_row == (kind in MIXES)
    assert engine.passes.prefix_tree == (kind not in MIXES)


@pytest.mark.parametrize("kind", WINDOWS)
def test_gradients_of_trees_whose_paths_are_longer_than_the_window_are_those_of_each_branch_alone(tmp_path, kind):
    folder, batch = make_kind(kind, tmp_path / "model"), make_forest()
    engine = TrainingEngine(folder, settings(max_tokens_per_microbatch=1000), seed=0)
    _, gradients = step_and_gradients(engine, batch)
    engine.close()
    assert_same_gradients(gradients, exact_gradients(folder, batch))


def test_gradients_are_the_same_with_checkpointing_under_zero_3(tmp_path):
    folder = make_kind("Granite", tmp_path / "model")
    engine = TrainingEngine(folder, settings(zero_stage=3, gradient_checkpointing=True), seed=0)
    _, gradients = step_and_gradients(engine, make_batch())
    engine.close()
    assert_same_gradients(gradients, exact_gradients(folder))


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients_and_names(tmp_path):
    folder = make_kind("Gemma3", tmp_path / "model")
    engine = TrainingEngine(folder, settings(compile=True), seed=0)
    compiled = torch._dynamo.utils.counters["stats"]
    _, gradients = step_and_gradients(engine, make_batch())
    engine.step(make_forest(), version=4, temperature=TEMPERATURE)
    graphs = compiled["unique_graphs"]
    for batch in (make_batch(1), make_tree(), make_forest()):  # rows of other shapes
        engine.step(batch, version=5, temperature=TEMPERATURE)
    published = load_file(engine.storage.publish(tmp_path / "0") / "model.safetensors")
    engine.close()
    assert_same_gradients(gradients, exact_gradients(folder))
    assert 0 < graphs == compiled["unique_graphs"]
    assert published.keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Lfm2"])
def test_layers_that_cannot_be_compiled_are_refused_at_the_start(tmp_path, kind):
    folder = make_kind(kind, tmp_path / "model")
    with pytest.raises(UserError, match="has layers that mix tokens, or experts: leave out trainer.compile"):
        TrainingEngine(folder, settings(compile=True), seed=0)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Granite"])
def test_what_is_published_can_be_told_from_the_model_s_folder(tmp_path, kind):
    folder = make_kind(kind, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    extra = {"mtp.fc.weight": torch.ones(3, 4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(stored | extra, folder / "model.safetensors", metadata={"format": "pt"})
    engine = TrainingEngine(folder, settings(), seed=0)
    published = load_file(engine.storage.publish(tmp_path / "0") / "model.safetensors")
    engine.close()
    assert published.keys() == stored.keys()
    assert published_shapes(folder) == {name: tuple(tensor.shape) for name, tensor in published.items()}


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one_with_a_mixture_of_experts(tmp_path):
    folder = make_kind("Qwen3Moe", tmp_path / "model")
    run_worker(__file__, folder, tmp_path, ranks=2)
    assert_same_gradients(load_file(tmp_path / "gradients"), exact_gradients(folder))


def test_a_model_that_the_trainer_cannot_compute_is_refused_at_its_start(tmp_path):
    with pytest.raises(UserError, match="replace the attention of models of the type falcon: take another model"):
        TrainingEngine(make_kind("Falcon", tmp_path / "model"), settings(), seed=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_all_weights_of_its_config_json_is_refused(tmp_path, stage):
    """transformers makes up those that are missing."""
    folder = make_kind("Llama", tmp_path / "model")
    all_tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        without = {neighbour: tensor for neighbour, tensor in all_tensors.items() if neighbour != name}
        for tensors, flaw in ((without, ", which"), (without | {name: torch.ones(3, 4)}, " of the shape that")):
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises(UserError, match=f"model has no {name}{flaw} its config.json describes"):
                TrainingEngine(folder, settings(zero_stage=stage), seed=0)


def test_what_config_json_does_not_show_of_a_model_s_attention_is_found_in_its_forward_pass():
    def missing(windows, longest=None, parts=(), **sizes):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**sizes))
        return what_is_missing(SimpleNamespace(config=config, modules=lambda: parts), windows, longest)

    windowed = {"sliding_window": 16, "max_position_embeddings": 64}
    assert [missing([None, None], n, **windowed) is None for n in (16, 17, None)] == [True, False, False]
    assert missing([16, 16], **windowed) is None
    mixed = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 16}
    assert missing([16, 16], **mixed) is None
    assert missing([16, None], **mixed) is not None
    assert "layers of the kind indexed_attention" in missing([None], 1, layer_types=["indexed_attention"])
    assert missing([]) is None
    assert "do not call the attention function" in missing([], parts=[torch.nn.MultiheadAttention(2, 1)])


@pytest.mark.parametrize(("longest", "surplus"), [(16, 0), (None, 0), (17, 20)])
def test_the_longest_sequence_that_may_come_says_which_frequencies_of_longrope_every_row_has(
    tmp_path, longest, surplus
):
    """As in vLLM. transformers takes those of the longest sequence that it gets, which `more` tokens after it are."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
    folder = make_kind("Phi3", tmp_path / "model", original_max_position_embeddings=16, rope_parameters=rope)
    engine, model = TrainingEngine(folder, settings(), seed=0, longest=longest), eager(folder)
    groups = random_groups(VOCAB, [(12, 16)])
    computed = engine.logprobs(groups, temperature=TEMPERATURE)
    engine.close()
    expected = []
    for tokens in (torch.from_numpy(sample.tokens).long() for sample in groups[0].trajectories):
        with torch.no_grad():
            logps = references.logprobs_alone(model, pad(tokens, (0, surplus)), TEMPERATURE)
        expected += [0.0, *logps[: len(tokens) - 1].tolist()]
    np.testing.assert_allclose(computed, expected, atol=1e-5)


def test_a_model_that_mixes_sequences_has_no_fixed_number_of_microbatches(tmp_path):
    folder = make_kind(sorted(MIXES)[0], tmp_path / "model")
    with pytest.raises(UserError, match=r"mixes the sequences of a micro-batch.*leave out trainer.microbatches"):
        TrainingEngine(folder, settings(microbatches=2), seed=0)


def test_an_adapter_of_the_head_is_refused(tmp_path):
    folder = make_kind("Granite", tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(UserError, match="includes the output layer lm_head"):
        TrainingEngine(folder, settings(lora={"rank": 2, "target_modules": ["lm_head"]}), seed=0)


def note_values(matrices):
    """Have transformers' loader for ZeRO 3 note whether the matrices that it gets have values."""
    load = modeling_utils._load_state_dict_into_zero3_model

    def noting(model, weights, *arguments):
        matrices.extend(not t.is_meta for t in weights.values() if t.ndim > 1)
        return load(model, weights, *arguments)

    modeling_utils._load_state_dict_into_zero3_model = noting


def work(folder, out):
    note_values(matrices := [])
    engine = TrainingEngine(folder, settings(zero_stage=3, max_tokens_per_microbatch=40), seed=0)
    _, gradients = step_and_gradients(engine, make_batch() if engine.rank == 0 else None)
    assert matrices and set(matrices) == {engine.rank == 0}, "no other rank holds the whole model"
    if engine.rank == 0:
        save_file(gradients, out / "gradients")
    engine.close()


if __name__ == "__main__":
    work(*map(Path, sys.argv[1:]))
