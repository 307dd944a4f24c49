"""The tools for engines and agents without a run, for sweeps, and for the copy of a run."""

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from areal.base.command_line import CONFIG, OVERRIDES, RUN, RoomTools, output
from areal.base.errors import UserError, explain

if TYPE_CHECKING:
    from areal.extensions.desk.sweep import SweptRun

# The sections and keys for reading and checking rows.
_OF_ROWS = {"data", "reward", "sandbox", "evaluator", "max_failed_share"}

PARTS = {
    "trainer": "areal.extensions.selftest.trainer_checks:TrainingChecks",
    "generator": "areal.extensions.selftest.generator_checks:GenerationChecks",
    "receiver": "actors.start.link_checks:Receiver",
}
"""The processes that the self-test starts."""


def declare(tools: RoomTools) -> None:
    agent = tools.add("agent", "trial:try_agent", "try an agent before a run (areal docs agents)")
    attempts = tools._replace(parsers=agent.add_subparsers(metavar="try", required=True))
    summary = "do one episode with a real engine, and print it; exit code 1 if it fails"
    add = attempts.add("try", "trial:try_agent", summary).add_argument
    words = (
        "the agent (a command in quotes, or FILE.py:FUNCTION; default: the configured workflow) and changes to the "
        "configuration, e.g. rollout_manager.tool_call_parser=qwen3_xml"
    )
    add("overrides", nargs="*", metavar="COMMAND key=value", help=words)
    add("--model", metavar="FOLDER", help="default: that of the configuration")
    add("--row", type=Path, metavar="FILE", help="rows (.jsonl), or one (default: the configured ones)")
    add("--index", type=int, default=0, metavar="N", help="number of the row (default: 0)")
    add("--config", help="configuration of the run", **CONFIG)

    summary = "do the runs of a grid of settings, one after another; exit code 1 if one has failed"
    sweep = tools.add(
        "sweep",
        "commands:sweep",
        summary,
        "A stopped sweep goes on with the same command: it leaves out finished runs, and resumes one that has begun.",
    )
    sweep.add_argument("file", help="a configuration with a grid: keys, each with a list of values", **CONFIG)
    how = sweep.add_mutually_exclusive_group().add_argument
    how("--dry-run", action="store_true", help="check each run as its start would, and print names and states")
    how("--print", action="store_true", help="print a command line for each run that is not finished, to run as jobs")
    sweep.add_argument("overrides", help="changes to the configuration of all runs", **OVERRIDES)

    summary = "copy the folder of a run, which may go on meanwhile, so that it can be resumed (areal docs operating)"
    add = tools._replace(room="actors.record").add("backup", "backup:backup", summary).add_argument
    add("folder", **RUN)
    add("copy", type=Path, metavar="COPY", help="a new folder; checkpoints are linked if it is on the same disk")
    _declare_selftest(tools)


def _declare_selftest(tools: RoomTools) -> None:
    summary = "check this machine, and with --config a run on it, before the first run (areal docs gpu)"
    epilog = "Exit code 0: nothing failed. 1: something did; the table says what to do."
    add = tools.add("selftest", "commands:selftest", summary, epilog).add_argument
    add("--config", help="after a tiny model, check the model and settings of this run", **CONFIG)
    add("--model-only", action="store_true", help="with --config: leave out the tiny model")
    add("--only", action="append", default=[], metavar="NAME", help="only this check of the table; may be repeated")
    results = Path("selftest.json")
    add("--json", type=Path, default=results, metavar="FILE", help=f"the results (default: {results})")
    way = "check the way from this node to the master of a run: keys, clocks, ports, the shared folder, interface"
    add("--master", metavar="tcp://HOST:PORT", help=way)
    time = "time for each of the two models (default: 300, and as much again if nothing is in the compilers' caches)"
    add("--seconds", type=float, metavar="N", help=time)
    add("overrides", help="changes to the configuration", **OVERRIDES)

    part = tools.parsers.add_parser("selftest-part")  # without help: only the self-test uses the command
    part.add_argument("part", choices=("model", *PARTS))
    part.add_argument("path", type=Path, nargs="?")
    part.set_defaults(tool="actors.start.commands:selftest_part")


def sweep(options: Namespace) -> int:
    from areal.extensions.desk.sweep import Sweep, print_commands, read_sweep

    runs = read_sweep(options.file, options.overrides)
    if options.print:
        print_commands(runs)
        return 0
    if not options.dry_run:
        return Sweep(runs).run()
    check_sweep(runs, lambda run: print(f"{run.state:8} {run.config.folder}", flush=True))
    return 0


def check_sweep(runs: "Iterable[SweptRun]", tell: "Callable[[SweptRun], None]") -> None:
    """Check every unfinished run of a sweep as its start would, and `tell` of the run. Rows are checked once for all
    runs with the same rows. Raises UserError, which names the run."""
    from actors.start.start_checks import on_this_machine, own_port, rehearse_start

    checked = set()
    for run in runs:
        if not run.finished:
            rows = json.dumps(run.config.model_dump(mode="json", include=_OF_ROWS), sort_keys=True)
            with (
                explain(UserError, f"{run.name}: {{why}}"),
                own_port(on_this_machine(run.config), False) as config,
            ):
                rehearse_start(config, resume=run.begun, rows=rows not in checked)
            checked.add(rows)
        tell(run)


def selftest(options: Namespace) -> int:
    from actors.start import link_checks as links
    from areal.extensions.selftest.selftest import SelfTest

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no folder is left behind
    return 0 if SelfTest(options, links).run(output(200)) else 1


def selftest_part(options: Namespace) -> None:
    if options.part == "model":
        from areal.extensions.selftest.synthetic import write_tiny_model

        return write_tiny_model(options.path)
    from areal.config import Config
    from areal.devices import set_allocator
    from areal.extensions.selftest.child import serve

    module, _, kind = PARTS[options.part].partition(":")
    config = None if options.part == "receiver" else Config.model_validate_json(options.path.read_bytes())
    if config and options.part == "trainer":
        set_allocator()
    make = getattr(import_module(module), kind)
    serve(make(config) if config else make())
