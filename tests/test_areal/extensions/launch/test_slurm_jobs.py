"""Runs on a real Slurm of four nodes on this machine: two nodes train together, two generate. Skipped where Slurm is
missing."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import yaml
from support.slurm_cluster import SlurmCluster, is_missing, slurm_cluster, until

from areal.base.processes import ROOT
from areal.extensions.launch.cluster_jobs import ClusterJob
from areal.storage.run_folder import metrics_of, read_summary, steps_trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(is_missing()), reason=is_missing())]
MAX_STALENESS = 4


@pytest.fixture(scope="module")
def cluster_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    first = 17817 + 20 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), 4, first, first + 10) as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster_of_tests: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, of which no test leaves a job to the next."""
    yield cluster_of_tests
    cluster_of_tests.cancel_jobs()


class LaunchedRun:
    """A run that `areal launch slurm` has started."""

    def __init__(self, slurm: SlurmCluster, folder: Path, model: Path, steps: int, **cluster: object) -> None:
        self.slurm, self.folder = slurm, folder / "runs" / "run"
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump(self._values(folder, model, steps, cluster)))

    def _values(self, folder: Path, model: Path, steps: int, cluster: dict[str, object]) -> dict[str, object]:
        return {
            "name": "run",
            "run_dir": str(folder / "runs"),
            "model": str(model),
            "steps": steps,
            "batch_size": 4,
            "group_size": 2,
            "max_staleness": MAX_STALENESS,
            "data": {"source": "addition", "eval_size": 0},
            "sampling": {"max_new_tokens": 24},
            "reward": {"functions": ["addition"]},
            "generator": {"count": 2, "dtype": "float32", "kv_cache_gib": 0.1},
            "trainer": {"ranks": 2, "dtype": "float32", "checkpoint_every": 20},
            "master": {"drain_seconds": 20},
            "cluster": {
                "device": "cpu",
                "nodes": {"cpu": {"count": 4, "devices": 1}},
                "queue": "common",
                "environment": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                **cluster,
            },
        }

    def areal(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "areal", *words]
        return subprocess.run(
            command, cwd=ROOT, env=self.slurm.environment, capture_output=True, text=True, timeout=240
        )

    def launch(self, *options: str) -> str:
        """The job."""
        launched = self.areal("launch", "slurm", str(self.file), *options)
        assert launched.returncode == 0, launched.stderr
        job = ClusterJob.of(self.folder)
        assert job
        return job.name

    def trains(self, steps: int = 5) -> None:
        """Wait until the run has trained some steps more."""
        goal = steps_trained(self.folder) + steps
        until(lambda: steps_trained(self.folder) >= goal)

    def start_again(self) -> None:
        """Have the requeued job start soon. Slurm puts it off for two minutes, at some time after it is requeued, and
        kills a job that starts at once."""
        job = ClusterJob.of(self.folder)

        def has_started() -> bool:
            state, start = self.slurm.job("%T %S", job.name).split()
            if state == "PENDING" and start > f"{datetime.now() + timedelta(seconds=10):%FT%T}":
                self.slurm.call("scontrol", "update", f"jobid={job.name}", "starttime=now+5seconds")
            return state == "RUNNING"

        until(lambda: self.slurm.job("%T", job.name) == "PENDING")
        until(has_started)

    def stop(self) -> None:
        assert f"slurm {ClusterJob.of(self.folder).name}" in self.areal("ps", "--runs", str(self.folder.parent)).stdout
        stopped = self.areal("stop", str(self.folder))
        assert stopped.returncode == 0, stopped.stderr
        summary = read_summary(self.folder)
        assert [*self.folder.glob(f"checkpoints/*{summary['steps']}")]
        self.check_record()

    @property
    def log(self) -> str:
        return (self.folder / "launch" / "job.log").read_text()

    def check_record(self) -> None:
        """No step is missing, and none was trained with older samples than the bound allows."""
        steps = [*metrics_of(self.folder)]
        assert [step["step"] for step in steps] == list(itertools.islice(itertools.count(1), len(steps)))
        assert max(step["staleness_max"] for step in steps) <= MAX_STALENESS


def test_a_run_on_four_nodes_reaches_its_end(slurm, tmp_path, tiny_model):
    run = LaunchedRun(slurm, tmp_path, tiny_model, 8)
    job = run.launch("--follow")
    assert slurm.job("%T", job) in ("", "COMPLETED", "COMPLETING")
    assert read_summary(run.folder)["ok"]
    run.check_record()
    again = run.areal("launch", "slurm", str(run.file))
    assert again.returncode == 2 and "is complete" in again.stderr


def test_a_killed_role_a_lost_node_that_generates_and_preemption_cost_a_run_only_time(slurm, tmp_path, tiny_model):
    run = LaunchedRun(slurm, tmp_path, tiny_model, 100_000)
    job = run.launch()
    run.trains()
    slurm.processes("n2", "--role generator")[-1].kill()
    run.trains()
    slurm.lose("n3")
    until(lambda: "node n3 is lost" in run.log)
    run.trains(20)
    assert slurm.job("%T", job) == "RUNNING" and "requeued" not in run.log
    slurm.bring_back("n3")
    slurm.call("sbatch", "--partition=urgent", "--nodes=4", "--output=/dev/null", "--wrap=true")
    until(lambda: "the job is requeued" in run.log)
    summary = read_summary(run.folder)
    assert summary["reason"].startswith("told to stop") and [*run.folder.glob(f"checkpoints/*{summary['steps']}")]
    run.start_again()
    run.trains()
    run.stop()


def test_before_its_time_limit_a_run_saves_a_checkpoint_and_goes_on(slurm, tmp_path, tiny_model):
    run = LaunchedRun(slurm, tmp_path, tiny_model, 100_000)
    job = run.launch()
    run.trains()
    slurm.call("scontrol", "update", f"jobid={job}", "timelimit=2")  # the warning comes 80 s before that
    until(lambda: "the job is requeued" in run.log)
    summary = read_summary(run.folder)
    assert summary["reason"].startswith("told to stop") and [*run.folder.glob(f"checkpoints/*{summary['steps']}")]
    slurm.call("scontrol", "update", f"jobid={job}", "timelimit=unlimited")
    run.start_again()
    run.trains()
    run.stop()


def test_a_run_that_has_lost_a_node_that_trains_is_requeued_and_goes_on(slurm, tmp_path, tiny_model):
    run = LaunchedRun(slurm, tmp_path, tiny_model, 100_000)
    run.launch()
    run.trains()
    slurm.lose("n1")
    until(lambda: "the nodes that are left have no trainer" in run.log)
    slurm.bring_back("n1")
    run.start_again()
    run.trains()
    run.stop()


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ({"queue": "nosuch"}, "there is no such partition: correct cluster.queue"),
        ({"nodes": {"cpu": {"count": 9, "devices": 1}}}, "lower cluster.nodes or cluster.time"),
        ({"device": "gpu"}, "the nodes have no such GPUs"),
        ({"image": "nowhere.sif"}, "There is no image nowhere.sif"),
    ],
)
def test_what_slurm_refuses_is_told_and_leaves_no_folder(slurm, tmp_path, tiny_model, cluster, sentence):
    run = LaunchedRun(slurm, tmp_path, tiny_model, 8, **cluster)
    refused = run.areal("launch", "slurm", str(run.file))
    assert refused.returncode == 2 and sentence in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert not run.folder.exists() and not slurm.call("squeue", "--noheader")
