"""What a target of `areal launch` is: an entry of the kind `launch_target` (`areal.base.extensions`), a class that is
made without arguments and has the methods of `Target`.

A launch goes on like this:

1. `launch.py` reads the configuration, computes the placement (`placement.py`), and makes a `Launch`.
2. `target.check(launch)` says what this target cannot do, before anything is written.
3. `target.render(launch)` gives the target's files, by name. With `--dry-run` they are printed, and this is the end.
4. The folder RUN_FOLDER/launch gets `run.yaml` (the configuration), `keys/`, and the files.
5. `target.submit(launch)` gives them to the scheduler. If it raises, the folder is removed again.
6. `job.json` there names the target and its job: `areal ps` calls `status`, `areal stop` calls `stop`.

What a process of the job does is the same everywhere:

* the master: `python` and `Launch.master(...)`, which starts the run, or resumes it if it has begun;
* any other role: `python` and `Launch.command([process], ...)`, with CUDA_VISIBLE_DEVICES=`process.devices` on GPUs.
  It waits for the master by itself. `Launch.parts` has the processes that one command may start together on a node;
* whoever starts them starts a process again that ends with another exit code than those in `FINAL`.
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

# Exit codes with which a role is over, as areal docs operating has them: the run has ended, or the user has to change
# something. Of the master also 1: the run failed, or was stopped.
FINAL, FINAL_OF_MASTER = (0, 2), (0, 1, 2)
# How long a role waits for its master, which may have to download a model.
WAIT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Launch:
    """A run that is to be launched. project: the folder with the code, the working directory of all roles."""

    config: Config
    cluster: ClusterConfig
    placement: Placement
    project: Path

    @property
    def run_folder(self) -> Path:
        return self.config.folder.absolute()

    @property
    def folder(self) -> Path:
        """The folder of the launch, in that of the run."""
        return self.run_folder / "launch"

    @property
    def keys(self) -> Path:
        """The folder with the keys of the run: the user's, or one of its own."""
        return (self.config.network.keys or self.folder / "keys").absolute()

    @property
    def port(self) -> int:
        return int(self.config.master.address.rpartition(":")[2])

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the user wants passed; those that are unset are left out."""
        values = self.cluster.environment
        return {name: text for name, value in values.items() if (text := value or os.environ.get(name)) is not None}

    def master(self, folder: str, address: str, run: str = "") -> list[str]:
        """The command of the master, without the Python. folder: of the launch, as the node sees it. address:
        tcp://HOST:PORT at which the nodes reach node 0. run: the run folder, if it is not the one around `folder`."""
        return ["-m", "areal.extensions.launch.master", folder, address, *filter(None, [run])]

    def parts(self) -> Iterator[tuple[int, list[Process]]]:
        """What one command starts on a node: the trainer's ranks there, a scorer, or all other roles together."""
        for node in self.placement.nodes:
            here = self.placement.on(node.number)
            alone = [process for process in here if process.role == "trainer" or process.options]
            for process in alone:
                yield node.number, [process]
            if together := [process for process in here if process not in alone]:
                yield node.number, together

    def command(self, processes: Sequence[Process], address: str, rendezvous: str) -> list[str]:
        """The command of one process, or of several of a part, without the Python: a supervisor then restarts each of
        them. rendezvous: HOST:PORT of the trainer's first node."""
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
        # The dashes keep torchrun from taking --master as a short form of an option of its own.
        return ["-m", "torch.distributed.run", *meet, "--module", "--", "actors.start", *words]


class Target(Protocol):
    """A scheduler, and what it takes to use it. All methods raise UserError."""

    def check(self, launch: Launch) -> None:
        """Raise UserError for what this target cannot do, and if its program is missing."""

    def render(self, launch: Launch) -> dict[str, str]:
        """The files of RUN_FOLDER/launch, by name. The first one is submitted."""

    def submit(self, launch: Launch) -> str:
        """Submit the files in `launch.folder`. Returns the name of the job, by which the scheduler knows it."""

    def status(self, job: str) -> str:
        """What the scheduler says of the job in a few words; empty once it is over, or unknown."""

    def logs(self, launch: Launch, job: str) -> str:
        """The command that shows the output of the job."""

    def stop(self, job: str, folder: Path) -> None:
        """Have the run stop in order, with a checkpoint, and the job end. folder: of the launch."""
