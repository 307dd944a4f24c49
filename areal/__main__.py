"""`python -m areal TOOL`: the command-line tools besides run.py."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from areal.config import UserError
from areal.text import shown

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool. Returns the exit status: 0, or 2 for a user error."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes positional arguments only once, so what follows `MODEL --option` is left over.
    if any(word.startswith("-") for word in rest) or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    try:
        options.tool(options)
    except UserError as error:
        print(shown(str(error)), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m areal", description=__doc__)
    tools = parser.add_subparsers(metavar="TOOL", required=True)
    report = tools.add_parser("report", help="write the report of a run, report.html")
    report.add_argument("folders", type=Path, metavar="RUN_FOLDER", nargs="+")
    instead = report.add_mutually_exclusive_group()
    instead.add_argument(
        "--figure", type=Path, metavar="FILE.svg",
        help="draw learning and staleness into FILE instead; of several runs, by the settings in which they differ",
    )  # fmt: skip
    instead.add_argument(
        "--against",
        metavar="paper:NAME",
        help="print a table of the paper, such as paper:table2, with these runs beside it",
    )
    report.set_defaults(tool=_report)
    versus = tools.add_parser("compare", help="print in what runs differ, and the figures that they end with")
    versus.add_argument("folders", type=Path, metavar="RUN_FOLDER", nargs="+")
    versus.set_defaults(tool=lambda options: _compare(options.folders))
    rollouts = tools.add_parser("rollouts", help="print rollouts of a run (docs/observe.md)")
    rollouts.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    rollouts.add_argument("--where", metavar="SQL", help='condition on their columns: "reward < 0.1 and step > 50"')
    order = rollouts.add_mutually_exclusive_group()
    order.add_argument(
        "--sort", default="step desc", metavar="COLUMN", help='or "COLUMN desc" (default: "step desc", newest first)'
    )
    order.add_argument("--random", action="store_true", help="show rollouts at random")
    rollouts.add_argument("--show", type=int, default=5, metavar="N", help="number to show (default: 5)")
    rollouts.set_defaults(tool=_rollouts)
    trace = tools.add_parser("trace", help="write the trace of a run, trace.json, to open in ui.perfetto.dev")
    trace.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    trace.set_defaults(tool=_trace)
    page = tools.add_parser(
        "dashboard", help="serve a live web page of a run, or of several with their curves overlaid"
    )
    page.add_argument("folders", type=Path, metavar="RUN_FOLDER", nargs="+")
    page.add_argument(
        "--host", default="127.0.0.1", help="interface to listen on (default: 127.0.0.1, this machine only)"
    )
    page.add_argument("--port", type=int, default=8090)
    page.add_argument(
        "--token", help="token that requests must carry, ?token=... (default: none on loopback, else a random one)"
    )
    page.set_defaults(tool=_dashboard)
    track = tools.add_parser(
        "track", help="send the numbers of a run to TensorBoard and other trackers (its master starts this)"
    )
    track.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    track.set_defaults(tool=_track)
    model = tools.add_parser(
        "quickstart-model", help="create the quickstart's model if it does not exist, and print its folder"
    )
    model.add_argument("folder", type=Path, metavar="PARENT_FOLDER")
    model.add_argument("--seed", type=int, default=0)
    model.set_defaults(tool=_quickstart_model)
    sft = tools.add_parser(
        "sft",
        help="fine-tune a model on prompts and completions before a run; also works under torchrun",
    )
    sft.add_argument("--model", required=True, metavar="FOLDER")
    sft.add_argument(
        "--data", required=True, metavar="FILE.jsonl", help="rows of prompt and completion, or RUN/rollouts"
    )
    sft.add_argument("--output", required=True, metavar="FOLDER")
    sft.add_argument("--config", type=Path, metavar="FILE.yaml", help="keys of areal.training.sft.SftConfig")
    sft.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the configuration, e.g. epochs=2 trainer.lr=1e-5"
    )
    sft.set_defaults(tool=_sft)
    replay = tools.add_parser(
        "replay",
        help="train again from the rollouts that a run has kept, as it did or with changes; also works under torchrun",
        epilog="Exit code 1: the weights are not those of the run, or a replay has failed (docs/replay.md).",
    )
    replay.add_argument("run", type=Path, metavar="RUN_FOLDER")
    replay.add_argument(
        "--sweep", action="append", default=[], metavar="key=value,value,...",
        help="a replay for each value, such as trainer.objective=ppo,gspo; may be repeated, for each combination",
    )  # fmt: skip
    replay.add_argument(
        "--steps", default=":", metavar="A:B", help="only the steps after A up to B, from the checkpoint of A"
    )
    replay.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for the trained model, with --sweep for one of each"
    )
    replay.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the training, e.g. trainer.lr=1e-5"
    )
    replay.set_defaults(tool=_replay)
    export = tools.add_parser("export", help="write the rollouts of a run as a data set for TRL and others")
    export.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    export.add_argument(
        "--output", required=True, type=Path, metavar="FILE.jsonl|FILE.parquet|FOLDER",
        help="a folder has a data set card and can be uploaded as it is",
    )  # fmt: skip
    export.add_argument(
        "--format", choices=("sft", "preference"), default="sft",
        help="the best sample of each group (default), or the best and the worst where they differ",
    )  # fmt: skip
    export.add_argument("--all", action="store_true", help="sft: all samples and not only the best of each group")
    export.add_argument(
        "--min-reward", type=float, metavar="R",
        help="lowest reward of a sample to imitate (default: above 0; in a pair: any)",
    )  # fmt: skip
    export.set_defaults(tool=_export)
    push = tools.add_parser("push", help="make a model folder of a run for the model hub, with a card, and upload it")
    push.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    push.add_argument("--repo", metavar="OWNER/NAME", help="upload to this repository, which is made if it is new")
    push.add_argument("--public", action="store_true", help="make a new repository public (default: private)")
    push.add_argument("--output", type=Path, metavar="FOLDER", help="the folder to make (default: RUN_FOLDER/hub)")
    push.set_defaults(tool=_push)
    evaluate = tools.add_parser(
        "eval",
        help="evaluate a model on benchmarks (docs/evaluation.md)",
        epilog="Goes on where it was killed if it is started again.",
    )
    evaluate.add_argument("model", metavar="MODEL", help="folder of a Hugging Face model, or hub id")
    evaluate.add_argument(
        "--benchmarks", required=True, metavar="NAME,...", help="names in configs/benchmarks/, or YAML files"
    )
    evaluate.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="rows of a benchmark, such as gsm8k=FILE.jsonl",
    )
    evaluate.add_argument("--generators", type=int, default=1, metavar="N", help="number of engines (default: 1)")
    evaluate.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="other settings (default: configs/evaluation.yaml)"
    )
    evaluate.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="changes to the configuration, e.g. evaluator.benchmarks.gsm8k.size=50 name=NAME",
    )
    evaluate.set_defaults(tool=_eval)
    score = tools.add_parser("score", help="score completions in a file with the rewards of a run")
    score.add_argument(
        "--reward", required=True, metavar="NAME", action="append", help="name of a reward; may be repeated"
    )
    score.add_argument(
        "--input", required=True, type=Path, metavar="FILE.jsonl", help="rows of prompt, completion, answer, ..."
    )
    score.add_argument(
        "--output", type=Path, metavar="FILE.jsonl", help="file for the scores (default: standard output)"
    )
    score.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="changes to the configuration, e.g. reward.workers=2 sandbox.cpu_seconds=2",
    )
    score.add_argument(
        "--check-data",
        action="store_true",
        help="check the rows instead: score something that does nothing, and each row's own solution or answer; "
        "exit with 1 if a row is bad",
    )
    score.set_defaults(tool=_score)
    agent = tools.add_parser("agent", help="try an agent before a run (docs/agents.md)")
    attempt = agent.add_subparsers(metavar="try", required=True).add_parser(
        "try", help="do one episode with a real engine, and print it; exit code 1 if it fails"
    )
    attempt.add_argument(
        "overrides",
        nargs="*",
        metavar="COMMAND key=value",
        help="the agent (a command in quotes, or FILE.py:FUNCTION; default: the configured workflow) and changes to "
        "the configuration, e.g. rollout_manager.tool_call_parser=qwen3_xml",
    )
    attempt.add_argument("--model", metavar="FOLDER", help="default: that of the configuration")
    attempt.add_argument(
        "--row", type=Path, metavar="FILE", help="rows (.jsonl), or one (default: the configured ones)"
    )
    attempt.add_argument("--index", type=int, default=0, metavar="N", help="number of the row (default: 0)")
    attempt.add_argument("--config", type=Path, metavar="FILE.yaml", help="configuration of the run")
    attempt.set_defaults(tool=_agent_try)
    health = tools.add_parser(
        "health", help="exit with 0 if the run's master answers and the actor is healthy, else with 1"
    )
    health.add_argument(
        "--master", required=True, metavar="tcp://HOST:PORT", help="or the run folder on the master's machine"
    )
    health.add_argument(
        "--actor", metavar="ROLE/INDEX", help="actor to check, such as generator/0 (default: only the master)"
    )
    health.add_argument(
        "--wait", type=float, default=5.0, metavar="SECONDS", help="how long to wait for that (default: 5)"
    )
    health.set_defaults(tool=_health)
    plan = tools.add_parser(
        "plan",
        help="plan the split of devices between generation and training, and the memory that each needs",
        epilog="Measure the rates with a short run on any number of such devices: plan --from runs/NAME --devices N",
    )
    plan.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="configuration of the run (default with --from: that run's)"
    )
    plan.add_argument(
        "--from", dest="run", type=Path, metavar="RUN_FOLDER", help="take rates and lengths from this run"
    )
    plan.add_argument("--devices", required=True, type=int, metavar="N", help="number of devices to split")
    plan.add_argument("--device-memory", required=True, type=float, metavar="GIB", help="memory of one device")
    plan.add_argument("--generation-rate", type=float, metavar="TOKENS/S", help="completion tokens per device")
    plan.add_argument("--training-rate", type=float, metavar="TOKENS/S", help="completion tokens per device")
    plan.add_argument("--mean-tokens", type=float, metavar="N", help="mean length of a completion")
    plan.add_argument(
        "--prompt-tokens", type=int, default=1024, metavar="N", help="length of the longest prompt (default: 1024)"
    )
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    plan.set_defaults(tool=_plan)
    selftest = tools.add_parser(
        "selftest",
        help="check this machine, and with --config a run on it, before the first run (docs/gpu.md)",
        epilog="Exit code 0: nothing failed. 1: something did; the table says what to do.",
    )
    selftest.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="after a tiny model, check the model and settings of this run"
    )
    selftest.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this check of the table; may be repeated"
    )
    selftest.add_argument(
        "--json", type=Path, default=Path("selftest.json"), metavar="FILE", help="the results (default: selftest.json)"
    )
    selftest.add_argument(
        "--master",
        metavar="tcp://HOST:PORT",
        help="check the way from this node to the master of a run: keys, clocks, ports, the shared folder",
    )
    selftest.add_argument(
        "--seconds", type=float, default=300.0, metavar="N", help="time for each of the two models (default: 300)"
    )
    selftest.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    selftest.set_defaults(tool=_selftest)
    part = tools.add_parser("selftest-part")
    part.add_argument("part", choices=("model", "trainer", "generator", "receiver"))
    part.add_argument("path", type=Path, nargs="?")
    part.set_defaults(tool=_selftest_part)
    sweep = tools.add_parser(
        "sweep",
        help="do the runs of a grid of settings, one after another; exit code 1 if one has failed",
        epilog="A sweep that was stopped goes on with the same command: finished runs are left out, and one that has "
        "begun is resumed.",
    )
    sweep.add_argument(
        "file", type=Path, metavar="FILE.yaml", help="a configuration with a grid: keys, each with a list of values"
    )
    how = sweep.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="check all runs, and print their names and states")
    how.add_argument(
        "--print", action="store_true", help="print a command line for each run that is not finished, to run as jobs"
    )
    sweep.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration of all runs")
    sweep.set_defaults(tool=_sweep)
    simulate = tools.add_parser(
        "simulate", help="run the actors in virtual time, with injected faults; exit code 1 if an invariant is broken"
    )
    simulate.add_argument("--seeds", default="0:200", metavar="A:B", help="seeds from A to B - 1 (default: 0:200)")
    simulate.add_argument("--seed", type=int, metavar="N", help="run only this seed, and print all its events")
    simulate.add_argument("--mutant", metavar="NAME", help="run with this known bug in the code")
    simulate.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="number of processes (default: number of cores)"
    )
    scale = simulate.add_argument_group(
        "scale", "instead of faults: throughput of the paper's runs, on modelled engines"
    )
    size = scale.add_mutually_exclusive_group()
    size.add_argument(
        "--devices", metavar="N,...", help="numbers of devices; one simulated run for each, such as 8,32,128,512"
    )
    size.add_argument(
        "--generators", type=int, metavar="N", help="run one size: as many devices as this number of engines needs"
    )
    scale.add_argument("--model", choices=("1.5b", "7b"), default="7b")
    scale.add_argument("--run-ahead", choices=("auto", "max"), default="auto")
    scale.add_argument("--eta", type=int, default=8, metavar="N", help="max_staleness (default: 8)")
    scale.add_argument("--steps", type=int, default=8, metavar="N", help="training steps to measure (default: 8)")
    scale.add_argument(
        "--warm-up", type=int, default=4, metavar="N", help="training steps before the measured ones (default: 4)"
    )
    simulate.set_defaults(tool=_simulate)
    keys = tools.add_parser("keys", help="create the keys that protect the links of a run (docs/security.md)")
    keys.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the keys; every node needs a copy")
    change = keys.add_mutually_exclusive_group()
    change.add_argument("--rotate", action="store_true", help="add new keys; the old ones stay valid")
    change.add_argument("--retire", action="store_true", help="remove all keys but the newest")
    keys.set_defaults(tool=_keys)
    return parser


def _console(width: int) -> Console:
    """Standard output. If it is no terminal, it is `width` columns wide: tables would be cut to 80."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def _report(options: argparse.Namespace) -> None:
    from areal.observe.report import write_figure, write_report

    if options.against is not None:
        from areal.planning.paper import compare  # imports torch, which the other reports do without

        compare(options.against.removeprefix("paper:"), options.folders, _console(120))
    elif options.figure is None:
        for folder in options.folders:
            print(write_report(folder))
    elif len(options.folders) == 1:
        write_figure(options.folders[0], options.figure)
    else:
        from areal.observe.comparison import write_comparison

        _console(120).print(write_comparison(options.folders, options.figure))


