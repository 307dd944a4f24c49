"""The KL penalty against a reference model, in the loss or in the rewards (Schulman, "Approximating KL divergence")."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.advantages import Credits
from areal.training.algorithms.algorithm import Algorithm, RowOutputs, tokens_in
from areal.training.algorithms.token_loss import LOG_RATIO_BOUND, TokenLoss, Tokens, behaviour_weight, ratio
from areal.training.packed import PackedRow


def with_reference(inner: Algorithm, config: TrainerConfig) -> Algorithm:
    """Return `inner` with the penalty `trainer.kl_coef`. The penalty needs log-probs of the reference: `reference` from
    a pass, or `reference_logprobs` from a scorer."""
    of_scorer = bool(config.reference_scorer)
    column = "reference_logprobs" if of_scorer else "reference"

    def advantages(credits: Credits) -> np.ndarray:
        columns = credits.columns
        columns["reference"] = columns[column]
        if config.kl_in == "reward":
            behaviour, reference = (torch.from_numpy(columns[name]) for name in ("logprobs", "reference"))
            cost = (config.kl_coef * kl(behaviour, reference, config.kl_estimator)).double().numpy()
            credits = replace(credits, penalties=np.where(columns["trained"], cost, 0.0))
        return inner.advantages(credits)

    def loss(outputs: RowOutputs, row: PackedRow) -> TokenLoss:
        out = inner.loss(outputs, row)
        if config.kl_in == "reward":
            return out
        penalty = kl_penalty(tokens_in(outputs, row), row.columns["reference"], config)
        return replace(out, loss=out.loss + config.kl_coef * penalty)

    needs = {**inner.needs, column: f"trainer.reference={config.reference}"}
    return replace(inner, advantages=advantages, loss=loss, needs=needs)


def kl_penalty(tokens: Tokens, logp_ref: Tensor, config: TrainerConfig) -> Tensor:
    """Return `kl` of each token, [S], times the surrogate's weight on gradients without clipping: sg(u w). So tokens of
    an older policy pull as strongly as tokens of the current policy."""
    if config.objective in ("ppo", "sao"):
        tokens = replace(tokens, logp_prox=tokens.logp_behav)
    weight = ratio(tokens.log_u.detach()) * behaviour_weight(tokens, config)
    return weight * kl(tokens.logp, logp_ref, config.kl_estimator)


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
        case _:  # k3
            log_r = log_r.clamp(max=LOG_RATIO_BOUND)
            return torch.expm1(log_r) - log_r
