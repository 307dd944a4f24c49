"""Every objective against a reference in float64 numpy: token by token, case by case, without min or clip."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal.base.errors import UserError
from areal.config import dump_config, load_config
from areal.config.named_objectives import OBJECTIVES
from areal.config.trainer_section import TrainerConfig
from areal.extensions.losses.m2po import within_second_moment
from areal.training.algorithms.assembly import interpolated_proximal
from areal.training.algorithms.objectives import objective_of, rehearse
from areal.training.algorithms.reference import kl, kl_penalty
from areal.training.algorithms.token_loss import LOG_RATIO_BOUND, TokenLoss, Tokens, behaviour_weight, mask_sequences

SURROGATES = [name for name in OBJECTIVES if objective_of(name) is objective_of("decoupled_ppo")]
WEIGHTS = ["full", "truncated", "masked", "masked_kl", "none"]
COMBINED = {"token": None, "sequence": np.sum, "geometric": np.mean}
UNCUT = (0.0, np.inf)


def make_tokens(seed=0, S=400):
    """Float64, with u, w inside and outside of all bounds, on both signs of A, and some A of 0; 1 to 20 a sequence.
    Each was drawn from two words."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 21, S)
    sequence = np.repeat(np.arange(S), lengths)[:S]
    logp_prox = rng.normal(-2, 1, S)
    logps = (logp_prox + rng.normal(0, 0.3, S), logp_prox, logp_prox - rng.normal(0, 0.8, S))
    arrays = [np.minimum(logp, -0.01) for logp in logps] + [rng.normal(0, 1, S).round(1)]
    theta, _, behaviour, _ = tensors = [torch.tensor(a) for a in arrays]
    kept = {"kept_words": torch.zeros(S, 2, dtype=torch.int64)}
    for name, logp in (("kept_policy", theta), ("kept_logprobs", behaviour)):
        kept[name] = torch.stack([logp, torch.log(-torch.expm1(logp))], 1)
    return Tokens(*tensors, torch.tensor(sequence), columns=kept)


def settings(name, **changes):
    needed = {"teacher": "wise"} if name == "distill" else {}
    return TrainerConfig(objective=name, **needed | changes)


def evaluate(name, tokens, config):
    """What the objective returns, and the gradient of the summed loss with respect to log pi_theta, in numpy."""
    logp = tokens.logp.clone().requires_grad_()
    out = objective_of(name)(replace(tokens, logp=logp), config)
    out.loss.sum().backward()
    return out.loss.detach().numpy(), out.clipped.numpy(), logp.grad.numpy()


# --- the reference


@dataclass
class Case:
    """J of a token, dJ / dlog pi_theta, and whether a clip or mask is at work."""

    J: float
    dJ: float
    held: bool


def surrogate(u, A, low, high, dual=np.inf):
    """The clipped surrogate of one token by its cases: held back where u has already moved past the bound in the
    direction that A asks for, or, with a dual clip, where a bad token's ratio is beyond it in the other one."""
    if A > 0 and u > 1 + high:
        return Case((1 + high) * A, 0.0, True)
    if A < 0 and u < 1 - low:
        return Case((1 - low) * A, 0.0, True)
    if A < 0 and u > dual:
        return Case(dual * A, 0.0, True)
    return Case(u * A, u * A, False)


def weight(log_w, kind, bounds):
    w = np.exp(log_w)
    if kind == "none":
        return 1.0
    if kind == "truncated" and w > bounds[1]:
        return bounds[1]
    if kind == "masked" and not bounds[0] <= w <= bounds[1]:
        return 0.0
    return w


def reference_weights(tokens, kind, bounds, level="token"):
    """w of each token, combined over its sequence in logarithms."""
    prox, behav, sequence = (getattr(tokens, n).numpy() for n in ("logp_prox", "logp_behav", "sequence"))
    log_w = prox - behav
    if level != "token":
        log_w = [COMBINED[level](log_w[sequence == i]) for i in sequence]
    w = np.array([weight(ratio, kind, bounds) for ratio in log_w])
    if kind == "masked_kl":
        p, q = np.exp(prox), np.exp(behav)
        w[np.maximum(bernoulli_kl(p, q), bernoulli_kl(q, p)) > bounds[1]] = 0.0
    return w


def bernoulli_kl(p, q):
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def weighted(case, w):
    return Case(w * case.J, w * case.dJ, case.held or w == 0)


def each(tokens):
    return zip(*(getattr(tokens, name).tolist() for name in ("logp", "logp_prox", "logp_behav", "A")), strict=True)


def reference_surrogate(tokens, low, high, kind="full", bounds=UNCUT, dual=np.inf, level="token"):
    return [
        weighted(surrogate(np.exp(theta - prox), A, low, high, dual), w)
        for (theta, prox, _, A), w in zip(
            each(tokens), reference_weights(tokens, kind, bounds, level).tolist(), strict=True
        )
    ]


