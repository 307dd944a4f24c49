"""Ranks on this machine, as torchrun starts them, but forked from one process that has imported what they need: imports
take longer than most of what tests have ranks do.

A line of standard input is a job, [COUNT, FILE, ARGUMENTS...] in JSON: each rank runs FILE as a program. For a COUNT of
0 one process does, which is no rank. The first one that fails ends the others. The answer is a line: ok, or failed.
Everything else goes to standard error.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys

import areal  # noqa: F401  # before torch, as in a run

# isort: split
from areal.base.processes import die_with_parent, importing
from areal.cpu.deepspeed_on_cpu import set_environment
from support.networks import find_free_port


def fork_rank(rank: int, ranks: int, port: int, words: list[str]) -> int:
    """The process of a rank, whose end is that of the program in the file, the first of `words`. Returns its id."""
    parent = os.getpid()
    if process := os.fork():
        return process
    die_with_parent(signal.SIGKILL, parent)
    if ranks:
        os.environ |= {
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "WORLD_SIZE": f"{ranks}",
            "LOCAL_WORLD_SIZE": f"{ranks}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def run(count: int, words: list[str]) -> bool:
    """Whether all ranks have succeeded."""
    port = find_free_port()
    running = {fork_rank(rank, count, port, words) for rank in range(count or 1)}
    while running:
        process, status = os.wait()
        running.remove(process)
        if status:
            for rank in running:
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)
            return False
    return True


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what ranks print is no answer
    set_environment("float32")  # what DeepSpeed reads at import
    with importing():
        import deepspeed  # noqa: F401
    imported = set()
    for line in sys.stdin:
        count, *words = json.loads(line)
        if words[0] not in imported:
            runpy.run_path(words[0], run_name="imported")
            imported.add(words[0])
        print("ok" if run(count, words) else "failed", file=answers)


if __name__ == "__main__":
    main()
