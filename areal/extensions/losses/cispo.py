"""CISPO: the weight of a token is clipped, and its gradient kept."""

import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import TokenLoss, Tokens, behaviour_weight, clip, ratio


def cispo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """CISPO (arXiv 2506.13585, eq. 4 and 5): J = sg(clip(u w)) A log pi_theta, where u w = pi_theta / pi_behav.

    Only the weight of a token is clipped, so every token keeps its gradient. In the paper the sampling policy is the
    old policy; here the sampling policy may be several versions older than pi_prox, so the clip is on the whole ratio.
    """
    w = behaviour_weight(tokens, config)
    r = ratio(tokens.log_u).detach() * w
    clipped = torch.where(w > 0, clip(r, config), 0.0)
    return TokenLoss(loss=-clipped * tokens.A * tokens.logp, clipped=(clipped != r) | (w == 0))
