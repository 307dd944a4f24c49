"""The policy objectives, per token. Symbols are the paper's (arXiv 2505.24298, section 5.2).

An objective is a function `(Tokens, TrainerConfig) -> TokenLoss`. The named ones are in `LOSSES`; a user's own is named
in `trainer.objective` as `package.module:function`. What else belongs to a named objective, such as how advantages are
normalised, stands in `areal.config.OBJECTIVE_SETTINGS`. How tokens are averaged (`trainer.loss_mean`), and the penalty
for leaving the reference model, are no business of an objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.config import TrainerConfig
from areal.plugins import load


@dataclass(frozen=True, slots=True)
class Tokens:
    """The S sampled tokens of a micro-batch that are in the loss.

    logp, logp_prox, logp_behav: [S], log-probabilities (nats) of the tokens under the current, the proximal and the
    behaviour policy; only `logp` carries a gradient. A: [S], advantages.
    sequence: int64 [S], which of the micro-batch's sequences a token belongs to, rising from 0. None is ever cut.
    """

    logp: Tensor
    logp_prox: Tensor
    logp_behav: Tensor
    A: Tensor
    sequence: Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """loss: [S], -J of each token, to be minimised.
    clipped: bool [S], where a clip or mask holds the token back (its gradient is 0).
    """

    loss: Tensor
    clipped: Tensor


Objective = Callable[[Tokens, TrainerConfig], TokenLoss]


def behaviour_weight(tokens: Tokens, config: TrainerConfig) -> Tensor:
    """w = pi_prox / pi_behav, [S] without gradient: corrects for tokens that an older policy sampled."""
    w = torch.exp(tokens.logp_prox - tokens.logp_behav).detach()
    low, high = config.behaviour_weight_bounds
    match config.behaviour_weight:
        case "full":
            return w
        case "truncated":
            return w.clamp(max=high)
        case "masked":
            return torch.where((low <= w) & (w <= high), w, 0.0)
        case "none":
            return torch.ones_like(w)


def clipped_surrogate(u: Tensor, A: Tensor, config: TrainerConfig) -> tuple[Tensor, Tensor]:
    """min(u A, clip(u, 1 - eps, 1 + eps_higher) A), and where the clipped term is the smaller one. [S] each."""
    free = u * A
    higher = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    held = u.clamp(1 - config.eps_clip, 1 + higher) * A
    return torch.minimum(free, held), held < free


def decoupled_ppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Decoupled PPO, eq. 5: J = w min(u A, clip(u) A) with u = pi_theta / pi_prox and w = pi_prox / pi_behav.

    The trust region lies around the recent proximal policy; w corrects for tokens sampled by older ones.
    """
    u = torch.exp(tokens.logp - tokens.logp_prox.detach())
    w = behaviour_weight(tokens, config)
    surrogate, clipped = clipped_surrogate(u, tokens.A, config)
    return TokenLoss(loss=-w * surrogate, clipped=clipped)


def ppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Plain PPO: J = min(u A, clip(u) A) with u = pi_theta / pi_behav.

    The trust region lies around the policy that sampled the token, however old: it collapses under staleness.
    """
    u = torch.exp(tokens.logp - tokens.logp_behav)
    surrogate, clipped = clipped_surrogate(u, tokens.A, config)
    return TokenLoss(loss=-surrogate, clipped=clipped)


LOSSES: dict[str, Objective] = {"decoupled_ppo": decoupled_ppo, "ppo": ppo}
"""By their name in the configuration; the keys of `areal.config.OBJECTIVE_SETTINGS`."""


def resolve_objective(name: str) -> Objective:
    """The objective of `trainer.objective`. Raises UserError where the user's own does not load."""
    return LOSSES[name] if name in LOSSES else load(name, "The objective")


def interpolated_proximal(logp: Tensor, logp_behav: Tensor, staleness: Tensor) -> Tensor:
    """log pi_prox between behaviour and current policy, [S] without gradient (A-3PO, arXiv 2512.06547, eq. 3).

    alpha log pi_behav + (1 - alpha) log pi_theta, alpha = 1 / staleness; a token of the current version has alpha 0.
    staleness: [S], versions between a token's sampling and this step.
    """
    alpha = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0)
    return (alpha * logp_behav + (1 - alpha) * logp).detach()


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
        case "k3":
            return torch.expm1(log_r) - log_r
        case _:
            raise ValueError(f"unknown estimator {estimator!r}")