def _compare(folders: Sequence[Path]) -> None:
    from areal.observe.end_figures import compare

    _console(200).print(compare(folders))


def _rollouts(options: argparse.Namespace) -> None:
    from areal.observe.rollout_print import print_rollouts

    sort = None if options.random else options.sort
    print_rollouts(options.folder, options.where, sort, options.show, _console(120))


def _trace(options: argparse.Namespace) -> None:
    from areal.observe.trace import write_trace

    print(write_trace(options.folder))


def _dashboard(options: argparse.Namespace) -> None:
    from actors.watching.dashboard import serve

    serve(options.folders, options.host, options.port, options.token)


def _track(options: argparse.Namespace) -> None:
    from areal.observe.tracking import track

    track(options.folder)


def _sft(options: argparse.Namespace) -> None:
    from rich.console import Console

    from areal.config import load_config
    from areal.training.sft import SftConfig, fine_tune

    given = {"model": options.model, "data.source": options.data, "output": options.output}
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    fine_tune(load_config(options.config, [*overrides, *options.overrides], SftConfig), Console())


def _replay(options: argparse.Namespace) -> None:
    from areal.training.replay import plan, replay

    if not replay(plan(options.run, options.overrides, options.sweep, options.steps, options.output), _console(160)):
        sys.exit(1)


