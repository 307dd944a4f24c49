"""The target `kubernetes`: a JobSet, with a replicated job for each role, and the needs of its pods.

JobSet gives the pods names under a headless service. The end of the master's job completes the set. A job starts a
killed pod again; if a job gives up, JobSet makes the whole set anew, and the run resumes. With cluster.queue, Kueue
admits all pods at once, or none.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from areal.base.errors import UserError
from areal.extensions.launch.master import CONFIG
from areal.extensions.launch.placement import Process
from areal.extensions.launch.scheduler_program import advice_on, call
from areal.extensions.launch.targets import Launch

MANIFEST = "jobset.yaml"
RUNS, KEYS, FILES = "/areal/runs", "/keys", "/launch"
COMMAND_SECONDS = 120.0
# Seconds for the end of a pod beyond `master.drain_seconds`.
GRACE_SECONDS = 15
RESTARTS, PODS_RESTARTED = 20, 100
GPU, QUEUE = "nvidia.com/gpu", "kueue.x-k8s.io/queue-name"
ANY = {"cpu": "2", "memory": "8Gi"}
REFUSALS = {
    "no matches for kind": "the cluster has no JobSet: install it (jobset.sigs.k8s.io)",
    "orbidden": "this user may not create that there: ask for the right, or choose another namespace",
    "refused|no such host|couldn't get|Unable to": "no cluster answers: choose one (kubectl config use-context)",
    "denied the request|is invalid": "correct the section cluster",
}


class _Plain(yaml.SafeDumper):
    """Writes repeated values in full, without YAML's references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class Kubernetes:
    def check(self, launch: Launch) -> None:
        if not launch.cluster.image:
            raise UserError("Kubernetes starts containers: set cluster.image (configs/deploy/Dockerfile makes one).")
        for name, processes in _jobs(launch):
            if len({launch.placement.nodes[process.node].kind for process in processes}) > 1:
                raise UserError(
                    f"The {name}s are on nodes of several kinds, and one job has pods of one kind: set roles of the "
                    f"kinds in cluster.nodes."
                )

    def render(self, launch: Launch) -> dict[str, str]:
        return {MANIFEST: yaml.dump_all(documents(launch), Dumper=_Plain, sort_keys=False, width=120)}

    def submit(self, launch: Launch) -> str:
        name, folder = name_of(launch), launch.folder
        files = [f"--from-file={folder / CONFIG}", f"--from-file={launch.keys / 'keys.json'}"]
        secret = _kubectl("create", "secret", "generic", name, *files, "--dry-run=client", "--output=yaml")
        _kubectl("apply", "--filename=-", text=secret)
        try:
            _kubectl("apply", f"--filename={folder / MANIFEST}")
        except UserError:
            self._remove(name)
            raise
        return name

    def status(self, job: str) -> str:
        text = _kubectl("get", "jobset", job, "--ignore-not-found", "--output=json")
        status: dict[str, Any] = json.loads(text).get("status", {}) if text else {"terminalState": "gone"}
        suspended = any(c["type"] == "Suspended" and c["status"] == "True" for c in status.get("conditions", []))
        if status.get("terminalState"):
            return ""
        return "suspended, until the queue admits it" if suspended else f"started, {status.get('restarts', 0)} restarts"

    def logs(self, launch: Launch, job: str) -> str:
        return f"kubectl logs --follow --prefix --max-log-requests=100 -l jobset.sigs.k8s.io/jobset-name={job}"

    def stop(self, job: str, folder: Path) -> None:
        self._remove(job)  # the pods get a SIGTERM, which stops the run in order

    def _remove(self, job: str) -> None:
        _kubectl("delete", "jobset", job, "--ignore-not-found", "--wait=true")
        _kubectl("delete", "secret", job, "--ignore-not-found")


