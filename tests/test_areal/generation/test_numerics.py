"""A step comes out the same however it is computed: on one rank or two, at any ZeRO stage, in any micro-batches, with
activations kept or computed again.

Run by ranks.py, this file is also the worker of two ranks.
"""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_training import TEMPERATURE, make_batch, make_model, run_worker, settings, weights_of
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from areal.training.training_engine import TrainingEngine

LORA = {"rank": 4, "alpha": 8}
CASES = {
    "one minibatch": {},
    "three minibatches": {"minibatches": 3},
    "mean over sequences": {"loss_mean": "sequence", "minibatches": 2},
    "mean over a constant": {"loss_mean": "constant", "loss_tokens": 32, "minibatches": 2},
    "penalty in the loss": {"kl_coef": 0.3, "reference": "other", "minibatches": 2},
    "penalty in the reward": {"kl_coef": 0.3, "reference": "other", "kl_in": "reward", "kl_estimator": "k1"},
    "adapters": {"lora": LORA, "minibatches": 2, "kl_coef": 0.3},
    "adapters and another reference": {"lora": LORA, "kl_coef": 0.3, "kl_in": "reward", "reference": "other"},
}
WAYS = [
    {"zero_stage": 0, "max_tokens_per_microbatch": 1},
    {"zero_stage": 1, "max_tokens_per_microbatch": 40, "gradient_checkpointing": True},
    {"zero_stage": 2, "max_tokens_per_microbatch": 10_000},
    {"zero_stage": 3, "max_tokens_per_microbatch": 10_000},
    {"zero_stage": 3, "max_tokens_per_microbatch": 40, "gradient_checkpointing": True},
]
IN_EVERY_WAY = ("three minibatches", "adapters")
"""On two ranks. Other cases: in the two ways in which most is done otherwise."""
IN_EVERY_WAY_ALONE = ("three minibatches",)
"""On one rank. Other cases: in the way that computes most otherwise."""
MOST = ("three minibatches", "penalty in the loss", "adapters and another reference")
"""Each other case differs from one of these in a setting."""
BATCHES = [make_batch(groups=3, seed=seed) for seed in range(2)]
EVERYTHING_PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""ZeRO 3 would leave parameters as small as these whole on each rank."""
MOVED = 1e-2
"""Most that a weight moves in a step: the learning rate."""
TOLERANCE = 1e-5
"""fp32: sums in another order differ by rounding, which Adam magnifies where a gradient is near 0."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model, and other: one of the same shape."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "other")):
        (folder / name).mkdir()
        make_model(folder / name, seed=seed)
    return folder


def ways(case):
    """Numbers."""
    return range(len(WAYS)) if case in IN_EVERY_WAY else (1, 4)


def work(folders, out, *combinations):
    """Publish the weights after training each "CASE-WAY"."""
    for combination in combinations:
        case, _, number = combination.rpartition("-")
        train(folders, out / combination, case, deepspeed_options=EVERYTHING_PARTITIONED, **WAYS[int(number)])


def train(folders, out, case, **way):
    """A step on each batch. The weights are published in `out`, and results of the steps beside them."""
    changes = CASES[case] | way
    if "reference" in changes:
        changes["reference"] = str(folders / changes["reference"])
    engine = TrainingEngine(folders / "model", settings(lr=MOVED, adam_eps=1e-2, **changes), seed=0)
    results = [
        engine.step(batch if engine.rank == 0 else None, version=3, temperature=TEMPERATURE) for batch in BATCHES
    ]
    if engine.rank == 1:
        late_for_every_gather(engine)
    engine.storage.publish(out)
    if engine.rank == 0:
        facts = [[r.loss, r.grad_norm, r.kl_reference or 0.0] for r in results]
        out.with_suffix(".json").write_text(json.dumps(facts))
    engine.close()


