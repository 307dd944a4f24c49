"""Where the op of DeepSpeed is built that ranks on a CPU use, without loading torch."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from areal.processes import cache_folder

ROOT_VARIABLE = "TORCH_EXTENSIONS_DIR"
OP = "deepspeed_shm_comm"
BUILDS = "DeepSpeed's op for the CPU is compiled, once in this environment, for about a minute"


def extensions_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """The folder of all builds of this Python environment, unless the user has set one. In a common one torch would
    build for minutes whenever an environment at another path was the last to build. variables: of the process."""
    if ROOT_VARIABLE in variables:
        return Path(variables[ROOT_VARIABLE])
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return cache_folder(variables).resolve() / "torch_extensions" / environment


def is_built() -> bool:
    """Whether the op need not be built."""
    return (extensions_folder() / OP / f"{OP}.so").is_file()
