"""What keeps a run in a Ray cluster, with programs that only say where they are: in four real nodes of this machine."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from areal.base.processes import ROOT

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from areal.extensions.launch.ray_cluster import NAMESPACE, start  # noqa: E402
from areal.extensions.launch.ray_plan import PLAN, STOP  # noqa: E402
from areal.extensions.launch.ray_run import RayRun  # noqa: E402

# Says its process and the master's address, and that it was told to stop.
PROGRAM = """
import os, pathlib, signal, sys, time
file, address = pathlib.Path(sys.argv[1]), sys.argv[2]
file.open("a").write(f"{os.getpid()} {address}\\n")
def leave(*_):
    file.open("a").write("left\\n")
    sys.exit(int(sys.argv[3]))
signal.signal(signal.SIGTERM, leave)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def nodes():
    """A cluster whose first node has no CPU."""
    from ray.cluster_utils import Cluster

    python_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ.pop("PYTHONPATH") if python_path is None else os.environ.update(PYTHONPATH=python_path)


HOSTS = iter(range(2, 255))


@pytest.fixture
def cluster(nodes):
    """The cluster with three more nodes, of one CPU each."""
    while len(nodes.list_all_nodes()) < 4:
        nodes.add_node(num_cpus=1, node_ip_address=f"127.0.0.{next(HOSTS)}")
    while ray.cluster_resources().get("CPU", 0) != 3 or ray.available_resources().get("CPU", 0) != 3:
        time.sleep(0.2)
    return nodes


class Programs:
    """A run of a master and a role, which write what they do into files."""

    def __init__(self, folder: Path, *programs: dict) -> None:
        self.folder = folder
        master = {"name": "master", "command": self._command("master", 1), "final": [0, 1, 2]}
        role = {"name": "role", "command": self._command("role", 5), "final": [0, 2]}
        shared = {"leads": False, "resources": {"CPU": 1}}
        processes = [shared | process for process in (master, role, *programs)]
        plan = {
            "project": str(ROOT),
            "environment": {"MINE": "1"},
            "port": 0,
            "rendezvous_port": 0,
            "start_seconds": 60,
        }
        (folder / PLAN).write_text(json.dumps(plan | {"processes": processes}))

    def _command(self, name: str, code: int) -> list[str]:
        return ["-c", PROGRAM, str(self.folder / name), "$address", str(code)]

    def start(self, cluster):
        return start(RayRun, self.folder, "run", cluster.head_node.node_id)

    def lines(self, name: str) -> list[list[str]]:
        file = self.folder / name
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def wait(self, name: str, count: int) -> list[list[str]]:
        while len(lines := self.lines(name)) < count:
            time.sleep(0.2)
        return lines


def test_programs_move_with_their_nodes_and_learn_where_the_master_is(tmp_path, cluster):
    programs = Programs(tmp_path)
    actor = programs.start(cluster)
    ((pid, address),) = programs.wait("master", 1)
    ((role, masters),) = programs.wait("role", 1)
    assert masters == address
    environment = psutil.Process(int(role)).environ()
    assert environment["MINE"] == "1" and environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not [name for name in environment if name.startswith("RAY_")]

    host = address.removeprefix("tcp://").partition(":")[0]
    lost = next(node for node in cluster.list_all_nodes() if node.node_ip_address == host)
    cluster.remove_node(lost, allow_graceful=False)
    _, (anew, moved) = programs.wait("master", 2)
    assert not psutil.pid_exists(int(pid)) and moved != address
    assert programs.wait("role", 3)[1:] == [["left"], [programs.lines("role")[2][0], moved]]

    (tmp_path / STOP).touch()
    assert programs.wait("master", 3)[2] == ["left"]
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.state.remote())
            time.sleep(0.2)
    while any(psutil.pid_exists(int(pid)) for pid in (anew, programs.lines("role")[2][0])):
        time.sleep(0.2)
    while ray.available_resources().get("CPU", 0) != 2:
        time.sleep(0.2)


def test_a_program_ends_with_the_worker_of_ray_that_has_started_it_and_is_started_anew(tmp_path, cluster):
    programs = Programs(tmp_path)
    actor = programs.start(cluster)
    ((first, _),) = programs.wait("role", 1)
    worker = psutil.Process(int(first)).ppid()
    os.kill(worker, signal.SIGKILL)  # as Ray does where memory is short
    _, (second, _) = programs.wait("role", 2)
    assert not psutil.pid_exists(int(first)) and psutil.pid_exists(int(second))
    ray.kill(actor)
    while psutil.pid_exists(int(second)):  # with the worker, whose owner is gone
        time.sleep(0.2)


def test_a_program_that_dies_again_and_again_stops_the_run_with_its_last_words(tmp_path, cluster, monkeypatch):
    words = {"name": "broken", "command": ["-c", "print('no such model'); raise SystemExit(2)"], "final": [0, 2]}
    programs = Programs(tmp_path, words)
    programs.start(cluster)
    assert programs.wait("master", 2)[1] == ["left"]
    assert "broken was refused: no such model" in (tmp_path / "ray.log").read_text()


def test_a_run_without_room_says_what_lacks_and_leaves_nothing(tmp_path, cluster):
    shared = {"command": ["-c", ""], "final": [0], "resources": {"CPU": 3}}
    programs = Programs(tmp_path, {"name": "large", **shared})
    plan = json.loads((tmp_path / PLAN).read_text())
    (tmp_path / PLAN).write_text(json.dumps(plan | {"start_seconds": 3}))
    actor = programs.start(cluster)
    while not (failure := ray.get(actor.state.remote())[1]):
        time.sleep(0.2)
    assert "no node has room for large (3 CPU)" in failure
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.state.remote())
            time.sleep(0.2)
    while ray.available_resources().get("CPU", 0) != 3:
        time.sleep(0.2)
    assert not programs.lines("master")
