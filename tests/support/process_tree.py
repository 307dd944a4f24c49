"""The processes of this machine, and what a process has started."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urpfnm", "--mount-proc", "true"], capture_output=True).returncode != 0,
    reason="user namespaces are forbidden here, as they often are in containers",
)


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    command: str


def processes() -> list[Process]:
    """All that run now."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            status = (folder / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        # The name in brackets may hold anything; state and parent follow it.
        results.append(Process(int(folder.name), int(status.rpartition(")")[2].split()[1]), command))
    return results


def processes_mentioning(word: str) -> list[str]:
    """Command lines of all processes that contain `word`."""
    return [process.command for process in processes() if word in process.command]


def descendants(pid: int) -> list[Process]:
    """What a process has started, and what that has started."""
    below, everything = [], processes()
    parents = {pid}
    while results := [p for p in everything if p.parent in parents]:
        below += results
        parents = {p.pid for p in results}
    return below
