"""What lies in configs/deploy: every command in it is one that run.py or `python -m areal` takes, and the scripts for
several nodes start everything, once each, on devices of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import yaml

from actors.start.run_command import parse
from areal.__main__ import command_line
from areal.base.processes import KEYS
from areal.config import load_config
from areal.extensions.launch.master import words_of

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "configs" / "deploy"
MASTER = "areal.extensions.launch.master"


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parsed arguments of a command that starts a part of a run. Fails where it would be refused."""
    words = [re.sub(r"\$[({]?\w+[)}]?", "0", word.replace("${MASTER}", "tcp://h:1")) for word in words]
    if words[:2] == ["sh", "-c"]:
        words = shlex.split(words[2])
    if "areal" in words:
        return command_line().parse_args(words[words.index("areal") + 1 :])
    if MASTER in words:
        folder, address, run = words[words.index(MASTER) + 1 :]
        words = ["run.py", *words_of(Path(folder), address, Path(run))]
    if "torchrun" in words[0]:
        words = words[words.index("--") + 1 :]
    start = next(n for n, word in enumerate(words) if word.endswith("run.py"))
    monkeypatch.setattr(sys, "argv", words[start:])
    arguments = parse()
    if arguments.role == ["master"]:
        load_config(ROOT / arguments.config, arguments.overrides)
        assert any(override.startswith("master.address=tcp://") for override in arguments.overrides)
    else:
        assert arguments.role and arguments.master.startswith("tcp://") and not arguments.overrides
    return arguments


def kubernetes_pods() -> Iterator[tuple[int, dict]]:
    """How many there are of each, and what they are."""
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        if document["kind"] == "Job":
            yield document["spec"].get("completions", 1), document["spec"]["template"]["spec"]


def compose_services() -> dict[str, dict]:
    return yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command in the YAML files and units, with where it is from."""
    for name, service in compose_services().items():
        if name == "keys":
            continue
        yield f"compose-{name}", shlex.split(service["command"])
        if "healthcheck" in service:
            yield f"compose-{name}-health", service["healthcheck"]["test"][1:]
    for _, pod in kubernetes_pods():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            name = f"kubernetes-{pod['containers'][0]['name']}-{container['name']}"
            yield name, [*container["command"], *container.get("args", [])]
            for probe in ("startupProbe", "livenessProbe"):
                if probe in container:
                    yield f"{name}-{probe}", container[probe]["exec"]["command"]
    for unit in sorted((DEPLOY / "systemd").iterdir()):
        for line in re.findall(
            r"^Exec\w+=(.*)$", unit.read_text().replace("--role %i", "--role trainer"), re.MULTILINE
        ):
            yield f"systemd-{unit.stem}", shlex.split(line)


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_a_command_is_one_that_the_programs_take(words, monkeypatch):
    check_command(words, monkeypatch)


def test_in_kubernetes_the_devices_are_as_many_as_the_commands_want():
    devices: Counter[str] = Counter()
    for count, pod in kubernetes_pods():
        (container,) = pod["containers"]
        limit = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        devices[container["name"]] += count * limit
        if container["name"] == "trainer":
            assert container["command"][container["command"].index("--nproc-per-node") + 1] == str(limit)
        if container["name"] == "generator":
            assert limit == load_config(DEPLOY / "run.yaml").generator.tensor_parallel
    assert (devices["generator"], devices["trainer"], devices.total()) == (12, 4, 16)


def test_in_kubernetes_everybody_has_the_keys():
    for _, pod in kubernetes_pods():
        (secret,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys")
        assert secret == {"secretName": "areal-keys", "defaultMode": 0o400}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {"name": "keys", "mountPath": "/keys"} in container["volumeMounts"]
            assert {"name": KEYS, "value": "/keys"} in container["env"]


def kubernetes_security() -> Iterator[tuple[str, dict, list[dict]]]:
    """The name of each role's container, the security context of its pod, and those of its containers."""
    for _, pod in kubernetes_pods():
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        yield containers[0]["name"], pod["securityContext"], [container["securityContext"] for container in containers]


def test_in_kubernetes_no_pod_is_root_or_gains_rights_or_speaks_to_the_api_server():
    for _, pod, containers in kubernetes_security():
        assert pod["runAsNonRoot"] and pod["runAsUser"] == pod["fsGroup"] == 1000
        for container in containers:
            assert container["allowPrivilegeEscalation"] is False and container["capabilities"] == {"drop": ["ALL"]}
    assert all(pod["automountServiceAccountToken"] is False for _, pod in kubernetes_pods())


