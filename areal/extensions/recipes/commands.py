"""The commands that export the record of a run and check recipes."""

from pathlib import Path

from areal.base.command_line import RUN, RoomTools


def declare(tools: RoomTools) -> None:
    summary = (
        "write the record of a finished run as one file, without secrets and paths, for `areal audit` and `replay`"
    )
    add = tools.add("export-record", "run_export:export", summary).add_argument
    add("run", **RUN)
    add("--out", required=True, type=Path, metavar="FILE.tar.zst")
    add("--most-mb", type=float, default=10.0, metavar="MB", help="size of the file (default: 10)")
    add("--audit", type=Path, metavar="FILE.json", help="the findings of an audit, by `areal audit --json`")

    summary = "run recipes with several seeds, compare how they end with their expect.yaml, and write records of it"
    epilog = "A stopped check goes on with the same command. Exit code 1: a recipe has not ended as it is expected to."
    add = tools.add("check-recipe", "recipe_check:check", summary, epilog).add_argument
    add("recipes", nargs="+", type=Path, metavar="FOLDER|FILE.yaml", help="a folder with run.yaml, or a configuration")
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (default: 3)")
    runs = Path("build/recipes")
    records = "folder of the figures and of the record of the first run (default: the same)"
    add("--folder", type=Path, default=runs, help=f"folder of the runs (default: {runs})")
    add("--records", type=Path, metavar="FOLDER", help=records)
    add("--most-mb", type=float, default=10.0, metavar="MB", help="size of a record (default: 10)")
    add("--write", action="store_true", help="write the bands of these runs into expect.yaml")
    add("--quick", action="store_true", help="two steps of one seed: does each recipe run? Bands are not compared")
