"""Starts vLLM's engine process by forking a process that has imported vLLM: Python's fork server.

vLLM would start it by `spawn`. It would then import vLLM only when the process that starts it has done so and has made
the configuration: 8 s of CPU one after the other. The fork server itself is forked from a process that has imported
vLLM, if that has a single thread. Otherwise it is a new process that imports vLLM beside this one.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import setproctitle

from areal.base.processes import importing

IMPORTED = ["vllm.v1.engine.core", "areal.generation.vllm_worker"]

PRELOAD = "LD_PRELOAD"
# The environment variables that are read when libraries are loaded begin with one of these.
READ_EARLY = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_", PRELOAD, "TORCH_", "TORCHDYNAMO_", "HF_", "PYTHON")

# Of glibc's mallopt, by the environment variable.
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}

_spawn = util.spawnv_passfds
_environment: dict[str, str] = {}  # of these, as they were when the fork server was started


def start_fork_server() -> None:
    """Start the fork server if it does not run yet (Linux only). The environment must be that of the engine already, as
    far as it is read when libraries are loaded. A process with a single thread imports vLLM here."""
    if _environment or sys.platform != "linux":
        return
    _preload_openmp()
    _environment.update(_read_early())
    alone = len(os.listdir("/proc/self/task")) == 1
    multiprocessing.get_context("forkserver").set_forkserver_preload([] if alone else IMPORTED)
    if not alone:
        return forkserver.ensure_running()
    with importing():
        for name in IMPORTED:
            importlib.import_module(name)
    util.spawnv_passfds = _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = _spawn


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In place of multiprocessing.util.spawnv_passfds: run the last of `args`, which is Python, in a fork of this
    process, with these open files and no others. Returns the process id."""
    gc.freeze()  # else garbage collection in the child would copy every page that it shares with this process
    if pid := os.fork():
        return pid
    util.spawnv_passfds = _spawn  # an engine of several devices spawns its workers
    try:
        setproctitle.setproctitle("areal forkserver of vLLM")
        open_files = {0, 1, 2, *passfds}
        for file in map(int, os.listdir("/proc/self/fd")):
            if file not in open_files:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(file)
        exec(args[-1])
    except SystemExit:  # this process has ended
        pass
    except BaseException:  # of the code in `args`, which has no caller here
        traceback.print_exc()
    finally:
        os._exit(0)


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Inside the block vLLM starts engine processes by the fork server. It does not if that does not run, or if an
    environment variable has changed that was read when it loaded libraries."""
    from vllm.v1.engine import utils

    if _read_early() != _environment:
        yield
        return
    get_mp_context = utils.get_mp_context
    utils.get_mp_context = _Context
    try:
        yield
    finally:
        utils.get_mp_context = get_mp_context


class _Context(ForkServerContext):
    def Process(  # type: ignore[override]  # a class in multiprocessing
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> ForkServerProcess:
        return ForkServerProcess(target=_begin, name=name, args=(dict(os.environ), target, kwargs))


def _begin(environment: Mapping[str, str], target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
    """The engine process. Its environment gets what was added since the fork server was started."""
    # Of the rest even a write of the same value would move it, and setproctitle finds its room by where all of it is.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    libc = ctypes.CDLL(None)
    for name, option in MALLOPT.items():  # glibc has read them when the fork server's own program was started
        if (value := environment.get(name, "")).isdecimal():
            libc.mallopt(option, int(value))
    target(**kwargs)


def _read_early() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_EARLY)}


def _preload_openmp() -> None:
    """Load PyTorch's libgomp first, here and in engine processes, so that vLLM's kernels use no second one."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch, loaded = Path(spec.origin).parent, os.environ.get(PRELOAD, "")
    libraries = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
    if libraries and not any(name in loaded for name in ("libgomp", "libomp", "libiomp")):
        os.environ[PRELOAD] = ":".join(filter(None, [loaded, str(libraries[0])]))
        ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
