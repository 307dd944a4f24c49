"""DeepSpeed on the CPU: its environment, and what it would compile."""

import os

from areal.base.processes import importing
from areal.cpu.processor import avoid_broken_amx


def set_environment(dtype: str) -> None:
    """Set the environment variables that DeepSpeed reads at import. dtype: the model's."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # If a folder of PATH may not be read, a program that is nowhere is "not permitted" in place of "not found", which
    # is all that DeepSpeed expects of `numactl`.
    folders = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(folder for folder in folders if os.access(folder, os.X_OK))
    if dtype == "bfloat16":
        avoid_broken_amx()


def load_libraries() -> None:
    """Import what an engine needs, so that processes forked from this one have it."""
    set_environment("float32")
    with importing():
        import deepspeed  # noqa: F401


def compile_no_op() -> None:
    """Keep DeepSpeed from compiling its op for ranks on one machine, for about a minute: it is for inference alone."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