def assert_equal(values, cases):
    loss, clipped, gradient = values
    np.testing.assert_allclose(loss, [-case.J for case in cases], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradient, [-case.dJ for case in cases], rtol=1e-10, atol=1e-12)
    assert clipped.tolist() == [case.held for case in cases]


# --- values and gradients


@pytest.mark.parametrize(
    ("name", "low", "high", "kind", "bounds", "level"),
    [
        ("decoupled_ppo", 0.2, 0.2, "full", UNCUT, "token"),
        ("grpo", 0.2, 0.2, "full", UNCUT, "token"),
        ("dr_grpo", 0.2, 0.2, "full", UNCUT, "token"),
        ("rloo", 0.2, 0.2, "full", UNCUT, "token"),
        ("reinforce_pp", 0.2, 0.2, "full", UNCUT, "token"),
        ("dapo", 0.2, 0.28, "full", UNCUT, "token"),
        ("tis", 0.2, 0.2, "truncated", (0, 2), "token"),
        ("seq_tis", 0.2, 0.2, "truncated", (0, 2), "sequence"),
        ("seq_mis", 0.2, 0.2, "masked", (0, 2), "sequence"),
        ("icepop", 0.2, 0.2, "masked", (0.5, 5), "token"),
        ("kpop", 0.2, 0.2, "masked_kl", (0, 2), "token"),
        ("flash_reinforce", 0.2, 0.2, "full", UNCUT, "token"),
    ],
)
def test_objectives_of_the_clipped_surrogate_are_its_equation_with_their_settings(name, low, high, kind, bounds, level):
    tokens = make_tokens()
    computed = evaluate(name, tokens, settings(name))
    assert_equal(computed, reference_surrogate(tokens, low, high, kind, bounds, level=level))
    assert 0.1 < computed[1].mean() < 0.9


def test_the_reference_knows_every_objective():
    objectives = {
        "ppo",
        "gspo",
        "luspo",
        "gmpo",
        "cispo",
        "sapo",
        "dppo",
        "dppo_kl",
        "vespo",
        "m2po",
        "sao",
        "score_centring",
    }
    assert {*SURROGATES, *objectives} == OBJECTIVES.keys()


@pytest.mark.parametrize("level", COMBINED)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_behaviour_weight_of_a_token_or_its_sequence_is_as_it_is_cut_masked_or_left_out(kind, level):
    tokens = make_tokens()
    bounds = (0.0, 0.05) if kind == "masked_kl" else (0.6, 1.5)
    changes = {"behaviour_weight": kind, "behaviour_weight_level": level, "behaviour_weight_bounds": bounds}
    computed = evaluate("decoupled_ppo", tokens, settings("decoupled_ppo", **changes))
    assert_equal(computed, reference_surrogate(tokens, 0.2, 0.2, kind, bounds, level=level))


def test_the_region_of_kpop_bounds_a_divergence_and_not_w():
    """areal/extensions/losses/README.md gives these figures."""
    prox, behaviour = np.log(1e-3), np.log(1e-12)
    tokens = dict(zip(("logp_prox", "logp_behav"), (torch.tensor([x]) for x in (prox, behaviour)), strict=True))
    alike = Tokens(logp=torch.tensor([prox]), A=torch.ones(1), sequence=torch.zeros(1).long(), **tokens)
    assert bernoulli_kl(1e-3, 1e-12) == pytest.approx(0.02, abs=1e-3)
    assert behaviour_weight(alike, settings("kpop")).item() == pytest.approx(np.exp(LOG_RATIO_BOUND))
    assert behaviour_weight(alike, settings("icepop")).item() == 0
    assert behaviour_weight(alike, settings("tis")).item() == 2


def test_a_dual_clip_bounds_what_a_bad_token_counts():
    tokens = make_tokens()
    config = settings("decoupled_ppo", eps_clip_dual=1.3)
    cases = reference_surrogate(tokens, 0.2, 0.2, dual=1.3)
    assert_equal(evaluate("decoupled_ppo", tokens, config), cases)
    assert cases != reference_surrogate(tokens, 0.2, 0.2)


def test_ppo_is_anchored_at_the_behaviour_policy_and_has_no_weight():
    tokens = make_tokens()
    config = settings("ppo")
    cases = [surrogate(np.exp(theta - behav), A, 0.2, 0.2) for theta, _, behav, A in each(tokens)]
    assert_equal(evaluate("ppo", tokens, config), cases)
    assert config.behaviour_weight == "none"


def gspo_objective(logp, tokens, low, high):
    """GSPO's sequence form: the sum over sequences of w min(s A, clip(s) A)."""
    prox, behav, A, sequence = (getattr(tokens, n).numpy() for n in ("logp_prox", "logp_behav", "A", "sequence"))
    total = 0.0
    for i in np.unique(sequence):
        selected = sequence == i
        s, w = np.exp((logp - prox)[selected].mean()), np.exp((prox - behav)[selected].mean())
        total += w * surrogate(s, A[selected][0], low, high).J
    return total


