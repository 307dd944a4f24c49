"""The comparison of this working tree with a commit, in pairs of runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from versus_commit import COMMIT, CPU, HERE, SECONDS, summary


def test_ratios_are_those_of_the_pairs_and_what_hardly_runs_is_left_out():
    pairs = [
        {HERE: {SECONDS: 1.0, CPU: 2.0, "reward": 0.001}, COMMIT: {SECONDS: 2.0, CPU: 2.0, "reward": 0.5}},
        {HERE: {SECONDS: 3.0, CPU: 4.0, "reward": 0.1}, COMMIT: {SECONDS: 2.0, CPU: 2.0, "reward": 0.5}},
        {HERE: {SECONDS: 1.0, CPU: 3.0, "reward": 0.1}, COMMIT: {SECONDS: 1.0, CPU: 2.0, "reward": 0.5}},
    ]
    figures = summary(pairs)
    assert (figures["ratio"], figures["spread"]) == (1.0, [0.5, 1.5])
    assert figures["rows"].keys() == {SECONDS, CPU}
    assert figures["rows"][CPU] == {HERE: 3.0, COMMIT: 2.0, "ratio": 1.5, "spread": [1.0, 2.0]}


@pytest.mark.slow
def test_a_tree_is_compared_with_its_own_last_commit(tiny_model, tmp_path):
    here = Path(__file__).parent
    words = ["HEAD", "batch_size=2", "group_size=2", "--model", tiny_model, "--rounds", "1", "--steps", "6"]
    subprocess.run(
        [sys.executable, here / "versus_commit.py", *words, "--json", tmp_path / "results.json"],
        env=os.environ | {"PYTHONPATH": str(here.parents[1])},
        check=True,
        timeout=400,
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rows"][CPU].keys() == {HERE, COMMIT, "ratio", "spread"}
    assert {"trainer", "rollout_manager"} <= results["rows"].keys()
