"""Starts vLLM's engine process on the CPU by forking a process that has imported vLLM.

vLLM would start it by `spawn`. It would then import vLLM only when the process that starts it has done so and has made
the configuration: 8 s of CPU one after the other. Python's fork server imports it at the same time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

IMPORTED = ["vllm.v1.engine.core", "areal.generation.vllm_worker"]

PRELOAD = "LD_PRELOAD"
# The environment variables that are read when libraries are loaded begin with one of these.
READ_EARLY = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_", PRELOAD, "TORCH_", "TORCHDYNAMO_", "HF_", "PYTHON")

_environment: dict[str, str] = {}  # of these, as they were when the fork server was started


def import_early() -> None:
    """Start the fork server if it does not run yet. It begins to import vLLM. The environment must be that of the
    engine already, as far as it is read when libraries are loaded."""
    if not _environment:
        _preload_openmp()
        _environment.update(_read_early())
        multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Inside the block vLLM starts engine processes by the fork server. It does not if an environment variable has
    changed that was read when that loaded libraries."""
    from vllm.v1.engine import utils

    if _read_early() != _environment:
        yield
        return
    before = utils.get_mp_context
    utils.get_mp_context = _Context
    try:
        yield
    finally:
        utils.get_mp_context = before


class _Context(ForkServerContext):
    def Process(  # type: ignore[override]  # a class in multiprocessing
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> ForkServerProcess:
        return ForkServerProcess(target=_begin, name=name, args=(dict(os.environ), target, kwargs))


def _begin(environment: Mapping[str, str], target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
    """The engine process. Its environment gets what was added since the fork server was started."""
    # Of the rest even a write of the same value would move it, and setproctitle finds its room by where all of it is.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    target(**kwargs)


def _read_early() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_EARLY)}


def _preload_openmp() -> None:
    """Have engine processes load PyTorch's libgomp first, so that vLLM's kernels load no second one. vLLM would do the
    same, but later."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch, loaded = Path(found.origin).parent, os.environ.get(PRELOAD, "")
    libraries = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
    if libraries and not any(name in loaded for name in ("libgomp", "libomp", "libiomp")):
        os.environ[PRELOAD] = ":".join(filter(None, [loaded, str(libraries[0])]))
