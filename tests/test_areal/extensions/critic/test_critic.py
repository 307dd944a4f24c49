"""The critic against plain transformers in float64, one sequence at a time, and against equations counted out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_training import (
    TEMPERATURE,
    VOCAB,
    assert_same_gradients,
    eager,
    logprobs_alone,
    make_batch,
    make_forest,
    make_model,
    settings,
    step_and_gradients,
    weights_of,
)

from areal.base.errors import UserError
from areal.extensions.critic.critic import gae, value_loss
from areal.training.algorithms.algorithm import policy_gradient, set_columns
from areal.training.algorithms.assembly import algorithm_of
from areal.training.packed import FlatBatch
from areal.training.training_engine import TrainingEngine

GAMMA, LAM, COEF = 0.97, 0.9, 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def estimates(V, rewards, gamma, lam):
    """Sums of temporal differences over the steps of one sample, as in the paper's equation 16."""
    ahead = [*V, 0.0][1:]
    deltas = [r + gamma * next_value - v for r, v, next_value in zip(rewards, V, ahead, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(V))) for t in range(len(V))]


@given(data=st.data(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.8, 0.0]))
def test_estimates_are_what_counting_out_gives_and_credit_flows_over_tokens_that_were_not_sampled(data, gamma, lam):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    sampled, samples = rng.random(2 * sum(lengths)) < 0.5, np.repeat(np.arange(len(lengths)), 2 * np.array(lengths))
    V, rewards, penalties, returns = rng.normal(size=(4, len(samples)))
    expected = np.zeros(len(samples))
    for sample in range(len(lengths)):
        places = np.flatnonzero((samples == sample) & sampled)
        returns[places] = rewards[places][::-1].cumsum()[::-1]
        expected[places] = estimates(V[places].tolist(), (rewards - penalties)[places].tolist(), gamma, lam)
    results = gae(V, returns, penalties, samples, sampled, gamma=gamma, lam=lam)
    np.testing.assert_allclose(results, expected, rtol=1e-9, atol=1e-9)
    if gamma == lam == 1:  # the sum telescopes
        plain = gae(V, returns, None, samples, sampled, gamma=1, lam=1)
        np.testing.assert_allclose(plain, np.where(sampled, returns - V, 0), atol=1e-9)


def test_a_value_is_held_near_the_one_before_the_step_unless_that_would_hide_an_error():
    values, old, targets = torch.tensor(
        [[0.1, 0.9, 0.9, -0.9], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, -1.0]], dtype=torch.float64
    )
    values.requires_grad_()
    losses = value_loss(values, old, targets, 0.2)
    torch.testing.assert_close(losses.detach().tolist(), [0.405, 0.32, 0.405, 0.32])
    losses.sum().backward()
    torch.testing.assert_close(values.grad.tolist(), [-0.9, 0.0, 0.9, 0.0])
    torch.testing.assert_close(value_loss(values, old, targets, None), (values - targets).square() / 2)


