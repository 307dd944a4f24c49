"""A tiny model and batches to train it on, for tests of what trains."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal.config.trainer_section import TrainerConfig
from areal.extensions.selftest import references
from areal.samples.trajectory import Branch, Group, Trajectory
from areal.storage.records import record_of
from areal.training.shards import share_out
from areal.weights.folders import write_weights
from areal.weights.model_files import write_index

TESTS = Path(__file__).parents[1]
WORKER_SECONDS = 240
VOCAB = 37
TEMPERATURE = 0.8
NEVER_CLIP = 1e9
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
WINDOWED = {"head_dim": 8, "sliding_window": 7}
SOME_WINDOWED = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
CAPPED = {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 1.5}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
}
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
KINDS = {
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "Qwen3Next": {"head_dim": 8, **EXPERTS, **LINEAR, "layer_types": MIXED, "shared_expert_intermediate_size": 24},
    "Qwen3_5": {"head_dim": 8, **LINEAR, "layer_types": MIXED},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Granite": {"logits_scaling": 5.0, "attention_dropout": 0.5},
    "Gemma2": {**SOME_WINDOWED, **CAPPED, "query_pre_attn_scalar": 8, "attention_dropout": 0.5},
    "Mistral": WINDOWED,
    "Gemma3": {**SOME_WINDOWED, "query_pre_attn_scalar": 24, "rope_parameters": TWO_ROPES},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma4": {
        **SOME_WINDOWED,
        "global_head_dim": 16,
        **PER_LAYER,
        "enable_moe_block": True,
        **EXPERTS,
        "top_k_experts": 2,
    },
    "Olmo3": SOME_WINDOWED,
    "GptOss": {**SOME_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4": {
        "head_dim": 8,
        "attention_chunk_size": 7,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
    },
}
"""What the configurations of tiny models have beside SIZES. Two of them have a dropout in their attention, WINDOWS a
window, or chunks, shorter than the sequences."""
WINDOWS = ["Mistral", "Gemma2", "Gemma3", "Gemma4", "Olmo3", "GptOss", "Llama4"]
MIXES = ["Qwen3Next", "Qwen3_5", "Lfm2"]
"""Models whose layers, as transformers has them on the CPU, run over the whole row."""


def settings(**changes):
    defaults = {"minibatches": 1, "max_tokens_per_microbatch": 64, "grad_clip": NEVER_CLIP, "lr": 1e-3}
    defaults["adam_eps"] = 1e-5  # at 1e-8 the rounding of a gradient near 0 would move a weight as far as any other
    return TrainerConfig(**(defaults | changes))


def make_model(folder, hidden_size=32, seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def weights_of(folder):
    """All tensors of a model folder or of published weights, whose files belong to one another."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def divide(folder, shards):
    """Give each shard of a model's weights a file, as ranks of a trainer do."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    number = share_out({name: tensor.numel() for name, tensor in tensors.items()}, shards)
    for shard in range(shards):
        tensors_of_shard = {name: tensor for name, tensor in tensors.items() if number[name] == shard}
        write_weights(tensors_of_shard, folder, shard, shards)
    write_index(folder)


def state_of(checkpoint):
    """The training state in a checkpoint: masters and moments, each whole but flat, and what is stored once."""
    facts = record_of((checkpoint / "training" / "state.json").read_bytes())
    parts_of_state = {name: {} for name in facts["shapes"]}
    files = sorted((checkpoint / "training").glob("rank_*"))
    assert [file.name for file in files] == [f"rank_{r:05}-of-{len(files):05}.safetensors" for r in range(len(files))]
    assert facts.pop("shares") == len(files)
    for file in files:
        with safe_open(file, "pt") as share:
            parts, place = json.loads(share.metadata()["parts"]), 0
            for name, start, stop in parts:
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    parts_of_state[name][kind, start] = share.get_slice(kind)[place : place + stop - start]
                place += stop - start
    return facts, {
        f"{name}/{kind}": torch.cat([parts_of_tensor[key] for key in sorted(parts_of_tensor) if key[0] == kind])
        for name, parts_of_tensor in parts_of_state.items()
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }


def assert_same_state(one, other):
    """Of the training states in two checkpoints, to the bit."""
    (one_facts, one), (other_facts, other) = state_of(one), state_of(other)
    assert one_facts == other_facts
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def make_kind(kind, folder, **changes):
    torch.manual_seed(0)
    configure = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = transformers.AutoModelForCausalLM.from_config(configure(**SIZES | KINDS.get(kind, {}) | changes))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_batch(groups=4, version=3, seed=0):
    """Groups of 1 to 4 samples, sampled by `version` and the two before it, with log-probs that are a little off."""
    rng = np.random.default_rng(seed)
    batch = []
    for g in range(groups):
        members = []
        for _ in range(1 + g % 4):
            prompt, length = int(rng.integers(1, 6)), int(rng.integers(8, 33))
            versions = np.sort(rng.integers(version - 2, version + 1, length)).astype(np.int32)
            versions[:prompt] = -1
            versions[-2] = -1  # a token in the middle that an environment wrote
            logprobs = np.where(versions >= 0, rng.normal(-3.5, 0.3, length), 0).astype(np.float32)
            tokens = rng.integers(0, VOCAB, length).astype(np.int32)
            members.append(Trajectory(tokens, logprobs, versions, float(rng.random()), "stop"))
        batch.append(Group(str(g), g, tuple(members)))
    return batch


def make_tree(seed=0):
    """As `make_batch`; but samples of a group begin with the same tokens."""
    batch = make_batch(seed=seed)
    for group in batch:
        for trajectory in group.trajectories[1:]:
            common = min(len(trajectory), len(group.trajectories[0])) - 3
            trajectory.tokens[:common] = group.trajectories[0].tokens[:common]
    return batch


def make_forest(seed=0):
    """As `make_batch`; but each sample has branches that leave the one before them, and returns of its own tokens."""
    rng = np.random.default_rng(seed)
    return [replace(group, trajectories=tuple(_branched(t, rng) for t in group.trajectories)) for group in make_batch()]


def _branched(trajectory, rng):
    branches, columns = [Branch(0, len(trajectory))], [trajectory]
    for _ in range(int(rng.integers(0, 4))):
        length_so_far = sum(branches[-1])
        shared, own_length = (
            int(rng.choice([0, length_so_far // 2, length_so_far - 1, length_so_far])),
            int(rng.integers(2, 9)),
        )
        versions = rng.integers(1, 4, own_length).astype(np.int32)
        versions[0] = -1
        logprobs = np.where(versions >= 0, rng.normal(-3.5, 0.3, own_length), 0).astype(np.float32)
        columns.append(Trajectory(rng.integers(0, VOCAB, own_length).astype(np.int32), logprobs, versions, 0.0, "stop"))
        branches.append(Branch(shared, own_length))
    arrays = {name: np.concatenate([getattr(c, name) for c in columns]) for name in ("tokens", "logprobs", "versions")}
    returns = rng.random(len(arrays["tokens"])) if rng.random() < 0.7 else None
    return replace(trajectory, **arrays, branches=tuple(branches), returns=returns)


def eager(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def logprobs_alone(model, trajectory):
    """log pi of every token but the first, [T - 1], from the sequence by itself."""
    return references.logprobs_alone(model, torch.from_numpy(trajectory.tokens).long(), TEMPERATURE)


def reference_gradients(model, batch, mask_older_than=0, entropy_coef=0.0):
    """Gradients of -1/N sum_t (w_t A_t u_t + entropy_coef H_t) at u = 1, where pi_theta = pi_prox: no packing, ranks or
    DeepSpeed."""
    loss, count = torch.zeros(()), 0
    samples = [t for group in batch for t in group.trajectories]
    credits = [np.array([t.reward]) if t.returns is None else t.returns[t.sampled] for t in samples]
    mean = np.mean([credit.mean() for credit in credits])
    std = np.sqrt(np.mean([((credit - mean) ** 2).mean() for credit in credits])) + 1e-6
    for sequence in (sequence for sample in samples for sequence in sample.sequences()):
        A = ((np.full(len(sequence), sequence.reward) if sequence.returns is None else sequence.returns) - mean) / std
        trained = torch.from_numpy(sequence.versions >= mask_older_than)[1:]
        logp = logprobs_alone(model, sequence)
        w = torch.exp(logp.detach() - torch.from_numpy(sequence.logprobs)[1:])
        loss = loss - (w * logp * torch.from_numpy(A)[1:].to(logp.dtype))[trained].sum()
        if entropy_coef:
            tokens = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
            logps = torch.log_softmax(model(input_ids=tokens).logits[0, :-1] / TEMPERATURE, -1)
            loss = loss + entropy_coef * (logps.exp() * logps).sum(-1)[trained].sum()
        count += int(trained.sum())
    model.zero_grad()
    (loss / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def exact_gradients(folder, batch=None):
    """In float64, of `batch`, or of that of `make_batch`."""
    model = eager(folder, torch.float64)
    model.config._experts_implementation = "eager"  # the default has no float64
    gradients = reference_gradients(model, batch or make_batch())
    return {name: gradient.float() for name, gradient in gradients.items()}


def step_and_gradients(engine, batch, **options):
    """The result of a step, and the gradients that its (last) optimizer step got, summed over all ranks."""
    from deepspeed.utils import safe_get_full_grad

    gradients = {}
    optimizer_step = engine.model.deepspeed.step

    def spy():
        for name, parameter in engine.model.module.named_parameters():
            if (gradient := safe_get_full_grad(parameter)) is not None:  # a bias of Ernie 4.5's routers has none
                gradients[name] = gradient.clone()
        optimizer_step()

    engine.model.deepspeed.step = spy
    result = engine.step(batch, version=3, temperature=TEMPERATURE, **options)
    engine.model.deepspeed.step = optimizer_step
    return result, gradients


def assert_same_gradients(gradients, expected):
    """fp32: sums in another order differ by rounding alone."""
    assert gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            gradients[name], expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@functools.cache
def rank_server():
    """The process from which ranks are forked, and the file of what they print. It ends with this one."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    errors = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115 - as long as the process
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ranks.py"))],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=open(errors.name, "a"),  # noqa: SIM115
        text=True,
    )
    return process, errors


