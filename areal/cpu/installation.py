"""`areal install-cpu`: what a machine without a GPU needs besides the wheel, and `pip install` cannot choose."""

import re
import shlex
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, requires

from areal.base.errors import UserError, explain
from areal.config.reading import CONFIGS

UV = "uv==0.13.9"
# PyTorch's own build for CPUs. Where pip finds none, that of PyPI is installed, which is 2.3 GB larger.
TORCH = "torch==2.13.0+cpu"


def commands() -> list[list[str]]:
    """The commands, one after another. The second may fail. Raises UserError if this is no installed package."""
    with explain(PackageNotFoundError, "This is no installed package: `make setup` installs a clone."):
        listed = requires("areal-as-actors") or []
    packages = [name.partition(";")[0].strip() for name in listed if re.search(r"extra == .cpu.", name)]
    pip = [sys.executable, "-m", "pip", "install"]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    return [[*pip, UV], [*pip, "--no-deps", TORCH], [*uv, "--overrides", str(CONFIGS / "cpu.txt"), *packages]]


def install(options: Namespace) -> None:
    """Run the commands, or print them. Raises UserError if one fails that may not."""
    for command in commands():
        if options.print:
            print(shlex.join(command))
            continue
        code = subprocess.run(command).returncode
        if code and TORCH not in command:
            raise UserError(f"This command ended with exit code {code}: {shlex.join(command)}.")
