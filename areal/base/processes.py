"""Processes of a run: death with the parent, the limit of open files, fast imports, output that may be lost."""

import ctypes
import fnmatch
import gc
import importlib.metadata
import io
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from areal.base.errors import UserError

ROOT = Path(__file__).parents[2]
# The program that run.py is, for installations without a clone.
START = str(ROOT / "actors" / "start")
# Environment variable that a supervisor sets for its children.
SUPERVISED = "AREAL_SUPERVISED"
# Environment variable with the folder of the run's keys.
KEYS = "AREAL_KEYS"
# The environment variables that a program of the user's inherits, unless the user names more: no keys, no tokens.
PLAIN_ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "XDG_*",
    "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
# A link of the bus with keys takes 4.2 open files: enough for the 4,096 members of the largest run.
OPEN_FILES = 65_536
# How often a run looks whether the process that started the run is alive.
PARENT_SECONDS = 0.5
# How often a rank, told to leave, looks whether rank 0 has left.
LEADER_SECONDS = 0.1


def check_packages() -> None:
    """Raise UserError if a file or a folder of the user's hides a package of this project with the same name."""
    for name in ("actors", "protocols"):
        spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
        places = [Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()]
        if spec is None or ROOT / name not in places:
            file = spec and (spec.origin or next(map(str, places), name))
            raise UserError(f"{file} hides the package {name!r} of areal: rename it, or start in another folder.")


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed, by name."""
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the user's caches."""
    return Path(variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME") or Path.home(), ".cache"))


def raise_open_files() -> None:
    """Raise the soft limit on open files as far as the hard limit allows, up to OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@contextmanager
def importing() -> Iterator[None]:
    """Import large packages without garbage collection, which takes a quarter of the import of vLLM."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def die_with_parent(sign: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send `sign` to this process when the parent ends, for whatever reason (Linux only).

    parent: the process id of the expected parent, if known. This process exits if the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sign)
    if parent is not None and os.getppid() != parent:
        sys.exit("the process that started this one has ended")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end work in order. SIGHUP, of a closed terminal, is one unless `nohup` has it ignored."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def stop_after_parent(parent: int) -> None:
    """Send this process a SIGTERM once the parent process has ended, for whatever reason. The kernel's signal
    (`die_with_parent`) comes as soon as the parent's starting thread has ended, too early in a notebook."""
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def outlive_sigterm(leader: int | None) -> None:
    """From now on, keep this process alive after a SIGTERM until the process `leader` has ended.

    A thread waits for the leader, because Python's signal handlers do not run while the main thread waits in a
    collective. leader: None if rank 0 is on another machine; torchrun kills late ranks.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    if leader is None:
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())

    def end_after_leader(writer: socket.socket) -> None:  # the socket has to stay open
        while reader.recv(1)[0] != signal.SIGTERM:
            pass
        while Path(f"/proc/{leader}").exists():
            time.sleep(LEADER_SECONDS)
        os._exit(1)

    threading.Thread(target=end_after_leader, args=[writer], daemon=True).start()


def plain_environment(pass_env: Sequence[str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a program that strangers may talk to. `python` is this process's interpreter. pass_env:
    names beside PLAIN_ENVIRONMENT, such as `TAU2_*`."""
    names = (*PLAIN_ENVIRONMENT, *pass_env)
    kept = {name: value for name, value in variables.items() if any(fnmatch.fnmatchcase(name, form) for form in names)}
    return kept | {"PATH": os.pathsep.join(filter(None, [str(Path(sys.executable).parent), kept.get("PATH")]))}


def find_program(name: str) -> str | None:
    """Return the path at which a program with `plain_environment` finds the program `name`; None if it does not."""
    return shutil.which(name, path=plain_environment(())["PATH"])


def tied(*command: str) -> list[str]:
    """Return the command line of a program that is killed when this process ends, even while the program starts."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def torchrun(ranks: int) -> list[str]:
    """Return the beginning of a command line that starts the rest of the line as `ranks` processes on this machine.

    The ranks meet by a file. With `--standalone` torchrun unpickles data from a store that listens on all interfaces.
    """
    options = ["--nnodes=1", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


class LenientOutput:
    """A stream of text whose writes may be lost: nothing is raised if the reader has gone, if the disk is full, or if
    the encoding lacks a character, because a run does not end for its display. reader_only: a full disk is raised."""

    def __init__(self, stream: TextIO, reader_only: bool = False) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        self._stream = stream
        self._reader_only = reader_only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._losses():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losses():
            self._stream.flush()

    @contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # nobody will read the stream any more, nor the rest of the buffer
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except OSError:
            if self._reader_only:
                raise


if __name__ == "__main__":  # PARENT PROGRAM ARGUMENT...: become a program that is killed when the parent ends
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


def timed(text: str) -> str:
    """Return the text after the seconds since this program's start."""
    import psutil

    return f"{time.time() - psutil.Process().create_time():5.1f} s  {text}"
