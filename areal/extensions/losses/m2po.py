"""M2PO: a mask by the second moment of log-ratios over a minibatch, in place of the clip."""

import numpy as np
import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import TokenLoss, Tokens, masked_surrogate
from areal.training.packed import FlatBatch


def m2po(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """M2PO (arXiv 2510.01161): J = w M u A without a clip; M masks the tokens where pi_prox is farthest from pi_behav.

    M is `Tokens.mask`, which `kept_tokens` chooses before the first minibatch.
    """
    return masked_surrogate(tokens, torch.zeros_like(tokens.A).bool() if tokens.mask is None else ~tokens.mask, config)


def kept_tokens(batch: FlatBatch, config: TrainerConfig) -> np.ndarray:
    """Return bool [T]: the tokens in the loss kept by the mask of their minibatch."""
    columns, minibatch = batch.columns, np.repeat(batch.minibatch, batch.lengths)
    kept = np.zeros(len(minibatch), bool)
    for m in range(int(batch.minibatch.max()) + 1):
        tokens = columns["trained"] & (minibatch == m)
        log_ratio = columns["proximal"][tokens] - columns["logprobs"][tokens]
        kept[tokens] = within_second_moment(log_ratio, config.m2_threshold)
    return kept


def within_second_moment(log_ratio: np.ndarray, threshold: float) -> np.ndarray:
    """Return bool [n], the tokens kept: the largest (log r)^2 are masked until the mean is below `threshold`."""
    moments = log_ratio.astype(np.float64) ** 2
    order = moments.argsort(kind="stable")
    mask = np.empty(len(moments), dtype=bool)
    mask[order] = moments[order].cumsum() / np.arange(1, len(moments) + 1) < threshold  # the means ascend
    return mask
