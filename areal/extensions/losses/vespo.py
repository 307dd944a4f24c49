"""VESPO: a soft weight of whole sequences."""

import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import LOG_RATIO_BOUND, TokenLoss, Tokens, behaviour_weight, sequence_sum


def vespo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """VESPO (arXiv 2602.10693): J = sg(W^k exp(lambda (1 - W))) A log pi_theta, where W is the product of u w over the
    sequence. k and lambda are `vespo_positive` where A >= 0, else `vespo_negative`."""
    w = behaviour_weight(tokens, config)
    log_W = sequence_sum(tokens.log_u.detach() + w.log(), tokens.sequence).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    by_sign = log_W.new_tensor([config.vespo_positive, config.vespo_negative])
    k, rate = torch.where(tokens.A >= 0, by_sign[0, :, None], by_sign[1, :, None])
    kernel = torch.exp(k * log_W + rate * (1 - log_W.exp()))
    return TokenLoss(loss=-kernel * tokens.A * tokens.logp, clipped=w == 0)
