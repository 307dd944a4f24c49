"""`areal ps` and `areal stop`: the runs of this machine. The process that holds a run's claim is found in /proc."""

from __future__ import annotations

import os
import pwd
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from areal.command_line import output
from areal.config import UserError
from areal.storage.claim import ADDRESS, claimed_address
from areal.storage.run_folder import config_of_run, steps_trained
from areal.text import shown

PROC = Path("/proc")
LOOK_SECONDS = 0.2
# What a run may take to stop beyond `master.drain_seconds`.
STOP_SECONDS = 60.0


class RunHere(NamedTuple):
    """process: the one that the run ends with. starter: the user and the program that started it. began: seconds since
    1970."""

    folder: Path
    process: int
    starter: str
    began: float


def runs_here() -> Iterator[RunHere]:
    """The runs that are in progress on this machine, of this user; for root, of all users."""
    for descriptor in PROC.glob("[0-9]*/fd/*"):
        try:
            target, process = Path(os.readlink(descriptor)), descriptor.parents[1]
            if target.name == ADDRESS and claimed_address(target.parent) is not None:
                owner = pwd.getpwuid(process.stat().st_uid).pw_name
                program = _command(_parent(int(process.name))) or "a program that has ended"
                yield RunHere(target.parent, int(process.name), f"{owner}: {program}", target.stat().st_mtime)
        except (OSError, KeyError):  # the process has ended meanwhile, or is another user's
            continue


def process_of(folder: Path) -> int:
    """The process to stop the run in a folder by. Raises UserError if none is in progress there."""
    for run in runs_here():
        if run.folder == folder.resolve():
            return run.process
    raise UserError(f"No run of yours is in progress in {folder} on this machine: `areal ps` lists those that are.")


def stop_run(folder: Path) -> list[str]:
    """Stop the run in a folder in order, and wait until it has ended. Returns the processes that remain after the time
    that it has for that. Raises UserError."""
    process = process_of(folder)
    descendants = _descendants(process)
    seconds = config_of_run(folder).master.drain_seconds + STOP_SECONDS
    os.kill(process, signal.SIGTERM)
    until = time.monotonic() + seconds
    while (survivors := [pid for pid in (process, *descendants) if _command(pid)]) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return [f"{pid} ({_command(pid)})" for pid in survivors]


def print_runs(_options: Namespace) -> None:
    from rich.table import Table

    table = Table("run", "step", "for", "process", "started by", box=None)
    for run in sorted(runs_here(), key=lambda run: run.began):
        minutes = int(time.time() - run.began) // 60
        age = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
        table.add_row(str(run.folder), str(steps_trained(run.folder)), age, str(run.process), run.starter)
    output(200).print(table if table.row_count else "No run is in progress on this machine.")


def stop(options: Namespace) -> int:
    process_of(options.folder)  # nothing is said of a run that is not there
    print(f"The run in {options.folder} is told to stop; a step in progress ends first.", file=sys.stderr, flush=True)
    if survivors := stop_run(options.folder):
        print(shown(f"It was told to stop, and these go on: {', '.join(survivors)}."), file=sys.stderr)
        return 1
    print(f"The run in {options.folder} has ended: `areal run --resume {options.folder}` goes on with it.")
    return 0


def _command(process: int) -> str:
    """The beginning of its command line; empty for one that has ended, or was never there."""
    try:
        words = (PROC / f"{process}" / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return words.replace("\0", " ").strip()[:60]


def _parent(process: int) -> int:
    stat = (PROC / f"{process}" / "stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _descendants(process: int) -> list[int]:
    """The processes below one, of all generations."""
    parents: dict[int, int] = {}
    for entry in PROC.glob("[0-9]*"):
        try:
            parents[int(entry.name)] = _parent(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return [pid for pid in parents if _is_below(pid, process, parents)]


def _is_below(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid := parents.get(pid, 0):
        if pid == ancestor:
            return True
    return False
