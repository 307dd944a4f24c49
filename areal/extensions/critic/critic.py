"""A critic: a value head estimates the return of each token, and `gae` makes advantages of the estimates."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from areal.config.trainer_section import CriticConfig
from areal.training.algorithms.advantages import Credits, to_go
from areal.training.algorithms.algorithm import Algorithm, RowOutputs
from areal.training.algorithms.token_loss import TokenLoss
from areal.training.packed import PackedRow


def with_critic(inner: Algorithm, config: CriticConfig) -> Algorithm:
    """Return `inner` with estimates in place of returns and penalties, and with the loss of the values."""

    def advantages(credits: Credits) -> np.ndarray:
        samples, values, returns = credits.samples, credits.columns["values"], credits.returns
        if returns is None:
            returns = credits.rewards[samples]
        arguments = values, returns, credits.penalties, samples, credits.sampled
        estimates = gae(*arguments, gamma=config.gamma, lam=config.lam)
        credits.columns["value_targets"] = estimates + values
        return inner.advantages(replace(credits, returns=estimates, penalties=None))

    def loss(outputs: RowOutputs, row: PackedRow) -> TokenLoss:
        old_values, targets = row.columns["values"], row.columns["value_targets"]
        out = inner.loss(outputs, row)
        return replace(out, value_loss=value_loss(outputs.values, old_values, targets, config.value_clip))

    return replace(inner, advantages=advantages, loss=loss, needs={**inner.needs, "values": "trainer.critic"})


def gae(
    values: np.ndarray,
    returns: np.ndarray,
    penalties: np.ndarray | None,
    samples: np.ndarray,
    sampled: np.ndarray,
    *,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """Return generalised advantage estimates (arXiv 1506.02438, eq. 16) of the sampled tokens, float64 [T]; else 0.

    values: [T], the critic's estimate before each token. returns, penalties, samples, sampled: as in `advantages`, with
    the samples in ascending order. Only sampled tokens are steps: the next state is the state before the sample's next
    sampled token. The reward of a token is its return minus the next token's return, minus the token's penalty, so a
    reward of the whole sample is the reward of its last token.
    """
    own, gains = np.flatnonzero(sampled), np.zeros(len(values))
    V, G, sample = values[own].astype(np.float64), returns[own], samples[own]
    is_last = np.append(sample[1:] != sample[:-1], True)
    next_V, next_G = (np.where(is_last, 0.0, np.roll(array, -1)) for array in (V, G))
    rewards = G - next_G - (0.0 if penalties is None else penalties[own])
    gains[own] = to_go(rewards + gamma * next_V - V, sample, gamma * lam)
    return gains


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """Return the critic's loss, [S]: half the squared error of `values` or, if larger, of the values clipped to `old`
    +- clip, as in OpenAI's baselines (ppo2). old: the values before the step. clip: None: no clipping."""
    losses = (values - targets).square() / 2
    if clip is None:
        return losses
    held = old + (values - old).clamp(-clip, clip)
    return torch.maximum(losses, (held - targets).square() / 2)