def _export(options: argparse.Namespace) -> None:
    from areal.observe.export import export

    if options.all and options.format == "preference":
        raise UserError("--all is for --format sft, because a pair is the best and the worst of a group: leave it out.")
    done = export(options.folder, options.output, options.format, best=not options.all, least=options.min_reward)
    print(f"{options.output}: {done}")


def _push(options: argparse.Namespace) -> None:
    from areal.observe.push import make_folder, upload

    folder = make_folder(options.folder, options.output, options.repo)
    print(upload(folder, options.repo, public=options.public) if options.repo else folder)


def _eval(options: argparse.Namespace) -> None:
    from rich.console import Console

    from actors.watching.monitor import print_summary
    from areal.config import Config, benchmarks_in, load_config
    from areal.models import with_folders
    from areal.processes import ROOT
    from areal.storage.run_folder import read_summary

    chosen = {Path(name).stem: {"base": name} for name in options.benchmarks.split(",")}
    for given in options.source:
        name, equals, source = given.partition("=")
        if not equals or name not in chosen:
            raise UserError(
                f"--source {given!r} is not of the form NAME=SOURCE with a name of --benchmarks, such as "
                f"{next(iter(chosen))}=FILE.jsonl."
            )
        chosen[name]["source"] = source
    settings = {
        "steps": 0,
        "name": f"eval-{Path(options.model).name}",
        "model": options.model,
        "generator.count": options.generators,
        "reward.workers": os.cpu_count(),
        "evaluator.benchmarks": benchmarks_in(chosen),
    }
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()] + options.overrides
    file = options.config or ROOT / "configs" / "evaluation.yaml"
    config: Config = load_config(file, overrides)
    folder = config.folder
    if (read_summary(folder) or {}).get("ok"):
        done: Config = load_config(folder / "config.yaml")
        if (done.evaluator.benchmarks, done.model) != (config.evaluator.benchmarks, with_folders(config).model):
            raise UserError(f"{folder} has an evaluation with other settings: give this one a name, name=NAME.")
        return print_summary(folder, Console())
    start = ["--resume", str(folder)] if (folder / "journal.db").exists() else ["--config", str(file)]
    os.execv(sys.executable, [sys.executable, str(ROOT / "run.py"), *start, *overrides])


