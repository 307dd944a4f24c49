"""The configuration of a small run, whose master does not wait for anybody at its end."""

from __future__ import annotations

import pytest

from actors.master import master as master_module
from areal.config import Config


@pytest.fixture
def config(tmp_path, free_port) -> Config:
    return Config.model_validate(
        {
            "model": str(tmp_path),
            "run_dir": tmp_path,
            "steps": 2,
            "batch_size": 2,
            "group_size": 1,
            "max_staleness": 1,
            "data": {"source": "addition", "eval_size": 4},
            "sampling": {"max_new_tokens": 8},
            "reward": {"functions": ["addition"]},
            "trainer": {"minibatches": 1},
            "master": {"address": f"tcp://127.0.0.1:{free_port}", "lease_seconds": 30},
        }
    )


@pytest.fixture(autouse=True)
def nobody_to_wait_for(monkeypatch) -> None:
    """The test does not leave when the run ends."""
    monkeypatch.setattr(master_module, "FAREWELL_SECONDS", 0.5)
