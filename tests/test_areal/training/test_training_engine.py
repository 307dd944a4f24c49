"""Real DeepSpeed on a tiny model, against plain transformers with eager attention, one sequence at a time.

Run by ranks.py, this file is also the worker of the test of two ranks.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_runs import made_once
from support.tiny_training import (
    TEMPERATURE,
    assert_same_gradients,
    assert_same_state,
    eager,
    logprobs_alone,
    make_batch,
    make_forest,
    make_model,
    make_tree,
    reference_gradients,
    run_worker,
    settings,
    step_and_gradients,
    weights_of,
)
from transformers import AutoModelForCausalLM

from areal.base.errors import UserError
from areal.config.trainer_section import TrainerConfig
from areal.samples.table import TOP
from areal.training.model_reader import ModelReader
from areal.training.packed import FlatBatch, pack
from areal.training.training_engine import TrainingEngine
from areal.weights.chunks import Manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_of(folder):
    engines = []

    def start(*, optimizer_steps=1, **changes):
        engines.append(TrainingEngine(folder, settings(**changes), seed=0, optimizer_steps=optimizer_steps))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def packed_logprobs(engine, batch):
    flat = FlatBatch.of(batch, minibatches=1)
    row = pack(flat, flat.trained(None), range(len(flat.lengths)), engine.model.device)
    with torch.no_grad():
        return engine.passes.forward(engine.model.deepspeed, row, TEMPERATURE)[0]


def test_packed_log_probs_equal_those_of_each_sequence_alone(engine_of, folder):
    batch, model = make_batch(), eager(folder)
    with torch.no_grad():
        alone = [
            logprobs_alone(model, t)[torch.from_numpy(t.sampled)[1:]] for group in batch for t in group.trajectories
        ]
    torch.testing.assert_close(packed_logprobs(engine_of(), batch), torch.cat(alone), rtol=1e-5, atol=1e-5)
    # GPUs add the parts of a product of bf16 in fp32.
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(("cuda", "stage", "place"), [(True, 1, {"": 3}), (True, 3, None), (False, 1, None)])
def test_ranks_read_a_whole_model_into_their_gpus_and_not_each_into_host_memory(
    folder, monkeypatch, cuda, stage, place
):
    places = []

    def read(*arguments, device_map, **options):
        places.append(device_map)
        raise OSError("enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(UserError, match="enough"):
        ModelReader(TrainerConfig(zero_stage=stage, dtype="bfloat16"), stage, "sdpa", None).read(folder)
    assert places == [place]


def test_a_sequence_does_not_see_its_neighbours_in_the_row(engine_of):
    engine, batch = engine_of(), make_batch()
    logprobs = packed_logprobs(engine, batch)
    batch[0].trajectories[0].tokens[:] = 0
    new_logprobs = packed_logprobs(engine, batch)
    count = int(batch[0].trajectories[0].sampled.sum())
    assert not torch.allclose(logprobs[:count], new_logprobs[:count])
    torch.testing.assert_close(logprobs[count:], new_logprobs[count:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("cap", [1, 40, 10_000])
def test_gradients_are_the_same_for_any_microbatch_cap(engine_of, folder, cap):
    batch = make_batch()
    _, gradients = step_and_gradients(engine_of(max_tokens_per_microbatch=cap), batch)
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch))


@pytest.mark.parametrize("microbatches", [1, 3, 32])
@pytest.mark.parametrize("prefix_tree", [True, False])
def test_gradients_are_the_same_for_any_fixed_number_of_microbatches(engine_of, folder, microbatches, prefix_tree):
    batch = make_tree()
    engine = engine_of(max_tokens_per_microbatch=40, microbatches=microbatches, prefix_tree=prefix_tree)
    result, gradients = step_and_gradients(engine, batch)
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch))
    assert engine.model.work_done == min(
        microbatches, sum(len(group.trajectories) for group in batch)
    )  # each is a pass


@pytest.mark.parametrize("cap", [1, 40, 10_000])
@pytest.mark.parametrize("prefix_tree", [True, False])
def test_gradients_are_the_same_when_samples_share_tokens(engine_of, folder, cap, prefix_tree):
    batch = make_tree()
    engine = engine_of(max_tokens_per_microbatch=cap, prefix_tree=prefix_tree)
    result, gradients = step_and_gradients(engine, batch)
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch))
    assert (result.tokens_computed < result.tokens_total) == (prefix_tree and cap > 1)


@pytest.mark.parametrize("prefix_tree", [True, False])
def test_an_entropy_bonus_has_its_own_gradient_and_is_part_of_the_loss(engine_of, folder, prefix_tree):
    batch = make_tree()
    plain = engine_of().step(batch, version=3, temperature=TEMPERATURE)
    result, gradients = step_and_gradients(engine_of(entropy_coef=0.5, prefix_tree=prefix_tree), batch)
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch, entropy_coef=0.5))
    assert result.loss == pytest.approx(plain.loss - 0.5 * result.entropy, rel=1e-4)


@pytest.mark.parametrize(("cap", "prefix_tree"), [(40, True), (10_000, True), (10_000, False)])
def test_gradients_of_branched_samples_are_those_of_each_branch_alone(engine_of, folder, cap, prefix_tree):
    batch = make_forest()
    result, gradients = step_and_gradients(engine_of(max_tokens_per_microbatch=cap, prefix_tree=prefix_tree), batch)
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch))
    distinct = sum(len(t) for group in batch for t in group.trajectories)
    assert result.tokens_trained == sum(int(t.sampled.sum()) for group in batch for t in group.trajectories)
    assert result.tokens_total == sum(len(s) for g in batch for t in g.trajectories for s in t.sequences())
    if prefix_tree and cap == 10_000:
        assert result.tokens_computed <= distinct


@pytest.mark.parametrize("prefix_tree", [True, False])
def test_a_teacher_adds_its_log_prob_minus_the_policys_to_the_advantage_of_each_token(engine_of, prefix_tree):
    """So the gradients are those of returns which say the same."""
    rng = np.random.default_rng(3)
    bare = {"advantage_mean": "none", "advantage_std": "none", "prefix_tree": prefix_tree, "minibatches": 2}
    engine = engine_of(**bare, objective="distill", teacher="wise", teacher_coef=0.5)
    batch = [replace(g, trajectories=tuple(replace(t, returns=None) for t in g.trajectories)) for g in make_forest()]
    policy = engine.logprobs(batch, temperature=TEMPERATURE)
    taught, returned, gaps, start = [], [], [], 0
    for group in batch:
        samples = []
        for sample in group.trajectories:
            gains = []
            for sequence in sample.sequences():
                gains.append(policy[start + 1 : start + len(sequence)])
                start += len(sequence)
            as_policy = sample.with_scores("teacher_logprobs", gains).teacher_logprobs
            gap = np.where(sample.sampled, rng.normal(0, 1, len(sample)), 0).astype(np.float32)
            gaps.append(gap[sample.sampled])
            samples.append((replace(sample, teacher_logprobs=as_policy + gap), sample.reward + 0.5 * gap))
        taught.append(replace(group, trajectories=tuple(sample for sample, _ in samples)))
        returned.append(replace(group, trajectories=tuple(replace(s, returns=r) for s, r in samples)))
    result, gradients = step_and_gradients(engine, taught)
    _, expected = step_and_gradients(engine_of(**bare), returned)
    assert_same_gradients(gradients, expected)
    gap = np.concatenate(gaps)
    assert result.kl_teacher == pytest.approx(-gap.mean(), abs=1e-4)
    assert result.teacher_agreement == pytest.approx(np.minimum(1, np.exp(gap)).mean(), abs=1e-4)


@pytest.mark.parametrize("changes", [{}, {"prefix_tree": False, "max_tokens_per_microbatch": 40}])
def test_the_teachers_likeliest_tokens_give_the_gradient_of_the_kl_divergence_over_them(engine_of, folder, changes):
    """A fifth of which the policy does not have. The rewards are all the same, so they teach nothing."""
    engine = engine_of(objective="distill", teacher="wise", teacher_coef=0.5, teacher_top_k=3, **changes)
    rng, batch = np.random.default_rng(3), []
    divergences = []
    for group in make_forest():
        samples = []
        for sample in group.trajectories:
            same = replace(sample, reward=0.0, returns=None)
            likely, logps = [], []
            for sequence in same.sequences():
                tokens = np.array([rng.permutation(engine.model.vocab_size)[:3] for _ in sequence.tokens[1:]], np.int32)
                tokens[::5, 2] = engine.model.vocab_size + 7
                likely.append(tokens)
                logps.append(np.log(rng.dirichlet(np.ones(4), len(tokens))[:, :3]).astype(np.float32))
                divergences.append((sequence, tokens, np.exp(logps[-1].astype(np.float64))))
            columns = dict(zip(TOP, (likely, logps), strict=True)) | {"teacher_logprobs": [row[:, 0] for row in logps]}
            for name, values in columns.items():
                same = same.with_scores(name, values)
            samples.append(same)
        batch.append(replace(group, trajectories=tuple(samples)))
    result, gradients = step_and_gradients(engine, batch)
    loss, expected = mean_divergence(eager(folder, torch.float64), divergences)
    assert result.loss == pytest.approx(0.5 * loss, rel=1e-4)
    assert_same_gradients(gradients, {name: 0.5 * gradient for name, gradient in expected.items()})


def mean_divergence(model, cases):
    """Of the sampled tokens, and its gradients."""
    total, count = torch.zeros(()), 0
    for sequence, tokens, p in cases:
        row = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
        logps = torch.log_softmax(model(input_ids=row).logits[0, :-1] / TEMPERATURE, -1)
        for place in np.flatnonzero(sequence.sampled[1:]):
            in_vocabulary = tokens[place] < logps.shape[1]
            q, of_pi = torch.from_numpy(p[place][in_vocabulary]), logps[place][tokens[place][in_vocabulary]]
            outcomes = torch.cat([q, 1 - q.sum(0, keepdim=True)])
            log_pi = torch.cat([of_pi, torch.log1p(-of_pi.exp().sum(0, keepdim=True))])
            total, count = total + (outcomes * (outcomes.log() - log_pi)).sum(), count + 1
    model.zero_grad()
    (total / count).backward()
    return total.item() / count, {name: p.grad.float().clone() for name, p in model.named_parameters()}


def test_a_batch_that_no_scorer_has_scored_is_not_trained_with_a_teacher(engine_of):
    with pytest.raises(ValueError, match="no teacher_logprobs, which trainer.teacher=wise needs"):
        engine_of(teacher="wise").step(make_batch(), version=3, temperature=TEMPERATURE)


def test_a_reference_that_is_a_scorer_is_that_of_the_trainer_by_other_means(engine_of, folder):
    penalty = {"kl_coef": 0.3, "kl_estimator": "k2"}
    expected, gradients = step_and_gradients(engine_of(**penalty), make_batch())
    engine = engine_of(**penalty, reference="scorer:first")
    assert engine._reference is None
    policy, start, batch = engine.logprobs(make_batch(), temperature=TEMPERATURE), 0, []
    for group in make_batch():
        samples = []
        for sample in group.trajectories:
            samples.append(sample.with_scores("reference_logprobs", [policy[start + 1 : start + len(sample)]]))
            start += len(sample)
        batch.append(replace(group, trajectories=tuple(samples)))
    result, own_gradients = step_and_gradients(engine, batch)
    assert_same_gradients(own_gradients, gradients)
    assert result.kl_reference == pytest.approx(expected.kl_reference, abs=1e-6)


def test_a_sample_weighs_the_same_however_many_branches_it_has():
    batch = make_forest()
    flat = FlatBatch.of(batch, minibatches=1, prefix_tree=True)
    trained = flat.trained(None)
    sample = np.repeat(flat.samples, flat.lengths)
    for mean in ("sequence", "constant"):
        weights = flat.weights(trained, mean, 50)
        for number, own in enumerate(t for group in batch for t in group.trajectories):
            expected = 1.0 if mean == "sequence" else own.sampled.sum() / 50
            assert weights[(sample == number) & trained].sum() == pytest.approx(expected / len(flat.rewards))


def test_tokens_by_sample_follow_each_other_branch_by_branch():
    flat = FlatBatch.of(make_forest(), minibatches=1, prefix_tree=True)
    order = flat.by_sample()
    assert sorted(order.tolist()) == list(range(len(flat.tokens)))
    samples, branches = (np.repeat(values, flat.lengths)[order] for values in (flat.samples, flat.branches))
    assert (np.diff(samples) >= 0).all()
    assert (np.diff(branches)[np.diff(samples) == 0] >= 0).all()


def m2po_gradients(model, batch, threshold):
    """Gradients of -1/N sum_t M_t u_t w_t A_t at u = 1, M over all tokens; and the share of tokens that M keeps."""
    rewards = np.array([t.reward for group in batch for t in group.trajectories])
    normalised = iter((rewards - rewards.mean()) / (rewards.std() + 1e-6))
    log_ws, gains = [], []
    for trajectory in (t for group in batch for t in group.trajectories):
        sampled = torch.from_numpy(trajectory.sampled)[1:]
        logp = logprobs_alone(model, trajectory)[sampled]
        log_ws.append(logp - torch.from_numpy(trajectory.logprobs)[1:][sampled])
        gains.append(torch.full_like(logp, float(next(normalised))))
    log_w, A = torch.cat(log_ws), torch.cat(gains)
    places = set(range(len(log_w)))
    far = log_w.detach().square().tolist()
    while places and np.mean([far[t] for t in places]) >= threshold:
        places.remove(max(places, key=far.__getitem__))
    in_loss = torch.tensor([t in places for t in range(len(log_w))])
    model.zero_grad()
    (-(log_w.exp() * A)[in_loss].sum() / len(log_w)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, len(places) / len(log_w)


@pytest.mark.parametrize("cap", [1, 40, 10_000])
def test_the_mask_of_m2po_is_that_of_the_minibatch_however_it_is_packed(engine_of, folder, cap):
    batch = make_batch()
    changes = {"objective": "m2po", "m2_threshold": 0.5, "advantage_mean": "batch", "advantage_std": "batch"}
    result, gradients = step_and_gradients(engine_of(max_tokens_per_microbatch=cap, **changes), batch)
    expected, share = m2po_gradients(eager(folder), batch, 0.5)
    assert_same_gradients(gradients, expected)
    assert result.clip_fraction == pytest.approx(1 - share)
    assert 0.2 < share < 0.8


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_the_same_at_any_zero_stage(engine_of, folder, stage):
    batch, engine = make_batch(), engine_of(zero_stage=stage)
    _, gradients = step_and_gradients(engine, batch)
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch))
    parameters = sum(parameter.numel() for parameter in eager(folder).parameters())
    assert engine.model.deepspeed.optimizer.reduce_bucket_size == parameters  # DeepSpeed's own 5e8 would take 2 GB


def test_masked_tokens_are_out_of_the_loss_and_its_normaliser(engine_of, folder):
    batch = make_batch()
    result, gradients = step_and_gradients(engine_of(), batch, mask_older_than=2)
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch, mask_older_than=2))
    versions = np.concatenate([t.versions for group in batch for t in group.trajectories])
    assert result.tokens_trained == (versions >= 2).sum() < (versions >= 0).sum()
    assert result.tokens_total == len(versions)


def cut(batch):
    return [replace(g, trajectories=tuple(replace(t, finish="length") for t in g.trajectories)) for g in batch]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"mask_older_than": 4}),
        ({"mask_cut": True}, {}),
        ({"behaviour_weight": "masked", "behaviour_weight_bounds": (1e6, 1e7)}, {}),
        ({"sequence_mask": "geometric", "sequence_mask_bounds": (1e6, 1e7), "objective": "grpo"}, {}),
        ({"objective": "m2po", "m2_threshold": 1e-20}, {}),
    ],
)
def test_a_step_in_which_every_token_is_masked_moves_nothing(engine_of, tmp_path, changes, options):
    engine = engine_of(minibatches=2, weight_decay=0.5, lr=0.1, **changes)
    engine.storage.save(tmp_path / "before")
    result = engine.step(cut(make_batch()), version=3, temperature=TEMPERATURE, **options)
    assert (result.optimizer_steps, result.lr, result.grad_norm, result.loss) == (0, None, 0.0, 0.0)
    engine.storage.save(tmp_path / "after")
    assert_same_state(tmp_path / "after", tmp_path / "before")
    assert_same_bits(tmp_path / "after", tmp_path / "before")


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 0},
        pytest.param({"zero_stage": 2}, marks=pytest.mark.slow),
        {"zero_stage": 3},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),  # bf16 takes three times as long on a CPU
    ],
)
def test_training_goes_on_after_a_step_without_a_trained_token_as_if_it_had_not_been(engine_of, tmp_path, changes):
    for name in ("with", "without"):
        engine = engine_of(minibatches=2, weight_decay=0.5, lr=0.01, warmup_steps=9, optimizer_steps=9, **changes)
        train(engine, BATCHES[:1])
        if name == "with":
            masked = engine.step(make_batch(), version=3, temperature=TEMPERATURE, mask_older_than=4)
            assert (masked.optimizer_steps, masked.tokens_trained) == (0, 0)
        train(engine, BATCHES[1:2])
        engine.storage.save(tmp_path / name)
    assert_same_state(tmp_path / "with", tmp_path / "without")
    assert_same_bits(tmp_path / "with", tmp_path / "without")


def test_a_minibatch_without_a_trained_token_makes_no_optimizer_step(engine_of):
    batch = make_batch(groups=2)
    for trajectory in batch[1].trajectories:
        trajectory.versions[trajectory.sampled] = 1
    engine = engine_of(minibatches=2, lr=1e-3, warmup_steps=4, optimizer_steps=4)
    result = engine.step(batch, version=3, temperature=TEMPERATURE, mask_older_than=2)
    assert result.tokens_trained > 0
    assert (result.optimizer_steps, result.lr) == (1, pytest.approx(1e-3 / 4))
    assert engine.model.deepspeed.lr_scheduler.last_epoch == 1
    assert engine.step(make_batch(), version=3, temperature=TEMPERATURE).lr == pytest.approx(1e-3 * 3 / 4)


def test_the_largest_advantage_is_a_metric(engine_of):
    batch = make_batch()
    rewards = np.array([t.reward for group in batch for t in group.trajectories])
    expected = np.abs(rewards - rewards.mean()).max() / rewards.std()
    result = engine_of(minibatches=2).step(batch, version=3, temperature=TEMPERATURE)
    assert result.advantage_max == pytest.approx(expected, rel=1e-5)


def test_cut_samples_are_out_of_the_loss_but_their_rewards_still_count(engine_of, folder):
    batch = make_batch()
    for n, group in enumerate(batch):
        members = tuple(replace(t, finish="length" if len(t) > 20 else "stop") for t in group.trajectories)
        batch[n] = replace(group, trajectories=members)
    result, gradients = step_and_gradients(engine_of(mask_cut=True), batch)
    for trajectory in (t for group in batch for t in group.trajectories if t.finish == "length"):
        trajectory.versions[:] = -1  # the reference leaves out what nobody sampled
    assert_same_gradients(gradients, reference_gradients(eager(folder), batch))
    assert 0 < result.tokens_trained == sum(t.sampled.sum() for g in batch for t in g.trajectories)


def test_every_minibatch_is_an_optimizer_step_against_the_same_proximal_policy(engine_of, folder):
    batch, model = make_batch(), eager(folder)
    engine = engine_of(minibatches=3, lr=0.05)
    result = engine.step(batch, version=3, temperature=TEMPERATURE)
    assert engine.model.deepspeed.global_steps == 3
    with torch.no_grad():  # w = pi_prox / pi_behav, with the weights from before the first of the three
        w = [
            torch.exp(logprobs_alone(model, t) - torch.from_numpy(t.logprobs)[1:])[torch.from_numpy(t.sampled)[1:]]
            for group in batch
            for t in group.trajectories
        ]
    assert result.weight_mean == pytest.approx(torch.cat(w).mean().item(), rel=1e-5)
    assert result.weight_max == pytest.approx(torch.cat(w).max().item(), rel=1e-5)
    assert result.clip_fraction > 0


def test_the_gap_is_measured_on_tokens_of_the_current_version_only(engine_of, folder):
    batch, model = make_batch(), eager(folder)
    engine = engine_of(lr=1e-9)
    assert engine.step(batch, version=4, temperature=TEMPERATURE).logprob_gap is None
    for trajectory in (t for group in batch for t in group.trajectories):
        with torch.no_grad():
            exact = logprobs_alone(model, trajectory).numpy()
        current = trajectory.versions == 3
        trajectory.logprobs[current] = exact[current[1:]] + 0.25
    assert engine.step(batch, version=3, temperature=TEMPERATURE).logprob_gap == pytest.approx(0.25, abs=1e-4)


def test_gradients_are_clipped_and_the_norm_is_that_before(engine_of, folder):
    batch = make_batch()
    expected = torch.cat([g.flatten() for g in reference_gradients(eager(folder), batch).values()]).norm().item()
    norms = {}
    for stage in (0, 2):
        engine = engine_of(zero_stage=stage, grad_clip=expected / 2, adam_eps=1.0, weight_decay=0, lr=1.0)
        old_weights = {name: p.detach().clone() for name, p in engine.model.module.named_parameters()}
        norms[stage] = engine.step(batch, version=3, temperature=TEMPERATURE).grad_norm
        # Adam's first step is lr g / (|g| + eps).
        moved = {name: old_weights[name] - p.detach() for name, p in engine.model.module.named_parameters()}
        clipped = torch.cat([(d / (1 - d.abs())).flatten() for d in moved.values()])
        assert clipped.norm().item() == pytest.approx(expected / 2, rel=1e-3)
    assert norms == pytest.approx({0: expected, 2: expected}, rel=1e-4)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_decay_but_norms_do_not_also_after_a_checkpoint_of_when_all_did_alike(
    engine_of, folder, tmp_path, stage
):
    old_engine = engine_of(zero_stage=stage, weight_decay=0)  # all parameters are one group
    old_engine.storage.save(tmp_path / "before")
    engine = engine_of(zero_stage=stage, weight_decay=0.5, lr=0.1)
    engine.storage.load(tmp_path / "before")
    batch = [replace(g, trajectories=tuple(replace(t, reward=1.0) for t in g.trajectories)) for g in make_batch()]
    engine.step(batch, version=3, temperature=TEMPERATURE)  # nothing is learned
    weights = weights_of(engine.storage.publish(tmp_path / "after"))
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(weights[name], tensor if tensor.dim() == 1 else tensor * (1 - 0.1 * 0.5))


def test_the_learning_rate_warms_up_linearly_and_then_stays(engine_of):
    engine = engine_of(warmup_steps=2, lr=1e-3)
    assert rates_of(engine, 4) == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


def rates_of(engine, steps):
    rates = []
    for _ in range(steps):
        (rate,) = set(engine.model.deepspeed.get_lr())  # of the weights that decay, and of the others
        rates.append(rate)
        assert engine.step(make_batch(1), version=3, temperature=TEMPERATURE).lr == rate
    return rates


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0.5, 1, 0.775, 0.55, 0.325, 0.1]), ("cosine", [0.5, 1, 0.8682, 0.55, 0.2318, 0.1])],
)
def test_the_learning_rate_falls_to_its_final_share_at_the_runs_last_step(engine_of, tmp_path, schedule, expected):
    changes = {"lr_schedule": schedule, "lr_final": 0.1, "warmup_steps": 2, "lr": 1.0}
    engine = engine_of(optimizer_steps=6, **changes)
    first = rates_of(engine, 3)
    engine.storage.save(tmp_path / "saved")
    assert first + rates_of(engine, 3) == pytest.approx(expected, abs=1e-4)
    resumed = engine_of(optimizer_steps=6, **changes)
    resumed.storage.load(tmp_path / "saved")
    assert rates_of(resumed, 3) == pytest.approx(expected[3:], abs=1e-4)
    longer = engine_of(optimizer_steps=60, **changes)  # as if the run had been of so many steps from its start
    longer.storage.load(tmp_path / "saved")
    assert rates_of(longer, 1)[0] > 0.9


BATCHES = [make_batch(groups=2, seed=seed) for seed in range(3)]


def train(engine, batches):
    for version, batch in enumerate(batches):
        engine.step(batch if engine.rank == 0 else None, version=version, temperature=TEMPERATURE)


def assert_same_bits(folder, expected):
    """Of the weights in two folders."""
    folder, expected = weights_of(folder), weights_of(expected)
    assert folder.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(folder[name], expected[name])] == []


@pytest.fixture(scope="module", params=["some cases", pytest.param("all cases", marks=pytest.mark.slow)])
def one_rank(request, folder, tmp_path_factory):
    """What `train_straight_and_stop` wrote on one rank."""
    cases = ON_ONE_RANK if request.param == "some cases" else CASES
    return made_once(
        tmp_path_factory, f"one rank, {request.param}", lambda out: train_straight_and_stop(folder, out, cases)
    )


def test_a_new_engine_goes_on_from_a_checkpoint_to_the_same_bits(folder, one_rank):
    names = list(checkpoints(one_rank))
    go_on(folder, one_rank, names)
    for name in names:
        assert_same_bits(one_rank / f"{name}-resumed", one_rank / f"{name}-straight")


ON_TWO_RANKS = ("zero3", "bf16-zero1", "bf16-adapters-zero3")


@pytest.fixture(scope="module", params=["some cases", pytest.param("all cases", marks=pytest.mark.slow)])
def two_ranks(request, folder, tmp_path_factory):
    """What `work` wrote on two ranks."""
    cases = ON_TWO_RANKS if request.param == "some cases" else CASES
    return made_once(
        tmp_path_factory, f"two ranks, {request.param}", lambda out: run_worker(__file__, folder, out, *cases, ranks=2)
    )


def checkpoints(folder):
    """Of the cases that `work` went through, by name."""
    return {file.name.removesuffix("-checkpoint"): file for file in folder.glob("*-checkpoint")}


def test_two_ranks_have_the_gradients_of_one(folder, two_ranks):
    tree, alone = make_tree(), make_batch(1)
    model = eager(folder)
    for stage in (0, 2, 3):
        assert_same_gradients(load_file(two_ranks / f"{stage}-tree"), reference_gradients(model, tree))
        assert_same_gradients(load_file(two_ranks / f"{stage}-one"), reference_gradients(model, alone))
        weights = weights_of(two_ranks / f"weights-{stage}")
        for name, tensor in load_file(folder / "model.safetensors").items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)


def write_gradients(folder, out):
    """Train at each ZeRO stage; `one` has a single sequence, so that one of two ranks has nothing to do."""
    for stage in (0, 2, 3):
        engine = TrainingEngine(folder, settings(zero_stage=stage, lr=1e-9, max_tokens_per_microbatch=40), seed=0)
        first = engine.rank == 0
        for name, batch in {"tree": make_tree(), "one": make_batch(1)}.items():
            result, gradients = step_and_gradients(engine, batch if first else None)
            assert engine.messages.broadcast({"result": repr(result.loss)} if first else None) == {
                "result": repr(result.loss)
            }
            assert result.optimizer_steps == 1
            if first:
                save_file(gradients, out / f"{stage}-{name}")
        batch = make_batch() if first else None
        assert not engine.step(batch, version=3, temperature=TEMPERATURE, mask_older_than=4).optimizer_steps
        engine.storage.snapshot()
        written = engine.storage.begin_write(out / f"weights-{stage}").result()
        assert written == (Manifest.of(out / f"weights-{stage}") if first else None)
        engine.close()


def test_two_ranks_go_on_from_a_checkpoint_to_the_same_bits(two_ranks):
    for name, checkpoint in checkpoints(two_ranks).items():
        assert_same_bits(two_ranks / f"{name}-resumed", two_ranks / f"{name}-straight")
        dtypes = {tensor.dtype for tensor in weights_of(checkpoint).values()}
        merged = "adapters" in name  # with the model's weights, which are fp32
        assert dtypes == {torch.bfloat16 if "bf16" in name and not merged else torch.float32}


def test_offload_changes_the_weights_by_rounding_alone(one_rank, two_ranks):
    assert {"zero2-offload", "bf16-zero3-offload"} <= checkpoints(one_rank).keys()
    for out in (one_rank, two_ranks):
        for name in OFFLOADED.keys() & checkpoints(out).keys():
            weights, expected = (weights_of(out / f"{name}{kind}-straight") for kind in ("-offload", ""))
            for tensor in expected:  # at ZeRO 1 and 2 they are the same bits
                torch.testing.assert_close(weights[tensor], expected[tensor])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_from_any_zero_stage_and_number_of_ranks_to_any_other(folder, two_ranks, tmp_path, dtype):
    cases = {name: changes for name, changes in CASES.items() if changes.get("dtype", "float32") == dtype}
    cases = {name: changes for name, changes in cases.items() if "lora" not in changes}  # those are in test_lora
    for changes in cases.values():
        engine = TrainingEngine(folder, worker_settings(**changes), seed=1)
        for name, written in checkpoints(two_ranks).items():
            if name not in cases:
                continue
            engine.storage.load(written)
            again = engine.storage.save(tmp_path / "again")
            assert_same_bits(again, written)
            assert_same_state(again, written)
        engine.close()


def tensors_equal(first, second):
    first, second = load_file(first), load_file(second)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_of_the_first_moment_takes_a_trained_engine_back_to_the_start(engine_of, folder, tmp_path):
    engine = engine_of(warmup_steps=4)
    engine.storage.save(tmp_path / "start")
    train(engine, BATCHES[:2])
    engine.storage.publish(tmp_path / "straight")
    engine.storage.load(tmp_path / "start")
    engine.storage.publish(tmp_path / "weights")
    assert_same_bits(tmp_path / "weights", folder)
    train(engine, BATCHES[:2])
    engine.storage.publish(tmp_path / "again")
    assert_same_bits(tmp_path / "again", tmp_path / "straight")


def test_a_folder_that_is_no_checkpoint_or_one_of_another_model_is_the_users_mistake(engine_of, folder, tmp_path):
    engine = engine_of()
    with pytest.raises(UserError, match=r"is not a checkpoint to resume from"):
        engine.storage.load(folder)
    second = TrainingEngine(make_model(tmp_path / "other", hidden_size=40), settings(), seed=0)
    second.storage.save(tmp_path / "checkpoint")
    second.close()
    with pytest.raises(UserError, match=r"belongs to another model"):
        engine.storage.load(tmp_path / "checkpoint")
    assert_same_bits(engine.storage.publish(tmp_path / "weights"), folder)


def test_a_checkpoint_holds_no_pickle(engine_of, tmp_path):
    saved = engine_of().storage.save(tmp_path / "saved")
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_a_checkpoint_takes_the_place_of_one_of_its_name(engine_of, tmp_path):
    engine = engine_of()
    engine.storage.save(tmp_path / "saved")
    train(engine, BATCHES[:1])
    engine.storage.save(tmp_path / "saved")
    engine.storage.publish(tmp_path / "weights")
    assert_same_bits(tmp_path / "saved", tmp_path / "weights")


@pytest.mark.parametrize("stage", [0, 3])
def test_saved_weights_load_in_transformers_and_give_the_same_log_probs(engine_of, tmp_path, stage):
    batch, engine = make_batch(), engine_of(zero_stage=stage)
    engine.step(batch, version=3, temperature=TEMPERATURE)
    saved = engine.storage.save(tmp_path / "saved")
    model = eager(saved)
    with torch.no_grad():
        alone = [
            logprobs_alone(model, t)[torch.from_numpy(t.sampled)[1:]] for group in batch for t in group.trajectories
        ]
    torch.testing.assert_close(packed_logprobs(engine, batch), torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert (saved / "tokenizer.json").exists()


def test_zero_3_saves_weights_that_a_pass_has_begun_to_gather(engine_of, tmp_path):
    """As it does with any model of more than a billion parameters; this one has 17,000."""
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 5000,
        "stage3_max_live_parameters": 15_000,
        "stage3_max_reuse_distance": 10_000,
    }
    engine = engine_of(zero_stage=3, gradient_checkpointing=True, deepspeed_options={"zero_optimization": zero})
    train(engine, BATCHES[:2])
    logprobs = engine.logprobs(make_batch(), temperature=TEMPERATURE)
    assert any(parameter.ds_status.name == "INFLIGHT" for parameter in engine.model.module.parameters())
    engine.storage.save(tmp_path / "saved")
    np.testing.assert_array_equal(engine.logprobs(make_batch(), temperature=TEMPERATURE), logprobs)
    train(engine, BATCHES[1:2])


def test_published_weights_are_complete_and_replace_those_of_the_name(engine_of, folder, tmp_path):
    engine = engine_of()
    version = engine.storage.publish(tmp_path / "weights" / "0")
    assert [path.name for path in version.iterdir()] == ["model.safetensors"]
    published, original = load_file(version / "model.safetensors"), load_file(folder / "model.safetensors")
    assert published.keys() == original.keys()  # so a tied lm_head is not there twice
    assert all(torch.equal(published[name], original[name]) for name in original)
    train(engine, BATCHES[:1])
    engine.storage.publish(version)
    assert not tensors_equal(version / "model.safetensors", folder / "model.safetensors")
    assert [path.name for path in version.parent.iterdir()] == ["0"]


def bytes_of(engine):
    """Of the weights and the training state, without what is in mapped files, as some models are on the CPU."""
    memories = {
        storage._cdata: storage
        for storage in (
            tensor.untyped_storage() for tensor in engine._resident() if tensor.device == engine.model.device
        )
    }
    return sum(storage.nbytes() for storage in memories.values() if storage.resizable())


@pytest.mark.parametrize(
    "changes",
    [
        *({"zero_stage": stage} for stage in (0, 2, 3)),
        pytest.param({"zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        *({"lora": {"rank": 2}}, {"kl_coef": 0.1}),
    ],
    ids=str,
)
def test_training_goes_on_to_the_same_bits_after_its_state_was_in_host_memory(engine_of, folder, tmp_path, changes):
    stayed, moved = engine_of(**changes), engine_of(**changes)
    for version, batch in enumerate(BATCHES):
        for engine in (stayed, moved):
            engine.step(batch, version=version, temperature=TEMPERATURE)
        size = bytes_of(moved)
        moved.offload()
        assert bytes_of(moved) == 0 < size
        moved.reload()
        assert bytes_of(moved) == size
    assert_same_state(stayed.storage.save(tmp_path / "stayed"), moved.storage.save(tmp_path / "moved"))
    assert_same_bits(moved.storage.publish(tmp_path / "published"), stayed.storage.publish(tmp_path / "expected"))


def test_a_snapshot_is_what_is_written_whatever_is_trained_meanwhile(engine_of, folder, tmp_path):
    engine = engine_of()
    engine.storage.snapshot()
    train(engine, BATCHES[:1])
    assert engine.storage.begin_write(tmp_path / "before").result() == Manifest.of(tmp_path / "before")
    assert tensors_equal(tmp_path / "before" / "model.safetensors", folder / "model.safetensors")
    new_folder = engine.storage.publish(tmp_path / "after")
    assert not tensors_equal(new_folder / "model.safetensors", folder / "model.safetensors")


def test_deepspeed_compiles_no_op_of_its_own(engine_of):
    engine_of()
    from deepspeed.comm import comm

    assert comm.cdb.shm_comm_op is None


def test_options_reach_deepspeed_on_top_of_what_is_set_here(engine_of):
    options = {"zero_optimization": {"reduce_bucket_size": 1234}, "data_types": {"grad_accum_dtype": "bf16"}}
    settings_of_engine = engine_of(zero_stage=2, grad_clip=0.5, deepspeed_options=options).model.deepspeed._config
    assert (settings_of_engine.zero_config.reduce_bucket_size, settings_of_engine.grad_accum_dtype) == (1234, "bf16")
    assert (settings_of_engine.zero_config.stage, settings_of_engine.gradient_clipping) == (2, 0.5)


def test_an_option_that_deepspeed_does_not_take_is_told_before_the_model_is_read(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())  # and no weights
    with pytest.raises(UserError, match=r"trainer.deepspeed_options: .*reduce_bucket_size") as error:
        TrainingEngine(
            tmp_path, settings(deepspeed_options={"zero_optimization": {"reduce_bucket_size": "many"}}), seed=0
        )
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        TrainingEngine(tmp_path, settings(), seed=0)


def work(folder, out, *cases):
    write_gradients(folder, out)
    train_straight_and_stop(folder, out, cases)
    go_on(folder, out, cases)


CASES = {f"zero{stage}": {"zero_stage": stage, "minibatches": 1 + stage % 2} for stage in (0, 1, 2, 3)}
CASES |= {f"bf16-zero{stage}": {"dtype": "bfloat16", "zero_stage": stage} for stage in (1, 2, 3)}
ADAPTERS = {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8}, "kl_coef": 0.1, "critic": {"warmup_steps": 1}}
OFFLOADED = {"zero1": "optimizer", "zero2": "optimizer", "bf16-zero3": "all"}
CASES |= {f"{name}-offload": CASES[name] | {"offload": what} for name, what in OFFLOADED.items()}
CASES |= {f"bf16-adapters-zero{stage}": ADAPTERS | {"zero_stage": stage} for stage in (1, 3)}
"""Changes of the settings: every place where DeepSpeed keeps masters and moments, 1 and 2 minibatches."""
ON_ONE_RANK = ("zero0", "zero2", "zero2-offload", "bf16-zero3", "bf16-zero3-offload")
"""Others are ON_TWO_RANKS."""


def worker_settings(**changes):
    return settings(warmup_steps=3, grad_clip=1.0, max_tokens_per_microbatch=40, **changes)


def train_straight_and_stop(folder, out, cases):
    """3 steps without a stop, leaving a checkpoint at the second."""
    for name in cases:
        engine = TrainingEngine(folder, worker_settings(**CASES[name]), seed=0)
        train(engine, BATCHES[:2])
        engine.storage.save(out / f"{name}-checkpoint")
        train(engine, BATCHES[2:])
        engine.storage.publish(out / f"{name}-straight")
        engine.close()


def go_on(folder, out, cases):
    for name in cases:
        engine = TrainingEngine(folder, worker_settings(**CASES[name]), seed=1)
        engine.storage.load(out / f"{name}-checkpoint")
        train(engine, BATCHES[2:])
        engine.storage.publish(out / f"{name}-resumed")
        engine.close()


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