def _score(options: argparse.Namespace) -> None:
    from rich.console import Console

    from areal.config import ScoringConfig, load_config
    from areal.rewards import functions as rewards
    from areal.rewards.check_data import check_file
    from areal.rewards.score import score_file

    given = [f"reward.workers={os.cpu_count()}", f"reward.functions={json.dumps(options.reward)}"]
    config = load_config(None, [*given, *options.overrides], ScoringConfig)
    for name in config.reward.functions:
        rewards.check(name, config.served_rewards.options.get(name, {}))
    console = Console(stderr=True)
    with nullcontext(sys.stdout) if options.output is None else options.output.open("w") as output:
        if not options.check_data:
            score_file(config, options.input, output, console)
        elif not check_file(config, options.input, output, console):
            sys.exit(1)


def _agent_try(options: argparse.Namespace) -> None:
    from actors.parts.trial import try_agent

    sys.exit(try_agent(options.overrides, options.model, options.config, options.row, options.index, _console(120)))


def _health(options: argparse.Namespace) -> None:
    import asyncio

    from actors.runtime.actor import incarnation
    from actors.runtime.addresses import find_master, open_network
    from actors.watching.health import UnhealthyError, until_healthy
    from protocols.addresses import host_of
    from protocols.transport import Bus

    try:
        master = find_master(options.master, options.wait)
    except UserError as error:
        print(shown(str(error)), file=sys.stderr)
        sys.exit(1)
    if not re.fullmatch(r"tcp://.+:\d+", master):
        raise UserError(f"--master {master!r} is not an address: write tcp://HOST:PORT, or a run folder.")
    network = open_network(host_of(master))

    async def ask() -> str:
        bus = Bus(f"monitor/0#{incarnation()}", network)
        try:
            return await until_healthy(bus, master, options.actor, options.wait)
        finally:
            await bus.close()

    try:
        print(asyncio.run(ask()))
    except UnhealthyError as error:
        print(shown(str(error)), file=sys.stderr)
        sys.exit(1)


