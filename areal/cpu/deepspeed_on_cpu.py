"""DeepSpeed on the CPU: its environment, and its compiled op."""

import os

from areal.base.processes import importing
from areal.cpu.processor import avoid_broken_amx


def set_environment(dtype: str) -> None:
    """Set the environment variables that DeepSpeed reads at import. dtype: the model's."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed expects that the missing program `numactl` is "not found". If PATH has an unreadable folder, the error
    # is "not permitted" instead.
    folders = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(folder for folder in folders if os.access(folder, os.X_OK))
    if dtype == "bfloat16":
        avoid_broken_amx()


def load_libraries() -> None:
    """Import the libraries of an engine, for processes that are forked from this process."""
    set_environment("float32")
    with importing():
        import deepspeed  # noqa: F401


def compile_no_op() -> None:
    """Keep DeepSpeed from compiling, for about a minute, its op for ranks of one machine: only inference uses it."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
