"""`areal launch ray` in a real Ray cluster of four nodes in this machine, each with an address of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from areal.base.errors import UserError
from areal.base.processes import ROOT
from areal.config import load_config
from areal.extensions.launch.cluster import ClusterConfig
from areal.extensions.launch.placement import place
from areal.extensions.launch.ray_cluster import RayCluster
from areal.extensions.launch.ray_plan import plan_of
from areal.extensions.launch.targets import Launch
from areal.storage.records import read_records

EIGHT = {"gpu": {"count": 2, "devices": 8}}


def launch(nodes=EIGHT, *overrides: str) -> Launch:
    config, cluster = load_config("configs/deploy/run.yaml", overrides), ClusterConfig(nodes=nodes)
    return Launch(config, cluster, place(config, cluster), ROOT)


def test_each_process_has_a_bundle_with_its_devices():
    plan = plan_of(launch())
    resources = {process["name"]: process["resources"] for process in plan["processes"]}
    assert resources["master"] == resources["reward-0"] == {"CPU": 1}
    assert resources["trainer-0"] == {"CPU": 1, "GPU": 4} and resources["generator-5"] == {"CPU": 1, "GPU": 2}


def test_the_ranks_of_a_trainer_on_two_nodes_meet_where_its_first_ones_are():
    plan = plan_of(launch({"gpu": {"count": 4, "devices": 8}}, "trainer.ranks=16", "generator.count=2"))
    first, second = [process for process in plan["processes"] if process["name"].startswith("trainer")]
    assert (first["leads"], second["leads"]) == (True, False)
    assert all("--rdzv-endpoint=$rendezvous" in part["command"] for part in (first, second))
    assert first["resources"]["GPU"] == second["resources"]["GPU"] == 8


def test_what_has_no_room_in_the_cluster_is_named_with_what_the_nodes_have():
    pytest.importorskip("ray")
    from areal.extensions.launch.ray_run import lacks

    nodes = [{"Alive": True, "Resources": {"CPU": 96.0, "GPU": 8.0}}, {"Alive": False, "Resources": {"GPU": 8.0}}]
    assert lacks(plan_of(launch())["processes"], nodes, 60) == (
        "Ray has not placed the run within 60 s, since no node has room for generator-2 (1 CPU and 2 GPU), generator-3 "
        "(1 CPU and 2 GPU), generator-4 (1 CPU and 2 GPU), generator-5 (1 CPU and 2 GPU). Its nodes have 96 CPU and 8 "
        "GPU: add nodes, or lower what the run asks for."
    )
    assert "other jobs hold what it needs" in lacks(plan_of(launch())["processes"], nodes[:1] * 2, 60)


def test_without_ray_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="Ray is not installed here: pip install"):
        RayCluster().check(launch())


def test_nodes_of_several_kinds_are_refused():
    pytest.importorskip("ray")
    with pytest.raises(UserError, match="by their devices: give cluster.nodes one kind"):
        RayCluster().check(launch({"gpu": {"count": 2, "devices": 8}, "small": {"devices": 0}}))


def areal(*words: str, address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal", *words]
    environment = {"RAY_ADDRESS": address}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**ENVIRONMENT, **environment}
    )


ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": str(Path.home()),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@pytest.fixture
def cluster(monkeypatch):
    """Four nodes of three CPUs. The first one has the cluster's own services."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    for number in (2, 3, 4):
        cluster.add_node(num_cpus=3, node_ip_address=f"127.0.0.{number}")
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()


def written(folder: Path, **settings) -> Path:
    file = folder / "run.yaml"
    nodes = {"cpu": {"count": 4, "devices": 2}}
    values = {
        "base": str(ROOT / "configs" / "quickstart.yaml"),
        "run_dir": str(folder),
        "name": "ray",
        "cluster": {"device": "cpu", "nodes": nodes},
        **settings,
    }
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.slow
def test_a_run_goes_on_when_a_node_is_removed_and_another_one_added(tmp_path, cluster, tiny_model):
    settings = {
        "model": str(tiny_model),
        "steps": 40,
        "batch_size": 4,
        "evaluator": {"every": 40},
        "data": {"source": "addition", "eval_size": 16},
        "sampling": {"max_new_tokens": 24},
        "master": {"lease_seconds": 10},
        "generator": {"count": 2},
        "trainer": {"checkpoint_every": 5},
    }
    file = written(tmp_path, **settings)
    started = areal("launch", "ray", str(file), address=cluster.address)
    assert started.returncode == 0, started.stdout + started.stderr
    run = tmp_path / "ray"

    def trained() -> int:
        return max((record["step"] for record in read_records(run / "metrics.jsonl")), default=0)

    def wait_for(step: int) -> None:
        while trained() < step:
            assert not (run / "summary.json").exists(), (run / "launch" / "ray.log").read_text()
            time.sleep(0.5)

    wait_for(10)
    place = (run / "launch" / "address").read_text()
    master = place.removeprefix("tcp://").partition(":")[0]
    removed = next(
        node
        for node in cluster.list_all_nodes()
        if node.node_ip_address not in (cluster.head_node.node_ip_address, master)
    )
    cluster.remove_node(removed, allow_graceful=False)
    wait_for(20)
    cluster.add_node(num_cpus=3, node_ip_address="127.0.0.5")
    while not (run / "summary.json").exists():
        time.sleep(0.5)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ok"], summary
    records = [*read_records(run / "metrics.jsonl")]
    assert [record["step"] for record in records] == [*range(1, 41)]
    prompts = [prompt for record in records for prompt in record["prompts"]]
    assert len(prompts) == len(set(prompts)) == 40 * 4
    assert max(record["staleness_max"] for record in records) <= 4
    audit = areal("audit", str(run), address=cluster.address)
    assert audit.returncode == 0, audit.stdout + audit.stderr
