"""The run of the soak, over all its resumes, and the faults that befall it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from runs import ROOT
from soak_reward import DOWN

ROLES = ("master", "trainer", "generator", "rollout_manager", "reward", "evaluator")
# Parts of roles that are processes of their own.
ENGINE, RANK, WORKER = "engine", "trainer rank", "reward worker"
# Their role, and what their command lines have.
PARTS = {ENGINE: ("generator", "EngineCore"), RANK: ("trainer", "--role trainer"), WORKER: ("reward", "")}
# What a fault may hit, and for how many seconds it may last.
TARGETS = {
    "kill": (*ROLES, ENGINE, RANK, WORKER),
    "terminate": ROLES[1:],
    "hang": (ENGINE, RANK),
    "pause": (*ROLES, RANK),
    "full disk": ("run folder",),
    "reward down": ("reward",),
    "Ctrl-C": ("run",),
    "kill all": ("run",),
}
SECONDS = {"pause": (5.0, 40.0), "full disk": (5.0, 40.0), "reward down": (30.0, 60.0)}
DISK = "512m"
# A run that was told to stop ends within this time; the supervisor kills its roles after ten seconds.
STOP_SECONDS = 90.0
END_SECONDS = 600.0
LEFT = re.compile(r"^(\w+)/\d+ has left and is not started again", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """kind: a key of TARGETS. seconds: it lasts; 0: until the run remedies it. steps: committed when it began. output:
    bytes on the console when it began. time: in seconds since 1970."""

    time: float
    kind: str
    target: str
    seconds: float
    steps: int
    output: int


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk at `folder`, if this user may. Yields whether it is one."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class SoakRun:
    """A run of everything on this machine. Actors that leave it and are not started again join it by hand.

    folder: has the disk with the run folder, the console (out.txt; of those that join, joined.txt), and their temporary
    files. kinds: of faults, keys of TARGETS. seed: of what is drawn. `violations`: what went wrong, in words.
    """

    def __init__(self, folder: Path, overrides: list[str], kinds: list[str], seed: int) -> None:
        self.folder = folder / "disk" / "run"
        self.violations: list[str] = []
        self._kinds, self._deck = kinds, list[str]()
        self._random = random.Random(seed)
        self._folder, self._disk = folder, folder / "disk"
        self._down, self._output = folder / "down", folder / "out.txt"
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        self._read = 0  # bytes of the output
        self._joined: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.supervisor = self._start(self._output, *overrides)

    def _start(self, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(self._temporary), DOWN: str(self._down)}
        with output.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "run.py"), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                *_, last, _ = [b"", *file.read().split(b"\n")]
        except FileNotFoundError:
            return 0
        return int(json.loads(last)["step"]) if last else 0

    def actors(self) -> list[tuple[str, psutil.Process]]:
        """The processes of the roles, without those that they have started."""
        below = [child for child in children(self.supervisor.pid) if "--role" in command(child)]
        supervised = [(words[words.index("--role") + 1], child) for child in below if (words := command(child))]
        return supervised + [(role, psutil.Process(p.pid)) for role, p in self._joined if p.poll() is None]

    def processes(self, target: str) -> list[psutil.Process]:
        """Those of a role or of a part of one."""
        role, mark = PARTS.get(target, (target, ""))
        actors = [process for name, process in self.actors() if name == role]
        if role == target:
            return actors
        below = [item for actor in actors for item in children(actor.pid, recursive=True)]
        return [item for item in below if mark in " ".join(command(item))]

    def zombies(self) -> list[str]:
        """Processes that have ended, and that nobody has waited for, with what started them."""
        results = []
        for child in children(self.supervisor.pid, recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_ZOMBIE:
                    results.append(f"{child.pid} ({child.name()}) of {' '.join(command(child.parent()))}")
        return results

    def replace_who_left(self) -> None:
        """Start by hand the actors that have left for good, and again those that were started so and have ended."""
        text = self._output.read_bytes()[self._read :]
        complete = text.rpartition(b"\n")[0]
        self._read += len(complete)
        roles = [
            *LEFT.findall(complete.decode(errors="replace")),
            *(role for role, p in self._joined if p.poll() is not None),
        ]
        self._joined = [(role, process) for role, process in self._joined if process.poll() is None]
        for role in roles:
            self._joined.append(
                (role, self._start(self._output.with_name("joined.txt"), "--role", role, "--master", str(self.folder)))
            )

    def draw(self) -> tuple[str, str, float]:
        """The kind of the next fault, its target and its seconds. All kinds come before one comes again."""
        if not self._deck:
            self._deck = self._random.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        return kind, self._random.choice(TARGETS[kind]), self._random.uniform(*SECONDS.get(kind, (0.0, 0.0)))

    def befall(self) -> Fault | None:
        """Draw a fault and do it, to its end. Returns None if the target is not there at the moment."""
        kind, target, seconds = self.draw()
        fault = Fault(time.time(), kind, target, seconds, self.steps, self._output.stat().st_size)
        if kind == "Ctrl-C":
            self.stop(signal.SIGINT)
            self.resume()
        elif kind == "kill all":
            self.kill()
            self.resume()
        elif kind == "full disk":
            self._fill_disk(seconds)
        elif kind == "reward down":
            self._down.touch()
            time.sleep(seconds)
            self._down.unlink()
        elif victims := self.processes(target):
            self._signal(kind, self._random.choice(victims), seconds)
        else:
            return None
        return fault

    def _signal(self, kind: str, victim: psutil.Process, seconds: float) -> None:
        signs = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "hang": signal.SIGSTOP, "pause": signal.SIGSTOP}
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signs[kind])
            if kind == "pause":
                time.sleep(seconds)
                victim.resume()

    def _fill_disk(self, seconds: float) -> None:
        """Keep the disk full, also if others remove files meanwhile."""
        hog = self._disk / "hog"
        end = time.monotonic() + seconds
        with hog.open("wb") as file:
            while time.monotonic() < end:
                free = os.statvfs(self._disk).f_bavail * os.statvfs(self._disk).f_frsize
                with suppress(OSError):  # others write at the same time
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(free, 1))
                time.sleep(0.1)
        hog.unlink()

    def stop(self, sign: signal.Signals) -> None:
        """Stop the run in order."""
        below = self._below()
        self.supervisor.send_signal(sign)
        for _, process in self._joined:
            process.terminate()
        self._wait(below, f"{sign.name} of the run")
        if self.supervisor.returncode != 1:
            self.violations.append(f"after {sign.name} the run exited with {self.supervisor.returncode}")

    def kill(self) -> None:
        """Kill all processes at once, as the loss of their machine does."""
        below = self._below()
        for process in (self.supervisor, *(process for _, process in self._joined), *below):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._wait(below, "a kill of all processes")

    def resume(self, *arguments: str) -> None:
        self.supervisor = self._start(self._output, "--resume", str(self.folder), *arguments)

    def end(self) -> None:
        """End a run that was stopped at the step that it has reached. This reads all of its record."""
        self.resume("--end")
        with suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(END_SECONDS)
        if self.supervisor.returncode != 0:
            self.violations.append(f"--resume --end: exit code {self.supervisor.returncode}, see out.txt")

    def _below(self) -> list[psutil.Process]:
        """All that the processes which the script has started have started in turn."""
        roots = (self.supervisor, *(process for _, process in self._joined))
        return [child for root in roots for child in children(root.pid, recursive=True)]

    def _wait(self, below: list[psutil.Process], what: str) -> None:
        """Wait until all have ended. Kills those that do not."""
        begun = time.monotonic()
        for process in (self.supervisor, *(process for _, process in self._joined)):
            try:
                process.wait(max(begun + STOP_SECONDS - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                self.violations.append(f"{what}: after {STOP_SECONDS:g} s there is still {process.args}")
                process.kill()
                process.wait()
        self._joined.clear()
        _, alive = psutil.wait_procs(below, timeout=max(begun + STOP_SECONDS - time.monotonic(), 1.0))
        for process in alive:
            self.violations.append(f"{what}: after {STOP_SECONDS:g} s there is still {command(process)}")
            with suppress(psutil.NoSuchProcess):
                process.kill()


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
