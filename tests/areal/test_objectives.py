import numpy as np
import pytest
import torch

from areal.objectives import decoupled_ppo, ppo

S = 400


def tokens(seed=0):
    """log pi_theta, log pi_prox, log pi_behav, A: float64 [S], with ratios well inside and outside the clip."""
    rng = np.random.default_rng(seed)
    logp_prox = rng.normal(-2, 1, S)
    return logp_prox + rng.normal(0, 0.3, S), logp_prox, logp_prox + rng.normal(0, 0.5, S), rng.normal(0, 1, S)


def reference(logp, anchor, weight, A, low, high):
    """J and dJ/dlogp by cases, without min or clip. The token is held back where its ratio has already moved past
    the bound in the direction that A asks for; then its gradient is 0."""
    J, gradient = np.empty(S), np.empty(S)
    for t in range(S):
        u = np.exp(logp[t] - anchor[t])
        held = (A[t] > 0 and u > 1 + high) or (A[t] < 0 and u < 1 - low)
        bound = 1 + high if A[t] > 0 else 1 - low
        J[t] = weight[t] * A[t] * (bound if held else u)
        gradient[t] = 0.0 if held else weight[t] * A[t] * u
    return J, gradient


def evaluate(objective, logp, prox, behav, A, **clips):
    theta = torch.tensor(logp, requires_grad=True)
    out = objective(theta, torch.tensor(prox), torch.tensor(behav), torch.tensor(A), **clips)
    out.loss.sum().backward()
    return out, theta.grad.numpy()


@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.2, 0.28)])
def test_decoupled_ppo_is_equation_5(low, high):
    logp, prox, behav, A = tokens()
    out, gradient = evaluate(decoupled_ppo, logp, prox, behav, A, eps_clip=low, eps_clip_higher=high)
    w = np.exp(prox - behav)
    J, dJ = reference(logp, prox, w, A, low, high or low)
    np.testing.assert_allclose(out.loss.detach().numpy(), -J, rtol=1e-12)
    np.testing.assert_allclose(gradient, -dJ, rtol=1e-12)
    np.testing.assert_allclose(out.weight.numpy(), w, rtol=1e-12)
    assert np.array_equal(out.clipped.numpy(), dJ == 0)
    assert 0.1 < out.clipped.double().mean() < 0.9


def test_ppo_is_anchored_at_the_behaviour_policy():
    logp, prox, behav, A = tokens()
    out, gradient = evaluate(ppo, logp, prox, behav, A, eps_clip=0.2, eps_clip_higher=None)
    J, dJ = reference(logp, behav, np.ones(S), A, 0.2, 0.2)
    np.testing.assert_allclose(out.loss.detach().numpy(), -J, rtol=1e-12)
    np.testing.assert_allclose(gradient, -dJ, rtol=1e-12)
    assert torch.equal(out.weight, torch.ones(S, dtype=torch.float64))


def test_on_policy_the_two_agree():
    logp, _, _, A = tokens()
    ours, theirs = (
        evaluate(objective, logp, logp, logp, A, eps_clip=0.2, eps_clip_higher=None)
        for objective in (decoupled_ppo, ppo)
    )
    assert np.array_equal(ours[1], theirs[1])
    np.testing.assert_allclose(ours[1], -A)


def test_no_gradient_reaches_the_proximal_policy():
    logp, prox, behav, A = (torch.tensor(x, requires_grad=True) for x in tokens())
    decoupled_ppo(logp, prox, behav.detach(), A.detach(), eps_clip=0.2, eps_clip_higher=None).loss.sum().backward()
    assert prox.grad is None
    assert logp.grad is not None
