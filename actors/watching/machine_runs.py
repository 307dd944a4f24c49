"""`areal ps` and `areal stop`: the runs of this machine, and launched runs. /proc names the process that holds a run's
claim."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from areal.base import extensions
from areal.base.command_line import output
from areal.base.errors import UserError
from areal.base.text import shown
from areal.storage.claim import ADDRESS, claimed_address
from areal.storage.run_folder import config_of_run, steps_trained

PROC = Path("/proc")
LOOK_SECONDS = 0.2
# Time for a run to stop beyond `master.drain_seconds`.
STOP_SECONDS = 60.0


class RunHere(NamedTuple):
    """process: the run ends with it. starter: user and program that started the process. began: seconds since 1970."""

    folder: Path
    process: int
    starter: str
    began: float


def runs_here() -> Iterator[RunHere]:
    """The runs of this user in progress on this machine; for root, the runs of all users."""
    for descriptor in PROC.glob("[0-9]*/fd/*"):
        try:
            target, process = Path(os.readlink(descriptor)), psutil.Process(int(descriptor.parents[1].name))
            if target.name == ADDRESS and claimed_address(target.parent) is not None:
                starter = process.parent()
                program = _command(starter) if starter else "a program that has ended"
                yield RunHere(target.parent, process.pid, f"{process.username()}: {program}", target.stat().st_mtime)
        except (OSError, psutil.Error):  # the process has ended meanwhile, or is another user's
            continue


def run_in(folder: Path) -> RunHere:
    """The run in progress in a folder. Raises UserError if there is none."""
    for run in runs_here():
        if run.folder == folder.resolve():
            return run
    raise UserError(f"No run of yours is in progress in {folder} on this machine: `areal ps` lists those that are.")


def stop_run(run: RunHere) -> list[str]:
    """Stop a run in order, even a suspended run (Ctrl-Z), and wait for the run's end. Returns remaining processes.
    Raises UserError."""
    until = time.monotonic() + config_of_run(run.folder).master.drain_seconds + STOP_SECONDS
    processes: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
        process = psutil.Process(run.process)
        processes = [process, *process.children(recursive=True)]
        process.terminate()
        for suspended in filter(_is_suspended, processes):  # a signal waits until the process goes on
            suspended.resume()
    while (survivors := [child for child in processes if _goes_on(child)]) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return [f"{survivor.pid} ({_command(survivor)})" for survivor in survivors]


def print_runs(options: Namespace) -> None:
    from rich.table import Table

    table = Table("run", "step", "for", "process", "started by", box=None)
    for run in sorted(runs_here(), key=lambda run: run.began):
        minutes = int(time.time() - run.began) // 60
        age = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
        table.add_row(str(run.folder), str(steps_trained(run.folder)), age, str(run.process), run.starter)
    output(200).print(table if table.row_count else "No run is in progress on this machine.")
    if (jobs := extensions.part_of("launch", "jobs")) and (rows := list(jobs(options.runs))):
        launched = Table("launched run", "step", "job", "state", box=None)
        for folder, job, state in rows:
            launched.add_row(str(folder), str(steps_trained(folder)), job, state)
        output(200).print(launched)


def stop(options: Namespace) -> int:
    stop_job = extensions.part_of("launch", "stop")
    if stop_job and (code := stop_job(options.folder)) is not None:
        return int(code)
    run = run_in(options.folder)
    print(f"The run in {options.folder} is told to stop; a step in progress ends first.", file=sys.stderr, flush=True)
    if survivors := stop_run(run):
        print(shown(f"It was told to stop, and these go on: {', '.join(survivors)}."), file=sys.stderr)
        return 1
    print(f"The run in {options.folder} has ended: `areal run --resume {options.folder}` goes on with it.")
    return 0


def _goes_on(process: psutil.Process) -> bool:
    """False for an ended process, even if nobody has waited for it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _is_suspended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _command(process: psutil.Process) -> str:
    """The beginning of the process's command line, without the program's folder; empty for an ended process."""
    with suppress(psutil.Error):
        program, *arguments = process.cmdline() or [""]
        return " ".join((Path(program).name, *arguments))[:60]
    return ""
