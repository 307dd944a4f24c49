"""What must hold of every finished run, whatever was killed in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from areal.storage.records import read_records
from areal.storage.stored_groups import batches


def check_accounts(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every step once, every prompt trained once or accounted for, no token older than the bound allows; and the
    rollouts of all that. Returns the records of the steps and the summary. Raises AssertionError with a sentence."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    records = list(read_records(folder / "metrics.jsonl"))
    summary = json.loads((folder / "summary.json").read_text())
    bound = config["max_staleness"]
    assert summary["ok"], f"the run has failed: {summary['reason']}"
    assert [r["step"] for r in records] == list(range(1, config["steps"] + 1)), "a step is missing or there twice"
    assert all(r["staleness_max"] <= bound for r in records), "a group is staler than its bound"
    assert all(len(r["prompts"]) == config["batch_size"] for r in records), "a batch is not whole"

    trained = [prompt for r in records for prompt in r["prompts"]]
    losses = [loss for source in (*records, summary) for loss in source["discarded"]]
    assert all(reason for _, reason in losses), "a prompt was discarded without a reason"
    accounted = trained + [prompt for prompt, _ in losses] + summary["prompts_open"]
    assert len(accounted) == len(set(accounted)), "a prompt has two fates"
    assert set(range(max(trained) + 1)) <= set(accounted), "a prompt was lost"
    assert summary["samples_trained"] == len(trained) * config["group_size"], "samples are missing or there twice"

    stored = []
    for step, groups in batches(folder / "rollouts"):
        stored.append((step, [group.prompt_index for group in groups]))
        versions = [
            v for group in groups for trajectory in group.trajectories for v in trajectory.versions.tolist() if v >= 0
        ]
        assert step - 1 - bound <= min(versions) and max(versions) < step, f"a token of step {step} has another version"
    assert stored == [(r["step"], r["prompts"]) for r in records], "the rollouts are not those of the steps"
    return records, summary
