"""The operations of a step, against those that PyTorch counts in the model's own passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from areal.config.trainer_section import LoraConfig
from areal.extensions.lora.lora import add_adapters
from areal.samples.table import NOT_SAMPLED
from areal.samples.trajectory import Group, Trajectory
from areal.training.flops import Operations, experts_of, peak_tflops
from areal.training.packed import FlatBatch, pack

LAYERS, HEADS, WIDTH = 3, 4, 16
DENSE = {"model_type": "qwen3", "intermediate_size": 96, "tie_word_embeddings": True}
LLAMA = {"model_type": "llama", "intermediate_size": 96, "tie_word_embeddings": False}
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def model_of(**sizes):
    config = AutoConfig.for_model(
        **sizes,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=WIDTH,
        vocab_size=50,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").train()


def row_of(*lengths, shared=0):
    """A row of sequences that begin with `shared` common tokens; all but the first token of each are sampled."""
    random = np.random.default_rng(0)
    prefix = random.integers(0, 50, shared)
    members = tuple(
        Trajectory(
            np.concatenate([prefix, random.integers(0, 50, length - shared)]).astype(np.int32),
            np.zeros(length, np.float32),
            np.repeat([NOT_SAMPLED, 0], [1, length - 1]).astype(np.int32),
            0.0,
            "stop",
        )
        for length in lengths
    )
    flat = FlatBatch.of([Group("g", 0, members)], minibatches=1, prefix_tree=bool(shared))
    return pack(flat, flat.trained(None), range(len(members)), torch.device("cpu"))


def counted(model, length, *, backward):
    tokens = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("sizes", [DENSE, LLAMA, EXPERTS], ids=lambda sizes: sizes["model_type"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_operations_are_those_of_the_model_alone_less_what_causality_saves(sizes, backward):
    model, length = model_of(**sizes), 21
    assert Operations(model).of(row_of(length), backward=backward) == without_masked(model, length, backward, backward)


def test_frozen_weights_get_no_gradient():
    model, length = add_adapters(model_of(**DENSE), LoraConfig(rank=4)), 21
    # PyTorch does not compute the gradient of the first layer's input, since nothing before it is trained.
    expected = without_masked(model, length, True, False)
    assert expected < Operations(model).of(row_of(length), backward=True) < 1.05 * expected


def without_masked(model, length, backward, head_trained):
    """What PyTorch counts, less the pairs of tokens that it masks and the head's product for the last token."""
    unseen = length * length - length * (length + 1) / 2
    passes = 3 if backward else 1
    unpredicted = 2 * 50 * 64 * (1 + backward + head_trained)
    return counted(model, length, backward=backward) - passes * 4 * LAYERS * HEADS * WIDTH * unseen - unpredicted


def test_a_shared_prefix_is_computed_once():
    operations = Operations(model_of(**DENSE))
    alone, tree = row_of(20, 20), row_of(20, 20, shared=12)
    assert sum(alone.added) - sum(tree.added) == 12
    saved = operations.of(alone, backward=False) - operations.of(tree, backward=False)
    head = 2 * 50 * 64 * 12  # hidden states of the prefix predict the same tokens
    weights = sum(p.numel() for n, p in model_of(**DENSE).named_parameters() if p.ndim > 1 and "embed" not in n)
    assert saved == 12 * 2 * weights + head + 4 * LAYERS * HEADS * WIDTH * (12 * 13 / 2)


def test_a_token_counts_those_that_it_attends_to_in_its_window():
    sliding = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "use_sliding_window": True}
    everything = Operations(model_of(**DENSE)).of(row_of(20), backward=False)
    windowed = Operations(model_of(**DENSE, **sliding, sliding_window=8)).of(row_of(20), backward=False)
    outside = sum(max(0, token + 1 - 8) for token in range(20))
    assert everything - windowed == 2 * 4 * HEADS * WIDTH * outside


def test_experts_have_other_names_in_each_family():
    small = {"num_hidden_layers": 1}
    ernie = {"moe_num_experts": 64, "moe_k": 6}
    for kind, sizes, counts in (
        ("deepseek_v3", {"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),
        ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4}, (32, 4)),
        ("ernie4_5_moe", ernie, (64, 6)),
        ("hunyuan_v1_moe", {"num_experts": 16, "moe_topk": 2}, (16, 2)),
        ("qwen3", {}, (0, 0)),
    ):
        assert experts_of(AutoConfig.for_model(kind, **small, **sizes)) == counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_is_measured_once_in_a_process(dtype):
    measured = peak_tflops(torch.device("cpu"), dtype)
    assert 1e-4 < measured < 1e3
    assert peak_tflops(torch.device("cpu"), dtype) == measured
