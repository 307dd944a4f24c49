"""The command line of `run.py`: its help and its options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from areal.processes import KEYS
from areal.roles import ROLES

# How long a role waits for its master: the nodes of a cluster start in any order.
WAIT_SECONDS = 300.0

HELP = """\
Asynchronous reinforcement learning for language models, as independent actors. `areal run` is `python run.py`. `areal
config` lists all keys of the configuration.

Everything on this machine:
  python run.py                                     the quickstart (configs/quickstart.yaml)
  python run.py FILE.yaml batch_size=32 generator.count=2
  python run.py FILE.yaml --dry-run                 check all that a start checks, and print the configuration
  python run.py --resume RUN_FOLDER                 resume a run that was stopped, or whose machine was lost
  python run.py --resume RUN_FOLDER steps=200       resume it with other settings, or extend one that is complete
  python run.py --resume RUN_FOLDER --from-step 40  go back to a checkpoint, and do what came after anew
  python run.py --resume RUN_FOLDER --end           end it where it is, with a checkpoint and an evaluation
  python run.py --fork RUN_FOLDER --at-step 40 trainer.lr=1e-5
                                                    a new run from a checkpoint of another one, with other settings

One role per terminal or node. Only the master reads the configuration; the other roles get it from the master. Links
between machines need keys, the same on every node (docs/security.md):
  python -m areal keys FOLDER; export AREAL_KEYS=FOLDER
  python run.py --role master --config FILE master.address=tcp://NODE0:5555
  python run.py --role trainer --master tcp://NODE0:5555
  python run.py --role generator --master tcp://NODE0:5555
  python run.py --role rollout_manager --master tcp://NODE0:5555
  python run.py --role reward --reward mypkg.rewards:Judge model=small --master tcp://NODE0:5555
  python run.py --role scorer --scorer NAME --master tcp://NODE0:5555
  python run.py --role evaluator --master tcp://NODE0:5555
A live dashboard of a run, on any node that can reach its master:
  python run.py --role monitor --master tcp://NODE0:5555
A trainer on several nodes: run this on each of them (the number of ranks comes from torchrun, not from trainer.ranks):
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE1:29400 -- \\
    run.py --role trainer --master tcp://NODE0:5555
Roles on the master's machine may take its run folder in place of its address. There the run makes keys of its own:
  python run.py --role generator --master runs/NAME
With several --role, each role runs in its own process. Generators, rollout managers, rewards and scorers may join and
leave at any time; on SIGTERM an actor hands over its work before it exits. Without --role, or with several, a process
that dies is restarted, also after a SIGTERM to it alone. Restart a master that was started by hand with --role master
--resume RUN_FOLDER.

Exit codes. 0: the run reached its end, or the actor left as it was told to. 1: the run failed. 2: something that you
supplied has to be changed. 3: the master no longer accepts this actor, start it again. 4: an error in the program. 5
(to a supervisor): the actor left as somebody else told it to, start it again.
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options_of_run(parser.add_argument)
    add_options_of_role(parser.add_argument)
    # argparse takes positional arguments only once, so what follows `FILE --option` is left over.
    arguments, words = parser.parse_known_args()
    if any(word.startswith("-") for word in words):
        parser.error(f"unrecognized arguments: {' '.join(words)}")
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
