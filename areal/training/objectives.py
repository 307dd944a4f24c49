"""The policy objectives, per token. Symbols are the paper's (arXiv 2505.24298, section 5.2).

An objective is a function `(Tokens, TrainerConfig) -> TokenLoss`. The named objectives are in `LOSSES`. A user's own
objective is given in `trainer.objective` as `package.module:function`. The other settings of a named objective are
in `OBJECTIVE_SETTINGS` of the configuration. Averaging over tokens (`trainer.loss_mean`) and the KL penalty against
the reference model are not part of an objective. docs/objectives.md lists all of this in one table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.trainer_section import OBJECTIVE_SETTINGS, TrainerConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this (a factor of 5e8) before exp, as in verl, so that products of ratios stay finite."""


LEAST_REST = 1e-6
"""The least probability of all tokens but the teacher's likeliest ones: fp32 cannot tell smaller ones from 0."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The S sampled tokens of a micro-batch that are in the loss.

    logp, logp_prox, logp_behav: [S], log-probabilities (nats) of the tokens under the current, the proximal and the
    behaviour policy; only `logp` carries a gradient. A: [S], advantages.
    sequence: int64 [S], the index of the micro-batch's sequence that a token belongs to, ascending from 0. A sequence
    is never split over micro-batches.
    mask: bool [S], true for the tokens that the mask over the whole minibatch (`m2po`) keeps; None: all.
    entropy: [S], nats, of the current policy's distribution that a token was drawn from, with its gradient, which is
    computed only if the loss depends on it. `trainer.entropy_coef` is a bonus for it with any objective.
    """

    logp: Tensor
    logp_prox: Tensor
    logp_behav: Tensor
    A: Tensor
    sequence: Tensor
    mask: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def log_u(self) -> Tensor:
        """log pi_theta / pi_prox, [S]."""
        return self.logp - self.logp_prox.detach()

    @property
    def log_w(self) -> Tensor:
        """log pi_prox / pi_behav, [S], without gradient."""
        return (self.logp_prox - self.logp_behav).detach()


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """loss: [S], -J of each token, to be minimised.
    clipped: bool [S], true if the ratio is clipped or the token masked. Such a token has no gradient, except in
    `cispo` and, under a mask of its sequence's weight, `vespo`.
    """

    loss: Tensor
    clipped: Tensor


Objective = Callable[[Tokens, TrainerConfig], TokenLoss]


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), [S], with `log_ratio` clamped to +-`LOG_RATIO_BOUND`; no gradient beyond that."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def behaviour_weight(tokens: Tokens, config: TrainerConfig) -> Tensor:
    """w = pi_prox / pi_behav, [S] without gradient: corrects for tokens that an older policy sampled.

    `behaviour_weight_level` says whether it is that of each token, or the product over its sequence (Liu et al. 2025,
    "When Speed Kills Stability"), or the geometric mean over it.
    "truncated": min(w, upper bound), TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training"). "masked": 0 outside the bounds, IcePop (arXiv 2510.18855). "masked_kl": 0 where `binary_kl` in either
    direction is above the upper bound, KPop (Guo et al. 2026, "Taming Training-Inference Mismatch ...").
    """
    log_w = tokens.log_w
    if config.behaviour_weight_level != "token":
        combined = sequence_sum if config.behaviour_weight_level == "sequence" else sequence_mean
        log_w = combined(log_w, tokens.sequence)
    w = ratio(log_w)
    low, high = config.behaviour_weight_bounds
    match config.behaviour_weight:
        case "full":
            return w
        case "truncated":
            return w.clamp(max=high)
        case "masked":
            return torch.where((low <= w) & (w <= high), w, 0.0)
        case "masked_kl":
            logps = tokens.logp_prox.detach(), tokens.logp_behav
            far = torch.maximum(binary_kl(*logps), binary_kl(*reversed(logps)))
            return torch.where(far <= high, w, 0.0)
        case "none":
            return torch.ones_like(w)


