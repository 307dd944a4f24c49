"""The tools around a run: `areal eval` starts a run without steps; `areal health` and `areal keys`."""

import asyncio
import json
import math
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

from areal.base.command_line import CONFIG, OVERRIDES, RoomTools
from areal.base.errors import UserError, explain
from areal.base.processes import START
from areal.base.text import shown
from areal.config import Config, load_config
from areal.config.reading import CONFIGS
from areal.config.role_sections import benchmarks_in
from areal.config.roles import is_role


def declare(tools: RoomTools) -> None:
    epilog = "Goes on where it was killed if it is started again."
    summary = "evaluate a model on benchmarks (areal docs evaluator)"
    add = tools.add("eval", "commands:evaluate", summary, epilog).add_argument
    add("model", metavar="MODEL", help="folder of a Hugging Face model, or hub id")
    add("--benchmarks", required=True, metavar="NAME,...", help="names in configs/benchmarks/, or YAML files")
    rows = "rows of a benchmark, such as gsm8k=FILE.jsonl"
    add("--source", action="append", default=[], metavar="NAME=SOURCE", help=rows)
    add("--generators", type=int, default=1, metavar="N", help="number of engines (default: 1)")
    add("--config", help="other settings (default: configs/evaluation.yaml)", **CONFIG)
    changes = "changes to the configuration, e.g. evaluator.benchmarks.gsm8k.size=50 name=NAME"
    add("overrides", help=changes, **OVERRIDES)

    summary = "exit with 0 if the run's master answers and the actor is healthy, else with 1"
    add = tools.add("health", "commands:health", summary).add_argument
    add("--master", required=True, metavar="tcp://HOST:PORT", help="or the run folder on the master's machine")
    add("--actor", metavar="ROLE/INDEX", help="actor to check, such as generator/0 (default: only the master)")
    add("--wait", type=float, default=5.0, metavar="SECONDS", help="how long to wait for that (default: 5)")

    reward = tools.add("reward", "commands:add_reward", "give a running run another reward (areal docs rewards)")
    attempts = tools._replace(parsers=reward.add_subparsers(metavar="add", required=True))
    summary = "have a reward that an actor of the run serves count, or count otherwise, from the next prompt on"
    add = attempts.add("add", "commands:add_reward", summary).add_argument
    add("run", metavar="RUN", help="the run folder on the master's machine, or the address of the master")
    add("name", metavar="NAME", help="name of the reward")
    add("weight", metavar="WEIGHT", type=float, help="0: it is only recorded")
    add("--wait", type=float, default=5.0, metavar="SECONDS", help="how long to wait for the run (default: 5)")

    make = tools.add("keys", "commands:keys", "create the keys that protect the links of a run (areal docs security)")
    make.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the keys; every node needs a copy")
    change = make.add_mutually_exclusive_group().add_argument
    change("--rotate", action="store_true", help="add new keys; the old ones stay valid")
    change("--retire", action="store_true", help="remove all keys but the newest")


def evaluate(options: Namespace) -> None:
    from rich.console import Console

    from areal.base import extensions
    from areal.models import with_folders
    from areal.storage.run_folder import config_of_run, read_summary

    chosen = {Path(name).stem: {"base": name} for name in options.benchmarks.split(",")}
    for assignment in options.source:
        name, equals, source = assignment.partition("=")
        if not equals or name not in chosen:
            raise UserError(
                f"--source {assignment!r} is not of the form NAME=SOURCE with a name of --benchmarks, such as "
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
    texts = {key: text if isinstance(text, str) else json.dumps(text, default=str) for key, text in settings.items()}
    overrides = [f"{key}={text}" for key, text in texts.items()] + options.overrides
    file = options.config or CONFIGS / "evaluation.yaml"
    config: Config = load_config(file, overrides)
    folder = config.folder
    if (read_summary(folder) or {}).get("ok"):
        finished = config_of_run(folder)
        if (finished.evaluator.benchmarks, finished.model) != (config.evaluator.benchmarks, with_folders(config).model):
            raise UserError(f"{folder} has an evaluation with other settings: give this one a name, name=NAME.")
        extensions.need("desk", "summary", "the summary of a run").load()(folder, Console())
        return
    start = ["--resume", str(folder)] if (folder / "journal.db").exists() else ["--config", str(file)]
    os.execv(sys.executable, [sys.executable, START, *start, *overrides])


def health(options: Namespace) -> int:
    from actors.runtime.bound_addresses import find_master, new_bus, open_network
    from actors.watching.health import UnhealthyError, until_healthy
    from protocols.addresses import host_of

    try:
        master = find_master(options.master, options.wait)
    except UserError as error:
        return _failure(error)
    if not re.fullmatch(r"tcp://.+:\d+", master):
        raise UserError(f"--master {master!r} is not an address: write tcp://HOST:PORT, or a run folder.")
    role, _, index = (options.actor or "").partition("/")
    if options.actor and not (is_role(role) and re.fullmatch(r"\d+", index)):
        raise UserError(f"--actor {options.actor!r} names no actor: write ROLE/INDEX, such as generator/0.")

    async def ask() -> str:
        async with new_bus("monitor/0", open_network(host_of(master))) as bus:
            return await until_healthy(bus, master, options.actor, options.wait)

    try:
        print(asyncio.run(ask()))
    except UnhealthyError as error:
        return _failure(error)
    return 0


def add_reward(options: Namespace) -> None:
    from actors.runtime.bound_addresses import find_master, open_network
    from actors.runtime.membership import ask_once
    from protocols.addresses import host_of
    from protocols.membership_messages import AddReward

    if not math.isfinite(options.weight):
        raise UserError(f"The weight {options.weight} is no finite number: give one, such as 0.2.")
    master = find_master(options.run, options.wait)
    message = AddReward(name=options.name, weight=options.weight)
    asyncio.run(ask_once(open_network(host_of(master)), master, message, options.wait))
    print(f"{options.name} counts with the weight {options.weight:g} from the next prompt on.")


def _failure(error: Exception) -> int:
    print(shown(str(error)), file=sys.stderr)
    return 1


def keys(options: Namespace) -> None:
    from protocols.security import KeysError, make_keys, retire_keys, rotate_keys

    change = rotate_keys if options.rotate else retire_keys if options.retire else make_keys
    with (
        explain(KeysError, "{why}"),
        explain(OSError, f"{options.folder} cannot hold keys ({{strerror}}): name another folder."),
    ):
        print(change(options.folder))
