"""What the processes of a run share: the death with their parent, the limit of open files, fast imports, the output."""

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
# The program that run.py is, also where there is no clone.
START = str(ROOT / "actors" / "start")
# Environment variable that a supervisor sets for the processes it starts.
SUPERVISED = "AREAL_SUPERVISED"
# Environment variable with the folder of the run's keys.
KEYS = "AREAL_KEYS"
# What programs of the user's get of this process's environment unless its user names more: no keys, no tokens.
PLAIN_ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "XDG_*",
    "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
# A link of the bus with keys takes 4.2 open files, so this is enough for the 4,096 members of the largest run.
OPEN_FILES = 65_536
# How often a run looks whether the process that started it is there.
PARENT_SECONDS = 0.5
# How often a rank that was told to leave looks whether rank 0 has left.
LEADER_SECONDS = 0.1


def check_packages() -> None:
    """Raises UserError if a file or a folder of the user's hides a package of this project, which has the same name."""
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
    """The folder of the user's caches."""
    return Path(variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME") or Path.home(), ".cache"))


def raise_open_files() -> None:
    """Raise the soft limit on open files as far as the hard limit allows, up to OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@contextmanager
def importing() -> Iterator[None]:
    """For blocks that import large packages: no garbage collection, which takes a quarter of the import of vLLM."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def die_with_parent(sign: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send `sign` to this process when its parent ends, for whatever reason (Linux only).

    parent: the process id of the expected parent, if known. This process exits if that parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sign)
    if parent is not None and os.getppid() != parent:
        sys.exit("the process that started this one has ended")


def stop_signals() -> list[signal.Signals]:
    """The signals that end work in order: that of a closed terminal, too, unless it is ignored, as below `nohup`."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def stop_after_parent(parent: int) -> None:
    """Send this process a SIGTERM once its parent has ended, for whatever reason. The kernel's own signal, as above,
    comes already when the parent's thread has ended that started this process, as in a notebook."""
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def outlive_sigterm(leader: int | None) -> None:
    """From now on a SIGTERM does not end this process. After one, it ends as soon as the process `leader` has ended.

    A thread does this, since Python's own handlers do not run while the main thread waits in a collective. leader: None
    if it is on another machine; torchrun kills who does not end in time.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    if leader is None:
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())

    def end_after_leader(writer: socket.socket) -> None:  # which has to stay open
        while reader.recv(1)[0] != signal.SIGTERM:
            pass
        while Path(f"/proc/{leader}").exists():
            time.sleep(LEADER_SECONDS)
        os._exit(1)

    threading.Thread(target=end_after_leader, args=[writer], daemon=True).start()


def plain_environment(pass_env: Sequence[str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a program that others may talk to. `python` is this process's own there. pass_env: names
    beside PLAIN_ENVIRONMENT, as `TAU2_*`."""
    names = (*PLAIN_ENVIRONMENT, *pass_env)
    kept = {name: value for name, value in variables.items() if any(fnmatch.fnmatchcase(name, form) for form in names)}
    return kept | {"PATH": os.pathsep.join(filter(None, [str(Path(sys.executable).parent), kept.get("PATH")]))}


def find_program(name: str) -> str | None:
    """Where a program with `plain_environment` finds the program of this name; None if it does not."""
    return shutil.which(name, path=plain_environment(())["PATH"])


def tied(*command: str) -> list[str]:
    """The command line of a program that is killed when this process ends, even if that is while the program starts."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def torchrun(ranks: int) -> list[str]:
    """The beginning of a command line: what follows it is started as so many ranks on this machine.

    They meet by a file. With `--standalone` torchrun unpickles what is in a store that listens on all interfaces.
    """
    options = ["--nnodes=1", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


class LenientOutput:
    """A stream of text that may lose what is written: where its reader has gone, its file is on a full disk, or its
    encoding lacks a character, nothing is raised: a run does not end for its display. reader_only: a full disk is
    raised."""

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
        except BrokenPipeError:  # nobody will read it any more, also not what is still in the buffer
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except OSError:
            if self._reader_only:
                raise


if __name__ == "__main__":  # PARENT PROGRAM ARGUMENT...: become a program that is killed when its parent ends
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


def timed(text: str) -> str:
    """The text, after the seconds for which this program has run."""
    import psutil

    return f"{time.time() - psutil.Process().create_time():5.1f} s  {text}"
