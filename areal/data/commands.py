"""The tool that makes the quickstart's model."""

from pathlib import Path

from areal.base.command_line import RoomTools


def declare(tools: RoomTools) -> None:
    summary = "create the quickstart's model if it does not exist, and print its folder"
    add = tools.add("quickstart-model", "quickstart:make", summary).add_argument
    words = "holds models of this kind (default: that of the quickstart, runs/models)"
    add("folder", type=Path, metavar="PARENT_FOLDER", nargs="?", default=Path("runs", "models"), help=words)
    add("--seed", type=int, default=0)