def test_in_kubernetes_only_rewards_are_allowed_what_the_sandbox_needs_and_then_in_a_user_namespace():
    relaxed = {name for name, pod, _ in kubernetes_security() if pod["seccompProfile"]["type"] != "RuntimeDefault"}
    relaxed |= {
        name for name, _, containers in kubernetes_security() if any("procMount" in context for context in containers)
    }
    assert relaxed == {"reward"}
    (reward,) = [pod for _, pod in kubernetes_pods() if pod["containers"][0]["name"] == "reward"]
    assert reward["hostUsers"] is False
    # A volume of a network file system cannot be mounted in a user namespace.
    assert not any("persistentVolumeClaim" in volume for volume in reward["volumes"])


def test_in_kubernetes_pods_hear_only_pods_of_the_run_and_rewards_reach_nothing_else():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert all(
        document["spec"]["template"]["metadata"]["labels"]["app"] == "areal"
        for document in documents
        if document["kind"] == "Job"
    )
    run, downloads = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    peers = [{"podSelector": {"matchLabels": {"app": "areal"}}}]
    assert run["podSelector"] == peers[0]["podSelector"] and run["policyTypes"] == ["Ingress", "Egress"]
    assert run["ingress"] == [{"from": peers}]
    assert run["egress"][0] == {"to": peers} and {port["port"] for port in run["egress"][1]["ports"]} == {53}
    assert {"key": "role", "operator": "NotIn", "values": ["reward"]} in downloads["podSelector"]["matchExpressions"]
    assert downloads["policyTypes"] == ["Egress"]


def test_in_compose_everybody_has_the_keys_and_nobody_the_rights_of_the_host():
    services = compose_services()
    keys = services.pop("keys")
    assert keys["volumes"] == ["keys:/keys"] and "python -m areal keys /keys" in keys["command"]
    assert services["master"]["depends_on"] == {"keys": {"condition": "service_completed_successfully"}}
    for name, service in services.items():
        assert service["environment"][KEYS] == "/keys" and "keys:/keys:ro" in service["volumes"]
        assert "ipc" not in service and "privileged" not in service and service["cap_drop"] == ["ALL"]
        # The sandbox needs these; the roles in `others` use it.
        extra = ["seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"] if name == "others" else []
        assert service["security_opt"] == ["no-new-privileges:true", *extra]


def test_the_image_runs_as_a_user_who_owns_what_is_written_and_nothing_else():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    assert re.findall(r"^USER (.*)$", lines, re.MULTILINE) == ["1000:1000"]
    owned = re.findall(r"install -d -o areal -g areal -m 700 (.*)", lines)[0].split()
    mounts = {volume.split(":")[1] for service in compose_services().values() for volume in service["volumes"]}
    mounts |= {
        mount["mountPath"]
        for _, pod in kubernetes_pods()
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] != "shm"
    }
    assert mounts <= {str(Path("/areal") / path) for path in owned}  # an empty volume takes the owner of the folder


def test_in_compose_no_two_services_share_a_device():
    services = compose_services()
    groups = [
        device["device_ids"]
        for service in services.values()
        for device in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    ]
    assert sorted(sum(groups, [])) == [str(n) for n in range(8)]


# A stand-in for python and torchrun: notes how it was called, then does what a file of its own name says.
STAND_IN = """\
#!/bin/bash
line="${NODE:-}|${CUDA_VISIBLE_DEVICES-}|$(basename "$0") $*"
echo "$line" >> "$CALLS"
for behaviour in "$CALLS".*; do
  [[ -e $behaviour && " $* " == *" ${behaviour##*.} "* ]] && . "$behaviour"
done
exit 0
"""


