"""A whole run over several hosts: a slow wire that loses packets, keys, and no folder that two of them share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from conftest import ROOT
from support.hosts import SpreadRun, Wire, wire
from support.small_runs import read_jsonl

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


def start_ranks(network: Wire, commands: Sequence[Sequence[str]], folder: Path) -> list[subprocess.Popen[str]]:
    """A rank on each of two hosts, where the own name of each leads to itself, as in the /etc/hosts of Debian and
    Ubuntu. The variables are torchrun's."""
    ranks = []
    for number, (first, command) in enumerate(zip(("127.0.1.1", network.address(0)), commands, strict=True)):
        hosts = folder / f"hosts{number}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{number}\n{first} host0\n")
        environment = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
        own_name = f'hostname host{number} && exec "$@"'
        shell = ["unshare", "--uts", "sh", "-c", own_name, "rank", sys.executable, *command]
        words = network.command(number, shell, hosts, Path("/etc/hosts"))
        ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | environment, cwd=ROOT))
    return ranks


def outputs_of(ranks: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


CHOOSES = """
import os
from areal.base.network_interfaces import GLOO, choose_interface
choose_interface(os.environ["MASTER_ADDR"])
print(os.environ[GLOO])
"""
JOINS = """
import os
from areal.base.network_interfaces import GLOO
import torch.distributed as dist
from areal.training.trained_model import join_ranks

def meet(backend):
    print(os.environ[GLOO], flush=True)
    os._exit(0)

dist.init_process_group = meet
join_ranks()
"""
"""As a trainer's rank does it, up to where it meets the others."""


@needs_hosts
def test_ranks_meet_at_the_interface_between_two_hosts_where_the_own_name_of_each_leads_to_itself(
    tmp_path: Path,
) -> None:
    with wire(2, delay=0.0, loss=0.0) as network:
        assert outputs_of(start_ranks(network, [["-c", JOINS], ["-c", CHOOSES]], tmp_path)) == ["tun0\n"] * 2


@needs_hosts
@pytest.mark.slow  # the test above has all but the meeting itself, which test_ulysses.py has on one host
def test_the_selftest_of_ranks_on_two_hosts_passes_where_the_own_name_of_each_leads_to_itself(tmp_path: Path) -> None:
    commands = [["-m", "areal", "selftest", "--json", str(tmp_path / f"{number}.json")] for number in range(2)]
    with wire(2, delay=0.0, loss=0.0) as network:
        texts = outputs_of(start_ranks(network, commands, tmp_path))
    (result,) = json.loads((tmp_path / "0.json").read_text())["findings"]
    assert (result["name"], result["result"]) == ("ranks", "ok")
    assert (result["values"]["hosts"], result["values"]["interface"]) == (["host0", "host1"], "tun0")
    assert "Nothing failed" in texts[0] and not texts[1] and not (tmp_path / "1.json").exists()


@needs_hosts
@pytest.mark.slow
def test_a_run_over_hosts_with_keys_and_folders_of_their_own_outlasts_a_partition(tiny_model: Path, tmp_path: Path):
    small = [
        "--config",
        str(ROOT / "configs" / "quickstart.yaml"),
        f"model={tiny_model}",
        "name=test",
        f"steps={STEPS}",
        f"max_staleness={MAX_STALENESS}",
        "batch_size=4",
        "group_size=4",
        "sampling.max_new_tokens=32",
        "data.eval_size=0",
        "generator.kv_cache_gib=0.25",
        "generator.memory_share=0.1",
    ]
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
