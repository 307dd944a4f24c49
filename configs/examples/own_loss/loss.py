"""A policy loss of one's own: tapered off-policy REINFORCE (TOPR, arXiv 2503.14286), token by token."""

import torch

from areal.training import TokenLoss, Tokens, TrainerConfig, ratio


def tapered(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """J = A log pi_theta for tokens with A > 0, else min(pi_theta / pi_behav, 1) A log pi_theta: a token that the
    policy has already made rare is not pushed further down."""
    old = ratio(tokens.logp.detach() - tokens.logp_behav)
    weight = torch.where(tokens.A > 0, torch.ones_like(old), old.clamp(max=1))
    loss = -weight * tokens.A * tokens.logp
    return TokenLoss(loss=loss, clipped=torch.zeros_like(loss, dtype=torch.bool))
