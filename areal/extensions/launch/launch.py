"""The tool `areal launch`: reads the configuration, places the run, and has a target submit it."""

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from areal.base import extensions
from areal.base.command_line import output, typed
from areal.base.errors import UserError
from areal.base.processes import ROOT
from areal.config import Config, load_config, validated
from areal.config.reading import write_yaml
from areal.extensions.launch.cluster import ClusterConfig
from areal.extensions.launch.cluster_jobs import ClusterJob, follow
from areal.extensions.launch.master import CONFIG
from areal.extensions.launch.placement import place
from areal.extensions.launch.targets import Launch, Target
from areal.storage.disk import replace
from areal.storage.record import has_begun
from areal.storage.run_folder import configuration_to_resume

KEYS_SECONDS = 60.0


def launch(options: Namespace) -> int:
    """`areal launch`. Returns the exit status."""
    target: Target = extensions.find("launch_target", options.target)()
    planned = plan(options.config, options.overrides)
    target.check(planned)
    files = target.render(planned)
    console = output(120)
    console.print(planned.placement.table())
    if options.dry_run:
        for name, text in files.items():
            console.print(f"\n--- {name}\n{text}", highlight=False, soft_wrap=True)
        return 0
    job = submit(planned, options.target, target, files)
    run = planned.config.folder
    console.print(f"\nJob {job.name} is submitted ({options.target}): {target.status(job.name)}", highlight=False)
    ways = {"output": target.logs(planned, job.name), "logs of the actors": f"{run}/logs/"}
    ways |= {"state": typed("ps"), "web page": typed(f"dashboard {run}"), "stop": typed(f"stop {run}")}
    for name, way in ways.items():
        console.print(f"  {name:20}{way}", highlight=False, soft_wrap=True)
    return follow(job, target) if options.follow else 0


def plan(file: str, overrides: list[str]) -> Launch:
    """Return the launch of a configuration. Raises UserError."""
    config: Config = load_config(file, overrides)
    if has_begun(config.folder):  # the run goes on: only some keys may change
        configuration_to_resume(config.folder, Path(file), overrides)
    if not config.cluster:
        raise UserError(f"{file} has no section cluster, which says on which nodes the run starts: areal docs deploy.")
    cluster = validated(config.cluster, f"the section cluster of {file}", ClusterConfig)
    return Launch(config, cluster, place(config, cluster), ROOT if (ROOT / "run.py").exists() else Path.cwd())


def submit(planned: Launch, name: str, target: Target, files: dict[str, str]) -> ClusterJob:
    """Write the folder of the launch, and submit it. A failure leaves no new folder. Raises UserError."""
    if (earlier := ClusterJob.of(planned.run_folder)) and (status := earlier.status):
        raise UserError(f"The run in {planned.config.folder} is launched already ({earlier}: {status}): areal stop it.")
    new = [folder for folder in (planned.run_folder, planned.folder) if not folder.exists()]
    try:
        write(planned, files)
        job = ClusterJob(planned.run_folder, name, target.submit(planned))
    except BaseException:
        for folder in new[:1]:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    job.store()
    return job


def write(planned: Launch, files: dict[str, str]) -> None:
    """Write the files for the nodes into the folder of the launch, readable for this user alone."""
    planned.run_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    planned.folder.mkdir(mode=0o700, exist_ok=True)
    replace(planned.folder / CONFIG, write_yaml(planned.config.model_dump(mode="json")), mode=0o600)
    for name, text in files.items():
        replace(planned.folder / name, text, mode=0o600)
    if not planned.keys.exists():
        command = [sys.executable, "-m", "areal", "keys", str(planned.keys)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=KEYS_SECONDS)
