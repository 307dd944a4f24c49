"""Where the op of DeepSpeed is built that ranks on a CPU use, without loading torch."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

ROOT_VARIABLE = "TORCH_EXTENSIONS_DIR"
OP = "deepspeed_shm_comm"
BUILDS = "DeepSpeed's op for the CPU is compiled, once in this environment, for about a minute"


def extensions_folder() -> Path:
    """The folder of all builds of this Python environment, unless the user has set one. In a common one torch would
    build for minutes whenever an environment at another path was the last to build."""
    if ROOT_VARIABLE in os.environ:
        return Path(os.environ[ROOT_VARIABLE])
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return Path(cache).resolve() / "torch_extensions" / environment


def is_built() -> bool:
    """Whether the op need not be built."""
    return (extensions_folder() / OP / f"{OP}.so").is_file()
