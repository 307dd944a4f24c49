"""A real Slurm of several nodes on this machine, whose nodes can be lost. Needs root, and Slurm and munge installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={controller}
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[0-{last}] NodeHostname={host} Port=[{first}-{final}] CPUs=1 State=UNKNOWN
PartitionName=common Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=closed Nodes=ALL State=UP AllowGroups=nogroup
"""
SECONDS = 150.0


def is_missing() -> str:
    """Why there can be no Slurm here; empty if there can be one."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")]
    return f"needs {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else ""


def until(what: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until something is so. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.2)


class SlurmCluster:
    def __init__(self, folder: Path, nodes: int, controller: int, first: int) -> None:
        """controller, first: free ports, of the controller and of node 0; those of the others follow."""
        self.folder, self._nodes = folder, nodes
        (folder / "state").mkdir(parents=True)
        values = {"host": socket.gethostname(), "folder": folder, "controller": controller, "last": nodes - 1}
        text = CONFIGURATION.format(**values, first=first, final=first + nodes - 1)
        (folder / "slurm.conf").write_text(text)
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }

    def start(self) -> None:
        if not [process for process in psutil.process_iter(["name"]) if process.info["name"] == "munged"]:
            os.makedirs("/run/munge", exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged"], check=True)
        self.call("slurmctld", "-c")
        for node in range(self._nodes):
            self.call("slurmd", "-N", f"n{node}")
        until(lambda: f"{self._nodes} idle" in self.call("sinfo", "--noheader", "--partition=common", "--format=%D %t"))

    def stop(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self.call("scancel", "--full", "--user=root")
        for node in range(self._nodes):
            self._kill_processes(f"n{node}")
        for file in self.folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)

    def call(self, *command: str) -> str:
        """What a program of Slurm prints. Raises CalledProcessError."""
        result = subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True, timeout=60)
        return result.stdout

    def job(self, form: str, job: str) -> str:
        """What squeue says of a job; empty once it is over."""
        with suppress(subprocess.CalledProcessError):
            return self.call("squeue", "--noheader", f"--jobs={job}", f"--format={form}").strip()
        return ""

    def cancel_jobs(self) -> None:
        """End all jobs, and wait until no node has a process of one."""
        self.call("scancel", "--full", "--signal=KILL", "--user=root")
        self.call("scancel", "--user=root")
        until(lambda: not self.call("squeue", "--noheader"))

    def lose(self, node: str) -> None:
        """A node is gone, with all its processes."""
        self._kill_processes(node)
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def bring_back(self, node: str) -> None:
        self.call("slurmd", "-N", node)
        with suppress(subprocess.CalledProcessError):  # by itself, with ReturnToService=2
            self.call("scontrol", "update", f"nodename={node}", "state=resume")

    def processes(self, node: str, word: str = "") -> list[psutil.Process]:
        """The processes of jobs on a node, whose command line has the word."""
        here = []
        for daemon in self._daemons(node):
            with suppress(psutil.Error):
                here += [process for process in daemon.children(recursive=True) if word in " ".join(process.cmdline())]
        return here

    def _daemons(self, node: str) -> list[psutil.Process]:
        """The slurmstepd processes of a node's steps, whose titles have the steps' ids."""
        with suppress(subprocess.CalledProcessError):
            lines = self.call("squeue", "--noheader", "--steps", "--format=%i %N").splitlines()
            titles = {f"slurmstepd: [{line.split()[0]}]" for line in lines if line.split()[1:] == [node]}
            everybody = psutil.process_iter(["cmdline"])
            return [process for process in everybody if " ".join(process.info["cmdline"] or []).strip() in titles]
        return []

    def _kill_processes(self, node: str) -> None:
        for daemon in self._daemons(node):
            with suppress(psutil.Error):
                for process in [daemon, *daemon.children(recursive=True)]:
                    process.kill()


@contextmanager
def slurm_cluster(folder: Path, nodes: int, controller: int, first: int) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, nodes, controller, first)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