def _plan(options: argparse.Namespace) -> None:
    from areal.planning.command import plan_run

    plan_run(options, _console(120))


def _selftest(options: argparse.Namespace) -> None:
    from actors.parts import links
    from areal.selftest.command import SelfTest

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no folder is left
    test = SelfTest(options, links)
    if not test.run(_console(200)):
        sys.exit(1)


def _selftest_part(options: argparse.Namespace) -> None:
    from areal.config import Config
    from areal.selftest.child import serve

    if options.part == "receiver":
        from actors.parts.links import Receiver

        return serve(Receiver())
    if options.part == "model":
        from areal.selftest.synthetic import write_tiny_model

        return write_tiny_model(options.path)
    config = Config.model_validate_json(options.path.read_bytes())
    if options.part == "generator":
        from areal.selftest.generation import GenerationChecks

        return serve(GenerationChecks(config))
    from areal.selftest.training import TrainingChecks

    serve(TrainingChecks(config))


def _sweep(options: argparse.Namespace) -> None:
    from areal.planning.sweep import Sweep, print_commands, read_sweep

    runs = read_sweep(options.file, options.overrides)
    if options.dry_run:
        for run in runs:
            print(f"{run.state:8} {run.config.folder}")
    elif options.print:
        print_commands(runs)
    else:
        sys.exit(Sweep(runs).run())