def _kubectl(*words: str, text: str | None = None) -> str:
    """Return the output of kubectl. text: its input. Raises UserError."""
    result = call(
        "kubectl",
        *words,
        seconds=COMMAND_SECONDS,
        missing="There is no kubectl here: install it, and choose a cluster.",
        slow=f"kubectl {words[0]} took more than {COMMAND_SECONDS:g} s: look whether the cluster answers.",
        text=text,
    )
    if result.returncode:
        reason = " ".join(result.stderr.split()).rstrip(".")
        advice = advice_on(reason, REFUSALS, "look at kubectl's words")
        raise UserError(f"Kubernetes refuses it ({reason:.300}): {advice}.")
    return result.stdout


def name_of(launch: Launch) -> str:
    """Return the name of the set: the run's name in Kubernetes' letters, short enough for the names of pods."""
    return f"areal-{re.sub('[^a-z0-9]+', '-', launch.config.name.lower())[:30]}".strip("-")


def documents(launch: Launch) -> Iterator[dict[str, Any]]:
    """Yield all documents to apply, except the secret with the configuration and the keys."""
    name, selected = name_of(launch), {"matchLabels": {"areal": name_of(launch)}}
    network = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    peers = [{"podSelector": selected}]
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    yield network | {  # the pods of the run talk to each other and ask for names, nothing else
        "metadata": {"name": name},
        "spec": {
            "podSelector": selected,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers}],
            "egress": [{"to": peers}, {"ports": names}],
        },
    }
    trusted = [{"key": "areal", "operator": "In", "values": [name]}]
    trusted += [{"key": "role", "operator": "NotIn", "values": ["reward"]}]
    yield network | {  # downloads of model and data
        "metadata": {"name": f"{name}-downloads"},
        "spec": {
            "podSelector": {"matchExpressions": trusted},
            "policyTypes": ["Egress"],
            "egress": [{"ports": [{"protocol": "TCP", "port": 443}]}],
        },
    }
    storage = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": launch.cluster.storage}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": launch.cluster.volume}}
    yield claim | {"spec": storage}
    yield _job_set(launch)


def _job_set(launch: Launch) -> dict[str, Any]:
    queue = {"labels": {QUEUE: launch.cluster.queue}} if launch.cluster.queue else {}
    jobs = [_job(launch, "master", []), *(_job(launch, *job) for job in _jobs(launch))]
    # The exit codes 1 and 2 of the master: the run failed, or the user has to change something.
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name_of(launch)} | queue,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name_of(launch), "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["master"]},
            "failurePolicy": {"maxRestarts": RESTARTS, "rules": [final]},
            "replicatedJobs": jobs,
        },
    }


def _jobs(launch: Launch) -> Iterator[tuple[str, list[Process]]]:
    """Yield the jobs besides the master's: the name, and the process of each pod."""
    jobs: dict[str, list[Process]] = {}
    for process in launch.placement.processes:
        name = process.name.replace("_", "-").lower()
        jobs.setdefault(name, []).append(process)
    yield from jobs.items()


