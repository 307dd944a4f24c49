"""Simulates a cluster: throughput, staleness and load of the paper's runs, on modelled engines (docs/generation.md).

.venv/bin/python tests/scaling.py --devices 8,32,128,512     # one simulated run for each number
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from areal.base.command_line import output
from areal.base.errors import UserError
from simulation.cluster.report import run_sizes
from simulation.cluster.setups import MODELS, Setup, devices_for, parse_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    add("--quick", action="store_true", help="8 devices, one step of 64 samples: does it run?")
    options = parser.parse_args()
    llm = MODELS[options.model]
    sizes = parse_devices(options.devices) if options.devices else [devices_for(options.generators, llm)]
    settings = options.eta, options.run_ahead, options.warm_up, options.steps
    setups = [Setup(devices, llm, *settings, seed=options.seed) for devices in sizes]
    if options.quick:
        setups = [replace(setups[0], devices=8, warm_up=1, steps=1, batch_size=16, group_size=4)]
    run_sizes(setups, output(200))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
