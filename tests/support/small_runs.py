"""The configuration of a small run, what it reads and leaves, and folders that are made once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.config import Config


def ten_steps(**more: Any) -> Config:
    """The configuration of a run of ten steps of two groups. more: sections in place of these."""
    values = {
        "model": "m",
        "steps": 10,
        "batch_size": 2,
        "group_size": 2,
        "sampling": {"max_new_tokens": 8},
        "data": {"source": "addition", "eval_size": 0},
        "reward": {"functions": ["addition"]},
        "trainer": {"minibatches": 1},
    }
    return Config.model_validate(values | more)


SHORT = """
class Short:
    def __init__(self, characters):
        self.characters = characters

    async def score(self, prompt, completion, row):
        return 1 / (self.characters + len(completion))
"""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills, in the first of pytest-xdist's processes that asks for it. The others wait."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, partial = shared / name, shared / f"{name}.partial"
    with (shared / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


def check_adapters(folder: Path, model: Path, checkpoint: str) -> None:
    """They alone are published; the last checkpoint is a whole model, which differs from the first where they are."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    published = list((folder / "weights").glob("*/*.safetensors"))
    assert {path.name for path in published} == {"adapter_model.safetensors"}
    assert all(path.stat().st_size < 40_000 for path in published)  # the model has 3 MB
    AutoModelForCausalLM.from_pretrained(checkpoint)
    weights_before, weights_after = (load_file(Path(of, "model.safetensors")) for of in (model, checkpoint))
    changed = {name for name in weights_before if not weights_before[name].equal(weights_after[name])}
    assert changed == {name for name in weights_before if "q_proj" in name or "v_proj" in name}


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
