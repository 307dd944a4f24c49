"""The command `areal launch`, which starts a run on a cluster."""

from areal.base import extensions
from areal.base.command_line import OVERRIDES, RoomTools


def declare(tools: RoomTools) -> None:
    summary = "start a run, or go on with it, on the nodes that its section `cluster` names (areal docs deploy)"
    add = tools.add("launch", "launch:launch", summary).add_argument
    add("target", choices=extensions.names("launch_target"), help="the scheduler")
    add("config", metavar="FILE.yaml", help="configuration of the run")
    words = "print which role runs where, and the files for the scheduler, without submitting anything"
    add("--dry-run", action="store_true", help=words)
    add("--follow", action="store_true", help="wait for the end of the job, and print its log")
    add("overrides", help="changes to the configuration", **OVERRIDES)
