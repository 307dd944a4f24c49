"""The comparison of an engine with the trainer on a few tokens of each batch sees what goes wrong in a load."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_training import eager, make_batch, make_forest, make_model, settings

from areal.training.engine_gap import KNOWN, PROBE_TOKENS, EngineGaps, probe_of
from areal.training.model_checks import random_groups
from areal.training.packed import FlatBatch
from areal.training.training_engine import TrainingEngine

VERSIONS = 6


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A probe, and of each version the folder of its weights and the trainer's log-probs of the probe's sampled
    tokens."""
    base = tmp_path_factory.mktemp("versions")
    engine = TrainingEngine(make_model(base / "model"), settings(lr=1e-4), seed=0)
    batch = make_batch()
    probe = probe_of(batch)
    results = []
    for version in range(VERSIONS):
        results.append((engine.storage.publish(base / f"{version}"), engine.logprobs(batch, temperature=1.0)))
        engine.step(batch, version=version, temperature=1.0)
    engine.close()
    return base / "model", probe, [(folder, logprobs[probe.start + probe.sampled]) for folder, logprobs in results]


def gap_of(model, weights, probe, ours):
    """That of an engine with these weights."""
    module = eager(model)
    module.load_state_dict(weights, strict=False)
    tokens = torch.from_numpy(probe.tokens).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(module(tokens[None, :-1]).logits[0], -1)
    their_values = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()
    return float(np.abs(their_values[probe.sampled - 1] - ours).mean())


def scaled(weights, old_weights):
    return weights | {"model.norm.weight": weights["model.norm.weight"] * 1.01}


def with_one_of_before(weights, old_weights):
    return weights | {name: old_weights[name] for name in weights if "layers.1.mlp.up_proj" in name}


@pytest.mark.parametrize("planted", [scaled, with_one_of_before, lambda weights, old_weights: old_weights])
def test_a_wrong_load_is_noticed_with_the_first_version_and_named_once(versions, planted):
    model, probe, results = versions
    loaded = [load_file(folder / "model.safetensors") for folder, _ in results]
    gaps = EngineGaps()
    for version, (_, our_values) in enumerate(results):
        assert gaps.add("generator/0#1", version, gap_of(model, loaded[version], probe, our_values)) is None
    wrong = gap_of(model, planted(loaded[-1], loaded[-2]), probe, results[-1][1])
    assert "generator/1#1" in gaps.add("generator/1#1", VERSIONS, wrong)
    assert gaps.add("generator/1#1", VERSIONS + 1, wrong) is None  # it was said
    assert gaps.add("generator/0#1", VERSIONS, wrong)  # of another engine it was not


def test_before_the_usual_gap_is_known_only_a_large_one_is_noticed():
    gaps = EngineGaps()
    assert gaps.add("generator/0#1", 1, 0.06) and EngineGaps().add("generator/0#1", 1, math.nan)
    for version in range(KNOWN):
        assert gaps.add("generator/0#1", version, 0.005) is None
    assert gaps.add("generator/0#1", KNOWN, 0.04) is None
    assert gaps.add("generator/0#1", KNOWN, 0.06)


def test_the_probe_is_the_sample_with_most_sampled_tokens_at_its_beginning_also_after_branches():
    groups = [*make_forest()[:2], *random_groups(37, [[5, 9], [PROBE_TOKENS + 20, 7]])]
    probe = probe_of(groups)
    flat = FlatBatch.of(groups, minibatches=1)  # its tokens are in the order of TokenValues
    at_start = flat.tokens[flat.by_sample()][probe.start :]
    assert np.array_equal(at_start[:PROBE_TOKENS], probe.tokens) and len(probe.tokens) == PROBE_TOKENS
    assert probe.sampled.tolist() == list(range(1, PROBE_TOKENS))
    late = groups[-1].trajectories[0]
    late.versions[:PROBE_TOKENS] = -1  # a long prompt
    assert probe_of(groups[-1:]).start == len(late)
    assert probe_of([]) is None
