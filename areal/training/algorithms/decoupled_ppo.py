"""Decoupled PPO, the default, and plain PPO. `OBJECTIVES` of the configuration makes grpo, dr_grpo, rloo,
reinforce_pp, dapo, tis, seq_tis, seq_mis, icepop, kpop, flash_reinforce and distill of decoupled PPO.
"""

from dataclasses import replace

import torch
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import TokenLoss, Tokens, behaviour_weight, clip, ratio


def decoupled_ppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Decoupled PPO, eq. 5: J = w min(u A, clip(u) A) with u = pi_theta / pi_prox and w = pi_prox / pi_behav.

    The trust region lies around the recent proximal policy; w corrects for tokens sampled by older policies.
    """
    return clipped_surrogate(ratio(tokens.log_u), behaviour_weight(tokens, config), tokens.A, config)


def ppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Plain PPO (arXiv 1707.06347, eq. 7): J = min(u A, clip(u) A) with u = pi_theta / pi_behav.

    The trust region lies around the policy that sampled the token, however old. PPO collapses under staleness.
    """
    return decoupled_ppo(replace(tokens, logp_prox=tokens.logp_behav), config)


def clipped_surrogate(u: Tensor, w: Tensor, A: Tensor, config: TrainerConfig) -> TokenLoss:
    """J = w min(u A, clip(u) A), [S].

    With `eps_clip_dual` = c, A < 0: max(min(u A, clip(u) A), c A) (arXiv 1912.09729, eq. 5).
    """
    free = u * A
    held = torch.minimum(free, clip(u, config) * A)
    if (c := config.eps_clip_dual) is not None:
        held = torch.where((A < 0) & (u > c), c * A, held)
    return TokenLoss(loss=-w * held, clipped=(held != free) | (w == 0))
