"""The library: configuration, data, ledger, algorithms, engines and reports; no actors and no messages.

The names for users of Python (areal docs running) are loaded at their first use: `train`, `start` and `join`, which
make the process an actor of a run, `Config`, `load_config`, `dump_config` and `UserError`.
"""

from importlib import import_module
from pathlib import Path

from areal.cpu.processor import use_avx512

use_avx512()  # before any import of torch

_LATE = dict.fromkeys(("LiveRun", "RunFailed", "join", "start", "train"), "actors.api.live_run")
_LATE |= dict.fromkeys(("Config", "dump_config", "load_config"), "areal.config") | {"UserError": "areal.base.errors"}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("areal-as-actors") + _commit()
        except PackageNotFoundError:
            return "unknown"  # a clone with packages installed by hand
    if name not in _LATE:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    if _LATE[name].startswith("actors."):
        import_module("areal.base.processes").check_packages()
    return getattr(import_module(_LATE[name]), name)


def _commit(git: Path = Path(__file__).parent.parent / ".git") -> str:
    """Return the last commit of a clone, as a local part of the version: many versions were never released."""
    try:
        head = (git / "HEAD").read_text().split()[-1]  # a commit, or the name of a branch
        if "/" in head and (git / head).exists():
            head = (git / head).read_text()
        elif "/" in head:  # `git gc` packs branches
            (head,) = (line for line in (git / "packed-refs").read_text().splitlines() if line.endswith(f" {head}"))
        return f"+g{head[:10]}"
    except (OSError, ValueError):  # no clone, or a branch without a commit
        return ""


def __dir__() -> list[str]:
    return [*globals(), *_LATE, "__version__"]
