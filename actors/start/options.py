"""The command line of `run.py`: its help and its options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from areal.config import advice
from areal.processes import KEYS
from areal.roles import ROLES

# How long a role waits for its master: the nodes of a cluster start in any order.
WAIT_SECONDS = 300.0


def parse() -> argparse.Namespace:
    words = Path(__file__).with_name("help.txt").read_text()
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options_of_run(parser.add_argument)
    add_options_of_role(parser.add_argument)
    # argparse takes positional arguments only once, so what follows `FILE --option` is left over.
    arguments, words = parser.parse_known_args()
    if any(word.startswith("-") for word in words):
        parser.error(f"unrecognized arguments: {' '.join(words)}{advice(words[0])}")
    arguments.overrides += words
    files = [word for word in arguments.overrides if re.fullmatch(r"[^=]+\.ya?ml", word)]
    named = [*filter(None, [arguments.config]), *files]
    if len(named) > 1:
        parser.error(f"there are two configurations, {named[0]} and {named[1]}: give one")
    if files:
        arguments.config = Path(files[0])
        arguments.overrides.remove(files[0])
    return arguments


def add_options_of_run(add: Callable[..., object]) -> None:
    words = "configuration of the run, which may also come without --config (default: configs/quickstart.yaml)"
    add("--config", type=Path, metavar="FILE.yaml", help=words)
    add("--resume", type=Path, metavar="RUN_FOLDER", help="resume this run (default for --config: its own)")
    words = "with --resume: go back to the checkpoint of step N; what came after is moved away, and done anew"
    add("--from-step", type=int, metavar="N", help=words)
    words = "with --resume: end the run at the step that it has reached, with a checkpoint and an evaluation"
    add("--end", action="store_true", help=words)
    add("--trust", action="store_true", help="with --resume or --fork: run code that another user's run names")
    add("--fork", type=Path, metavar="RUN_FOLDER", help="a new run from a checkpoint of this one, with its settings")
    add("--at-step", type=int, metavar="N", help="with --fork: the step of the checkpoint")
    words = "check all that a start checks and print the resolved configuration, without starting anything"
    add("--dry-run", action="store_true", help=words)
    add("--quiet", action="store_true", help="with --dry-run: leave out the configuration")
    words = f"keys from `python -m areal keys`, (default: {KEYS}; on one machine, keys of the run's own)"
    add("--keys", metavar="FOLDER", help=words)
    words = "changes to the configuration, e.g. max_staleness=4; with --role reward: options of the one --reward"
    add("overrides", nargs="*", metavar="key=value", help=words)


def add_options_of_role(add: Callable[..., object]) -> None:
    add("--role", action="append", choices=("master", *ROLES, "monitor"), help="start only this role (may be repeated)")
    add("--master", metavar="tcp://HOST:PORT", help="address of the master, or the run folder on the master's machine")
    words = f"how long to wait for a master that has not started yet (default: {WAIT_SECONDS:g})"
    add("--wait", type=float, default=WAIT_SECONDS, metavar="SECONDS", help=words)
    add("--index", type=int, help="index of this actor within its role (default: the master assigns one)")
    add("--host", help="name or address at which others reach this actor (default: the interface towards the master)")
    add("--bind", metavar="HOST", help="interface to listen on, `*` for all (default: that of --host)")
    add("--ports", metavar="FIRST-LAST", default="*", help="ports to listen on (default: any free one)")
    words = "reward that a reward role serves; may be repeated (default: the run's reward.functions)"
    add("--reward", action="append", metavar="NAME", help=words)
    add("--scorer", metavar="NAME", help="name in the run's `scorers` of what a scorer role serves")