def gmpo_objective(logp, tokens, low, high):
    """GMPO's sequence form: the sum over sequences of w g A."""
    prox, behav, A, sequence = (getattr(tokens, n).numpy() for n in ("logp_prox", "logp_behav", "A", "sequence"))
    total = 0.0
    for i in np.unique(sequence):
        selected = sequence == i
        sign, u = np.sign(A[selected][0]), np.exp(logp - prox)[selected]
        held = np.minimum(u**sign, np.clip(u**sign, np.exp(-low), np.exp(high))) ** sign if sign else u
        total += np.exp((prox - behav)[selected].mean()) * held.prod() ** (1 / selected.sum()) * A[selected][0]
    return total


@pytest.mark.parametrize(
    ("name", "objective", "low", "high"), [("gspo", gspo_objective, 0.05, 0.07), ("gmpo", gmpo_objective, 0.2, 0.2)]
)
def test_the_token_form_of_gspo_and_gmpo_is_their_sequence_form(name, objective, low, high):
    tokens = make_tokens(S=150)
    lengths = torch.bincount(tokens.sequence)[tokens.sequence]
    tokens = replace(tokens, A=tokens.A[tokens.sequence])  # one advantage a sequence
    config = settings(name, eps_clip=low, eps_clip_higher=high)
    logp = tokens.logp.clone().requires_grad_()
    out = objective_of(name)(replace(tokens, logp=logp), config)
    loss = (out.loss / lengths).sum()  # loss_mean: sequence, up to the number of sequences
    loss.backward()
    theta = tokens.logp.numpy()
    np.testing.assert_allclose(loss.item(), -objective(theta, tokens, low, high), rtol=1e-10)
    h = 1e-6
    for t in range(0, 150, 7):
        up, down = (objective(theta + d * (np.arange(150) == t), tokens, low, high) for d in (h, -h))
        np.testing.assert_allclose(logp.grad[t], -(up - down) / (2 * h), rtol=1e-5, atol=1e-7)
    assert 0.1 < out.clipped.double().mean() < 0.9
    assert config.loss_mean == "sequence"


@pytest.mark.parametrize("kind", WEIGHTS)
def test_gspo_gives_the_tokens_of_a_sequence_one_ratio_and_one_weight_and_each_its_own_advantage(kind):
    tokens = make_tokens()
    sequence, log_u, log_w = (getattr(tokens, name).numpy() for name in ("sequence", "log_u", "log_w"))
    cases = []
    for i, A, w in zip(
        sequence, tokens.A.tolist(), reference_weights(tokens, kind, (0.6, 1.5), "geometric").tolist(), strict=True
    ):
        s = np.exp(log_u[sequence == i].mean())
        cases.append(weighted(surrogate(s, A, 3e-4, 4e-4), w))
    config = settings("gspo", behaviour_weight=kind, behaviour_weight_bounds=(0.6, 1.5))
    assert_equal(evaluate("gspo", tokens, config), cases)
    assert_equal(evaluate("luspo", tokens, config), cases)  # whose sequences count by their lengths
    assert settings("luspo").loss_mean == "constant"


