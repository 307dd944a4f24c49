"""What the targets write: every command in it is one that the programs take, and nothing has more rights or fewer
devices than it needs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.start.run_command import parse
from areal.base.errors import UserError
from areal.extensions.launch.kubernetes import Kubernetes
from areal.extensions.launch.launch import plan
from areal.extensions.launch.master import words_of
from areal.extensions.launch.skypilot import SkyPilot
from areal.extensions.launch.slurm import Slurm, _slurm
from areal.extensions.launch.targets import Launch

CONFIG = "configs/deploy/run.yaml"
MASTER = "areal.extensions.launch.master"


def planned(*overrides: str, **cluster: Any) -> Launch:
    return plan(CONFIG, [*overrides, *(f"cluster.{key}={yaml.safe_dump(value)}" for key, value in cluster.items())])


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parsed arguments of a command. Fails where `run.py` would refuse it."""
    if MASTER in words:
        folder, address, *run = words[words.index(MASTER) + 1 :]
        words = words_of(Path(folder), address, Path(*run or ["runs/deploy"]))
    else:
        words = words[words.index("--role") :]
    monkeypatch.setattr(sys, "argv", ["run.py", *(word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in words)])
    return parse()


def jobs(launch: Launch) -> dict[str, Any]:
    """The jobs of a set, by their names."""
    *_, job_set = yaml.safe_load_all(Kubernetes().render(launch)["jobset.yaml"])
    return {job["name"]: job["template"]["spec"] for job in job_set["spec"]["replicatedJobs"]}


@pytest.fixture
def image() -> Launch:
    nodes = {"gpu": {"count": 3, "devices": 8}}
    return planned("trainer.ranks=16", "generator.count=4", "reward.functions=[math,code]", image="i", nodes=nodes)


def test_in_kubernetes_each_role_is_a_job_with_its_devices_and_a_command_that_is_taken(image, monkeypatch):
    pods = {name: (job["completions"], job["template"]["spec"]["containers"][0]) for name, job in jobs(image).items()}
    devices = {
        name: count * c["resources"].get("limits", {}).get("nvidia.com/gpu", 0) for name, (count, c) in pods.items()
    }
    assert devices == {"master": 0, "trainer": 16, "generator": 8, "reward": 0, "rollout-manager": 0, "evaluator": 0}
    for name, (_, container) in pods.items():
        assert check_command(container["command"], monkeypatch).role == [name.replace("-", "_")]
    words = pods["trainer"][1]["command"]
    assert {"--nnodes=2", "--nproc-per-node=8"} < {*words} and words[words.index("--") + 1] == "actors.start"


def test_in_kubernetes_only_what_runs_a_models_code_is_relaxed_and_then_in_a_user_namespace(image):
    for name, job in jobs(image).items():
        pod, relaxed = job["template"]["spec"], name == "reward"
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert (pod["securityContext"]["seccompProfile"]["type"] == "Unconfined") is relaxed
        assert ("procMount" in container["securityContext"]) is relaxed is (pod.get("hostUsers") is False)
        # A volume of a network file system cannot be mounted in a user namespace.
        assert relaxed is not any("persistentVolumeClaim" in volume for volume in pod["volumes"])
        assert {"name": "AREAL_KEYS", "value": "/keys"} in container["env"]


def test_in_kubernetes_pods_hear_only_pods_of_the_run_and_rewards_reach_nothing_else(image):
    run, downloads, *_ = yaml.safe_load_all(Kubernetes().render(image)["jobset.yaml"])
    peers = [{"podSelector": {"matchLabels": {"areal": "areal-deploy"}}}]
    assert run["spec"]["ingress"] == [{"from": peers}] and run["spec"]["egress"][0] == {"to": peers}
    reach = downloads["spec"]["podSelector"]["matchExpressions"]
    assert {"key": "role", "operator": "NotIn", "values": ["reward"]} in reach


def test_rdma_and_the_queue_are_those_of_the_section():
    launch = planned("trainer.ranks=8", "generator.count=4", image="i", queue="team", resources={"rdma/a": 1})
    *_, job_set = yaml.safe_load_all(Kubernetes().render(launch)["jobset.yaml"])
    assert job_set["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    limits = {
        name: job["template"]["spec"]["containers"][0]["resources"].get("limits") for name, job in jobs(launch).items()
    }
    assert limits["trainer"] == {"nvidia.com/gpu": 8, "rdma/a": 1} and limits["generator"] == {"nvidia.com/gpu": 2}


