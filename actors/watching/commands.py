"""The tools that serve a run's web page, and list and stop the runs of this machine."""

from pathlib import Path

from areal.base.command_line import RUN, RoomTools


def declare(tools: RoomTools) -> None:
    add = tools.add("ps", "machine_runs:print_runs", "list the runs that are in progress on this machine").add_argument
    words = "folder of the run folders of `areal launch`, whose jobs are listed too (default: runs)"
    add("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help=words)
    summary = "stop a run, also one of `areal launch`, in order, and wait until it has ended; exit code 1 if it has not"
    tools.add("stop", "machine_runs:stop", summary).add_argument("folder", **RUN)

    summary = "serve a live web page of a run, or of several with their curves overlaid"
    add = tools.add("dashboard", "dashboard:serve", summary).add_argument
    add("folders", nargs="+", **RUN)
    add("--host", default="127.0.0.1", help="interface to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8090)
    add("--token", help="token that requests must carry, ?token=... (default: none on loopback, else a random one)")
