"""The tool `areal simulate`."""

from __future__ import annotations

import os
from argparse import Namespace

from areal.command_line import Tools, output


def declare(tools: Tools) -> None:
    summary = "run the actors in virtual time, with injected faults; exit code 1 if an invariant is broken"
    parser = tools.add("simulate", "commands:simulate", summary)
    add = parser.add_argument
    add("--seeds", default="0:200", metavar="A:B", help="seeds from A to B - 1 (default: 0:200)")
    add("--seed", type=int, metavar="N", help="run only this seed, and print all its events")
    add("--mutant", metavar="NAME", help="run with this known bug in the code")
    jobs = "number of processes (default: number of cores)"
    add("--jobs", type=int, default=os.cpu_count(), metavar="N", help=jobs)

    scale = parser.add_argument_group("scale", "instead of faults: throughput of the paper's runs, on modelled engines")
    size = scale.add_mutually_exclusive_group().add_argument
    size("--devices", metavar="N,...", help="numbers of devices; one simulated run for each, such as 8,32,128,512")
    size("--generators", type=int, metavar="N", help="run one size: the devices that this number of engines needs")
    add = scale.add_argument
    add("--model", choices=("1.5b", "7b"), default="7b")
    add("--run-ahead", choices=("auto", "max"), default="auto")
    add("--eta", type=int, default=8, metavar="N", help="max_staleness (default: 8)")
    add("--steps", type=int, default=8, metavar="N", help="training steps to measure (default: 8)")
    add("--warm-up", type=int, default=4, metavar="N", help="training steps before the measured ones (default: 4)")


def simulate(options: Namespace) -> int:
    if options.devices or options.generators:
        return _scale(options)

    from rich.console import Console

    from actors.simulation.runner import parse_seeds, run_one, run_seeds

    if options.seed is not None:
        sound = run_one(options.seed, options.mutant, Console())
    else:
        sound = run_seeds(parse_seeds(options.seeds), options.jobs, options.mutant, Console())
    return 0 if sound else 1


def _scale(options: Namespace) -> int:
    from actors.simulation.scale.report import run_sizes
    from actors.simulation.scale.setups import MODELS, Setup, devices_for, parse_devices

    llm = MODELS[options.model]
    sizes = parse_devices(options.devices) if options.devices else [devices_for(options.generators, llm)]
    more = options.eta, options.run_ahead, options.warm_up, options.steps
    setups = [Setup(devices, llm, *more, seed=options.seed or 0) for devices in sizes]
    run_sizes(setups, output(200))
    return 0