def binary_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(P || Q), nats [S], of distributions that have the token with probability p and q, and anything else."""
    rest_p, rest_q = (torch.log(-torch.expm1(x.clamp(max=-1e-7))) for x in (logp, logq))
    return logp.exp() * (logp - logq) - torch.expm1(logp) * (rest_p - rest_q)


def clip_bounds(config: TrainerConfig) -> tuple[float, float]:
    """eps_clip and eps_clip_higher."""
    return config.eps_clip, config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher


def clip(u: Tensor, config: TrainerConfig) -> Tensor:
    """u clamped to 1 - eps_clip and 1 + eps_clip_higher, [S]."""
    low, high = clip_bounds(config)
    return u.clamp(1 - low, 1 + high)


def clipped_surrogate(u: Tensor, w: Tensor, A: Tensor, config: TrainerConfig) -> TokenLoss:
    """J = w min(u A, clip(u) A), [S].

    With `eps_clip_dual` = c, A < 0: max(min(u A, clip(u) A), c A) (arXiv 1912.09729, eq. 5).
    """
    free = u * A
    held = torch.minimum(free, clip(u, config) * A)
    if (c := config.eps_clip_dual) is not None:
        held = torch.where((A < 0) & (u > c), c * A, held)
    return TokenLoss(loss=-w * held, clipped=(held != free) | (w == 0))


def decoupled_ppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Decoupled PPO, eq. 5: J = w min(u A, clip(u) A) with u = pi_theta / pi_prox and w = pi_prox / pi_behav.

    The trust region lies around the recent proximal policy; w corrects for tokens sampled by older policies.
    """
    return clipped_surrogate(ratio(tokens.log_u), behaviour_weight(tokens, config), tokens.A, config)


def ppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Plain PPO (arXiv 1707.06347, eq. 7): J = min(u A, clip(u) A) with u = pi_theta / pi_behav.

    The trust region lies around the policy that sampled the token, however old. PPO collapses under staleness.
    """
    return decoupled_ppo(replace(tokens, logp_prox=tokens.logp_behav), config)


def gspo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """GSPO (arXiv 2507.18071): J = w min(s A, clip(s) A) with s the geometric mean of u over the token's sequence.

    This is GSPO's token form: it uses sg(s) u / sg(u) for s, where sg stops the gradient. With `loss_mean` sequence and
    one advantage per sequence, value and gradient equal those of the sequence form. w is a geometric mean as well.
    """
    log_s = sequence_mean(tokens.log_u, tokens.sequence).detach() + tokens.logp - tokens.logp.detach()
    return clipped_surrogate(ratio(log_s), behaviour_weight(tokens, config), tokens.A, config)


def gmpo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """GMPO (arXiv 2507.20673, eq. 4): J = w A g, with g the geometric mean over the sequence of u, which is first held
    at exp(eps_clip_higher) where A > 0 and at exp(-eps_clip) where A < 0.

    In `gspo`'s token form: with `loss_mean` sequence and one advantage each, it equals the sequence form.
    """
    low, high = clip_bounds(config)
    held = torch.where(tokens.A > 0, tokens.log_u.clamp(max=high), tokens.log_u.clamp(min=-low))
    log_g = sequence_mean(held, tokens.sequence).detach() + held - held.detach()
    w = behaviour_weight(tokens, config)
    return TokenLoss(loss=-w * ratio(log_g) * tokens.A, clipped=(held != tokens.log_u) | (w == 0))


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """The sum of `values` over all tokens of the same sequence, at each of them, [S]. sequence: as in `Tokens`."""
    _, member = sequence.unique_consecutive(return_inverse=True)
    return torch.zeros_like(values).index_add(0, member, values)[member]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """The mean of `values` over all tokens of the same sequence, at each of them, [S]. sequence: as in `Tokens`."""
    return sequence_sum(values, sequence) / sequence_sum(torch.ones_like(values), sequence)


def mask_sequences(out: TokenLoss, tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """`out` without the sequences whose w is outside `sequence_mask_bounds`: the product over the tokens of a sequence,
    as verl's rejection of sequences has it, or the geometric mean."""
    if config.sequence_mask == "none":
        return out
    combined = sequence_sum if config.sequence_mask == "product" else sequence_mean
    log_w = combined(tokens.log_w, tokens.sequence)
    low, high = config.sequence_mask_bounds
    mask = (log_w.exp() >= low) & (log_w.exp() <= high)
    return TokenLoss(loss=torch.where(mask, out.loss, 0.0), clipped=out.clipped | ~mask)


def cispo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """CISPO (arXiv 2506.13585, eq. 4 and 5): J = sg(clip(u w)) A log pi_theta, where u w = pi_theta / pi_behav.

    Only the weight of a token is clipped, so every token keeps its gradient. In the paper the policy that sampled is
    the old policy; here it may be several versions older than pi_prox, so the clip is on the whole ratio.
    """
    w = behaviour_weight(tokens, config)
    r = ratio(tokens.log_u).detach() * w
    clipped = torch.where(w > 0, clip(r, config), 0.0)
    return TokenLoss(loss=-clipped * tokens.A * tokens.logp, clipped=(clipped != r) | (w == 0))


def sapo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """SAPO (arXiv 2511.20347, eq. 5 and 6): J = w (4 / tau) sigmoid(tau (u - 1)) A, a soft gate in place of the clip.

    tau is the first of `sapo_temperatures` where A > 0, else the second.
    """
    tau = torch.where(tokens.A > 0, *tokens.logp.new_tensor(config.sapo_temperatures))
    w = behaviour_weight(tokens, config)
    return TokenLoss(loss=-w * 4 / tau * torch.sigmoid(tau * (ratio(tokens.log_u) - 1)) * tokens.A, clipped=w == 0)