def test_gspo_numbers_sequences_as_they_come_whichever_have_no_token_in_the_loss():
    tokens = make_tokens()
    some = (tokens.sequence % 3 != 0) & (torch.arange(400) % 13 == 0)  # fewer tokens than sequences
    part = Tokens(*(getattr(tokens, n)[some] for n in ("logp", "logp_prox", "logp_behav", "A", "sequence")))
    renumbered = replace(part, sequence=torch.unique(part.sequence, return_inverse=True)[1])
    for a, b in zip(*(evaluate("gspo", x, settings("gspo")) for x in (part, renumbered)), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("lowest", [0.0, 0.8])
def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient(lowest):
    tokens = make_tokens()
    config = settings("cispo", eps_clip_higher=0.3, **({"eps_clip": 1 - lowest} if lowest else {}))
    cases = []
    for theta, _, behav, A in each(tokens):
        r = np.exp(theta - behav)  # however old the policy is that sampled; the preset has no lower bound
        bounded = 1.3 if r > 1.3 else max(r, lowest)
        cases.append(Case(bounded * A * theta, bounded * A, r > 1.3 or r < lowest))
    loss, clipped, gradient = evaluate("cispo", tokens, config)
    assert_equal((loss, clipped, gradient), cases)
    assert clipped.any()
    assert (gradient[clipped & (tokens.A.numpy() != 0)] != 0).all()


def test_sapo_lets_a_soft_gate_fall_as_the_ratio_leaves_1_faster_for_bad_tokens():
    tokens = make_tokens()
    cases = []
    for theta, prox, behav, A in each(tokens):
        u, w, tau = np.exp(theta - prox), np.exp(prox - behav), 1.0 if A > 0 else 1.05
        gate = 1 / (1 + np.exp(-tau * (u - 1)))
        cases.append(Case(w * 4 / tau * gate * A, w * 4 * gate * (1 - gate) * u * A, False))
    assert_equal(evaluate("sapo", tokens, settings("sapo")), cases)


@pytest.mark.parametrize("name", ["dppo", "dppo_kl"])
def test_dppo_masks_tokens_whose_probability_has_moved_too_far_where_their_advantage_pushes_it(name):
    tokens = make_tokens()
    low, high = (0.05, 0.1) if name == "dppo" else (0.01, 0.02)
    cases = []
    for theta, _, behav, A in each(tokens):
        p, q = np.exp(theta), np.exp(behav)
        distance = abs(p - q) if name == "dppo" else bernoulli_kl(q, p)
        far = (A > 0 and p > q and distance > high) or (A < 0 and p < q and distance > low)
        J = 0.0 if far else p / q * A
        cases.append(Case(J, J, far))
    computed = evaluate(name, tokens, settings(name, eps_clip=low, eps_clip_higher=high))
    assert_equal(computed, cases)
    assert 0.1 < computed[1].mean() < 0.9
    assert settings(name).uses_behaviour


def test_sao_leaves_out_every_token_whose_ratio_to_the_behaviour_policy_is_outside_two_bounds():
    tokens = make_tokens()
    cases = []
    for theta, _, behav, A in each(tokens):
        r = np.exp(theta - behav)
        inside = 0.9 <= r <= 1.2
        cases.append(Case(r * A * inside, r * A * inside, not inside))
    computed = evaluate("sao", tokens, settings("sao", eps_clip=0.1, eps_clip_higher=0.2))
    assert_equal(computed, cases)
    assert 0.1 < computed[1].mean() < 0.9
    assert settings("sao").uses_behaviour


@pytest.mark.parametrize(("kind", "bounds"), [("none", UNCUT), ("truncated", (0, 1.2)), ("masked", (0.8, 1.2))])
def test_score_centring_takes_the_mean_of_the_weighted_score_under_the_behaviour_policy_out(kind, bounds):
    random, S, V = np.random.default_rng(0), 60, 7
    kept = random.random((S, V)) < 0.7
    kept[:, 0] = True
    theta, behaviour = (np.where(kept, random.normal(size=(S, V)), -np.inf) for _ in range(2))
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (theta, behaviour))
    token, A = np.array([random.choice(V, p=row) for row in q]), random.normal(size=S)
    w = np.array([weight(x, kind, bounds) for x in np.log(np.where(kept, p, 1) / np.where(kept, q, 1)).ravel()])
    pulls = np.where(kept, q * w.reshape(S, V), 0)  # of each word's score, the centre's
    pulls = np.eye(V)[token] * w.reshape(S, V) - pulls
    expected = A[:, None] * (pulls - pulls.sum(1, keepdims=True) * p)
    logits = torch.from_numpy(np.where(kept, theta, 0.0)).requires_grad_()
    policy = torch.where(torch.from_numpy(kept), logits, -torch.inf).log_softmax(1)
    words, numbers = torch.from_numpy(np.where(kept, np.arange(V), -1)), torch.arange(S)
    logq = torch.from_numpy(np.log(np.where(kept, q, 1)))
    columns = {"kept_words": words, "kept_logprobs": logq, "kept_policy": policy}
    tokens = Tokens(
        policy[numbers, token], policy.detach()[numbers, token], logq[numbers, token],
        torch.from_numpy(A), numbers, columns=columns,
    )  # fmt: skip
    config = settings(
        "score_centring", behaviour_weight=kind, **({} if kind == "none" else {"behaviour_weight_bounds": bounds})
    )
    objective_of("score_centring")(tokens, config).loss.sum().backward()
    np.testing.assert_allclose(-logits.grad.numpy()[kept], expected[kept], rtol=1e-9, atol=1e-12)


def test_flash_reinforce_weighs_a_sequence_s_gradient_or_leaves_the_sequence_out_by_its_mean_binary_kl():
    """At one optimizer step a batch, where pi_theta is pi_prox."""
    tokens, config = make_tokens(), settings("flash_reinforce", sequence_mask_bounds=(0.0, 0.1))
    logp = tokens.logp.clone().requires_grad_()
    tokens = replace(tokens, logp=logp, logp_prox=tokens.logp)
    out = mask_sequences(objective_of("flash_reinforce")(tokens, config), tokens, config)
    out.loss.sum().backward()
    p, q, sequence = np.exp(tokens.logp_prox.numpy()), np.exp(tokens.logp_behav.numpy()), tokens.sequence.numpy()
    means = np.array([bernoulli_kl(q, p)[sequence == number].mean() for number in sequence])
    expected = np.where(means <= 0.1, p / q * tokens.A.numpy(), 0.0)
    np.testing.assert_allclose(-logp.grad.numpy(), expected, rtol=1e-6, atol=1e-12)
    assert out.clipped.tolist() == (means > 0.1).tolist() and 0.1 < out.clipped.double().mean() < 0.9
    assert (config.minibatches, config.loss_mean, config.advantage_std) == (1, "sequence", "none")


