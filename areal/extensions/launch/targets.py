"""The targets of `areal launch`: entries of the kind `launch_target` (`areal.base.extensions`). A target is a class
with the methods of `Target`, made without arguments.

A launch has six steps:

1. `launch.py` reads the configuration, computes the placement (`placement.py`), and makes a `Launch`.
2. `target.check(launch)` refuses what this target cannot do, before anything is written.
3. `target.render(launch)` gives the target's files, by name. With `--dry-run` they are printed, and the launch ends.
4. The folder RUN_FOLDER/launch gets `run.yaml` (the configuration), `keys/`, and the files.
5. `target.submit(launch)` gives them to the scheduler. If `submit` raises, a new folder is removed again.
6. `job.json` there names the target and its job: `areal ps` calls `status`, `areal stop` calls `stop`.

The processes of the job are the same for all targets:

* the master: `python` and `Launch.master(...)`, which starts or resumes the run;
* any other role: `python` and `Launch.command([process], ...)`, with CUDA_VISIBLE_DEVICES=`process.devices` on GPUs.
  The role itself waits for the master. `Launch.parts` groups the processes for a single command on a node;
* the target's job starts a process again unless its exit code is in `FINAL`.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.base.processes import torchrun
from areal.config import Config
from areal.extensions.launch.cluster import ClusterConfig
from areal.extensions.launch.placement import Placement, Process

# Exit codes with which a role is over, as in areal docs operating: the run has ended, or the user has to change
# something. The master also has 1: the run failed, or was stopped.
FINAL, FINAL_OF_MASTER = (0, 2), (0, 1, 2)
# Seconds for which a role waits for its master, which may have to download a model.
WAIT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Launch:
    """A run to launch. project: the folder with the code, the working directory of all roles."""

    config: Config
    cluster: ClusterConfig
    placement: Placement
    project: Path

    @property
    def run_folder(self) -> Path:
        return self.config.folder.absolute()

    @property
    def folder(self) -> Path:
        """The folder of the launch, in the run's folder."""
        return self.run_folder / "launch"

    @property
    def keys(self) -> Path:
        """The folder with the run's keys: the user's folder, or the launch's own."""
        return (self.config.network.keys or self.folder / "keys").absolute()

    @property
    def port(self) -> int:
        return int(self.config.master.address.rpartition(":")[2])

    @property
    def environment(self) -> dict[str, str]:
        """The user's variables to pass on, without unset variables."""
        values = self.cluster.environment
        return {name: text for name, value in values.items() if (text := value or os.environ.get(name)) is not None}

    def master(self, folder: str, address: str, run: str = "") -> list[str]:
        """Return the master's command, without the Python. folder: the launch's folder on the node. address:
        tcp://HOST:PORT of node 0, for all nodes. run: the run folder, by default the parent of `folder`."""
        return ["-m", "areal.extensions.launch.master", folder, address, *filter(None, [run])]

    def parts(self) -> Iterator[tuple[int, list[Process]]]:
        """Yield node and processes of each part, for a single command: ranks, a scorer, or all other roles together."""
        for node in self.placement.nodes:
            here = self.placement.on(node.number)
            alone = [process for process in here if process.role == "trainer" or process.options]
            for process in alone:
                yield node.number, [process]
            if together := [process for process in here if process not in alone]:
                yield node.number, together

    def command(self, processes: Sequence[Process], address: str, rendezvous: str) -> list[str]:
        """Return the command of a process, or of several processes of a part, without the Python: a supervisor then
        restarts each of several. rendezvous: HOST:PORT of the trainer's first node."""
        first = processes[0]
        roles = [word for process in processes for word in ("--role", process.role)]
        words = [*roles, *first.options, "--master", address, "--wait", f"{WAIT_SECONDS}"]
        nodes, ranks = len(self.placement.of("trainer")), len(first.devices)
        if first.role != "trainer" or nodes * ranks == 1:
            return ["-m", "areal", "run", *words]
        meet = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
        meet += [f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={self.config.name}"]
        if nodes == 1:
            meet = torchrun(ranks)[3:]
        # The dashes keep torchrun from taking --master as a short form of its own option.
        return ["-m", "torch.distributed.run", *meet, "--module", "--", "actors.start", *words]


class Target(Protocol):
    """A scheduler, seen from `areal launch`. All methods raise UserError."""

    def check(self, launch: Launch) -> None:
        """Refuse a launch that this target cannot do, or whose program is missing. Raises UserError."""

    def render(self, launch: Launch) -> dict[str, str]:
        """Return the files of RUN_FOLDER/launch, by name. The first file is submitted."""

    def submit(self, launch: Launch) -> str:
        """Submit the files in `launch.folder`. Returns the scheduler's name of the job."""

    def status(self, job: str) -> str:
        """Return the job's state in the scheduler's words; empty for an ended or unknown job."""

    def logs(self, launch: Launch, job: str) -> str:
        """Return the command that shows the output of the job."""

    def stop(self, job: str, folder: Path) -> None:
        """Have the run stop in order, with a checkpoint, and the job end. folder: the launch's folder."""