def exact_values(model, head, sequence):
    """The values before every token but the first, [T - 1], and what the body gets their gradient from."""
    hidden = model(input_ids=torch.from_numpy(sequence.tokens).long()[None], output_hidden_states=True).hidden_states[
        -1
    ][0, :-1]
    scaled = hidden * COEF + hidden.detach() * (1 - COEF)
    features = scaled / (scaled.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    return (features * head["weight"]).mean(-1) + head["bias"]


def exact_gradients(folder, batch, head):
    """In float64, of -1/N sum_t w_t A_t u_t + 1/N sum_t (V_t - (A_t + V_t))^2 / 2, A by `estimates`."""
    model = eager(folder, torch.float64)
    logps, values, ws, raw, targets, of_samples = [], [], [], [], [], []
    for sample in (sample for group in batch for sample in group.trajectories):
        credits, own_values = [], []
        for sequence in sample.sequences():
            selected = torch.from_numpy(sequence.sampled)[1:]
            logps.append(logprobs_alone(model, sequence)[selected])
            ws.append((logps[-1].detach() - torch.from_numpy(sequence.logprobs)[1:][selected]).exp())
            own_values.append(exact_values(model, head, sequence)[selected])
            credits += sequence.filled("returns")[1:][selected.numpy()].tolist()
        V = torch.cat(own_values)
        rewards = -np.diff([*credits, 0.0])
        raw.append(np.array(estimates(V.tolist(), rewards.tolist(), GAMMA, LAM)))
        targets.append(raw[-1] + V.detach().numpy())
        values.append(V)
        of_samples.append(raw[-1].mean())
    mean = np.mean(of_samples)
    std = np.sqrt(np.mean([((values_of_sample - mean) ** 2).mean() for values_of_sample in raw])) + 1e-6
    A, target = (torch.from_numpy(np.concatenate(parts)) for parts in (raw, targets))
    errors = (torch.cat(values) - target).square() / 2
    (errors - torch.cat(ws) * torch.cat(logps) * (A - mean) / std).mean().backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    gradients |= {f"value_head.{name}": p.grad.float() for name, p in head.items()}
    return gradients, errors.mean().item(), 1 - (np.concatenate(raw).var() / target.var(correction=0)).item()


@pytest.mark.parametrize(
    ("batch", "changes"),
    [(make_batch(), {"zero_stage": 3}), (make_forest(), {}), (make_forest(), {"max_tokens_per_microbatch": 10_000})],
)
def test_gradients_and_metrics_are_those_of_each_sequence_alone(folder, batch, changes):
    """With branches: the tokens of a sample follow each other branch by branch."""
    critic = {"gamma": GAMMA, "lam": LAM, "coef": COEF}
    engine = TrainingEngine(folder, settings(critic=critic, lr=1e-9, **changes), seed=0)
    torch.manual_seed(1)
    head = {"weight": torch.randn(1, 32).double(), "bias": torch.randn(1).double()}
    with torch.no_grad(), engine.model.zero.GatheredParameters([*engine.model.critic.parameters()], modifier_rank=0):
        for name, parameter in engine.model.critic.named_parameters():
            parameter.copy_(head[name])
            head[name] = parameter.double().requires_grad_()
    result, gradients = step_and_gradients(engine, batch)
    engine.close()
    expected, errors, explained = exact_gradients(folder, batch, head)
    assert_same_gradients(gradients, expected)
    assert result.value_loss == pytest.approx(errors, rel=1e-4)
    assert result.explained_variance == pytest.approx(explained, rel=1e-3)


def test_a_penalty_in_the_reward_is_taken_from_the_step_of_its_own_token():
    changes = {
        "kl_coef": 0.1,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "advantage_mean": "none",
        "advantage_std": "none",
    }
    config = settings(critic={"gamma": GAMMA, "lam": LAM}, **changes)
    flat, rng = FlatBatch.of(make_forest(), minibatches=1, prefix_tree=True), np.random.default_rng(0)
    values, reference = rng.normal(-2, 1, (2, len(flat.tokens)))
    columns = flat.columns
    sampled = columns["versions"] >= 0
    columns |= {"trained": sampled, "values": values, "reference": reference}
    set_columns(flat, algorithm_of(policy_gradient(config), config, VOCAB), config)
    for sample in range(len(flat.rewards)):
        places = [place for place in flat.by_sample() if sampled[place] and flat.of_sample[place] == sample]
        penalties = 0.1 * (columns["logprobs"] - reference)[places]
        rewards = -np.diff([*columns["returns"][places], 0.0]) - penalties
        expected = estimates(values[places].tolist(), rewards.tolist(), GAMMA, LAM)
        np.testing.assert_allclose(columns["advantages"][places], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose((columns["value_targets"] - values)[places], expected, rtol=1e-6, atol=1e-6)


def test_the_first_steps_train_the_head_alone_which_stays_with_the_trainer(folder, tmp_path):
    changes = {"zero_stage": 1, "weight_decay": 0.5, "warmup_steps": 2, "minibatches": 2}
    engine = TrainingEngine(folder, settings(critic={"warmup_steps": 2, "lr": 0.02}, **changes), seed=0)
    original = weights_of(folder)
    assert engine.model.deepspeed.get_lr() == [0, 0, 0.02]
    losses = [engine.step(make_batch(), version=3, temperature=TEMPERATURE).value_loss]
    assert all(
        torch.equal(computed, original[name])
        for name, computed in weights_of(engine.storage.publish(tmp_path / "1")).items()
    )
    assert engine.model.deepspeed.get_lr() == [0.0005, 0.0005, 0.02]
    losses += [engine.step(make_batch(), version=3, temperature=TEMPERATURE).value_loss for _ in range(2)]
    assert losses[0] > losses[1] > losses[2]
    saved = engine.storage.save(tmp_path / "saved")
    engine.close()
    assert weights_of(saved).keys() == original.keys()
    assert not torch.equal(weights_of(saved)["model.norm.weight"], original["model.norm.weight"])
    plain = TrainingEngine(folder, settings(**changes), seed=0)
    with pytest.raises(UserError, match=r"only one of the two has a trainer\.critic"):
        plain.storage.load(saved)
    plain.close()
