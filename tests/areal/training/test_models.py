"""Kinds of models: the trainer's gradients against plain transformers in float64, one sequence at a time.

Run under torchrun, this file is also the worker of the test of two ranks.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_training import (
    VOCAB,
    assert_same_gradients,
    eager,
    make_batch,
    reference_gradients,
    run_worker,
    settings,
    step_and_gradients,
)

from areal.config import UserError
from areal.training.engine import TrainingEngine

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXED = ["linear_attention", "full_attention"]
KINDS = {
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "Qwen3Next": {"head_dim": 8, **EXPERTS, **LINEAR, "layer_types": MIXED, "shared_expert_intermediate_size": 24},
    "Qwen3_5": {"head_dim": 8, **LINEAR, "layer_types": MIXED},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Granite": {"logits_scaling": 5.0, "attention_dropout": 0.5},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 4.0, "attn_logit_softcapping": None, "attention_dropout": 0.5},
}
"""What the configurations of tiny models have beside SIZES. Two of them have a dropout in their attention."""
MIXES = ["Qwen3Next", "Qwen3_5", "Lfm2"]
"""Models whose layers, as transformers has them on the CPU, run over the whole row."""


def make(kind, folder, **changes):
    torch.manual_seed(0)
    configure = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = transformers.AutoModelForCausalLM.from_config(configure(**SIZES | KINDS.get(kind, {}) | changes))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def exact_gradients(folder):
    model = eager(folder, torch.float64)
    model.config._experts_implementation = "eager"  # the default has no float64
    gradients = reference_gradients(model, make_batch())
    return {name: gradient.float() for name, gradient in gradients.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_those_of_each_sequence_alone(tmp_path, kind, stage):
    folder = make(kind, tmp_path / "model")
    engine = TrainingEngine(folder, settings(zero_stage=stage), seed=0)
    result, gradients = step_and_gradients(engine, make_batch())
    engine.close()
    assert_same_gradients(gradients, exact_gradients(folder))
    assert result.tokens_computed > 0
    assert not any(getattr(part, "attention_dropout", 0) for part in engine._module.modules())
    assert engine._one_a_row == (kind in MIXES)
    assert engine._prefix_tree == (kind not in MIXES)


def test_gradients_are_the_same_with_checkpointing_under_zero_3(tmp_path):
    folder = make("Granite", tmp_path / "model")
    engine = TrainingEngine(folder, settings(zero_stage=3, gradient_checkpointing=True), seed=0)
    _, gradients = step_and_gradients(engine, make_batch())
    engine.close()
    assert_same_gradients(gradients, exact_gradients(folder))


def test_two_ranks_have_the_gradients_of_one_with_a_mixture_of_experts(tmp_path):
    folder = make("Qwen3Moe", tmp_path / "model")
    run_worker(__file__, folder, tmp_path, ranks=2)
    assert_same_gradients(load_file(tmp_path / "gradients"), exact_gradients(folder))


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("Mamba", {"state_size": 4}, "MambaForCausalLM does not support an attention implementation"),
        ("Gemma2", {"attn_logit_softcapping": 30.0}, r"Gemma2ForCausalLM cannot be trained: .*softcap"),
    ],
)
def test_a_model_that_the_trainer_cannot_compute_is_refused_at_its_start(tmp_path, kind, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        TrainingEngine(make(kind, tmp_path / "model", **changes), settings(), seed=0)


def test_a_model_that_mixes_sequences_has_no_fixed_number_of_microbatches(tmp_path):
    folder = make(sorted(MIXES)[0], tmp_path / "model")
    with pytest.raises(UserError, match=r"mixes the sequences of a micro-batch.*leave out trainer.microbatches"):
        TrainingEngine(folder, settings(microbatches=2), seed=0)


def test_an_adapter_of_the_head_is_refused(tmp_path):
    folder = make("Granite", tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(UserError, match="includes the output layer lm_head"):
        TrainingEngine(folder, settings(lora={"rank": 2, "target_modules": ["lm_head"]}), seed=0)


def work(folder, out):
    engine = TrainingEngine(folder, settings(zero_stage=3, max_tokens_per_microbatch=40), seed=0)
    _, gradients = step_and_gradients(engine, make_batch() if engine.rank == 0 else None)
    if engine.rank == 0:
        save_file(gradients, out / "gradients")
    engine.close()


if __name__ == "__main__":
    work(*map(Path, sys.argv[1:]))