def test_vespo_weights_a_sequence_by_a_soft_kernel_of_its_ratio():
    tokens = make_tokens()
    theta, behav, sequence = (getattr(tokens, n).numpy() for n in ("logp", "logp_behav", "sequence"))
    cases = []
    for t, A in enumerate(tokens.A.tolist()):
        W, (k, rate) = np.exp((theta - behav)[sequence == sequence[t]].sum()), (2, 3) if A >= 0 else (3, 2)
        kernel = W**k * np.exp(rate * (1 - W))
        cases.append(Case(kernel * A * theta[t], kernel * A, False))
    assert_equal(evaluate("vespo", tokens, settings("vespo")), cases)


def masked(tokens):
    """With the mask of m2po, as if the tokens were a minibatch."""
    return replace(tokens, mask=torch.from_numpy(within_second_moment(tokens.log_w.numpy(), 0.04)))


def test_m2po_masks_the_tokens_farthest_from_the_behaviour_policy_until_the_second_moment_is_low():
    tokens = make_tokens()
    remaining = {t: (prox - behav) ** 2 for t, (_, prox, behav, _) in enumerate(each(tokens))}
    while remaining and np.mean(list(remaining.values())) >= 0.04:
        del remaining[max(remaining, key=remaining.get)]
    cases = []
    for t, (theta, _, behav, A) in enumerate(each(tokens)):
        J = np.exp(theta - behav) * A if t in remaining else 0.0
        cases.append(Case(J, J, t not in remaining))
    assert_equal(evaluate("m2po", masked(tokens), settings("m2po")), cases)
    assert 0.1 < len(remaining) / 400 < 0.9


def test_m2po_masks_all_where_even_the_nearest_token_is_too_far_and_none_where_all_are_near():
    assert not within_second_moment(np.array([0.3, -0.5]), 0.04).any()
    assert within_second_moment(np.array([0.1, -0.1, 0.25]), 0.04).all()


@pytest.mark.parametrize(("kind", "low", "high"), [("product", 0.1, 10.0), ("geometric", 0.8, 1.3)])
def test_a_sequence_whose_weight_is_out_of_bounds_is_masked_as_a_whole(kind, low, high):
    tokens = make_tokens()
    config = settings("decoupled_ppo", sequence_mask=kind, sequence_mask_bounds=(low, high))
    sequence, log_w = tokens.sequence.numpy(), tokens.log_w.numpy()
    combined = {"product": np.prod, "geometric": lambda w: np.prod(w) ** (1 / len(w))}[kind]
    ws = {i: combined(np.exp(log_w[sequence == i])) for i in np.unique(sequence)}
    stored = np.array([low <= ws[i] <= high for i in sequence])
    logp = tokens.logp.clone().requires_grad_()
    current = replace(tokens, logp=logp)
    out = mask_sequences(objective_of("decoupled_ppo")(current, config), current, config)
    out.loss.sum().backward()
    cases = [
        case if keep else Case(0.0, 0.0, True)
        for case, keep in zip(reference_surrogate(tokens, 0.2, 0.2), stored, strict=True)
    ]
    assert_equal((out.loss.detach().numpy(), out.clipped.numpy(), logp.grad.numpy()), cases)
    assert 0.1 < stored.mean() < 0.9


# --- boundaries


@pytest.mark.parametrize("name", OBJECTIVES)
def test_where_all_policies_are_one_every_gradient_is_that_of_reinforce(name):
    tokens = make_tokens()
    tokens = replace(tokens, logp_prox=tokens.logp, logp_behav=tokens.logp)
    _, clipped, gradient = evaluate(name, tokens, settings(name))
    np.testing.assert_allclose(gradient, -tokens.A.numpy(), rtol=1e-12)
    assert not clipped.any()