def test_a_script_of_slurm_starts_every_process_on_devices_of_its_own(monkeypatch):
    script = Slurm().render(planned(queue="gpu", options=["--account=me"]))["slurm.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "#SBATCH --gpus-per-node=8" in script and "#SBATCH --account=me" in script
    used, roles = Counter(), Counter()
    for line in (line for line in script.splitlines() if line.startswith('keep "')):
        words = shlex.split(line.removesuffix(" &"))
        roles.update(check_command([word.replace("$address", "tcp://h:1") for word in words], monkeypatch).role)
        visible = next((word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE")), "")
        used.update((words[3], device) for device in visible.split(",") if device)
    assert roles == {"master": 1, "trainer": 1, "generator": 6, "rollout_manager": 1, "reward": 1, "evaluator": 1}
    assert used == {(node, str(device)): 1 for node in "01" for device in range(8)}


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("a.sif", "apptainer exec --nv --bind"),
        ("docker://a", "apptainer exec --nv --bind"),
        ("nvcr.io#a", "--container-image='nvcr.io#a' --container-mounts="),
    ],
)
def test_a_container_of_slurm_is_apptainers_or_pyxis(image, words):
    assert words in Slurm().render(planned(image=image))["slurm.sh"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("sbatch: error: Invalid account or account/partition combination specified", "this user may not submit there"),
        ("sbatch: error: User's group not permitted to use this partition", "this user may not submit there"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "no controller of Slurm answers"),
    ],
)
def test_what_sbatch_says_becomes_one_sentence_with_what_to_do(words, sentence):
    with pytest.raises(UserError, match=sentence) as raised:
        _slurm("sh", "-c", f'echo "{words}" >&2; exit 1')
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("target", "overrides", "sentence"),
    [
        (Kubernetes, [], "set cluster.image"),
        (SkyPilot, [], "set weights.transport=stream"),
        (
            SkyPilot,
            [*["trainer.ranks=16", "cluster.nodes.gpu.count=4", "weights.transport=stream"]],
            "lower trainer.ranks",
        ),
        (Slurm, ["cluster.nodes.cpu={devices: 0}"], "give cluster.nodes one kind"),
    ],
)
def test_what_a_target_cannot_do_is_said_before_anything_is_written(target, overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        target().check(planned(*overrides))


# Notes how it was called, then does what a file of its own name says.
STAND_IN = """\
#!/bin/bash
echo "$SKYPILOT_NODE_RANK|${CUDA_VISIBLE_DEVICES-}|$*" >> "$CALLS"
for behaviour in "$CALLS".*; do
  [[ -e $behaviour && $* == *"${behaviour#"$CALLS".}"* ]] && . "$behaviour"
done
exit 0
"""


class Script:
    """A task of SkyPilot's whose Python is a stand-in."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.folder = folder / "calls", folder
        task = yaml.safe_load(SkyPilot().render(planned("weights.transport=stream"))["skypilot.yaml"])
        (folder / "task.sh").write_text(task["run"])
        (folder / ".areal-launch").mkdir()
        for name, text in {"python": STAND_IN, "sleep": "#!/bin/sh\n"}.items():
            program = folder / ".venv" / "bin" / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(text)
            program.chmod(0o755)

    def behave(self, word: str, script: str) -> None:
        """What the stand-in does that is called with this word."""
        Path(f"{self.calls}.{word}").write_text(script)

    def start(self, node: int) -> int:
        """The script's exit code, once nothing that it started holds its output."""
        variables = {"HOME": str(self.folder), "CALLS": str(self.calls), "SKYPILOT_NODE_RANK": f"{node}"}
        environment = os.environ | variables | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        command, pipe = [shutil.which("bash"), "task.sh"], subprocess.PIPE
        return subprocess.run(command, cwd=self.folder, env=environment, timeout=60, stdout=pipe).returncode

    @property
    def called(self) -> list[list[str]]:
        return [line.split("|") for line in self.calls.read_text().splitlines()]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_a_task_of_skypilot_starts_everything_once_with_the_masters_address(script, monkeypatch):
    assert [script.start(node) for node in (0, 1)] == [0, 0]
    parsed = [check_command(words.split(), monkeypatch) for _, _, words in script.called]
    roles = Counter(role for arguments in parsed for role in arguments.role)
    assert roles == {"master": 1, "trainer": 1, "generator": 6, "rollout_manager": 1, "reward": 1, "evaluator": 1}
    assert {arguments.master for arguments in parsed if arguments.role != ["master"]} == {"tcp://10.0.0.1:5555"}


def test_what_dies_is_started_again_until_it_ends_well(script):
    script.behave("generator", '(($(grep -c "generator" "$CALLS") < 3)) && exit 1\n')
    assert script.start(1) == 0
    assert len(script.called) == 3


# Kills the script at the first start, and ends when the script's loop has another parent.
KILL = """\
(($(grep -c "generator" "$CALLS") > 1)) && exit 0
script=$(ps -o ppid= $PPID)
kill -9 $script
while [[ $(ps -o ppid= $PPID) == "$script" ]]; do :; done
exit 1
"""


def test_what_a_killed_script_leaves_behind_starts_nothing_again(script):
    script.behave("generator", KILL)
    assert script.start(1) == -9
    assert len(script.called) == 1


def test_a_run_that_failed_ends_its_node_with_its_exit_code(script):
    script.behave("launch.master", "exit 1\n")
    script.behave("trainer", "exec /bin/sleep 1000\n")
    assert script.start(0) == 1
