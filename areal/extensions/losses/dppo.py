"""DPPO: a trust region of probabilities in place of ratios."""

import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import TokenLoss, Tokens, binary_kl, clip_bounds, masked_surrogate


def dppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """DPPO, binary TV (arXiv 2602.04879): J = w M u A. M masks a token if its probability is further than the clip from
    its probability under pi_behav, on the side to which A pushes."""
    low, high = clip_bounds(config)
    moved = tokens.logp.detach().exp() - tokens.logp_behav.exp()
    return masked_surrogate(tokens, torch.where(tokens.A > 0, moved > high, (tokens.A < 0) & (moved < -low)), config)


def dppo_kl(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """DPPO, binary KL (arXiv 2602.04879): as `dppo`, by KL(pi_behav || pi_theta) of the token against the rest."""
    low, high = clip_bounds(config)
    divergence = binary_kl(tokens.logp_behav, tokens.logp.detach())
    rises = tokens.logp.detach() > tokens.logp_behav
    good, bad = (tokens.A > 0) & rises, (tokens.A < 0) & ~rises
    return masked_surrogate(tokens, good & (divergence > high) | bad & (divergence > low), config)
