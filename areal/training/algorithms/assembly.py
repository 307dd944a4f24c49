"""The algorithm of a configuration: a policy gradient, and the algorithms around it."""

from dataclasses import replace

import torch
from torch import Tensor

from areal.base import extensions
from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.algorithm import Algorithm, RowOutputs
from areal.training.algorithms.reference import with_reference
from areal.training.algorithms.token_loss import TokenLoss
from areal.training.packed import PackedRow


def algorithm_of(policy: Algorithm, config: TrainerConfig, vocabulary: int) -> Algorithm:
    """The algorithm of a configuration. policy: its `policy_gradient`. vocabulary: how many tokens the policy has."""
    algorithm, recompute = policy, config.proximal == "recompute"
    if config.critic:
        algorithm = extensions.need("critic", "around", "trainer.critic").load()(algorithm, config.critic)
    if config.kl_coef:  # around the critic, whose estimates include penalties
        algorithm = with_reference(algorithm, config)
    if config.teacher:
        with_teacher = extensions.need("distillation", "around", "trainer.teacher").load()
        algorithm = with_teacher(algorithm, config, vocabulary)

    def loss(outputs: RowOutputs, row: PackedRow) -> TokenLoss:
        columns = row.columns
        if not recompute:
            columns["proximal"] = interpolated_proximal(outputs.logp, columns["logprobs"], columns["staleness"])
        elif "proximal" not in columns:  # before the first optimizer step the policy is the proximal policy
            columns["proximal"] = outputs.logp.detach()
        out = algorithm.loss(outputs, row)
        return replace(out, loss=out.loss - config.entropy_coef * outputs.entropy) if config.entropy_coef else out

    needs = {**algorithm.needs, **({"proximal": "trainer.proximal"} if recompute else {})}
    return replace(algorithm, loss=loss, needs=needs)


def interpolated_proximal(logp: Tensor, logp_behav: Tensor, staleness: Tensor) -> Tensor:
    """log pi_prox, between behaviour and current policy, [S] without gradient (A-3PO, arXiv 2512.06547, eq. 3).

    alpha log pi_behav + (1 - alpha) log pi_theta, alpha = 1 / staleness; a token of the current version has alpha 0.
    staleness: [S], versions between a token's sampling and this step.
    """
    alpha = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0)
    return (alpha * logp_behav + (1 - alpha) * logp).detach()
