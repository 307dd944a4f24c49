"""Ratios of whole sequences: GSPO, with the settings of luspo LUSPO, and GMPO."""

import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.decoupled_ppo import clipped_surrogate
from areal.training.algorithms.token_loss import TokenLoss, Tokens, behaviour_weight, clip_bounds, ratio, sequence_mean


def gspo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """GSPO (arXiv 2507.18071): J = w min(s A, clip(s) A) with s the geometric mean of u over the token's sequence.

    GSPO's token form uses sg(s) u / sg(u) for s, where sg stops the gradient. With `loss_mean` sequence and an
    advantage per sequence, value and gradient equal the sequence form's. w is a geometric mean as well.
    """
    log_s = sequence_mean(tokens.log_u, tokens.sequence).detach() + tokens.logp - tokens.logp.detach()
    return clipped_surrogate(ratio(log_s), behaviour_weight(tokens, config), tokens.A, config)


def gmpo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """GMPO (arXiv 2507.20673, eq. 4): J = w A g, with g the geometric mean over the sequence of u. First, u is held at
    exp(eps_clip_higher) if A > 0 and at exp(-eps_clip) if A < 0.

    The token form is `gspo`'s: with `loss_mean` sequence and an advantage per sequence, both forms are equal.
    """
    low, high = clip_bounds(config)
    held = torch.where(tokens.A > 0, tokens.log_u.clamp(max=high), tokens.log_u.clamp(min=-low))
    log_g = sequence_mean(held, tokens.sequence).detach() + held - held.detach()
    w = behaviour_weight(tokens, config)
    return TokenLoss(loss=-w * ratio(log_g) * tokens.A, clipped=(held != tokens.log_u) | (w == 0))
