"""Experts of sampling in training, against transformers' own routers in float64 whose `topk` is given the experts.

Run by ranks.py, this file is also the worker of the test of two ranks.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_training import (
    EXPERTS,
    LINEAR,
    MIXED,
    SIZES,
    TEMPERATURE,
    assert_same_gradients,
    eager,
    make_batch,
    make_forest,
    make_kind,
    reference_gradients,
    run_worker,
    settings,
    step_and_gradients,
)
from torch.overrides import TorchFunctionMode

from areal.base.errors import UserError
from areal.extensions.parallel.ulysses import filled
from areal.extensions.routing.expert_routing import Routing, routing_of
from areal.extensions.routing.routes import RouteReplay
from areal.samples.trajectory import Branch, Group, Trajectory
from areal.training.packed import FlatBatch, pack
from areal.training.training_engine import TrainingEngine

GROUPED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DENSE_FIRST = {"first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1, "norm_topk_prob": True}
MIXTURES = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "Qwen3Next": {"head_dim": 8, **EXPERTS, **LINEAR, "layer_types": MIXED, "shared_expert_intermediate_size": 24},
    "Qwen3_5Moe": {"head_dim": 8, **EXPERTS, **LINEAR, "layer_types": MIXED, "shared_expert_intermediate_size": 24},
    "DeepseekV3": {**GROUPED, **DENSE_FIRST, **LATENT, "num_key_value_heads": 4},
    "Glm4Moe": {"head_dim": 8, **GROUPED, **DENSE_FIRST},
    "GptOss": {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "layer_types": ["full_attention"] * 2},
}


class GivenExperts(TorchFunctionMode):
    """Has transformers' routers choose the experts of `numbers`, int64 [layers with experts, T, chosen]; where a token
    has zeros alone, those that they would choose."""

    def __init__(self, numbers: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._numbers, self._experts = iter(numbers), experts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function is torch.topk and args[0].ndim == 2 and args[0].shape[-1] == self._experts:
            numbers = next(self._numbers)
            chosen = torch.where(numbers.any(1, keepdim=True), numbers, result[1])
            return args[0].gather(1, chosen), chosen
        return result


def with_routes(batch, routing, sparse, seed=0):
    """The batch with random routes of its sampled tokens. sparse: the layers that have experts."""
    rng = np.random.default_rng(seed)

    def routed(trajectory):
        routes = np.zeros((len(trajectory), routing.layers, routing.chosen), routing.dtype)
        for token, layer in itertools.product(np.flatnonzero(trajectory.sampled), sparse):
            routes[token, layer] = rng.permutation(routing.experts)[: routing.chosen]
        return replace(trajectory, routes=routes.reshape(len(trajectory), -1).view(np.uint8))

    return [replace(group, trajectories=tuple(map(routed, group.trajectories))) for group in batch]


def exact_gradients(folder, batch, routing, sparse, *, prefix_tree):
    """In float64, one sequence at a time."""
    flat = FlatBatch.of(batch, minibatches=1, prefix_tree=prefix_tree, keeps_cache=True)
    model = eager(folder, torch.float64)
    model.config._experts_implementation = "eager"
    ends = flat.lengths.cumsum()
    routes_of = {
        flat.tokens[end - length : end].tobytes(): flat.inputs["routes"][end - length : end]
        for end, length in zip(ends, flat.lengths, strict=True)
    }
    forward = model.forward

    def routed(input_ids):
        routes = routes_of[input_ids[0].int().numpy().tobytes()].reshape(len(input_ids[0]), routing.layers, -1)
        numbers = torch.from_numpy(routes.astype(np.int64)).transpose(0, 1)[sparse]
        with GivenExperts(numbers, routing.experts):
            return forward(input_ids=input_ids)

    model.forward = routed
    return {name: gradient.float() for name, gradient in reference_gradients(model, batch).items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3Moe", {"gradient_checkpointing": True, "max_tokens_per_microbatch": 1000}),
        *(
            pytest.param(kind, changes, marks=pytest.mark.slow)
            for kind in MIXTURES
            if kind != "GptOss"  # the trainer does not compute its attention
            for changes in ({}, *[{"zero_stage": 3}] * (kind in ("Qwen3Moe", "DeepseekV3")))
        ),
    ],
)
def test_gradients_are_those_of_each_branch_alone_with_the_experts_of_sampling(tmp_path, kind, changes):
    folder = make_kind(kind, tmp_path / "model", **MIXTURES[kind])
    routing, sparse = routing_of(folder), [1] if kind in ("Qwen2Moe", "DeepseekV3", "Glm4Moe") else [0, 1]
    batch = with_routes(make_forest(), routing, sparse)
    engine = TrainingEngine(folder, settings(routing="replay", **changes), seed=0, keeps_cache=True)
    _, gradients = step_and_gradients(engine, batch)
    engine.close()
    expected = exact_gradients(folder, batch, routing, sparse, prefix_tree=engine.passes.prefix_tree)
    assert_same_gradients(gradients, expected)
    routers = [name for name in gradients if name.endswith(("gate.weight", "router.weight"))]
    assert all(gradients[name].abs().max() > 1e-3 for name in routers), "the router has its gradient"


@pytest.mark.slow
def test_two_ranks_that_compute_rows_together_have_the_gradients_of_one(tmp_path):
    folder = make_kind("Qwen3Moe", tmp_path / "model", **MIXTURES["Qwen3Moe"])
    run_worker(__file__, folder, tmp_path, ranks=2)
    batch = with_routes(make_forest(), routing_of(folder), [0, 1])
    for stage in (0, 3):
        expected = exact_gradients(folder, batch, routing_of(folder), [0, 1], prefix_tree=True)
        assert_same_gradients(load_file(tmp_path / f"zero{stage}"), expected)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_router_weighs_given_experts_as_transformers_does(tmp_path, kind):
    folder = make_kind(kind, tmp_path / "model", **MIXTURES[kind])
    routing, model = routing_of(folder), eager(folder)
    routers = {
        name: part for name, part in model.named_modules() if type(part).__name__.endswith(("KRouter", "kRouter"))
    }
    layers = [int(name.split(".layers.")[1][0]) for name in routers]
    (group,) = with_routes([Group("0", 0, (trajectory(40, prompt=10),))], routing, layers)
    routes = torch.from_numpy(group.trajectories[0].routes)
    numbers = routes.view(40, routing.layers, routing.chosen).long()
    hidden = torch.randn(40, SIZES["hidden_size"])
    replayed = RouteReplay(model, routing)
    for layer, router in zip(layers, routers.values(), strict=True):
        replayed.follow(None)
        unrouted = router(hidden)
        with GivenExperts(numbers[:, layer][None], routing.experts):
            expected = router(hidden)
        replayed.follow(routes)
        choice = router(hidden)
        assert choice[2].equal(expected[2]) and choice[2][:10].equal(unrouted[2][:10])
        torch.testing.assert_close(choice[1], expected[1], rtol=1e-6, atol=1e-7)
        assert choice[1].dtype == unrouted[1].dtype and choice[0].equal(unrouted[0])


def trajectory(length, prompt, *, tokens=None, routes=None):
    versions = np.where(np.arange(length) < prompt, -1, 3)
    numbers = np.arange(length) if tokens is None else tokens
    return Trajectory(numbers, np.zeros(length), versions, 0.0, "stop", routes=routes)


def test_the_pass_at_a_token_has_the_routes_of_the_token_that_it_sampled():
    routes = np.array([[0, 0], [0, 0], [1, 2], [3, 1], [0, 2]], np.uint8)
    flat = FlatBatch.of([Group("0", 0, (trajectory(5, 2, routes=routes),))], minibatches=1)
    assert flat.inputs["routes"].tolist() == [[0, 0], [1, 2], [3, 1], [0, 2], [0, 0]]
    row = pack(flat, flat.trained(None), [0], torch.device("cpu"))
    assert row.inputs["routes"].tolist() == flat.inputs["routes"].tolist()
    assert filled(row, 2).inputs["routes"].tolist() == [*flat.inputs["routes"].tolist(), [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="only 1 of 2 sequences have routes"):
        FlatBatch.of([Group("0", 0, (trajectory(5, 2, routes=routes), trajectory(5, 2)))], minibatches=1)


def test_a_prefix_is_shared_up_to_the_first_pass_that_took_other_experts():
    """Two samples with the same prompt and first answer; then a third, which another version sampled."""
    first = trajectory(5, 2, tokens=[5, 6, 7, 8, 1], routes=np.uint8([[0, 0], [0, 0], [1, 2], [2, 3], [4, 5]]))
    second = trajectory(5, 2, tokens=[5, 6, 7, 8, 2], routes=np.uint8([[0, 0], [0, 0], [1, 2], [2, 3], [5, 4]]))
    third = trajectory(5, 2, tokens=[5, 6, 7, 9, 3], routes=np.uint8([[0, 0], [0, 0], [0, 2], [2, 3], [4, 5]]))
    flat = FlatBatch.of([Group("0", 0, (first, second, third))], minibatches=1, prefix_tree=True)
    assert flat.shared.tolist() == [0, 3, 1], "their last common pass took other experts"
    row = pack(flat, flat.trained(None), range(3), torch.device("cpu"))
    assert row.tokens.tolist() == [[5, 6, 7, 8, 1, 8, 2, 6, 7, 9, 3]]
    assert row.inputs["routes"][:, 0].tolist() == [0, 1, 2, 4, 0, 5, 0, 0, 2, 4, 0]


def test_a_branch_has_the_routes_of_the_tokens_that_it_shares():
    """The second branch leaves by a tool's text, whose pass has no routes, and samples a token after it."""
    routes = np.uint8([[0, 0], [0, 0], [1, 2], [2, 3], [0, 0], [4, 5]])
    sample = Trajectory(
        [5, 6, 7, 8, 9, 1], np.zeros(6), [-1, -1, 3, 3, -1, 3], 0.0, "stop", (Branch(0, 4), Branch(3, 2)), routes=routes
    )
    flat = FlatBatch.of([Group("0", 0, (sample,))], minibatches=1, prefix_tree=True)
    assert flat.inputs["routes"].tolist() == [[0, 0], [1, 2], [2, 3], [0, 0], [0, 0], [1, 2], [2, 3], [4, 5], [0, 0]]
    assert flat.shared.tolist() == [0, 3]


