"""The tools that look at runs, and those that make data sets and models for others of them."""

from __future__ import annotations

from pathlib import Path

from areal.command_line import RUN, RoomTools


def declare(tools: RoomTools) -> None:
    compare = tools.add("compare", "comparison:compare", "print in what runs differ, and the figures they end with")
    compare.add_argument("folders", nargs="+", **RUN)

    rollouts = tools.add("rollouts", "rollout_print:print_rollouts", "print rollouts of a run (docs/observe.md)")
    add = rollouts.add_argument
    add("folder", **RUN)
    add("--where", metavar="SQL", help='condition on their columns: "reward < 0.1 and step > 50"')
    order = rollouts.add_mutually_exclusive_group().add_argument
    order("--sort", default="step desc", metavar="COLUMN", help='or "COLUMN desc" (default: "step desc", newest first)')
    order("--random", action="store_true", help="show rollouts at random")
    add("--show", type=int, default=5, metavar="N", help="number to show (default: 5)")

    trace = tools.add("trace", "trace:write_trace", "write the trace of a run, trace.json, to open in ui.perfetto.dev")
    trace.add_argument("folder", **RUN)

    track = tools.add("track", "tracking:track", "send a run's numbers to TensorBoard and others (its master does it)")
    track.add_argument("folder", **RUN)

    add = tools.add("export", "export:export", "write rollouts of a run as a data set for TRL and others").add_argument
    add("folder", **RUN)
    add(
        "--output", required=True, type=Path, metavar="FILE.jsonl|FILE.parquet|FOLDER",
        help="a folder has a data set card and can be uploaded as it is",
    )  # fmt: skip
    best = "the best sample of each group (default), or the best and the worst where they differ"
    add("--format", choices=("sft", "preference"), default="sft", help=best)
    add("--all", action="store_true", help="sft: all samples and not only the best of each group")
    least = "lowest reward of a sample to imitate (default: above 0; in a pair: any)"
    add("--min-reward", type=float, metavar="R", help=least)

    add = tools.add("push", "push:run", "make a model folder for the hub, with a card, and upload it").add_argument
    add("folder", **RUN)
    add("--repo", metavar="OWNER/NAME", help="upload to this repository, which is made if it is new")
    add("--public", action="store_true", help="make a new repository public (default: private)")
    add("--output", type=Path, metavar="FOLDER", help="the folder to make (default: RUN_FOLDER/hub)")
