"""The jobs of launched runs: `job.json` in RUN_FOLDER/launch names the run's target, and the job there."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from areal.base import extensions
from areal.base.errors import UserError
from areal.base.text import shown
from areal.config import Config, load_config
from areal.extensions.launch.master import CONFIG
from areal.extensions.launch.targets import Target
from areal.storage.disk import replace
from areal.storage.run_folder import read_summary

FOLDER, FILE = "launch", "job.json"
LOOK_SECONDS = 1.0
# Seconds for the end of a job beyond `master.drain_seconds`.
STOP_SECONDS = 120.0


class ClusterJob(NamedTuple):
    """The job of a launched run. folder: the run's folder. target: a target's name. name: the target's job name."""

    folder: Path
    target: str
    name: str

    @classmethod
    def of(cls, folder: Path) -> "ClusterJob | None":
        """Return the job of the run in a folder, or None if the run was not launched."""
        try:
            values = json.loads((folder / FOLDER / FILE).read_text())
            return cls(folder, values["target"], values["job"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self) -> None:
        replace(self.folder / FOLDER / FILE, json.dumps({"target": self.target, "job": self.name}) + "\n")

    @property
    def owner(self) -> Target:
        return cast(Target, extensions.find("launch_target", self.target)())

    @property
    def status(self) -> str:
        """The scheduler's words for the job's state; empty after the job's end."""
        return self.owner.status(self.name)

    def __str__(self) -> str:
        return f"{self.target} {self.name}"


def jobs_in(run_dir: Path) -> Iterator[tuple[Path, str, str]]:
    """For `areal ps`: yield run folder, job and state of the unfinished launched runs in a folder."""
    for file in sorted(run_dir.glob(f"*/{FOLDER}/{FILE}")):
        if job := ClusterJob.of(file.parents[1]):
            try:
                status = job.status
            except UserError as error:
                status = str(error)
            if status:
                yield job.folder, str(job), status


def stop(folder: Path) -> int | None:
    """For `areal stop`: stop the launched run in a folder. Returns the exit status, or None if the run has no job."""
    if not (job := ClusterJob.of(folder.resolve())) or not job.status:
        return None
    print(f"The job {job} is told to stop; a step in progress ends first.", file=sys.stderr, flush=True)
    job.owner.stop(job.name, job.folder / FOLDER)
    config: Config = load_config(job.folder / FOLDER / CONFIG)
    until = time.monotonic() + config.master.drain_seconds + STOP_SECONDS
    while (status := job.status) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    if status:
        print(shown(f"It was told to stop, and goes on: {status}."), file=sys.stderr)
        return 1
    print(f"The job {job} has ended: `areal launch` with the same configuration goes on with the run.")
    return 0


def follow(job: ClusterJob, target: Target) -> int:
    """Wait for the end of a job. Returns 0 if the run has reached its end, else 1."""
    while target.status(job.name):
        time.sleep(LOOK_SECONDS)
    summary = read_summary(job.folder)
    reason = summary["reason"] if summary else "it left no summary, so its output says why"
    print(shown(f"The job {job} has ended: {reason}."))
    return 0 if summary and summary["ok"] else 1
