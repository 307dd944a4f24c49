"""The learning rates of a run, beside the same curves in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal.config.trainer_section import TrainerConfig
from areal.training.optimizer import learning_rates


def rates(steps, **settings):
    """The rate of each optimizer step."""
    config = TrainerConfig(lr=1.0, **settings)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(2)]  # the critic's is the last
    optimizer = torch.optim.AdamW(groups, lr=config.lr)
    schedule, computed = learning_rates(optimizer, config, steps), []
    for _ in range(steps):
        computed.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return computed


@pytest.mark.parametrize("final", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 30])
def test_warm_up_rises_from_near_0_and_a_decay_ends_at_its_share_at_the_last_step(kind, final, warmup):
    steps = 100
    progress = np.linspace(0, 1, steps - warmup + 1)[1:]  # of the decay
    curve = {"constant": np.zeros_like(progress), "linear": progress, "cosine": 0.5 - np.cos(np.pi * progress) / 2}[
        kind
    ]
    expected = [*(np.arange(1, warmup + 1) / max(warmup, 1)), *(1 - (1 - final) * curve)]
    np.testing.assert_allclose(
        rates(steps, lr_schedule=kind, lr_final=final, warmup_steps=warmup), expected, atol=1e-12
    )


def test_a_schedule_begins_after_the_steps_that_train_a_critic_alone():
    computed = rates(9, critic={"warmup_steps": 3}, warmup_steps=2, lr_schedule="linear", lr_final=0.2)
    np.testing.assert_allclose(computed, [0, 0, 0, 0.5, 1, 0.8, 0.6, 0.4, 0.2], atol=1e-12)