def _job(launch: Launch, name: str, processes: list[Process]) -> dict[str, Any]:
    count = max(1, len(processes))
    job: dict[str, Any] = {"completionMode": "Indexed", "completions": count, "parallelism": count}
    job["backoffLimit"] = PODS_RESTARTED
    spec = _pod(launch, name, processes)
    if name == "master":
        codes = {"containerName": name, "operator": "In", "values": [1, 2]}
        job["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
        spec["restartPolicy"] = "Never"
    labels = {"areal": name_of(launch), "role": processes[0].role if processes else name}
    job["template"] = {"metadata": {"labels": labels}, "spec": spec}
    return {"name": name, "replicas": 1, "template": {"spec": job}}


def _pod(launch: Launch, name: str, processes: list[Process]) -> dict[str, Any]:
    """Return the pods of a job. Pods with the sandbox are in a user namespace (Kubernetes 1.33, Linux 6.3), where
    network file systems cannot be mounted; all other pods meet the Pod Security Standard `restricted`."""
    kind = launch.placement.nodes[processes[0].node if processes else 0].kind
    sandbox = _has_sandbox(launch, processes[0].role if processes else name)
    mounts: dict[str, Any] = {KEYS: {"secret": _secret(launch, "keys.json")}}
    if name == "master":
        mounts[FILES] = {"secret": _secret(launch, CONFIG)}
    if not sandbox:
        mounts[RUNS] = {"persistentVolumeClaim": {"claimName": launch.cluster.volume}}
    if processes and processes[0].devices:
        mounts["/dev/shm"] = {"emptyDir": {"medium": "Memory"}}
    volumes = [{"name": path.strip("/").replace("/", "-")} | volume for path, volume in mounts.items()]
    seen = [{"name": volume["name"], "mountPath": path} for volume, path in zip(volumes, mounts, strict=True)]
    user: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
    user["seccompProfile"] = {"type": "Unconfined" if sandbox else "RuntimeDefault"}
    select = launch.cluster.nodes[kind].select
    return {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "securityContext": user,
        "terminationGracePeriodSeconds": int(launch.config.master.drain_seconds) + GRACE_SECONDS,
        **({"hostUsers": False} if sandbox else {}),
        **({"nodeSelector": select} if select else {}),
        "containers": [_container(launch, name, processes, sandbox) | {"volumeMounts": seen}],
        "volumes": volumes,
    }


def _secret(launch: Launch, key: str) -> dict[str, Any]:
    return {"secretName": name_of(launch), "defaultMode": 0o400, "items": [{"key": key, "path": key}]}


def _has_sandbox(launch: Launch, role: str) -> bool:
    """Return whether a role runs programs written by a model."""
    config = launch.config
    runs = {"reward": "code" in config.rewards, "rollout_manager": config.rollout_manager.workflow == "python_tool"}
    return runs.get(role, False)


def _container(launch: Launch, name: str, processes: list[Process], sandbox: bool) -> dict[str, Any]:
    context: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if sandbox:
        context |= {"appArmorProfile": {"type": "Unconfined"}, "procMount": "Unmasked"}
    resources = _resources(launch, processes)
    if launch.cluster.resources.keys() & resources.get("limits", {}).keys():
        context["capabilities"] = {"drop": ["ALL"], "add": ["IPC_LOCK"]}  # RDMA registers memory
    variables: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in launch.environment.items()]
    variables.append({"name": "AREAL_KEYS", "value": KEYS})
    variables.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    set_name = name_of(launch)
    address = f"tcp://{set_name}-master-0-0.{set_name}:{launch.port}"
    words = launch.master(FILES, f"tcp://$(POD_IP):{launch.port}", f"{RUNS}/{launch.config.name}")
    if processes:
        rendezvous = f"{set_name}-trainer-0-0.{set_name}:{launch.cluster.rendezvous_port}"
        words = launch.command(processes[:1], address, rendezvous)
        words += ["--index", "$(JOB_COMPLETION_INDEX)"] if processes[0].role == "generator" else []
    health = ["python", "-m", "areal", "health", "--master", address]
    if name == "master":
        health[-1] = f"tcp://$(POD_IP):{launch.port}"
    probes = _probes(health) if name == "master" else {}
    container = {"name": name, "image": launch.cluster.image, "securityContext": context, "env": variables}
    return container | {"command": ["python", *words], "resources": resources} | probes


def _probes(health: list[str]) -> dict[str, Any]:
    """Return probes of the master, which may first download the model. The master itself watches the roles."""
    probe = {"exec": {"command": ["sh", "-c", " ".join(health).replace("$(POD_IP)", "$POD_IP")]}, "timeoutSeconds": 60}
    return {
        "startupProbe": probe | {"periodSeconds": 10, "failureThreshold": 180},
        "livenessProbe": probe | {"periodSeconds": 30, "failureThreshold": 4},
    }


def _resources(launch: Launch, processes: list[Process]) -> dict[str, Any]:
    """Return a pod's devices. A pod with all devices of a node also gets cluster.resources, such as RDMA."""
    devices = len(processes[0].devices) if processes else 0
    if not devices or launch.cluster.device == "cpu":
        return {"requests": ANY}
    has_node = devices == launch.placement.nodes[processes[0].node].devices
    limits: dict[str, int] = {GPU: devices} | (launch.cluster.resources if has_node else {})
    return {"limits": limits}
