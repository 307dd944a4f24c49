"""SAO: a region of trust around the sampling policy, with two sides for every token."""

from dataclasses import replace

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import TokenLoss, Tokens, clip_bounds, masked_surrogate, ratio


def sao(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """SAO's direct double-sided importance sampling (arXiv 2607.07508): J = r A with r = pi_theta / pi_behav, and 0
    where r is outside the clip, whichever way A pushes."""
    tokens = replace(tokens, logp_prox=tokens.logp_behav)
    r, (low, high) = ratio(tokens.log_u.detach()), clip_bounds(config)
    return masked_surrogate(tokens, (r < 1 - low) | (r > 1 + high), config)