@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("name", [*SURROGATES, "ppo"])
def test_just_inside_its_clip_a_token_learns_and_just_outside_it_does_not(name, A):
    config = settings(name)
    bound = 1 - config.eps_clip if A < 0 else 1 + (config.eps_clip_higher or config.eps_clip)
    logp = torch.tensor([np.log(bound * (1 - 1e-9)), np.log(bound * (1 + 1e-9))])
    zero = torch.zeros(2, dtype=torch.float64)
    tokens = Tokens(logp, zero, zero, torch.full_like(zero, A), torch.tensor([0, 1]))
    _, clipped, gradient = evaluate(name, tokens, config)
    assert clipped.tolist() == [A < 0, A > 0]
    np.testing.assert_allclose(gradient[~clipped], -bound * A, rtol=1e-8)
    assert gradient[clipped] == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_gradient_reaches_the_proximal_or_the_behaviour_policy(name):
    tokens = make_tokens()
    leaves = {n: getattr(tokens, n).clone().requires_grad_() for n in ("logp", "logp_prox")}
    out = objective_of(name)(replace(tokens, **leaves), settings(name))
    out.loss.sum().backward()
    assert leaves["logp"].grad is not None
    assert leaves["logp_prox"].grad is None


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_log_ratios_of_any_size_give_finite_losses_and_gradients(name, kind):
    far = torch.tensor([-80.0, -20.0, 0.0, 20.0, 80.0])
    theta, prox, behav, A = torch.cartesian_prod(far, far, far, torch.tensor([-3.0, 0.0, 3.0])).T
    of_words = dict(zip(("kept_policy", "kept_logprobs"), (theta[:, None], behav[:, None].clamp(max=0)), strict=True))
    of_words["kept_words"] = torch.zeros(len(A), 1, dtype=torch.int64)
    tokens = Tokens(theta, prox, behav, A, torch.arange(len(A)), columns=of_words)
    loss, _, gradient = evaluate(name, tokens, settings(name, behaviour_weight=kind, eps_clip_dual=3.0))
    assert loss.dtype == np.float32
    assert np.isfinite(loss).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_micro_batch_without_tokens_has_an_empty_loss(name):
    rehearse(settings(name))
    none = make_tokens(S=0)
    loss, clipped, gradient = evaluate(name, none, settings(name))
    assert loss.shape == clipped.shape == gradient.shape == (0,)


# --- the penalty for leaving the reference model, and the proximal policy


def test_kl_estimators_are_right_on_average_and_k3_is_never_negative():
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(9), 2)
    divergence = (p * np.log(p / q)).sum()
    logp, logp_ref = torch.tensor(np.log(p)), torch.tensor(np.log(q))
    for estimator in ("k1", "k3"):
        assert np.isclose((p * kl(logp, logp_ref, estimator).numpy()).sum(), divergence)
    np.testing.assert_allclose(kl(logp, logp_ref, "k2"), np.log(p / q) ** 2 / 2)
    assert (kl(logp, logp_ref, "k3") >= 0).all()


@pytest.mark.parametrize(("estimator", "slope"), [("k1", None), ("k2", "kl"), ("k3", "reverse")])
def test_gradients_of_the_kl_estimators_in_the_loss(estimator, slope):
    """Expected under pi, k1 pulls nowhere, k2 as KL(pi || ref) does, k3 as KL(ref || pi) does."""
    rng = np.random.default_rng(2)
    logits = torch.tensor(rng.normal(0, 1, 9), requires_grad=True)
    logp, logp_ref = torch.log_softmax(logits, 0), torch.log_softmax(torch.tensor(rng.normal(0, 1, 9)), 0)
    pull = (logp.exp().detach() * kl(logp, logp_ref, estimator)).sum()
    (result,) = torch.autograd.grad(pull, logits, retain_graph=True)
    expected = {
        None: torch.zeros(()) * logits.sum(),
        "kl": (logp.exp() * (logp - logp_ref)).sum(),
        "reverse": (logp_ref.exp() * (logp_ref - logp)).sum(),
    }[slope]
    torch.testing.assert_close(result, *torch.autograd.grad(expected, logits))


@pytest.mark.parametrize("objective", ["decoupled_ppo", "ppo", "grpo"])
@pytest.mark.parametrize(("estimator", "slope"), [("k2", "kl"), ("k3", "reverse")])
def test_the_kl_penalty_in_the_loss_pulls_alike_whatever_policy_has_sampled(objective, estimator, slope):
    """Exactly, as a sum over a vocabulary; the wanted gradient in closed form. The first policy is the current one."""
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(0, 1, 6), requires_grad=True)
    ref = torch.log_softmax(torch.tensor(rng.normal(0, 1, 6)), 0)
    p, q = torch.softmax(logits.detach(), 0).numpy(), np.exp(ref.numpy())
    log_ratio = np.log(p / q)
    expected = {"kl": p * (log_ratio - (p * log_ratio).sum()), "reverse": p - q}[slope]
    for drift in (0.0, 0.7, 2.0):
        logp = torch.log_softmax(logits, 0)
        prox, behav = (
            torch.log_softmax(logits.detach() + scale * torch.tensor(rng.normal(0, 1, 6)), 0)
            for scale in (drift / 4, drift)
        )
        tokens = Tokens(logp, prox, behav, torch.zeros(6), torch.arange(6))
        penalty = kl_penalty(tokens, ref, settings(objective, kl_estimator=estimator))
        (result,) = torch.autograd.grad((behav.exp() * penalty).sum(), logits)
        np.testing.assert_allclose(result, expected, atol=1e-9)