def late_for_every_gather(engine):
    gather = engine.model.zero.GatheredParameters

    class Late:
        @staticmethod
        def GatheredParameters(*args, **kwargs):
            time.sleep(0.005)
            return gather(*args, **kwargs)

    engine.model.zero = Late


@pytest.mark.parametrize(
    "case", [case if case in MOST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_weights_after_two_steps_are_the_same_in_every_way_of_computing_them(folders, tmp_path, case):
    train(folders, tmp_path / case, case)
    combinations = [f"{case}-{number}" for number in (ways(case) if case in IN_EVERY_WAY_ALONE else [4])]
    work(folders, tmp_path, *combinations)
    for combination in combinations:
        assert_same_steps(tmp_path / combination, tmp_path / case)


@pytest.mark.slow
def test_weights_after_two_steps_are_the_same_on_two_ranks(folders, tmp_path):
    combinations = [f"{case}-{number}" for case in CASES for number in ways(case)]
    run_worker(__file__, folders, tmp_path, *combinations, ranks=2)
    for case in CASES:
        train(folders, tmp_path / case, case)
    for combination in combinations:
        assert_same_steps(tmp_path / combination, tmp_path / combination.rpartition("-")[0])


def assert_same_steps(steps, expected):
    """The same weights and the same results of the steps."""
    weights, right = weights_of(steps), weights_of(expected)
    assert weights.keys() == right.keys()
    for name in right:
        message = f"{steps.name}, {name}: "
        assert_close(weights[name], right[name], rtol=0, atol=TOLERANCE, msg=lambda m, at=message: at + m)
    facts, right_facts = (json.loads(folder.with_suffix(".json").read_text()) for folder in (steps, expected))
    for step, same in zip(facts, right_facts, strict=True):
        assert step == pytest.approx(same, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("stage", "lora"),
    [(0, None), (3, LORA), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, LORA), (3, None)))],
)
def test_the_penalty_begins_at_nothing_where_the_reference_is_the_model_itself(folders, stage, lora):
    config = settings(zero_stage=stage, lora=lora, kl_coef=0.1, lr=MOVED)
    engine = TrainingEngine(folders / "model", config, seed=0)
    first, second = (engine.step(batch, version=3, temperature=TEMPERATURE) for batch in BATCHES)
    assert first.kl_reference == 0 < second.kl_reference
    engine.close()


def test_each_rank_holds_a_part_of_the_reference_only_under_zero_3(folders):
    for stage in (2, 3):
        engine = TrainingEngine(folders / "model", settings(zero_stage=stage, kl_coef=0.1), seed=0)
        assert all(hasattr(p, "ds_tensor") == (stage == 3) for p in engine._reference.parameters())
        engine.close()


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), LORA])
def test_a_bf16_model_under_zero_3_has_the_weights_and_positions_that_transformers_reads(folders, tmp_path, lora):
    engine = TrainingEngine(folders / "model", settings(zero_stage=3, dtype="bfloat16", lora=lora), seed=0)
    expected = AutoModelForCausalLM.from_pretrained(folders / "model", dtype=torch.bfloat16)
    read = dict(engine.model.module.named_buffers())
    for name, buffer in expected.named_buffers():
        result = read["base_model.model." * bool(lora) + name]
        assert result.dtype == torch.float32
        assert torch.equal(result, buffer)
    weights = load_file(engine.storage.export(tmp_path / "exported") / "model.safetensors")
    for name, tensor in load_file(folders / "model" / "model.safetensors").items():
        # An export with adapters has each weight that no adapter changes as the model has it.
        assert torch.equal(weights[name], tensor if lora else tensor.bfloat16())
    engine.close()


def test_without_a_penalty_no_reference_is_loaded(folders):
    engine = TrainingEngine(folders / "model", settings(reference=str(folders / "nowhere")), seed=0)
    assert engine.step(BATCHES[0], version=3, temperature=TEMPERATURE).kl_reference is None
    engine.close()


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