def _simulate(options: argparse.Namespace) -> None:
    from rich.console import Console

    if options.devices or options.generators:
        _simulate_scale(options, _console(200))
        return

    from actors.simulation.runner import parse_seeds, run_one, run_seeds

    console = Console()
    if options.seed is not None:
        sound = run_one(options.seed, options.mutant, console)
    else:
        sound = run_seeds(parse_seeds(options.seeds), options.jobs, options.mutant, console)
    if not sound:
        sys.exit(1)


def _simulate_scale(options: argparse.Namespace, console: Console) -> None:
    from actors.simulation.scale.report import run_sizes
    from actors.simulation.scale.setups import MODELS, Setup, devices_for, parse_devices

    llm = MODELS[options.model]
    sizes = parse_devices(options.devices) if options.devices else [devices_for(options.generators, llm)]
    setups = [
        Setup(
            devices=devices,
            llm=llm,
            max_staleness=options.eta,
            run_ahead=options.run_ahead,
            steps=options.steps,
            warm_up=options.warm_up,
            seed=options.seed or 0,
        )
        for devices in sizes
    ]
    run_sizes(setups, console)


def _keys(options: argparse.Namespace) -> None:
    from protocols.security import KeysError, make_keys, retire_keys, rotate_keys

    change = rotate_keys if options.rotate else retire_keys if options.retire else make_keys
    try:
        print(change(options.folder))
    except KeysError as error:
        raise UserError(str(error)) from None


def _quickstart_model(options: argparse.Namespace) -> None:
    from areal.data.quickstart import ensure

    print(ensure(options.folder, options.seed, lambda line: print(line, file=sys.stderr, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
