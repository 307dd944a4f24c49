"""`areal TOOL`: run.py, and further command-line tools. A room declares tools in `commands.py`."""

import difflib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO, cast

import areal
from areal.base import extensions
from areal.base.command_line import RoomTools
from areal.base.errors import NOT_PERMITTED, UserError, explain
from areal.base.processes import START, LenientOutput, check_packages
from areal.base.text import sentences_on, shown
from areal.config import advice

# Names of the tool that executes run.py.
RUN = ["run", "train"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tool. Returns the exit status, 2 for a user error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdout = cast(TextIO, LenientOutput(sys.stdout, reader_only=True))  # as in `areal score ... | head`
    sys.stderr = sentences_on(sys.stderr)
    try:
        return _run(words)
    except UserError as error:
        print(shown(str(error)), file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    check_packages()
    if words and words[0] in RUN:
        os.execv(sys.executable, [sys.executable, START, *words[1:]])
    parser = command_line()
    if words and (close := _close_tool(parser, words[0])):
        parser.error(f"there is no tool {words[0]!r}: did you mean {close!r}?")
    options, further = parser.parse_known_args(words)
    # argparse takes positional arguments only once, so arguments after `MODEL --option` are left over.
    if any(word.startswith("-") for word in further) or (further and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(further)}{advice(further[0], words)}")
    if further:
        options.overrides += further
    module, _, function = options.tool.partition(":")
    with explain(PermissionError, NOT_PERMITTED):
        return getattr(import_module(module), function)(options) or 0


def _close_tool(parser: ArgumentParser, word: str) -> str | None:
    """Return the tool with the name closest to an unknown word."""
    names = [name for action in parser._actions if isinstance(action.choices, dict) for name in action.choices]
    close = difflib.get_close_matches(word, names, 1)
    return close[0] if close and word not in names else None


def command_line() -> ArgumentParser:
    parser = ArgumentParser(prog="areal", description="Runs, and the tools around them (areal docs running).")
    parser.add_argument("--version", action="version", version=areal.__version__)
    parsers = parser.add_subparsers(metavar="TOOL", required=True)
    summary = "start a run, or one role of it: CONFIG.yaml key=value, and all options of run.py"
    parsers.add_parser(RUN[0], aliases=RUN[1:], help=summary)
    RoomTools("areal.base", parsers).add("docs", "pages:print_page", "print a page of the documentation").add_argument(
        "page", nargs="?", help="its name; without it all names"
    )
    install = RoomTools("areal.cpu", parsers).add(
        "install-cpu", "installation:install", "install PyTorch, vLLM and DeepSpeed for a machine without a GPU"
    )
    install.add_argument("--print", action="store_true", help="print the commands, and do not run them")
    install.add_argument("--vision", action="store_true", help="install what models with vision need beside them")
    completion = RoomTools("areal", parsers).add(
        "completion", "__main__:complete", "print what completes tools in a shell"
    )
    RoomTools("areal.base", parsers).add(
        "extensions",
        "extensions:print_entries",
        "list the workflows, rewards, ... that there are, and where they come from",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help='in bash: eval "$(areal completion bash)"')
    for declare in extensions.find_own("commands"):
        declare(RoomTools(declare.__module__.rpartition(".")[0], parsers))
    return parser


def complete(options: Namespace) -> None:
    """`areal completion`: print the shell code that completes tools, options, and files."""
    with explain(ImportError, "The completion needs shtab: pip install shtab."):
        import shtab

    parser = command_line()
    tools = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    start = import_module("actors.start.run_command")
    start.add_options_of_run(tools[RUN[0]].add_argument)  # the alias `train` has the same parser
    start.add_options_of_role(tools[RUN[0]].add_argument)
    for action in (action for tool in tools.values() for action in tool._actions if action.type is Path):
        action.complete = shtab.DIRECTORY if action.metavar == "RUN_FOLDER" else shtab.FILE
    print(shtab.complete(parser, options.shell))


if __name__ == "__main__":
    sys.exit(main())
