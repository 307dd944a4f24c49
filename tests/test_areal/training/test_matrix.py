"""What the trainer trains: tiny random models of every family, packed and branching, against transformers in float64.

Run as a program, this file writes the table of docs/training.md.
"""

import json
from collections import defaultdict

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.tiny_training import (
    EXPERTS,
    KINDS,
    LINEAR,
    MIXED,
    SIZES,
    SOME_WINDOWED,
    TESTS,
    VOCAB,
    WINDOWED,
    exact_gradients,
    make_batch,
    make_forest,
    settings,
    step_and_gradients,
)

from areal.base.errors import UserError
from areal.models import check_trainable
from areal.training.training_engine import TrainingEngine

PAGE = TESTS.parent / "docs" / "training.md"
BEGIN = "<!-- from here on written by tests/test_areal/training/test_matrix.py -->\n"
TREE, ALONE = "a prefix tree", "one sequence, on a CPU"
ROUNDING = 3e-4
"""Of the largest gradient; most models have 1e-6. For Qwen3.5-MoE transformers in fp32 is itself off by 1e-4."""
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    **FEW,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
INDEXED = {**LATENT, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
STATES = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
HEAD = {"head_dim": 8}
MODELS = {
    "Afmoe": {
        **HEAD,
        **FEW,
        "num_experts": 4,
        "num_dense_layers": 1,
        "sliding_window": 7,
        "global_attn_every_n_layers": 2,
    },
    "Apertus": {},
    "Arcee": {},
    "Bamba": {**STATES, "attn_layer_indices": [1]},
    "Cohere": {},
    "Cohere2": SOME_WINDOWED,
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "DeepseekV32": INDEXED,
    "Dots1": {**ROUTED, **HEAD},
    "Ernie4_5": HEAD,
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "Exaone4": SOME_WINDOWED,
    "Falcon": {},
    "FalconH1": {**STATES, **HEAD, "mamba_d_ssm": 64},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {},
    "GPTNeoX": {},
    "Gemma": HEAD,
    "Gemma2": KINDS["Gemma2"],
    "Gemma3": KINDS["Gemma3"],
    "Gemma3n": {
        **HEAD,
        "sliding_window": 7,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "pad_token_id": None,  # its embedding would be 0, of which Gemma 3n takes the root
    },
    "Gemma4": KINDS["Gemma4"],
    "Glm": HEAD,
    "Glm4": HEAD,
    "Glm4Moe": {**ROUTED, **HEAD},
    "GlmMoeDsa": INDEXED,
    "GptOss": KINDS["GptOss"],
    "Granite": KINDS["Granite"],
    "GraniteMoe": LOCAL,
    "GraniteMoeHybrid": {**STATES, **LOCAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "Helium": HEAD,
    "HunYuanDenseV1": HEAD,
    "HunYuanMoEV1": {**HEAD, "num_experts": 4, "moe_topk": 2},
    "Jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "KimiLinear": {
        **LATENT,
        "q_lora_rank": None,
        "num_experts": 4,
        "layer_types": MIXED,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "Lfm2": KINDS["Lfm2"],
    "Lfm2Moe": {**FEW, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    "Llama": {},
    "Llama4": KINDS["Llama4"],
    "Mamba": {"state_size": 4},
    "MiniMaxM2": {**HEAD, **LOCAL, "rotary_dim": 8},
    "Ministral": SOME_WINDOWED,
    "Ministral3": HEAD,
    "Mistral": WINDOWED,
    "Mixtral": {**LOCAL, "sliding_window": 7},
    "Nemotron": HEAD,
    "NemotronH": {
        **HEAD,
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2": {},
    "Olmo3": SOME_WINDOWED,
    "OlmoHybrid": {"layer_types": MIXED, **LINEAR},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phi": {},
    "Phi3": {"sliding_window": 7},
    "Phimoe": KINDS["Phimoe"],
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3": HEAD,
    "Qwen3Moe": KINDS["Qwen3Moe"],
    "Qwen3Next": KINDS["Qwen3Next"],
    "Qwen3_5": KINDS["Qwen3_5"],
    "Qwen3_5Moe": KINDS["Qwen3Next"],
    "SeedOss": HEAD,
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 7},
    "VaultGemma": {**HEAD, "attn_logit_softcapping": 2.0, "sliding_window": 7},
}
"""The models' classes in transformers, and what their tiny configurations have beside SIZES."""
MIX = {
    *("Bamba", "FalconH1", "GraniteMoeHybrid", "Jamba", "KimiLinear", "Lfm2", "Lfm2Moe", "Mamba", "NemotronH"),
    *("OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
}
"""Those whose layers mix the sequences of a row."""


def config_of(kind):
    configure = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    return configure(**SIZES | MODELS[kind])


def why_refused(kind, folder):
    """What the check before the start says of a model, without its folder; None: it is trained."""
    (folder / "config.json").write_text(json.dumps(config_of(kind).to_dict()))
    try:
        check_trainable(folder)
    except UserError as error:
        return str(error).partition("cannot be trained: ")[2].rstrip(".")
    return None


def table(folder):
    """The table of docs/training.md."""
    rows = defaultdict(list)
    for kind in MODELS:
        held = ALONE if kind in MIX else TREE
        why = why_refused(kind, folder)
        rows[held if why is None else f"not trained: {why}"].append(f"`{config_of(kind).model_type}`")
    ordered = sorted(rows, key=lambda held: ([TREE, ALONE, held].index(held), held))
    lines = [f"| {held} | {', '.join(sorted(rows[held], key=str.lower))} |\n" for held in ordered]
    return "| a row holds | `model_type` in config.json |\n|---|---|\n" + "".join(lines)


def test_the_page_says_of_each_model_what_the_check_before_the_start_says(tmp_path):
    assert PAGE.read_text(encoding="utf-8").partition(BEGIN)[2] == table(tmp_path), "run this file as a program"
    assert len(MODELS) >= 35


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_trained_as_transformers_computes_each_sequence_alone_or_is_refused(tmp_path, kind):
    """Gradients on packed and on branching rows, and the names of what is published. The gradient of each token's
    log-prob is in them, so the log-probs are exact too."""
    torch.manual_seed(0)
    if why_refused(kind, tmp_path):
        return
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    for parameter in model.parameters():
        if not parameter.isfinite().all():
            torch.nn.init.normal_(parameter, std=0.2)  # transformers leaves some of Gemma 3n as they are in memory
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    stored = load_file(tmp_path / "model" / "model.safetensors").keys()
    for batch in (make_batch(), make_forest()):
        engine = TrainingEngine(tmp_path / "model", settings(max_tokens_per_microbatch=1000), seed=0)
        published = load_file(engine.storage.publish(tmp_path / "0") / "model.safetensors").keys()
        _, gradients = step_and_gradients(engine, batch)
        assert (engine.passes.one_a_row, engine.passes.prefix_tree) == (kind in MIX, kind not in MIX)
        engine.close()
        assert published == stored
        exact = exact_gradients(tmp_path / "model", batch)
        assert gradients.keys() == exact.keys()
        largest = max(float(gradient.abs().max()) for gradient in exact.values())
        for name, gradient in exact.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=ROUNDING * largest, msg=name)


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(
            PAGE.read_text(encoding="utf-8").partition(BEGIN)[0] + BEGIN + table(Path(place)), encoding="utf-8"
        )
