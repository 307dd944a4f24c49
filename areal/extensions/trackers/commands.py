"""The command `areal track`, which sends the numbers of a run."""

from areal.base.command_line import RUN, RoomTools


def declare(tools: RoomTools) -> None:
    summary = "send a run's numbers to TensorBoard and others (its master does it)"
    tools.add("track", "tracking:track", summary).add_argument("folder", **RUN)
