"""The library: configuration, data, ledger, algorithms, engines and reports; no actors and none of their messages.

What users of Python import from here (docs/notebooks.md) is loaded when it is first used: `train`, `start` and `join`,
which make the process an actor of a run, `Config`, `load_config`, `dump_config` and `UserError`.
"""

from importlib import import_module
from pathlib import Path

from areal.cpu.processor import use_avx512

use_avx512()  # here, so that it comes before any import of torch

_LATE = dict.fromkeys(("LiveRun", "RunFailed", "join", "start", "train"), "actors.api.runs") | dict.fromkeys(
    ("Config", "UserError", "dump_config", "load_config"), "areal.config"
)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("areal-as-actors") + _commit()
        except PackageNotFoundError:
            return "unknown"  # a clone whose packages were installed by hand
    if name not in _LATE:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


def _commit() -> str:
    """In a clone, its last commit, as a local part of the version: versions that were never released are many."""
    git = Path(__file__).parent.parent / ".git"
    try:
        head = (git / "HEAD").read_text().strip().removeprefix("ref: ")
        return f"+g{((git / head).read_text() if '/' in head else head)[:10]}"
    except OSError:  # no clone, or one whose branch is packed
        return ""


def __dir__() -> list[str]:
    return [*globals(), *_LATE, "__version__"]
