"""The target `slurm`: a batch job that holds all nodes at once, and starts each role on its node by srun.

`slurm.sh.jinja` is the job: the nodes meet (`gang.py`), then the roles start, and start again when they die. The job
goes on without a lost node that only generated (`--no-kill`). The job is requeued after the loss of a training node,
before its time limit, and when it is preempted; then the run resumes from its last checkpoint.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.extensions.launch.placement import Placement
from areal.extensions.launch.scheduler_program import advice_on, call
from areal.extensions.launch.scripts import render, values_of
from areal.extensions.launch.targets import Launch
from areal.storage.disk import replace

SCRIPT, STOP = "slurm.sh", "stop"
# Seconds between looks for lost nodes, and seconds before the time limit beyond `master.drain_seconds`.
LOOK_SECONDS, MARGIN_SECONDS = 10, 60
COMMAND_SECONDS = 60.0
# Words of sbatch, and advice on them.
REFUSALS = {
    r"[Ii]nvalid partition": "there is no such partition: correct cluster.queue (sinfo lists the partitions)",
    r"not permitted|[Pp]ermission denied|access/permission|[Ii]nvalid account": "this user may not submit there: "
    "correct cluster.queue, or add --account and --qos to cluster.options",
    r"generic resource|gres": "the nodes have no such GPUs: correct devices in cluster.nodes, or cluster.device",
    r"[Nn]ode count|node configuration|Requested nodes": "the partition has no such nodes: correct cluster.nodes",
    r"time limit": "the partition does not allow that time: lower cluster.time",
    r"[Uu]nable to contact|[Cc]onnection refused": "no controller of Slurm answers: try again, or ask who keeps it",
}


class Slurm:
    def check(self, launch: Launch) -> None:
        if len(launch.cluster.nodes) > 1:
            raise UserError("A job of Slurm has nodes of one kind: give cluster.nodes one kind.")
        image = launch.cluster.image
        if image and image.endswith(".sif") and not Path(image).is_file():
            raise UserError(f"There is no image {image} (cluster.image): build it by apptainer build, or correct it.")

    def render(self, launch: Launch) -> dict[str, str]:
        return {SCRIPT: render(f"{SCRIPT}.jinja", **_values(launch))}

    def submit(self, launch: Launch) -> str:
        (launch.folder / STOP).unlink(missing_ok=True)
        answer = _slurm("sbatch", "--parsable", str(launch.folder / SCRIPT))
        job = answer.partition(";")[0].strip()
        reason = _slurm("squeue", "--noheader", f"--jobs={job}", "--format=%r").strip()
        if sentence := _never(reason):
            _slurm("scancel", job)
            raise UserError(f"Slurm would never start the job ({reason}): {sentence}.")
        return job

    def status(self, job: str) -> str:
        try:
            return _slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T %N %r").strip().removesuffix(" None")
        except UserError as error:
            if "Invalid job id" in str(error):
                return ""
            raise

    def logs(self, launch: Launch, job: str) -> str:
        return f"tail -F {launch.config.folder}/launch/job.log {launch.config.folder}/launch/output/*"

    def stop(self, job: str, folder: Path) -> None:
        replace(folder / STOP, "")
        if self.status(job).startswith("RUNNING"):
            _slurm("scancel", "--batch", "--signal=USR1", job)  # the script stops the run in order
        else:
            _slurm("scancel", job)


def _slurm(*command: str) -> str:
    """Return the output of a program of Slurm. Raises UserError."""
    result = call(
        *command,
        seconds=COMMAND_SECONDS,
        missing=f"There is no {command[0]} here: call areal on a node of Slurm's.",
        slow=f"{command[0]} did not answer within {COMMAND_SECONDS:g} s: ask who keeps Slurm.",
    )
    if result.returncode:
        words = " ".join(result.stderr.replace(f"{command[0]}: error: ", "").split()).rstrip(".")
        advice = advice_on(words, REFUSALS, "correct the section cluster")
        raise UserError(f"Slurm refuses it ({words}): {advice}.")
    return result.stdout


def _never(reason: str) -> str:
    """Return advice on a reason for which a job would wait for ever; empty for any other reason."""
    if reason in ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"):
        return "lower cluster.nodes or cluster.time, or choose another cluster.queue"
    if reason.startswith(("Invalid", "AccountNotAllowed", "QOSNotAllowed")):
        return "add an --account and --qos that you may use to cluster.options"
    return ""


def _values(launch: Launch) -> dict[str, Any]:
    """Return the values for the template."""
    cluster, placement = launch.cluster, launch.placement
    python = "python" if cluster.image else shlex.quote(sys.executable)
    options = [f"--partition={cluster.queue}"] if cluster.queue else []
    options += [f"--time={cluster.time}"] if cluster.time else []
    return values_of(launch, python, shield=True) | {
        "name": f"areal-{launch.config.name}",
        "nodes": len(placement.nodes),
        "gpus": placement.nodes[0].devices if cluster.device == "gpu" else 0,
        "warning": int(launch.config.master.drain_seconds) + MARGIN_SECONDS,
        "project": launch.project,
        "folder": launch.folder,
        "options": [*options, *cluster.options],
        "keys": launch.keys,
        "environment": launch.environment,
        "setup": cluster.setup or "",
        "python": python,
        "srun": _pyxis(launch),
        "container": _apptainer(launch),
        "training": " ".join(str(process.node) for process in placement.of("trainer")),
        "places": _places(placement),
        "look": LOOK_SECONDS,
    }


def _places(placement: Placement) -> str:
    """Return the nodes of each role, as the values of a shell array."""
    roles: dict[str, list[str]] = {}
    for process in placement.processes:
        roles.setdefault(process.name, []).append(f"{process.node}")
    return " ".join(f'[{role}]="{" ".join(dict.fromkeys(nodes))}"' for role, nodes in roles.items())


def _mounts(launch: Launch) -> list[str]:
    return [*dict.fromkeys([str(launch.project), str(launch.run_folder.parent), *launch.cluster.mounts])]


def _apptainer(launch: Launch) -> str:
    image = launch.cluster.image or ""
    if not image.endswith(".sif") and "://" not in image:
        return ""
    gpus = "--nv " if launch.cluster.device == "gpu" else ""
    return f"apptainer exec {gpus}--bind {shlex.quote(','.join(_mounts(launch)))} {shlex.quote(image)}"


def _pyxis(launch: Launch) -> str:
    image = launch.cluster.image
    if not image or _apptainer(launch):
        return ""
    mounts = ",".join(f"{folder}:{folder}" for folder in _mounts(launch))
    return f"--container-image={shlex.quote(image)} --container-mounts={shlex.quote(mounts)} --no-container-mount-home"