@pytest.mark.parametrize("prefix_tree", [False, True])
def test_a_pass_has_the_same_routes_in_a_tree_and_by_itself(prefix_tree):
    """As above; and the first branch ends at the token after which a third samples."""
    routes = np.uint8([[0, 0], [0, 0], [1, 2], [2, 3], [0, 0], [4, 5], [3, 1]])
    branches, versions = (Branch(0, 4), Branch(3, 2), Branch(3, 1)), [-1, -1, 3, 3, -1, 3, 3]
    sample = Trajectory([5, 6, 7, 8, 9, 1, 4], np.zeros(7), versions, 0.0, "stop", branches, routes=routes)
    flat = FlatBatch.of([Group("0", 0, (sample,))], minibatches=1, prefix_tree=prefix_tree)
    parts = np.split(flat.inputs["routes"], flat.lengths.cumsum()[:-1])
    by_branch = dict(zip(flat.branches.tolist(), parts, strict=True))
    assert by_branch[0].tolist() == [[0, 0], [1, 2], [2, 3], [0, 0]]
    assert by_branch[1].tolist() == [[0, 0], [1, 2], [2, 3], [4, 5], [0, 0]], "of the first branch's pass"
    assert by_branch[2].tolist() == [[0, 0], [1, 2], [3, 1], [0, 0]], "of its own pass, which took other experts"


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_passes_that_a_load_had_computed_again_have_no_routes(keeps_cache):
    """The second answer comes from newer weights, which have computed the first one again with experts of their own."""
    routes = np.uint8([[0, 0], [1, 2], [2, 3], [0, 0], [4, 5], [3, 1]])
    sample = trajectory(6, 1, routes=routes)
    sample = replace(sample, versions=np.int32([-1, 3, 3, -1, 4, 4]))
    flat = FlatBatch.of([Group("0", 0, (sample,))], minibatches=1, keeps_cache=keeps_cache)
    of_old = [[1, 2], [2, 3]] if keeps_cache else [[0, 0], [0, 0]]
    assert flat.inputs["routes"].tolist() == [*of_old, [0, 0], [4, 5], [3, 1], [0, 0]]


