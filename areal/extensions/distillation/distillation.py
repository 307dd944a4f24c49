"""A teacher: the log-probs of a scorer's model as a gain in the advantages, or as a divergence in the loss."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.samples.table import TOP
from areal.training.algorithms.advantages import Credits
from areal.training.algorithms.algorithm import Algorithm, RowOutputs
from areal.training.algorithms.token_loss import TokenLoss
from areal.training.packed import PackedRow

LEAST_REST = 1e-6
"""The least probability of all tokens but the teacher's likeliest tokens: fp32 cannot tell less from 0."""

UNLIKELY = -1e4
"""The log-prob of a teacher's token that the policy does not have."""


def with_teacher(inner: Algorithm, config: TrainerConfig, vocabulary: int) -> Algorithm:
    """Return `inner` with the teacher `trainer.teacher`. A token's advantage gains teacher_coef (log teacher - log
    pi_prox). With `trainer.teacher_top_k` the loss gains teacher_coef `kl_of_top` instead. vocabulary: the number of
    the policy's tokens."""
    needs = {"teacher_logprobs": f"trainer.teacher={config.teacher}"}
    if top_k := config.teacher_top_k:
        needs |= dict.fromkeys(TOP, f"trainer.teacher_top_k={top_k}")

    def advantages(credits: Credits) -> np.ndarray:
        if top_k:
            tokens, logprobs = (credits.columns[name] for name in TOP)
            known = tokens < vocabulary
            credits.columns["likely_tokens"] = np.where(known, tokens, 0)
            credits.columns["likely_logprobs"] = np.where(known, logprobs, np.float32(UNLIKELY))
        return inner.advantages(credits)

    def loss(outputs: RowOutputs, row: PackedRow) -> TokenLoss:
        columns = row.columns
        if not top_k:
            gain = columns["teacher_logprobs"] - columns["proximal"]
            columns["advantages"] = columns["advantages"] + config.teacher_coef * gain
            return inner.loss(outputs, row)
        out = inner.loss(outputs, row)
        divergence = kl_of_top(columns["likely_logprobs"], outputs.further)
        return replace(out, loss=out.loss + config.teacher_coef * divergence)

    further = "likely_tokens" if top_k else inner.further
    return replace(inner, advantages=advantages, loss=loss, needs={**inner.needs, **needs}, further=further)


def kl_of_top(teacher: Tensor, logp: Tensor) -> Tensor:
    """Return KL(teacher || pi) over the teacher's k likeliest tokens and the rest as a single token, nats [S]. teacher,
    logp: log-probs of the k tokens, [S, k]. Tokens of probability 0 for the teacher count to the rest. The result is at
    most the divergence over all tokens, and 0 if the k probabilities agree."""
    p = teacher.exp()
    rest = (1 - p.sum(-1)).clamp(min=0)
    log_rest = torch.log1p(-(logp.exp() * (p > 0)).sum(-1).clamp(max=1 - LEAST_REST))
    return (p * (teacher - logp)).sum(-1) + torch.xlogy(rest, rest) - rest * log_rest
