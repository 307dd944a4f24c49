"""Score centring: the loss takes out the mean of the score under the sampling policy."""

from dataclasses import replace

import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import TokenLoss, Tokens, behaviour_weight


def score_centring(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Score centring (arXiv 2609.20807): J = A (sg(w) log pi_theta - sum_v sg(q_v w_v) log pi_theta(v)) over the words
    v from which the token was drawn. q = pi_behav, and w = pi_theta / q, bounded by `behaviour_weight`; none: 1.

    The gradient's mean under q is 0. Without the sum, the mean would be 0 only for q = pi_theta.
    """
    present, q = tokens.columns["kept_words"] >= 0, tokens.columns["kept_logprobs"]
    p = torch.where(present, tokens.columns["kept_policy"], 0.0)
    w = behaviour_weight(replace(tokens, logp_prox=tokens.logp.detach()), config)
    w_of_words = behaviour_weight(replace(tokens, logp_prox=p.detach(), logp_behav=q), config)
    mean = (torch.where(present, q.exp() * w_of_words, 0.0) * p).sum(1)
    return TokenLoss(loss=-tokens.A * (w * tokens.logp - mean), clipped=w == 0)