class Nodes:
    """A copy of configs/deploy whose programs are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        shutil.copytree(DEPLOY, folder / "configs" / "deploy")
        for name, text in {"python": STAND_IN, "torchrun": STAND_IN, "sleep": "#!/bin/sh\n"}.items():
            program = folder / ".venv" / "bin" / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(text)
            program.chmod(0o755)

    def behave(self, word: str, script: str) -> None:
        """What a stand-in does that is called with this word."""
        Path(f"{self.calls}.{word}").write_text(script)

    def start(self, script: str, output: int | None = None, **environment: str) -> int:
        """The exit code of a script in configs/deploy."""
        path = f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}"
        variables = {"PATH": path, "CALLS": str(self.calls)}
        command = ["bash", f"configs/deploy/{script}"]
        env = variables | environment
        return subprocess.run(command, cwd=self.folder, env=env, stdout=output, timeout=120).returncode

    def called(self) -> list[tuple[str, str, list[str]]]:
        """Node, visible devices and words of each command that starts a part of the run."""
        lines = [line.split("|") for line in self.calls.read_text().splitlines()]
        return [(node, devices, shlex.split(call)) for node, devices, call in lines if "-m areal " not in call]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_a_trainer_may_take_several_nodes(nodes):
    for node in "012":
        assert nodes.start("node.sh", NODE=node, NODES="3", HEAD="h", GPUS="4", TRAINING_GPUS="8") == 0
    ranks = [(node, words[1:5]) for node, _, words in nodes.called() if words[0] == "torchrun"]
    assert sorted(ranks) == [(node, ["--nnodes", "2", "--nproc-per-node", "4"]) for node in "01"]
    generators = [(node, devices) for node, devices, words in nodes.called() if "generator" in words]
    assert sorted(generators) == [("2", "0,1"), ("2", "2,3")]


def test_scorers_have_devices_of_their_own_before_the_generators(nodes):
    assert nodes.start("node.sh", NODE="1", NODES="2", HEAD="h", GPUS="4", TRAINING_GPUS="4", SCORERS="wise liked") == 0
    assert not [words for _, _, words in nodes.called() if "generator" in words]
    scorers = [(devices, words[-3]) for _, devices, words in nodes.called() if "scorer" in words]
    assert sorted(scorers) == [("0,1", "wise"), ("2,3", "liked")]


def test_part_of_a_second_node_is_refused(nodes, capfd):
    assert nodes.start("node.sh", NODE="0", NODES="3", HEAD="h", GPUS="4", TRAINING_GPUS="6") == 2
    assert "use at most the 4 of one node, or whole nodes" in capfd.readouterr().err


def test_what_dies_is_started_again_until_it_ends_well(nodes):
    nodes.behave(
        "generator", '(($(grep -c "|0,1|" "$CALLS") < 6)) && exit 1\n'
    )  # each time beside a wait for the master
    assert nodes.start("node.sh", NODE="1", NODES="2", HEAD="h", GPUS="2", TRAINING_GPUS="2", TENSOR_PARALLEL="2") == 0
    assert sum("generator" in words for _, _, words in nodes.called()) == 3


def test_what_a_killed_script_leaves_behind_starts_nothing_again(nodes):
    nodes.behave("reward", "kill -9 $(ps -o ppid= $PPID) 2>/dev/null; exit 1\n")  # its script, at each start
    # Whatever is left holds the pipe: the call returns once all of it has ended.
    assert nodes.start("node.sh", NODE="1", NODES="2", HEAD="h", GPUS="0", TRAINING_GPUS="0", output=PIPE) == -9
    assert sum("reward" in words for _, _, words in nodes.called()) == 1


def test_a_run_that_failed_ends_its_node_with_its_exit_code(nodes):
    nodes.behave("master", "exit 1\n")
    nodes.behave("health", "exec /bin/sleep 1000\n")
    assert nodes.start("node.sh", NODE="0", NODES="1", HEAD="h") == 1


def test_a_run_that_has_begun_is_resumed(nodes, monkeypatch):
    begun = nodes.folder / "runs" / "mine"
    begun.mkdir(parents=True)
    (begun / "journal.db").touch()
    assert nodes.start("node.sh", NODE="0", NODES="1", HEAD="h", RUN="runs/mine") == 0
    (master,) = [words for _, _, words in nodes.called() if "master" in words]
    arguments = check_command(master, monkeypatch)
    assert arguments.resume == Path("runs/mine")
    assert {"run_dir=runs", "name=mine"} <= set(arguments.overrides)


def test_skypilot_starts_the_same_script(nodes, monkeypatch):
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    (nodes.folder / "configs" / "deploy" / "task.sh").write_text(task["run"])
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    for node in "01":
        assert nodes.start("task.sh", SKYPILOT_NODE_RANK=node, **task["envs"], **sky) == 0
    parsed = [check_command(words, monkeypatch) for _, _, words in nodes.called()]
    assert Counter(role for arguments in parsed for role in arguments.role)["generator"] == 6
    (master,) = [arguments for arguments in parsed if arguments.role == ["master"]]
    assert {"master.address=tcp://10.0.0.1:5555", "weights.transport=stream"} <= set(master.overrides)
