"""An objective that is a function of the caller's process becomes a file of the run."""

from __future__ import annotations

import torch

from actors.api.call_settings import settings_of
from areal.config import load_config
from areal.training import TokenLoss, Tokens, TrainerConfig
from areal.training.algorithms.objectives import rehearse
from areal.training.algorithms.token_loss import ratio as behind

MOST = 1.2


def clipped_reinforce(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    weight = behind(tokens.logp.detach() - tokens.logp_behav)
    losses = [torch.minimum(weight, torch.full_like(weight, MOST)) for _ in range(1)]
    return TokenLoss(loss=-losses[0] * tokens.A * tokens.logp, clipped=weight > MOST)


def test_an_objective_of_this_process_is_a_file_of_the_run_with_what_it_uses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key, value in (("trainer.objective", clipped_reinforce), ("trainer", {"objective": clipped_reinforce})):
        settings = settings_of(None, None, None, None, {"model": "quickstart", "steps": 1, key: value})
        trainer = load_config(settings.file).trainer
        assert trainer.objective == f"{settings.config.folder.absolute()}/objective.py:clipped_reinforce"
        assert rehearse(trainer).__code__.co_filename == trainer.objective.partition(":")[0]
