"""The parts that the tools of `areal` share: their declaration in a room's `commands.py`, and where they print."""

import shlex
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.base.text import shown

if TYPE_CHECKING:
    from rich.console import Console

RUN: dict[str, Any] = {"type": Path, "metavar": "RUN_FOLDER"}
CONFIG: dict[str, Any] = {"type": Path, "metavar": "FILE.yaml"}
OVERRIDES: dict[str, Any] = {"nargs": "*", "metavar": "key=value"}


def typed(words: str) -> str:
    """Return the command `areal WORDS` for the user's shell, with the path of the program if PATH lacks it."""
    program, named = Path(sys.executable).with_name("areal"), shutil.which("areal")
    if not program.exists():
        return f"{shlex.quote(sys.executable)} -m areal {words}"
    if named and Path(named).samefile(program):
        return f"areal {words}"
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return f"{shlex.quote(str(program))} {words}"


class RoomTools(NamedTuple):
    """The tools of a room. parsers: the result of `add_subparsers`."""

    room: str
    parsers: Any

    def add(self, name: str, function: str, summary: str, epilog: str | None = None) -> ArgumentParser:
        """Declare `areal NAME`. function: MODULE:FUNCTION of the room, imported when the tool is used. The function
        gets the options, and returns the exit status or None for 0."""
        parser: ArgumentParser = self.parsers.add_parser(name, help=summary, description=summary, epilog=epilog)
        parser.set_defaults(tool=f"{self.room}.{function}")
        return parser


def output(width: int) -> "Console":
    """Return a console on standard output, `width` columns wide if stdout is no terminal: tables would be cut to 80.
    Texts are printed as they are: `[/INST]` in a setting is no markup, and no printed text can steer the terminal."""
    from rich.console import Console

    class ShownConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Any]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=shown(segment.text))

    return ShownConsole(width=None if sys.stdout.isatty() else width, markup=False)
