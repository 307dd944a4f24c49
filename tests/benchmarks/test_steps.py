import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_training_step_takes_the_memory_that_areal_plan_says(tmp_path):
    here = Path(__file__).parent
    subprocess.run(
        [sys.executable, here / "memory.py", "--quick", "--json", tmp_path / "results.json"],
        env=os.environ | {"PYTHONPATH": str(here.parents[1])},
        check=True,
        timeout=240,
    )
    results = json.loads((tmp_path / "results.json").read_text())
    steps = {name: figures["bytes"] / figures["planned"] for name, figures in results.items() if "planned" in figures}
    assert len(steps) == 3 and all(0.85 < ratio < 1.15 for ratio in steps.values()), steps
    assert results.keys() - steps.keys() == {"tiny, areal.training.head", "tiny, whole logits"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("packing", {"ratio", "spread", "prefix_tree_ratio", "prefix_tree_tokens_saved", "forward_backward_share"}),
        ("trainer_overhead", {"ratio", "spread", "zero_seconds_per_step", "proximal_seconds_per_step"}),
    ],
)
def test_the_benchmark_runs_and_writes_its_results(tiny_model, tmp_path, name, keys):
    here = Path(__file__).parent
    subprocess.run(
        [sys.executable, here / f"{name}.py", "--quick", "--model", tiny_model, "--json", tmp_path / "results.json"],
        env=os.environ | {"PYTHONPATH": str(here.parents[1])},
        check=True,
        timeout=240,
    )
    assert keys <= json.loads((tmp_path / "results.json").read_text()).keys()
