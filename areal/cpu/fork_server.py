"""Starts vLLM's engine process by forking a process that has imported vLLM: Python's fork server.

vLLM would use `spawn`, and would import vLLM in the new process only after its parent has imported vLLM and has made
the configuration: 8 s of CPU one after the other. The fork server itself is forked from a process that has imported
vLLM, if the process has a single thread. Otherwise a new process imports vLLM at the same time.
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

IMPORTED = ["vllm.v1.engine.core", "areal.generation.vllm_worker", "areal.generation.gathering_scheduler"]

PRELOAD = "LD_PRELOAD"
# Prefixes of the environment variables that are read when libraries are loaded.
READ_EARLY = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_", PRELOAD, "TORCH_", "TORCHDYNAMO_", "HF_", "PYTHON")

# Options of glibc's mallopt, by environment variable.
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}

_spawn = util.spawnv_passfds
_environment: dict[str, str] = {}  # variables with these prefixes at the start of the fork server


def start_fork_server() -> None:
    """Start the fork server unless it runs (Linux only). The variables in READ_EARLY must already have the engine's
    values. A process with a single thread imports vLLM here."""
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
    """Replace multiprocessing.util.spawnv_passfds: run the last of `args`, Python code, in a fork of this process with
    only the files `passfds` open. Returns the process id."""
    gc.freeze()  # otherwise garbage collection in the child would copy every shared page
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
    except BaseException:  # the code in `args` has no caller here
        traceback.print_exc()
    finally:
        os._exit(0)


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Have vLLM start engine processes by the fork server inside the block. Changes nothing if the fork server does not
    run, or if an environment variable has changed that the fork server's libraries have read."""
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
    """Run the engine process. Its environment gets the variables added since the start of the fork server."""
    # Writing an unchanged variable would move it too, and setproctitle finds its room by the places of all variables.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    libc = ctypes.CDLL(None)
    for name, option in MALLOPT.items():  # glibc reads these variables only at the start of a program
        if (value := environment.get(name, "")).isdecimal():
            libc.mallopt(option, int(value))
    target(**kwargs)


def _read_early() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_EARLY)}


def _preload_openmp() -> None:
    """Load PyTorch's libgomp first, here and in engine processes, to keep vLLM's kernels from loading another."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch, loaded = Path(spec.origin).parent, os.environ.get(PRELOAD, "")
    libraries = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
    if libraries and not any(name in loaded for name in ("libgomp", "libomp", "libiomp")):
        os.environ[PRELOAD] = ":".join(filter(None, [loaded, str(libraries[0])]))
        ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
