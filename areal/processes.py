"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Set in the environment of what a supervisor starts.
SUPERVISED = "AREAL_SUPERVISED"
# Names the folder of the run's keys in the environment, or says `none`.
KEYS = "AREAL_KEYS"
_PR_SET_PDEATHSIG = 1


def die_with_parent(sign: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send `sign` to this process when its parent ends, however that ends (Linux only).

    parent: the expected parent's id, where known; this process exits if that is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sign)
    if parent is not None and os.getppid() != parent:
        sys.exit("the process that started this one is gone")


if __name__ == "__main__":  # PARENT PROGRAM ARGUMENT...: become a program that is killed when its parent ends
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