def test_the_kl_penalty_keeps_the_bounds_of_the_behaviour_weight():
    logp, behav = torch.log(torch.tensor([0.5, 0.5, 0.5])), torch.log(torch.tensor([0.5, 0.1, 0.9]))
    tokens, ref = Tokens(logp, logp, behav, torch.ones(3), torch.arange(3)), torch.log(torch.tensor([0.25] * 3))
    k2 = np.log(2) ** 2 / 2
    for kind, weights in {
        "full": [1, 5, 5 / 9],
        "truncated": [1, 2, 5 / 9],
        "masked": [1, 0, 0],
        "none": [1] * 3,
    }.items():
        config = TrainerConfig(behaviour_weight=kind, behaviour_weight_bounds=(0.8, 2.0), kl_estimator="k2")
        np.testing.assert_allclose(kl_penalty(tokens, ref, config), k2 * np.array(weights), rtol=1e-6)


def test_k1_in_the_loss_is_refused(load):
    with pytest.raises(UserError, match="kl_estimator is k1, whose gradient in the loss is 0 on average: set"):
        load("trainer.kl_coef=0.1", "trainer.kl_estimator=k1")
    assert load("trainer.kl_coef=0.1", "trainer.objective=rloo").trainer.kl_estimator == "k1"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_far_away_tokens_is_finite(estimator):
    logp = torch.tensor([-90.0, -1.0], requires_grad=True)
    cost = kl(logp, torch.tensor([-1.0, -90.0]), estimator)
    cost.sum().backward()
    assert cost.isfinite().all()
    assert logp.grad.isfinite().all()


def test_the_interpolated_proximal_policy_moves_from_the_current_to_the_behaviour_policy_as_a_token_gets_fresher():
    logp, behav = torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -3.0)
    prox = interpolated_proximal(logp, behav, torch.tensor([0, 1, 2, 4]))
    torch.testing.assert_close(prox, torch.tensor([-1.0, -3.0, -2.0, -1.5]))
    assert not prox.requires_grad


# --- the user's own


