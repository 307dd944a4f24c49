"""The tools that prepare runs, do many of them, and report what came out."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from areal.command_line import CONFIG, OVERRIDES, RUN, RoomTools, output


def declare(tools: RoomTools) -> None:
    reports = tools.add("report", "commands:report", "write the report of a run, report.html")
    reports.add_argument("folders", nargs="+", **RUN)
    instead = reports.add_mutually_exclusive_group().add_argument
    figure = "draw learning and staleness into FILE instead; of several runs, by the settings in which they differ"
    instead("--figure", type=Path, metavar="FILE.svg", help=figure)
    instead("--against", metavar="paper:NAME", help="print a table of the paper, such as paper:table2, with these runs")

    add = tools.add(
        "config", "keys:print_keys", "list the keys of the configuration, their values and meaning"
    ).add_argument
    add("words", nargs="*", metavar="WORD", help="only keys with these words, such as trainer.lora or staleness")

    add = tools.add(
        "plan", "command:plan_run", "plan the split of devices between generation and training, and their memory",
        "Measure the rates with a short run on any number of such devices: plan --from runs/NAME --devices N",
    ).add_argument  # fmt: skip
    add("--config", help="configuration of the run (default with --from: that run's)", **CONFIG)
    add("--from", dest="run", help="take rates and lengths from this run", **RUN)
    add("--devices", required=True, type=int, metavar="N", help="number of devices to split")
    add("--device-memory", required=True, type=float, metavar="GIB", help="memory of one device")
    add("--generation-rate", type=float, metavar="TOKENS/S", help="completion tokens per device")
    add("--training-rate", type=float, metavar="TOKENS/S", help="completion tokens per device")
    add("--mean-tokens", type=float, metavar="N", help="mean length of a completion")
    add("--prompt-tokens", type=int, default=1024, metavar="N", help="length of the longest prompt (default: 1024)")
    add("overrides", help="changes to the configuration", **OVERRIDES)


def report(options: Namespace) -> None:
    from areal.observe.report import write_figure, write_report

    if options.against is not None:
        from areal.planning.paper import compare  # imports torch, which the other reports do without

        compare(options.against.removeprefix("paper:"), options.folders, output(120))
    elif options.figure is None:
        for folder in options.folders:
            print(write_report(folder))
    elif len(options.folders) == 1:
        write_figure(options.folders[0], options.figure)
    else:
        from areal.observe.comparison import write_comparison

        output(120).print(write_comparison(options.folders, options.figure))
