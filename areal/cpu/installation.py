"""`areal install-cpu`: installs packages for machines without GPUs that `pip install` cannot choose for the wheel."""

import re
import shlex
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from areal.base.errors import UserError, explain
from areal.config.reading import CONFIGS

UV = "uv==0.13.9"
# PyTorch's own build for CPUs. If pip finds none, PyPI's build is installed, which is 2.3 GB larger.
TORCH = "torch==2.13.0+cpu"
TORCHVISION = "torchvision==0.28.0"
NUM2WORDS = "num2words==0.5.14"


def commands() -> list[list[str]]:
    """Return the commands in order. The second command may fail if pip finds no build for CPUs. Raises UserError if the
    package is not installed."""
    with explain(PackageNotFoundError, "This is no installed package: `make setup` installs a clone."):
        listed = requires("areal-as-actors") or []
    packages = [name.partition(";")[0].strip() for name in listed if re.search(r"extra == .cpu.", name)]
    pip = [sys.executable, "-m", "pip", "install"]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    return [[*pip, UV], [*pip, "--no-deps", TORCH], [*uv, "--overrides", str(CONFIGS / "cpu.txt"), *packages]]


def vision_commands() -> list[list[str]]:
    """Return the commands for models with vision: torchvision for vLLM, unless installed, and the imports of SmolVLM's
    processor. The first command may fail if pip finds no build for CPUs."""
    pip = [sys.executable, "-m", "pip", "install"]
    builds = [] if import_fault("torchvision") is None else [f"{TORCHVISION}+cpu", TORCHVISION]
    return [*([*pip, "--no-deps", build] for build in builds), [*pip, NUM2WORDS]]


def install(options: Namespace) -> None:
    """Run the commands, or print them. Raises UserError if a required command fails."""
    chosen = vision_commands() if options.vision else commands()
    if options.print:
        print(*map(shlex.join, chosen), sep="\n")
        return
    for command in chosen:
        code = subprocess.run(command).returncode
        if code and not command[-1].endswith("+cpu"):
            raise UserError(f"This command ended with exit code {code}: {shlex.join(command)}.")
    if options.vision:
        declare_operators()


def declare_operators() -> None:
    """Make torchvision importable. PyPI's build does not load its operators beside PyTorch's build for CPUs. No model
    here calls the operators, but torchvision wants them declared. Raises UserError if the import still fails."""
    if import_fault("torchvision") is None:
        return
    spec = find_spec("torchvision")
    if spec is not None and spec.origin is not None:
        with Path(spec.origin).with_name("extension.py").open("a") as file:
            file.write((CONFIGS / "torchvision.txt").read_text())
    if fault := import_fault("torchvision"):
        raise UserError(f"torchvision was installed, but Python cannot import it: {fault}.")


def import_fault(package: str) -> str | None:
    """Return the last line of Python's error if it cannot import a package, or None. Runs another process, since a
    failed import leaves parts behind."""
    process = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True)
    return process.stderr.strip().splitlines()[-1] if process.returncode else None
