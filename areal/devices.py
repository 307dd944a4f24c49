"""Which GPUs of this machine belong to whom."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from areal.config import Config, UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_SECONDS = 60.0  # a driver that nobody uses yet may take half of that to wake up


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, or else the driver numbers them."""
    if VISIBLE in os.environ:
        named = [device.strip() for device in os.environ[VISIBLE].split(",")]
        return [device for device in named if device not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def own_devices(config: Config, devices: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for each actor of a run on this machine that takes some: first the trainer, one a rank, then
    the generators, `tensor_parallel` each. Where there are too few, it begins with the first again, and they are
    shared, as a single one is by all.

    Raises UserError where one actor alone takes more than there are. Without devices all is done on the CPU.
    """
    if not devices:
        return {}
    ranks, each = config.trainer.ranks, config.generator.tensor_parallel
    for key, wanted in (("trainer.ranks", ranks), ("generator.tensor_parallel", each)):
        if wanted > len(devices):
            raise UserError(
                f"{key} is {wanted}, but the GPUs here are {len(devices)} ({','.join(devices)}): lower it, "
                f"or start the roles on several machines (docs/deploy.md)."
            )
    takes = {"trainer/0": range(ranks)}
    for index in range(config.generator.count):
        first = ranks + index * each
        takes[f"generator/{index}"] = range(first, first + each)
    return {name: ",".join(devices[number % len(devices)] for number in taken) for name, taken in takes.items()}
