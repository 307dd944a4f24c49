"""The commands of the desk: tools that read runs, and tools that plan and prepare runs."""

from argparse import Namespace
from pathlib import Path

from areal.base.command_line import CONFIG, OVERRIDES, RUN, RoomTools
from areal.base.extensions import need

RUN_OR_RECORD = RUN | {"metavar": "RUN_FOLDER|RECORD.tar.zst"}


def declare(tools: RoomTools) -> None:
    _declare_readers(tools)
    _declare_planning(tools)
    _declare_replays(tools)


def _declare_readers(tools: RoomTools) -> None:
    compare = tools.add(
        "compare", "comparison:compare", "print how the settings of runs differ, and their last figures"
    )
    compare.add_argument("folders", nargs="+", **RUN)

    rollouts = tools.add("rollouts", "rollout_print:print_rollouts", "print rollouts of a run (areal docs observe)")
    add = rollouts.add_argument
    add("folder", **RUN)
    add("--where", metavar="SQL", help='condition on their columns: "reward < 0.1 and step > 50"')
    order = rollouts.add_mutually_exclusive_group().add_argument
    order("--sort", default="step desc", metavar="COLUMN", help='or "COLUMN desc" (default: "step desc", newest first)')
    order("--random", action="store_true", help="show rollouts at random")
    add("--show", type=int, default=5, metavar="N", help="number to show (default: 5)")

    trace = tools.add("trace", "trace:write_trace", "write the trace of a run, trace.json, to open in ui.perfetto.dev")
    trace.add_argument("folder", **RUN)

    grafana = "print a dashboard to import into Grafana, with every curve of a step"
    tools.add("grafana", "grafana:print_dashboard", grafana)

    summary = "write rollouts of a run as a data set for TRL and other libraries, or its model"
    add = tools.add("export", "export:export", summary).add_argument
    add("folder", **RUN)
    add(
        "--output",
        required=True,
        type=Path,
        metavar="FILE.jsonl|FILE.parquet|FOLDER",
        help="a folder has a card and can be uploaded as it is, by `hf upload`",
    )
    form = "the best sample of each group (default), the best and the worst where they differ, or the newest checkpoint"
    add("--format", choices=("sft", "preference", "model"), default="sft", help=form)
    add("--all", action="store_true", help="sft: all samples and not only the best of each group")
    least = "lowest reward of a sample to imitate (default: above 0; in a pair: any)"
    add("--min-reward", type=float, metavar="R", help=least)


def _declare_planning(tools: RoomTools) -> None:
    reports = tools.add("report", "commands:report", "write the report of a run, report.html")
    reports.add_argument("folders", nargs="+", **RUN)

    add = tools.add("config", "settings_list:print_keys", "list the keys, their values and meaning").add_argument
    schema = "print the JSON schema of a configuration, by which editors complete YAML"
    add("--schema", action="store_true", help=schema)
    add("words", nargs="*", metavar="WORD", help="only keys with these words, such as trainer.lora or staleness")

    add = tools.add(
        "plan",
        "plan:plan_run",
        "plan the split of devices between generation and training, and their memory",
        "Measure the rates with a short run on any number of such devices: plan --from runs/NAME --devices N",
    ).add_argument
    add("--config", help="configuration of the run (default with --from: that run's)", **CONFIG)
    add("--from", dest="run", help="take rates and lengths from this run", **RUN)
    add("--devices", required=True, type=int, metavar="N", help="number of devices to split")
    add("--device-memory", required=True, type=float, metavar="GIB", help="memory of one device")
    add("--generation-rate", type=float, metavar="TOKENS/S", help="completion tokens per device")
    add("--training-rate", type=float, metavar="TOKENS/S", help="completion tokens per device")
    add("--mean-tokens", type=float, metavar="N", help="mean length of a completion")
    add("--prompt-tokens", type=int, default=1024, metavar="N", help="length of the longest prompt (default: 1024)")
    add("overrides", help="changes to the configuration", **OVERRIDES)


def _declare_replays(tools: RoomTools) -> None:
    summary = "train again from the rollouts that a run has kept, as it did or with changes; also works under torchrun"
    epilog = "Exit code 1: the weights are not those of the run, or a replay has failed (areal docs desk)."
    add = tools.add("replay", "commands:replay", summary, epilog).add_argument
    add("run", **RUN_OR_RECORD)
    add("--trust", action="store_true", help="run code that the configuration of another user's run names")
    grid = "a replay for each value, such as trainer.objective=ppo,gspo; may be repeated, for each combination"
    add("--sweep", action="append", default=[], metavar="key=value,value,...", help=grid)
    add("--steps", default=":", metavar="A:B", help="only the steps after A up to B, from the checkpoint of A")
    add("--without", metavar="SQL", help='leave out groups that have such a row: "step > 40 and reward > 1"')
    add("--until", metavar="CONDITION", help='end with the first step of which it holds, such as "entropy<0.2"')
    add("--output", type=Path, metavar="FOLDER", help="folder for the trained model, with --sweep for one of each")
    add("overrides", help="changes to the training, e.g. trainer.lr=1e-5", **OVERRIDES)

    summary = "check a finished run by its record alone: data, bound, token versions, and the weights by training again"
    epilog = "Exit code 1: a check fails, or the record lacks the data for it (areal docs desk)."
    add = tools.add("audit", "commands:audit", summary, epilog).add_argument
    add("run", **RUN_OR_RECORD)
    add("--trust", action="store_true", help="run code that the configuration of another user's run names")
    add("--full", action="store_true", help="train all steps again, not only the steps between two checkpoints")
    add("--json", type=Path, metavar="FILE", help="also write the findings as JSON")


def audit(options: Namespace) -> int:
    if options.run.is_file():
        return _on_record(options)
    from areal.extensions.desk.audit import run

    return run(options)


def _on_record(options: Namespace) -> int:
    code: int = need("recipes", "on_record", "the record of a run in one file").load()(options.run, options.trust)
    return code


def replay(options: Namespace) -> int:
    if options.run.is_file():
        return _on_record(options)
    from areal.base.plugins import announce_code
    from areal.extensions.desk.replay import FOLDER, run
    from areal.storage.disk import within
    from areal.storage.record import Record

    within(options.run / FOLDER, options.run)
    record = Record(options.run)
    announce_code(options.run, record.configuration.load().model_dump(mode="json"), options.trust)
    return run(record, options)


def report(options: Namespace) -> None:
    from areal.extensions.desk.report import write_report

    for folder in options.folders:
        print(write_report(folder))
