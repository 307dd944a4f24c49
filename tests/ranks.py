"""Ranks on this machine, as torchrun starts them, but forked from one process that has imported what they need: imports
take longer than most of what tests have ranks do.

python ranks.py COUNT FILE ARGUMENTS: each rank runs FILE as a program. The first one that fails ends the others.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import areal  # noqa: F401  # before torch, as in a run

# isort: split
from helpers import find_free_port

from areal.cpu.training import set_environment
from areal.processes import die_with_parent, importing


def fork_rank(rank: int, ranks: int, port: int, file: str) -> int:
    """The process of a rank, whose end is that of the program in `file`. Returns its id."""
    parent = os.getpid()
    if process := os.fork():
        return process
    die_with_parent(signal.SIGKILL, parent)
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}",
        "LOCAL_WORLD_SIZE": f"{ranks}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    runpy.run_path(file, run_name="__main__")
    sys.exit()


def main() -> int:
    count, file = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_path(file, run_name="imported")
    set_environment("float32")  # what DeepSpeed reads at import
    with importing():
        import deepspeed  # noqa: F401
    port = find_free_port()
    running = {fork_rank(rank, count, port, file) for rank in range(count)}
    while running:
        process, status = os.wait()
        running.remove(process)
        if status:
            for rank in running:
                os.kill(rank, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
