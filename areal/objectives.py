"""The policy objectives, per token. Symbols are the paper's (arXiv 2505.24298, section 5.2).

All arguments are log-probabilities of the sampled tokens and their advantages, [S] each. The proximal and the
behaviour policy are constants: only `logp` carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """loss: [S], -J of each token, to be minimised.
    clipped: bool [S], where the clip holds the token back (its gradient is 0).
    weight: [S], the importance weight w that multiplies the token, without gradient; 1 in plain PPO.
    """

    loss: Tensor
    clipped: Tensor
    weight: Tensor


def clipped_surrogate(u: Tensor, A: Tensor, eps_clip: float, eps_clip_higher: float | None) -> tuple[Tensor, Tensor]:
    """min(u A, clip(u, 1 - eps, 1 + eps_higher) A), and where the clipped term is the smaller one. [S] each."""
    free = u * A
    held = u.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)) * A
    return torch.minimum(free, held), held < free


def decoupled_ppo(
    logp: Tensor, logp_prox: Tensor, logp_behav: Tensor, A: Tensor, *, eps_clip: float, eps_clip_higher: float | None
) -> TokenLoss:
    """Decoupled PPO, eq. 5: J = w min(u A, clip(u) A) with u = pi_theta / pi_prox and w = pi_prox / pi_behav.

    The trust region lies around the recent proximal policy; w corrects for tokens sampled by older ones.
    `eps_clip_higher` None means the same as `eps_clip`.
    """
    u = torch.exp(logp - logp_prox.detach())
    w = torch.exp(logp_prox - logp_behav).detach()
    surrogate, clipped = clipped_surrogate(u, A, eps_clip, eps_clip_higher)
    return TokenLoss(loss=-w * surrogate, clipped=clipped, weight=w)


def ppo(
    logp: Tensor, logp_prox: Tensor, logp_behav: Tensor, A: Tensor, *, eps_clip: float, eps_clip_higher: float | None
) -> TokenLoss:
    """Plain PPO: J = min(u A, clip(u) A) with u = pi_theta / pi_behav. Takes `logp_prox` only to be exchangeable.

    The trust region lies around the policy that sampled the token, however old: it collapses under staleness.
    """
    u = torch.exp(logp - logp_behav)
    surrogate, clipped = clipped_surrogate(u, A, eps_clip, eps_clip_higher)
    return TokenLoss(loss=-surrogate, clipped=clipped, weight=torch.ones_like(A))


OBJECTIVES: dict[str, Callable[..., TokenLoss]] = {"decoupled_ppo": decoupled_ppo, "ppo": ppo}
"""By their name in the configuration (`trainer.objective`)."""
