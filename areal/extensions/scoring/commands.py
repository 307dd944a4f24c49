"""The tool that scores without a run."""

import json
import os
from argparse import Namespace
from pathlib import Path

from areal.base.command_line import OVERRIDES, RoomTools


def declare(tools: RoomTools) -> None:
    add = tools.add("score", "commands:score", "score completions in a file with the rewards of a run").add_argument
    add("--reward", required=True, metavar="NAME", action="append", help="name of a reward; may be repeated")
    add("--input", required=True, type=Path, metavar="FILE.jsonl", help="rows of prompt, completion, answer, ...")
    add("--output", type=Path, metavar="FILE.jsonl", help="file for the scores (default: standard output)")
    check = (
        "check the rows instead: score something that does nothing, and each row's own solution or answer; exit with 1 "
        "if a row is bad"
    )
    add("--check-data", action="store_true", help=check)
    add("overrides", help="changes to the configuration, e.g. reward.workers=2 sandbox.cpu_seconds=2", **OVERRIDES)


def score(options: Namespace) -> int:
    from rich.console import Console

    from areal.base.errors import UserError
    from areal.config import load_config
    from areal.config.scoring import ScoringConfig
    from areal.extensions.scoring.check_data import check_file
    from areal.extensions.scoring.score import score_file
    from areal.rewards.lookup import check, with_groups

    defaults = [f"reward.workers={os.cpu_count()}", f"reward.functions={json.dumps(options.reward)}"]
    config = load_config(None, [*defaults, *options.overrides], ScoringConfig)
    for name in config.reward.functions:
        check(name, config.served_rewards.options.get(name, {}))
    if options.output and options.output.resolve() == options.input.resolve():
        raise UserError(f"{options.output} is the --input, which would be lost: name another --output.")
    judge = check_file if options.check_data else score_file
    return 0 if judge(with_groups(config), options.input, options.output, Console(stderr=True)) else 1