def _masked(tokens: Tokens, beyond: Tensor, config: TrainerConfig) -> TokenLoss:
    """J = w M u A without a clip. M is 0 for the tokens `beyond`, bool [S]."""
    w = behaviour_weight(tokens, config)
    J = torch.where(beyond, 0.0, w * ratio(tokens.log_u) * tokens.A)
    return TokenLoss(loss=-J, clipped=beyond | (w == 0))


def dppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """DPPO, binary TV (arXiv 2602.04879): J = w M u A. M masks a token whose probability is further than the clip from
    that under pi_behav, on the side where A pushes it."""
    low, high = clip_bounds(config)
    moved = tokens.logp.detach().exp() - tokens.logp_behav.exp()
    return _masked(tokens, torch.where(tokens.A > 0, moved > high, (tokens.A < 0) & (moved < -low)), config)


def dppo_kl(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """DPPO, binary KL (arXiv 2602.04879): as `dppo`, by KL(pi_behav || pi_theta) of the token against all others."""
    low, high = clip_bounds(config)
    divergence = binary_kl(tokens.logp_behav, tokens.logp.detach())
    rises = tokens.logp.detach() > tokens.logp_behav
    good, bad = (tokens.A > 0) & rises, (tokens.A < 0) & ~rises
    return _masked(tokens, good & (divergence > high) | bad & (divergence > low), config)


def vespo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """VESPO (arXiv 2602.10693): J = sg(W^k exp(lambda (1 - W))) A log pi_theta, where W is the product of u w over the
    sequence. k and lambda are `vespo_positive` where A >= 0, else `vespo_negative`."""
    w = behaviour_weight(tokens, config)
    log_W = sequence_sum(tokens.log_u.detach() + w.log(), tokens.sequence).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    by_sign = log_W.new_tensor([config.vespo_positive, config.vespo_negative])
    k, rate = torch.where(tokens.A >= 0, by_sign[0, :, None], by_sign[1, :, None])
    kernel = torch.exp(k * log_W + rate * (1 - log_W.exp()))
    return TokenLoss(loss=-kernel * tokens.A * tokens.logp, clipped=w == 0)


def m2po(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """M2PO (arXiv 2510.01161): J = w M u A without a clip; M masks the tokens where pi_prox is farthest from pi_behav.

    M is `Tokens.mask`. It is chosen over the whole minibatch, before the minibatch, by `within_second_moment`.
    """
    return _masked(tokens, torch.zeros_like(tokens.A).bool() if tokens.mask is None else ~tokens.mask, config)


def within_second_moment(log_ratio: np.ndarray, threshold: float) -> np.ndarray:
    """bool [n], the tokens kept: those with the largest (log r)^2 are masked until its mean is below `threshold`."""
    moments = log_ratio.astype(np.float64) ** 2
    order = moments.argsort(kind="stable")
    mask = np.empty(len(moments), dtype=bool)
    mask[order] = moments[order].cumsum() / np.arange(1, len(moments) + 1) < threshold  # the means ascend
    return mask


LOSSES: dict[str, Objective] = dict.fromkeys(OBJECTIVE_SETTINGS, decoupled_ppo)
LOSSES |= {"ppo": ppo, "gspo": gspo, "luspo": gspo, "gmpo": gmpo, "cispo": cispo, "m2po": m2po}
LOSSES |= {"sapo": sapo, "dppo": dppo, "dppo_kl": dppo_kl, "vespo": vespo}
"""The objectives by their name in the configuration. Those with the same function differ in their settings."""


def resolve_objective(name: str) -> Objective:
    """The objective named `name` in `trainer.objective`.

    Raises UserError if the user's own objective does not load or is not a function.
    """
    if name in LOSSES:
        return LOSSES[name]
    function = extensions.find("objective", name, "The objective")
    if not callable(function):
        raise UserError(f"The objective {name!r} is of type {type(function).__name__}: name a function.")
    return function


def rehearse(config: TrainerConfig) -> Objective:
    """The objective of `config`, after test calls on three tokens, of equal and other policies, and on none.

    A rank without work has empty micro-batches. Raises UserError if the objective does not load, raises, or does not
    return a `TokenLoss` as that class describes it, or one with values or gradients that are not finite.
    """
    objective = resolve_objective(config.objective)
    for size, gap in ((3, 0.1), (3, 0.0), (0, 0.0)):
        logp = torch.linspace(-1.0, -2.0, size, requires_grad=True)
        sequence = torch.arange(size) // 2
        tokens = Tokens(
            logp, logp.detach() - gap, logp.detach() + gap, torch.linspace(-1.0, 1.0, size), sequence, entropy=-logp
        )
        same = " that all policies find equally likely" if size and not gap else ""
        called = f"The objective {config.objective!r}, called on {size} tokens{same},"
        # The user's own code may raise anything.
        with explain(
            Exception,
            f"{called} raised {{why}}. It takes (areal.training.objectives.Tokens, TrainerConfig).",
        ):
            out = objective(tokens, config)
        if flaw := _flaw(out, size) or _flaw_of_values(out.loss, logp):
            raise UserError(f"{called} {flaw}.")
    return objective


def _flaw(out: object, size: int) -> str | None:
    if not isinstance(out, TokenLoss):
        return f"returned a value of type {type(out).__name__}: return an areal.training.objectives.TokenLoss"
    for name, value, kind in (("loss", out.loss, "floating-point"), ("clipped", out.clipped, "bool")):
        if not isinstance(value, Tensor):
            return f"returned a {name} of type {type(value).__name__}: return a {kind} tensor [{size}]"
        if value.shape != (size,):
            return f"returned a {name} of shape {list(value.shape)}: return one value for each token, [{size}]"
    if out.clipped.dtype != torch.bool:
        return f"returned a clipped of {out.clipped.dtype}: return a bool tensor"
    if not out.loss.requires_grad:
        return "returned a loss without gradient: it must depend on tokens.logp, not detached"
    return None


def _flaw_of_values(loss: Tensor, logp: Tensor) -> str | None:
    try:
        (gradient,) = torch.autograd.grad(loss.sum(), logp, allow_unused=True)
    except RuntimeError as error:
        return f"returned a loss without a gradient for tokens.logp ({' '.join(str(error).split())})"
    for name, values in (("loss", loss), ("gradient", gradient)):
        if values is not None and not values.isfinite().all():
            shown = ", ".join(f"{value:g}" for value in values.tolist())
            return f"has a {name} that is not finite, [{shown}]: look for a division by 0 or a logarithm of 0 in it"
    return None


def interpolated_proximal(logp: Tensor, logp_behav: Tensor, staleness: Tensor) -> Tensor:
    """log pi_prox, between behaviour and current policy, [S] without gradient (A-3PO, arXiv 2512.06547, eq. 3).

    alpha log pi_behav + (1 - alpha) log pi_theta, alpha = 1 / staleness; a token of the current version has alpha 0.
    staleness: [S], versions between a token's sampling and this step.
    """
    alpha = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0)
    return (alpha * logp_behav + (1 - alpha) * logp).detach()


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """The critic's loss, [S]: half the squared error of `values`, or of those held within `old` +- clip if that is
    larger, as in OpenAI's baselines (ppo2). old: the values before the step. clip: None: not held."""
    losses = (values - targets).square() / 2
    if clip is None:
        return losses
    held = old + (values - old).clamp(-clip, clip)
    return torch.maximum(losses, (held - targets).square() / 2)


def kl_of_top(teacher: Tensor, logp: Tensor) -> Tensor:
    """KL(teacher || pi) over the teacher's k likeliest tokens and all others as one, nats [S]. teacher, logp: their
    log-probs, [S, k]. Tokens of probability 0 for the teacher count as others. It is at most the divergence over all
    tokens, and 0 if the k probabilities agree."""
    p = teacher.exp()
    rest = (1 - p.sum(-1)).clamp(min=0)
    log_rest = torch.log1p(-(logp.exp() * (p > 0)).sum(-1).clamp(max=1 - LEAST_REST))
    return (p * (teacher - logp)).sum(-1) + torch.xlogy(rest, rest) - rest * log_rest


def kl_penalty(tokens: Tokens, logp_ref: Tensor, config: TrainerConfig) -> Tensor:
    """`kl` of each token, [S], times what the surrogate weighs its gradient with where nothing is clipped: sg(u w), so
    that tokens of an older policy pull as those of the current one would."""
    if config.objective == "ppo":
        tokens = replace(tokens, logp_prox=tokens.logp_behav)
    weight = ratio(tokens.log_u.detach()) * behaviour_weight(tokens, config)
    return weight * kl(tokens.logp, logp_ref, config.kl_estimator)


def kl(logp: Tensor, logp_ref: Tensor, estimator: str) -> Tensor:
    """Estimators of KL(pi || pi_ref) from tokens that pi sampled, nats [S] (Schulman, "Approximating KL divergence").

    k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r with r = pi_ref / pi.
    """
    log_r = logp_ref - logp
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return log_r.square() / 2
        case _:  # k3
            log_r = log_r.clamp(max=LOG_RATIO_BOUND)
            return torch.expm1(log_r) - log_r