def likelihood(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    return TokenLoss(loss=-tokens.A * tokens.logp, clipped=torch.zeros_like(tokens.A, dtype=torch.bool))


def needs_a_setting(tokens, config):
    return TokenLoss(loss=tokens.logp * (1 + config.eps_clip_higher), clipped=tokens.A > 0)


def returns_a_tensor(tokens, config):
    return tokens.logp


def returns_a_mean(tokens, config):
    return TokenLoss(loss=tokens.logp.mean(), clipped=tokens.A > 0)


def returns_numbers(tokens, config):
    return TokenLoss(loss=tokens.logp, clipped=tokens.A.abs())


def returns_a_list(tokens, config):
    return TokenLoss(loss=tokens.logp, clipped=[False] * len(tokens.A))


def detaches(tokens, config):
    return TokenLoss(loss=tokens.logp.detach(), clipped=tokens.A > 0)


def raises(tokens, config):
    raise KeyError("beta")


def needs_tokens(tokens, config):
    return TokenLoss(loss=tokens.logp - tokens.logp.detach().max(), clipped=tokens.A > 0)


def divides_by_the_gap(tokens, config):
    return TokenLoss(loss=-tokens.A * (tokens.log_u.exp() - 1) / tokens.log_u, clipped=tokens.A > 2)


not_a_function = 3


def own(name):
    return f"{__name__}:{name}"


def test_ones_own_objective_plugs_in_by_its_name():
    assert objective_of(own("likelihood")) is likelihood
    rehearse(settings(own("likelihood")))
    rehearse(settings(own("needs_a_setting"), eps_clip_higher=0.3))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("not_a_function", "is of type int: name a function"),
        ("likelyhood", "did you mean likelihood"),
        ("returns_a_tensor", "returned a value of type Tensor: return an areal.training.TokenLoss"),
        ("returns_a_mean", "returned a loss of shape []: return one value for each token, [3]"),
        ("returns_numbers", "returned a clipped of torch.float32: return a bool tensor"),
        ("returns_a_list", "returned a clipped of type list"),
        ("detaches", "returned a loss without gradient"),
        ("raises", "called on 3 tokens, raised KeyError: 'beta'"),
        ("needs_tokens", "called on 0 tokens, raised"),
        (
            "divides_by_the_gap",
            "on 3 tokens that all policies find equally likely, has a loss that is not finite, [nan",
        ),
    ],
)
def test_a_mistake_in_ones_own_objective_is_told_in_a_sentence_that_names_it(name, sentence):
    with pytest.raises(UserError) as raised:
        rehearse(settings(own(name)))
    assert sentence in str(raised.value)
    assert own(name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_example_of_an_own_loss_is_an_objective():
    file = Path(__file__).parents[3] / "configs" / "examples" / "own_loss" / "loss.py"
    rehearse(settings(f"{file}:tapered"))


def test_the_documentation_has_every_objective():
    page = Path(__file__).parents[3] / "docs" / "objectives.md"
    rows = re.findall(r"^\| `(\w+)`", page.read_text().split("## ")[0], re.MULTILINE)
    assert rows == list(OBJECTIVES)


# --- settings


CONFIG = """
model: m
steps: 1
batch_size: 4
group_size: 2
data: {source: addition}
sampling: {max_new_tokens: 64}
reward: {functions: [addition]}
"""


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    teacher = ["scorers.wise.model=m", "trainer.teacher=wise"]
    return lambda *overrides: load_config(
        file, [*(teacher if "trainer.objective=distill" in overrides else ()), *overrides]
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resolved_configuration_reads_back_as_itself(load, tmp_path, name):
    config = load(f"trainer.objective={name}", "trainer.eps_clip_higher=null")
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_brings_its_settings_and_the_users_own_win(load, name):
    config = load(f"trainer.objective={name}").trainer
    for key, value in OBJECTIVES[name].settings.items():
        assert getattr(config, key) == value
    config = load(f"trainer.objective={name}", "trainer.advantage_std=batch", "trainer.loss_mean=token").trainer
    assert (config.advantage_std, config.loss_mean) == ("batch", "token")


def test_the_default_is_decoupled_ppo_with_its_weight():
    config = TrainerConfig()
    assert (config.objective, config.behaviour_weight) == ("decoupled_ppo", "full")


def test_only_objectives_around_the_behaviour_policy_are_without_a_weight_unless_asked():
    assert [name for name in OBJECTIVES if settings(name).behaviour_weight == "none"] == [
        "ppo",
        "score_centring",
        "sao",
    ]


def test_dapo_filters_groups_without_signal_unless_told_otherwise(load):
    assert not load().filter_zero_signal
    assert load("trainer.objective=dapo").filter_zero_signal
    assert not load("trainer.objective=dapo", "filter_zero_signal=false").filter_zero_signal


BLIND = {"behaviour_weight": "none", "proximal": "recompute"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_that_depends_on_the_behaviour_policy_needs_the_words_that_sampling_kept(load, name):
    tokens = make_tokens()
    remainder = replace(tokens, logp_behav=tokens.logp_behav - 1)
    if name == "m2po":
        tokens, remainder = masked(tokens), masked(remainder)
    blind = settings(name, **BLIND)
    same = (evaluate(name, tokens, blind)[2] == evaluate(name, remainder, blind)[2]).all()
    assert blind.uses_behaviour is not same
    if name == "distill":
        with pytest.raises(
            UserError, match=r"trainer.teacher gives log-probs among all words, but with sampling.top_p"
        ):
            load("sampling.top_p=0.9", "trainer.objective=distill")
        return
    if name == "score_centring":
        assert load(f"trainer.objective={name}").keeps_words
        return
    for key, value in (("top_p", 0.9), ("min_new_tokens", 4)):
        default = [f"sampling.{key}={value}", f"trainer.objective={name}"]
        without = [*default, *(f"trainer.{key}={value}" for key, value in BLIND.items())]
        assert load(*default).keeps_words and not load(f"trainer.objective={name}").keeps_words
        assert load(*without).keeps_words is not same
        assert load(*without, "trainer.kl_coef=0.1", "trainer.kl_in=reward").keeps_words


def test_evaluation_may_truncate(load):
    assert load("evaluator.top_p=0.9").evaluator.top_p == 0.9


def test_the_constant_of_the_loss_mean_is_the_longest_completion(load):
    assert load("trainer.objective=dr_grpo").trainer.loss_tokens == 64
    assert load("trainer.objective=dr_grpo", "trainer.loss_tokens=10").trainer.loss_tokens == 10


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.objective=gropo", "Unknown objective 'gropo'"),
        ("trainer.objective=[grpo]", "Unknown objective '[grpo]'"),
        ("trainer.behaviour_weight_bounds=[2, 0.5]", "write the lower bound, 0 or more, first"),
        ("trainer.sequence_mask_bounds=[2, 0.5]", "trainer.sequence_mask_bounds is [2, 0.5]"),
        ("trainer.behaviour_weight=some", "trainer.behaviour_weight is 'some'"),
        ("trainer={objective: m2po, proximal: interpolate}", "set trainer.proximal=recompute"),
        ("trainer.eps_clip_dual=0.9", "trainer.eps_clip_dual is 0.9"),
        ("reward.overlong_tokens=65", "lower reward.overlong_tokens"),
    ],
)
def test_a_wrong_setting_is_told_in_a_sentence_that_names_it(load, override, sentence):
    with pytest.raises(UserError) as raised:
        load(override)
    assert sentence in str(raised.value)
