"""Assigns the GPUs, or the cores, of this machine to the actors of a run."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

from areal.config import Config, UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Environment variables: the cores of a generator's engine, and the cores of everything else.
ENGINE_CORES, CORES = "AREAL_ENGINE_CORES", "AREAL_CORES"
ASK_SECONDS = 60.0  # timeout of nvidia-smi; a driver that is not in use may take half of it to wake up


def visible_devices() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES or, if unset, the driver's numbers."""
    if VISIBLE in os.environ:
        named = [device.strip() for device in os.environ[VISIBLE].split(",")]
        return [device for device in named if device not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def deal_out_devices(config: Config, devices: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return CUDA_VISIBLE_DEVICES for each actor of a run on this machine that uses GPUs.

    The trainer gets the first GPUs, one per rank, and each generator the next `tensor_parallel`. If there are too few,
    they are shared, beginning with the first again. All these actors share a single GPU. Without devices the result is
    empty, and the run uses the CPU. Raises UserError if one actor alone needs more GPUs than there are.
    """
    if not devices:
        return {}
    ranks, each = config.trainer.ranks if config.steps else 0, config.generator.tensor_parallel
    for key, wanted in (("trainer.ranks", ranks), ("generator.tensor_parallel", each)):
        if wanted > len(devices):
            raise UserError(
                f"{key} is {wanted}, but the number of GPUs here is {len(devices)} ({','.join(devices)}): lower it, "
                f"or start the roles on several machines (docs/deploy.md)."
            )
    takes = {"trainer/0": range(ranks)} if ranks else {}
    for index in range(config.generator.count):
        first = ranks + index * each
        takes[f"generator/{index}"] = range(first, first + each)
    return {
        name: {VISIBLE: ",".join(devices[number % len(devices)] for number in taken)} for name, taken in takes.items()
    }


def engine_cores(config: Config, roles: Sequence[str], cores: Iterable[int]) -> dict[str, list[int]]:
    """Return the cores of the engine of each generator in `roles` (one entry per actor), by actor.

    The result is empty unless the engines and the trainer together need exactly all `cores` (without a trainer: all but
    one). In that case any other process that wakes up preempts an engine or the trainer, and it should preempt the
    trainer: on two cores this makes a run a fifth faster, and generation alone a third. If there are cores to spare,
    the kernel finds a free one itself.
    """
    left = sorted(cores)
    count = roles.count("generator")
    each = config.generator.threads * config.generator.tensor_parallel
    training = config.trainer.ranks * config.trainer.threads if "trainer" in roles else 1
    if count * each + training != len(left):
        return {}
    return {f"generator/{index}": left[index * each :][:each] for index in range(count)}


def deal_out_cores(config: Config, roles: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the environment variable of each generator in `roles` with the cores that only its engine may use.

    The result is empty if `engine_cores` assigns none, or if there are GPUs. Otherwise this also sets CORES, the
    remaining cores, in the environment of this process and so of all actors.
    """
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    dealt = engine_cores(config, roles, cores)
    if not dealt or visible_devices():  # GPUs last: a driver may take long to answer
        return {}
    os.environ[CORES] = _named(cores - {core for own in dealt.values() for core in own})
    return {name: {ENGINE_CORES: _named(own)} for name, own in dealt.items()}


def settle(variable: str) -> None:
    """Move this process, its threads and its future children to the cores in the environment variable, if it is set.

    Call it once the process has started, because starting is slow and should use all cores. The objects that exist now
    are excluded from garbage collection: going through vLLM's objects took half a second each time.
    """
    gc.freeze()
    atexit.unregister(gc.unfreeze)  # register it once: the simulator has thousands of actors in a process
    atexit.register(gc.unfreeze)  # otherwise some libraries report the objects left at exit as leaks
    if variable in os.environ:
        own = {int(core) for core in os.environ[variable].split(",")}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended in the meantime
                os.sched_setaffinity(int(thread), own)


def _named(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