@pytest.mark.parametrize("kind", ["Qwen3Moe", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_log_probs_of_branches_do_not_depend_on_how_rows_are_packed(tmp_path, kind):
    folder = make_kind(kind, tmp_path / "model", **MIXTURES[kind])
    batch = with_routes(make_forest(), routing_of(folder), [1] if kind == "DeepseekV3" else [0, 1])
    computed = []
    for prefix_tree in (False, True):
        engine = TrainingEngine(folder, settings(routing="replay", prefix_tree=prefix_tree), seed=0)
        computed.append(engine.logprobs(batch, temperature=TEMPERATURE))
        engine.close()
    np.testing.assert_allclose(computed[0], computed[1], atol=1e-5)


def test_the_reference_model_routes_by_itself(tmp_path):
    """Adapters that have not been trained change nothing, so only the experts tell the reference from the policy."""
    folder = make_kind("Qwen3Moe", tmp_path / "model", **MIXTURES["Qwen3Moe"])
    batch = with_routes(make_batch(), routing_of(folder), [0, 1])
    adapted = {"lora": {"rank": 2, "target_modules": ["q_proj"]}, "kl_coef": 0.1}
    engine = TrainingEngine(folder, settings(routing="replay", **adapted), seed=0)
    assert engine.step(batch, version=3, temperature=TEMPERATURE).kl_reference > 0.01
    engine.close()


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        (None, "its tokens have no routes, which trainer.routing=replay needs"),
        (np.ones((3, 3), np.uint8), "have 3 bytes of routes, but the model has 4: 2 experts in each of 2 layers"),
        (np.zeros((3, 4), np.uint8), "one of its sampled tokens has no routes"),
        (np.full((3, 4), 6, np.uint8), "one of its routes names an expert that is not one of the model's 6"),
    ],
)
def test_routes_that_are_not_the_model_s_are_refused(routes, sentence):
    routing, sampled = Routing("softmax", 2, 6, 2), np.array([False, True, True])
    routing.check(np.uint8([[0, 0, 0, 0], [0, 1, 0, 5], [1, 0, 2, 3]]), sampled)
    with pytest.raises(ValueError, match=sentence):
        routing.check(routes, sampled)


