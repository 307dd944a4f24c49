"""DeepSpeed on the CPU: its environment, and the op by which ranks on one machine talk."""

from __future__ import annotations

import fcntl
import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from areal.config import UserError
from areal.cpu import op_folder
from areal.cpu.op_folder import BUILDS
from areal.cpu.processor import avoid_broken_amx
from areal.processes import importing


def set_environment(dtype: str) -> None:
    """Set the environment variables that DeepSpeed reads at import. dtype: the model's."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if dtype == "bfloat16":
        avoid_broken_amx()


def load_libraries() -> None:
    """Import what an engine needs, so that processes forked from this one have it."""
    set_environment("float32")
    with importing():
        import deepspeed  # noqa: F401


def build_communication() -> None:
    """Build DeepSpeed's op for ranks on one machine, unless it is built already, and load it.

    torch marks a running build with a lock file. A process that is killed leaves this file behind, and all later builds
    would wait for it forever. The lock taken here is released when its holder exits. Its holder knows that no build is
    running, and removes torch's file. A build takes about a minute, which is told. Raises UserError if the op cannot be
    built.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import build_shm_op
    from torch.utils.cpp_extension import _get_build_directory

    os.environ[op_folder.ROOT_VARIABLE] = str(op_folder.extensions_folder())
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    folder = Path(_get_build_directory(builder.name, False))
    with folder.with_name(f"{builder.name}.building").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        if not op_folder.is_built():
            print(f"{BUILDS} ...", file=sys.stderr, flush=True)
        try:
            with redirect_stdout(io.StringIO()):
                build_shm_op()
        except RuntimeError as error:
            lines = str(error).splitlines()
            reason = next((line for line in lines if "not found" in line or "error:" in line), lines[0])
            raise UserError(
                f"DeepSpeed cannot build its op for the CPU ({reason.strip()}): install a C++ compiler and Python's "
                f"headers, on Debian and Ubuntu by apt-get install build-essential python3-dev."
            ) from error
