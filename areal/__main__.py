"""`python -m areal TOOL`: what one does with a run besides running it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.config import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool; returns the exit status, 2 for a mistake of the user's."""
    options = _parser().parse_args(arguments)
    try:
        options.tool(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m areal", description=__doc__)
    tools = parser.add_subparsers(metavar="TOOL", required=True)
    report = tools.add_parser("report", help="write report.html of a run")
    report.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    report.set_defaults(tool=_report)
    return parser


def _report(options: argparse.Namespace) -> None:
    from areal.report import write_report

    print(write_report(options.folder))


if __name__ == "__main__":
    sys.exit(main())
