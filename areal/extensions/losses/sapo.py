"""SAPO: a soft gate in place of the clip."""

import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import TokenLoss, Tokens, behaviour_weight, ratio


def sapo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """SAPO (arXiv 2511.20347, eq. 5 and 6): J = w (4 / tau) sigmoid(tau (u - 1)) A, a soft gate in place of the clip.

    tau is the first of `sapo_temperatures` where A > 0, else the second.
    """
    tau = torch.where(tokens.A > 0, *tokens.logp.new_tensor(config.sapo_temperatures))
    w = behaviour_weight(tokens, config)
    return TokenLoss(loss=-w * 4 / tau * torch.sigmoid(tau * (ratio(tokens.log_u) - 1)) * tokens.A, clipped=w == 0)
