"""A whole run over several hosts: a slow wire that loses packets, keys, and no folder that two of them share."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import read_jsonl
from hosts import SpreadRun, wire

STEPS = 5
CUT_AT = 2  # the newest version when the partition begins
MAX_STALENESS = 1
# Longer than a link takes to give up a silent peer, shorter than a lease.
CUT_SECONDS = 7.0
MASTER, TRAINER, GENERATOR = range(3)
ROLES = (("master",), ("trainer",), ("generator", "rollout_manager", "reward"))

PROBE = ["unshare", "-nm", "ip", "tuntap", "add", "probe", "mode", "tun"]

needs_hosts = pytest.mark.skipif(
    subprocess.run(PROBE, capture_output=True).returncode != 0,
    reason="needs root, /dev/net/tun, and the tools ip, nsenter and unshare",
)


@needs_hosts
@pytest.mark.slow
def test_a_run_over_hosts_with_keys_and_folders_of_their_own_outlasts_a_partition(tiny_model: Path, tmp_path: Path):
    small = [
        "--config", str(ROOT / "configs" / "quickstart.yaml"), f"model={tiny_model}", "name=test", f"steps={STEPS}",
        f"max_staleness={MAX_STALENESS}", "batch_size=4", "group_size=4", "sampling.max_new_tokens=32",
        "data.eval_size=0", "generator.kv_cache_gib=0.25", "generator.memory_share=0.1",
    ]  # fmt: skip
    with wire(len(ROLES), delay=0.02, loss=0.01) as network, closing(SpreadRun(network, ROLES, tmp_path, small)) as run:
        run.wait_for_step("test", CUT_AT)
        run.cut_off(TRAINER, CUT_SECONDS)
        assert run.wait(240) == [0, 0, 0], run.output
        assert "is started again" not in run.output  # everybody has waited the partition out
    master, trainer, generator = (run.folder(host, "test") for host in (MASTER, TRAINER, GENERATOR))
    summary = json.loads((master / "summary.json").read_text())
    assert summary["ok"] and summary["staleness_max"] <= MAX_STALENESS
    assert [record["step"] for record in read_jsonl(master / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert (trainer / "spool.db").exists() and not (master / "spool.db").exists()
    events = read_jsonl(generator / "logs" / "generator-0.jsonl")
    # The last step's samples must begin at this version or a later one; newer ones may find that the run has ended.
    needed = STEPS - 1 - MAX_STALENESS
    assert max(event["version"] for event in events if event["event"] == "weights arrived") >= needed > CUT_AT
