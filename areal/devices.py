"""Assigns the machine's GPUs, or the cores, to the actors of a run."""

import atexit
import contextlib
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from areal.base.errors import UserError
from areal.config import Config
from areal.config.roles import ROLES, role_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Environment variables: the cores of a generator's engine, and the cores of everything else.
ENGINE_CORES, CORES = "AREAL_ENGINE_CORES", "AREAL_CORES"
SHARES = "AREAL_SHARES_GPU"  # environment variable: trainer and generator share a GPU at the same time
DEVICE_FILES = Path("/dev")
VMSTAT = Path("/proc/vmstat")
# The folder of control groups, and the list of the process's groups. In a container, the top group is the container's.
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# By version (2, and 1): a group's files with the limit and the use, and the line of memory.stat with cached files.
GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # read by torch
ASK_SECONDS = 60.0  # timeout of nvidia-smi; waking an idle driver may take half a minute


def visible_devices() -> list[str]:
    """Return the GPUs of the process: the names in CUDA_VISIBLE_DEVICES or, if unset, the driver's numbers."""
    if VISIBLE in os.environ:
        named = [device.strip() for device in os.environ[VISIBLE].split(",")]
        return [device for device in named if device not in ("", "-1")]
    return list(listed_devices())


def host_memory() -> int:
    """Return the memory of the machine in bytes, or the limit of a smaller control group of the process."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(limit for limit, _ in _groups())])


def free_memory() -> int:
    """Return the bytes of `host_memory` that are still free."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(max(0, limit - used) for limit, used in _groups())])


def _groups() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group of the process, and the bytes in use there without cached files. A
    scheduler such as Slurm sets a limit far below the topmost group."""
    with contextlib.suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, version, path = line.split(":", 2)
            if version in GROUP_FILES:
                top = GROUPS / version
                group = top / path.lstrip("/")
                for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                    with contextlib.suppress(OSError, ValueError):  # the group has no limit
                        yield _limit_and_use(folder, *GROUP_FILES[version])


def _limit_and_use(group: Path, limit: str, use: str, cache: str) -> tuple[int, int]:
    bound, used = (int((group / name).read_text()) for name in (limit, use))
    cached = re.search(rf"^{cache} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
    return bound, used - int(cached[1] if cached else 0)


def memory_kills() -> int:
    """Return how many processes the machine's kernel has killed for lack of memory; 0 if unknown."""
    with contextlib.suppress(OSError):
        if count := re.search(r"^oom_kill (\d+)", VMSTAT.read_text(), re.MULTILINE):
            return int(count[1])
    return 0


def transfer_backend() -> str:
    """Return the backend of vLLM's weight transfer from a trainer on this machine into engines."""
    return "nccl" if visible_devices() else "gloo"


@cache
def listed_devices() -> Sequence[str]:
    """Return all GPUs. The driver is asked once in a process, since an answer may take long. Without the driver's tool,
    as in some containers, the driver's device files count, or the devices of torch if torch is loaded."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=ASK_SECONDS)
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    except (OSError, subprocess.TimeoutExpired):
        torch: Any = sys.modules.get("torch")
        count = len([*DEVICE_FILES.glob("nvidia[0-9]*")]) or (torch.cuda.device_count() if torch else 0)
    return [str(number) for number in range(count)]


def set_allocator() -> None:
    """Have torch take a GPU's memory in segments that grow, unless the user has set the allocator: rows of many lengths
    would fragment fixed segments. For processes that train; torch reads the setting at import."""
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def deal_out(config: Config, roles: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return environment variables, by actor, that divide the machine's GPUs, or else the cores, among `roles` (an
    entry per actor). Raises UserError for too few GPUs."""
    devices = visible_devices() if any(role_of(name).devices(config, 0) for name in roles) else []
    dealt = deal_out_devices(config, roles, devices) or deal_out_cores(config, roles)
    if any(SHARES in variables for variables in dealt.values()) and listed_devices():
        print("Note: trainer and generator share the only GPU here.", file=sys.stderr)
    return dealt


def shares_devices(config: Config) -> bool:
    """Return whether the process, a trainer or a generator, shares devices with the other role."""
    return config.colocate or SHARES in os.environ


