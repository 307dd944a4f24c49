"""The configuration of a small run, whose master does not wait for anybody at its end."""

from __future__ import annotations

import pytest
from support.small_runs import ten_steps

from actors.master import farewell
from areal.config import Config


@pytest.fixture
def config(tmp_path, free_port) -> Config:
    master, data = (
        {"address": f"tcp://127.0.0.1:{free_port}", "lease_seconds": 30},
        {"source": "addition", "eval_size": 4},
    )
    folders = {"model": str(tmp_path), "run_dir": tmp_path}
    return ten_steps(**folders, steps=2, group_size=1, max_staleness=1, data=data, master=master)


@pytest.fixture(autouse=True)
def nobody_to_wait_for(monkeypatch) -> None:
    """The test does not leave when the run ends."""
    monkeypatch.setattr(farewell, "FAREWELL_SECONDS", 0.5)
