"""The tool `areal simulate`."""

from __future__ import annotations

from argparse import Namespace

from areal.command_line import RoomTools, output


def declare(tools: RoomTools) -> None:
    summary = "simulate a cluster: throughput, staleness and load of the paper's runs, on modelled engines"
    parser = tools.add("simulate", "commands:simulate", summary)
    size = parser.add_mutually_exclusive_group(required=True).add_argument
    size("--devices", metavar="N,...", help="numbers of devices; one simulated run for each, such as 8,32,128,512")
    size("--generators", type=int, metavar="N", help="run one size: the devices that this number of engines needs")
    add = parser.add_argument
    add("--model", choices=("1.5b", "7b"), default="7b")
    add("--run-ahead", choices=("auto", "max"), default="auto")
    add("--eta", type=int, default=8, metavar="N", help="max_staleness (default: 8)")
    add("--steps", type=int, default=8, metavar="N", help="training steps to measure (default: 8)")
    add("--warm-up", type=int, default=4, metavar="N", help="training steps before the measured ones (default: 4)")
    add("--seed", type=int, default=0, metavar="N", help="of the lengths of completions (default: 0)")


def simulate(options: Namespace) -> None:
    from actors.simulation.report import run_sizes
    from actors.simulation.setups import MODELS, Setup, devices_for, parse_devices

    llm = MODELS[options.model]
    sizes = parse_devices(options.devices) if options.devices else [devices_for(options.generators, llm)]
    settings = options.eta, options.run_ahead, options.warm_up, options.steps
    run_sizes([Setup(devices, llm, *settings, seed=options.seed) for devices in sizes], output(200))
