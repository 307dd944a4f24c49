"""Which GPUs, or cores, of this machine belong to whom."""

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
# Cores of a generator's engine, and of everything else.
ENGINE_CORES, CORES = "AREAL_ENGINE_CORES", "AREAL_CORES"
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


def deal_out_devices(config: Config, devices: Sequence[str]) -> dict[str, dict[str, str]]:
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
    return {
        name: {VISIBLE: ",".join(devices[number % len(devices)] for number in taken)} for name, taken in takes.items()
    }


def engine_cores(config: Config, roles: Sequence[str], cores: Iterable[int]) -> dict[str, list[int]]:
    """The cores of each engine among `roles`, one entry an actor, where they and the trainer need all that there are
    (without a trainer: all but one); else of none.

    Whatever else wakes up there preempts one of them, which had better be the trainer: on two cores that makes a run a
    fifth faster, and generation alone a third. With cores to spare the kernel finds one by itself.
    """
    left = sorted(cores)
    count = roles.count("generator")
    each = config.generator.threads * config.generator.tensor_parallel
    training = config.trainer.ranks * config.trainer.threads if "trainer" in roles else 1
    if count * each + training != len(left):
        return {}
    return {f"generator/{index}": left[index * each :][:each] for index in range(count)}


def deal_out_cores(config: Config, roles: Sequence[str]) -> dict[str, dict[str, str]]:
    """What the environment of each actor of `roles` says about the cores that its engine has to itself; nothing where
    there are GPUs. Sets what that of all says about the cores that are left."""
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    dealt = engine_cores(config, roles, cores)
    if not dealt or visible_devices():  # asked last: a driver may take long to tell
        return {}
    os.environ[CORES] = _named(cores - {core for own in dealt.values() for core in own})
    return {name: {ENGINE_CORES: _named(own)} for name, own in dealt.items()}


def settle(variable: str) -> None:
    """To be called once a process has started, which is slow, and on all cores.

    It moves, with all its threads and what it starts from now on, to the cores in that variable of the environment, if
    that is set. What it has made by now stays: to look through vLLM's for garbage took half a second each time.
    """
    gc.freeze()
    atexit.unregister(gc.unfreeze)  # the simulator has thousands of actors in a process
    atexit.register(gc.unfreeze)  # else some libraries take what is left at the end for leaks
    if variable in os.environ:
        own = {int(core) for core in os.environ[variable].split(",")}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), own)


def _named(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