def deal_out_devices(config: Config, roles: Sequence[str], devices: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return CUDA_VISIBLE_DEVICES for each actor in `roles` (an entry per actor) that uses GPUs.

    An actor gets the next GPUs, in the order of ROLES. With `colocate` each role begins with the first GPU. Otherwise
    two actors share a GPU only if the machine has a single GPU, for a single generator and a trainer of one rank.
    Without devices the result is empty, and the run uses the CPU. Raises UserError for too few GPUs, and for weights by
    NCCL between two actors on the same GPU.
    """
    if not devices:
        return {}
    shares: dict[str, Sequence[str]] = {}
    needs: list[str] = []
    total = 0
    for role in [role for role in ROLES.values() if role.name in roles and role.devices(config, 0)]:
        first = 0 if config.colocate and role.in_turns else total
        for index in range(roles.count(role.name)):
            shares[f"{role.name}/{index}"] = devices[first : first + role.devices(config, index)]
            first += role.devices(config, index)
        needs.append(role.needed_devices(config, roles.count(role.name)))
        total = max(total, first)
    if (
        len(devices) == 1
        and shares.keys() == {"trainer/0", "generator/0"}
        and config.trainer.ranks == config.generator.devices == 1
    ):
        if config.weights.direct:
            raise UserError(
                "weights.transport=direct does not work between a trainer and a generator that share one GPU, since "
                "NCCL refuses two ranks on a device: set it to folder."
            )
        return dict.fromkeys(shares, {VISIBLE: devices[0]} | ({} if config.colocate else {SHARES: "1"}))
    if total > len(devices):
        raise UserError(
            f"There are too few GPUs here: {' and '.join(needs)}, which is {total}{' in turns' * config.colocate}, but "
            f"there are {len(devices)} ({','.join(devices)}): lower these numbers, or start the roles on several "
            f"machines (areal docs deploy)."
        )
    return {name: {VISIBLE: ",".join(share)} for name, share in shares.items()}


def engine_cores(config: Config, roles: Sequence[str], cores: Iterable[int]) -> dict[str, list[int]]:
    """Return the cores of the engine of each generator in `roles` (an entry per actor), by actor.

    The result is empty unless the trainer and all engines, including scorers', need exactly all `cores` at the same
    time (without a trainer: all but one). In such a run, a process that wakes up preempts an engine or the trainer.
    With reserved cores it preempts the trainer: on two cores a run is a fifth faster, and generation alone a third.
    If cores are free, the kernel finds a free core.
    """
    core_ids = sorted(cores)
    count = roles.count("generator")
    per_engine = config.generator.threads * config.generator.devices
    reserved = config.trainer.ranks * config.trainer.threads if "trainer" in roles else 1
    reserved += threads_of_scorers(config) if "scorer" in roles else 0
    if config.colocate or count * per_engine + reserved != len(core_ids):
        return {}
    return {f"generator/{index}": core_ids[index * per_engine :][:per_engine] for index in range(count)}


def threads_of_scorers(config: Config) -> int:
    """Return how many threads the engines of a run's scorers have on a machine without GPUs."""
    return sum(config.scorers[name].threads * config.scorers[name].devices for name in config.scorer_uses.started)


def deal_out_cores(config: Config, roles: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the environment variable of each generator in `roles` with the cores for its engine alone.

    The result is empty if `engine_cores` assigns no cores, or if there are GPUs. Otherwise the function also sets
    CORES, the remaining cores, in the environment of the process, which all actors inherit.
    """
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    dealt = engine_cores(config, roles, cores)
    if not dealt or visible_devices():  # GPUs last: a driver may take long to answer
        return {}
    os.environ[CORES] = _named(cores - {core for share in dealt.values() for core in share})
    return {name: {ENGINE_CORES: _named(share)} for name, share in dealt.items()}


def settle(variable: str) -> None:
    """Move the process with its threads and future children to the cores in the environment variable, if set.

    Call `settle` after the start of the process, because a start is slow and should use all cores. Existing objects are
    excluded from garbage collection: a collection took half a second for vLLM's objects.
    """
    gc.freeze()
    atexit.unregister(gc.unfreeze)  # register once: the simulator has thousands of actors in a process
    atexit.register(gc.unfreeze)  # otherwise some libraries report the objects left at exit as leaks
    if variable in os.environ:
        cores = {int(core) for core in os.environ[variable].split(",")}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended in the meantime
                os.sched_setaffinity(int(thread), cores)


def _named(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
