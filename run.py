#!/usr/bin/env python3
"""Start a run, or a single role: `.venv/bin/python run.py --help`. `.venv/bin/areal run` is the same command."""

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OURS = ("areal", "actors", "protocols")


def way_in() -> str:
    """Return the remedy if the current Python cannot start a run."""
    venv = ROOT / ".venv"
    if not venv.exists():
        return f"`make setup` in {ROOT} makes one that can"
    if Path(sys.prefix).resolve() == venv or not (venv / "bin" / "python").exists():  # old packages, or an old Python
        return f"`rm -r .venv && make setup` in {ROOT} makes {venv} anew"
    near = "" if Path.cwd() == ROOT else f"{ROOT}/"
    words = [f"{near}.venv/bin/python", f"{near}run.py", *sys.argv[1:]]
    return "type " + " ".join(map(shlex.quote, words))


def main() -> int:
    """Return the exit status."""
    here = f"{sys.executable} (Python {sys.version_info[0]}.{sys.version_info[1]})"
    if sys.version_info < (3, 11):  # noqa: UP036
        print(f"{here} is too old for run.py: {way_in()}.", file=sys.stderr)
        return 2
    try:
        from actors.start.run_command import main as start
    except ImportError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        print(f"{here} does not have the packages that run.py needs ({error}): {way_in()}.", file=sys.stderr)
        return 2
    return start()


if __name__ == "__main__":
    sys.exit(main())