def run_worker(file, *arguments, ranks=1):
    """A file as a program in new processes, one a rank; with 0, in one that is no rank. Returns what they print."""
    server, errors = rank_server()
    print(json.dumps([ranks, str(file), *map(str, arguments)]), file=server.stdin, flush=True)
    answers, _, _ = select.select([server.stdout], [], [], WORKER_SECONDS)
    answer = server.stdout.readline() if answers else f"no answer within {WORKER_SECONDS} s"
    if not answers:
        server.kill()
        rank_server.cache_clear()
    printed = errors.read()
    assert answer == "ok\n", answer + printed[-3000:]
    return printed


async def sampled(engine, name, prompt, sampling, pictures=()):
    """A sample that a generation engine makes of the prompt, as the trainer gets it."""
    async with aclosing(engine.generate(name, prompt, sampling, pictures=pictures)) as parts:
        rows = [part async for part in parts]
    tokens, logprobs, versions = (
        np.concatenate([getattr(row, column) for row in rows]) for column in ("tokens", "logprobs", "versions")
    )
    start = len(prompt)
    return Trajectory(
        np.concatenate([prompt, tokens]).astype(np.int32),
        np.concatenate([np.zeros(start), logprobs]).astype(np.float32),
        np.concatenate([np.full(start, -1), versions]).astype(np.int32),
        float(tokens[0] % 2),
        "length",
    )
