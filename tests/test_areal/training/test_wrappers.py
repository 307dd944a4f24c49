"""Models with vision beside their text: the trainer trains the text, under the names of the whole model."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_training import (
    KINDS,
    LINEAR,
    MIXED,
    SIZES,
    TEMPERATURE,
    logprobs_alone,
    make_batch,
    settings,
    step_and_gradients,
)
from transformers import AutoModelForImageTextToText

from areal.base.errors import UserError
from areal.models import check_trainable
from areal.training.training_engine import TrainingEngine
from areal.weights.wrappers import check_names, published_shapes

WIDTH = {"hidden_size": 32, "intermediate_size": 32}
TOWER = {**WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_TOWER = {**WIDTH, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
THREE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
TEXT = {**SIZES, "head_dim": 8}
UNTIED = {"tie_word_embeddings": False}
QWEN = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8, **UNTIED}
PLACES = {"num_position_embeddings": 16}
LLAMA4 = {**KINDS["Llama4"], "pad_token_id": 0}
WRAPPERS = {
    "Gemma3": {
        "text_config": {**TEXT, "sliding_window": 7},
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
        **{"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5},
    },
    "Llama4": {
        "text_config": {**TEXT, **LLAMA4},
        "vision_config": {**TOWER, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "boi_token_index": 3,
        "eoi_token_index": 4,
        "image_token_index": 5,
    },
    "Mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**TOWER, "model_type": "pixtral"},
        "image_token_index": 5,
        **UNTIED,
    },
    "Qwen2_5_VL": {
        "text_config": {**SIZES, "rope_parameters": THREE, **UNTIED},
        "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [0]},
        **QWEN,
    },
    "Qwen3VL": {
        "text_config": {**TEXT, "rope_parameters": {**THREE, "mrope_interleaved": True}, **UNTIED},
        "vision_config": {**QWEN_TOWER, **PLACES, "deepstack_visual_indexes": [0]},
        **QWEN,
    },
    "Qwen3_5": {
        "text_config": {
            **TEXT,
            **LINEAR,
            "layer_types": MIXED,
            "rope_parameters": {**THREE, "mrope_interleaved": True},
            **UNTIED,
        },
        "vision_config": {**QWEN_TOWER, **PLACES, "deepstack_visual_indexes": []},
        **QWEN,
    },
}
FAST = ("Mistral3", "Qwen3VL")


def make_wrapper(kind, folder):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**WRAPPERS[kind])
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tensors_in(folder):
    return load_file(folder / "model.safetensors")


def exact_logprobs(folder, batch):
    """Of the whole model, in float64, of each sampled token."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    values = []
    for sample in (trajectory for group in batch for trajectory in group.trajectories):
        with torch.no_grad():
            values.append(torch.cat([torch.zeros(1).double(), logprobs_alone(model, sample)]) * (sample.versions >= 0))
    return torch.cat(values).float()


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in WRAPPERS]
)
def test_the_text_of_a_wrapper_is_trained_and_what_is_saved_is_the_wrapper_with_its_vision(tmp_path, kind, stage):
    folder, batch = make_wrapper(kind, tmp_path / "model"), make_batch()
    check_trainable(folder)
    stored = tensors_in(folder)
    engine = TrainingEngine(folder, settings(zero_stage=stage), seed=0)
    computed = torch.from_numpy(engine.logprobs(batch, temperature=TEMPERATURE))
    torch.testing.assert_close(computed, exact_logprobs(folder, batch), rtol=0, atol=1e-4)
    step_and_gradients(engine, batch)
    published = tensors_in(engine.storage.publish(tmp_path / "1"))
    trained = engine.logprobs(batch, temperature=TEMPERATURE)
    saved = engine.storage.export(tmp_path / "saved")
    engine.close()
    assert {name: tuple(tensor.shape) for name, tensor in published.items()} == published_shapes(folder)
    assert {name for name in stored if not re.search("vis|multi_modal", name)} == published.keys()
    assert not any(torch.equal(stored[name], tensor) for name, tensor in published.items() if "proj" in name)
    assert tensors_in(saved).keys() == stored.keys()
    for name, tensor in tensors_in(saved).items():
        assert torch.equal(tensor, published.get(name, stored[name]))
    torch.testing.assert_close(torch.from_numpy(trained), exact_logprobs(saved, batch), rtol=0, atol=1e-4)


def test_a_wrapper_with_the_names_that_the_hub_has_for_it_keeps_them(tmp_path):
    folder = make_wrapper("Qwen3VL", tmp_path / "model")
    renamed = {
        name.replace("model.language_model.", "language_model.model.").replace("lm_head", "language_model.lm_head"): t
        for name, t in tensors_in(folder).items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    engine = TrainingEngine(folder, settings(), seed=0)
    saved = engine.storage.export(tmp_path / "saved")
    engine.close()
    assert {name: tensor.tolist() for name, tensor in tensors_in(saved).items()} == {
        name: tensor.tolist() for name, tensor in renamed.items()
    }


def test_names_that_engines_would_not_know_are_told_before_a_run(tmp_path):
    folder = make_wrapper("Mistral3", tmp_path / "model")
    check_names(folder)
    tensors = tensors_in(folder)
    tensors["language_model.model.layers.0.mlp.up.weight"] = tensors.pop(
        "language_model.model.layers.0.mlp.up_proj.weight"
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    published_shapes.cache_clear()
    with pytest.raises(
        UserError, match=r"would publish 1 weights .* the first is language_model.model.layers.0.mlp.up_p"
    ):
        check_names(folder)