def test_a_number_above_255_takes_two_bytes():
    routing = Routing("softmax", 1, 300, 2)
    routes = np.array([[299, 256]], routing.dtype).view(np.uint8)
    assert routing.width == 4 == routes.shape[1]
    routing.check(routes, np.array([True]))
    with pytest.raises(ValueError, match="not one of the model's 300"):
        routing.check(np.array([[300, 1]], routing.dtype).view(np.uint8), np.array([True]))
    router = torch.nn.Module()
    router.norm_topk_prob = True
    replayed = RouteReplay(torch.nn.Module(), routing)
    replayed.follow(torch.from_numpy(routes))
    logits, own = torch.zeros(1, 300), torch.tensor([[0, 1]])
    assert replayed._replace(0, router, (), (logits, torch.zeros(1, 2), own))[2].tolist() == [[299, 256]]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Llama", {}), ("Phimoe", {}), ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1})],
)
def test_a_model_whose_experts_cannot_be_given_is_refused_by_its_kind(tmp_path, kind, changes):
    getattr(transformers, f"{kind}Config")(**SIZES | changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"of the kind {kind.lower()} is no mixture of experts for which"):
        routing_of(tmp_path)


def work(folder, out):
    batch = with_routes(make_forest(), routing_of(folder), [0, 1])
    for stage in (0, 3):
        changes = {"sequence_parallel": 2, "zero_stage": stage, "gradient_checkpointing": stage == 3}
        engine = TrainingEngine(folder, settings(routing="replay", **changes), seed=0, keeps_cache=True)
        _, gradients = step_and_gradients(engine, batch if engine.rank == 0 else None)
        if engine.rank == 0:
            save_file(gradients, out / f"zero{stage}")
        engine.close()


if __name__ == "__main__":
    work(*map(Path, sys.argv[1:]))
