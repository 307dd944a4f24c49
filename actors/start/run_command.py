"""`areal run`, also `run.py`: start a run, or a single role."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import structlog
import uvloop

from areal.base import extensions
from areal.base.errors import NOT_PERMITTED, UserError, explain
from areal.base.processes import (
    KEYS,
    ROOT,
    SUPERVISED,
    LenientOutput,
    die_with_parent,
    importing,
    raise_open_files,
    stop_after_parent,
    stop_signals,
    tied,
    torchrun,
)
from areal.base.text import sentences_on, shown
from areal.config import Config, advice, dump_config, from_message, load_config, overridden
from areal.config.engine_sections import ScorerConfig
from areal.config.reading import CONFIGS
from areal.config.roles import USES_MODEL, is_role, role_of
from areal.storage.run_folder import config_of_run, configuration_to_resume, end_of, steps_trained

if TYPE_CHECKING:
    from actors.runtime.actor import Ending
    from actors.runtime.membership import Membership
    from actors.runtime.supervisor import Supervisor
    from areal.data.prompt_sources import PromptSource
    from areal.storage.journal import Journal
    from areal.storage.run_folder import RunFolder
    from protocols.messages import Message
    from protocols.network import ZmqNetwork

# How long a role waits for its master: the nodes of a cluster start in any order.
WAIT_SECONDS = 300.0
# torchrun kills ranks that are still there so long after `master.drain_seconds`.
DRAIN_MARGIN_SECONDS = 10.0
# Time limit for the report of a run.
REPORT_SECONDS = 300.0
DEFAULT_CONFIG = CONFIGS / "quickstart.yaml"


def parse() -> argparse.Namespace:
    text = Path(__file__).with_name("help.txt").read_text()
    usage = "%(prog)s [FILE.yaml] [key=value ...] [options]; --help lists them"
    parser = argparse.ArgumentParser("areal run", usage, text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options_of_run(parser.add_argument)
    add_options_of_role(parser.add_argument)
    # argparse takes positional arguments only once, so words after `FILE --option` are left over.
    arguments, words = parser.parse_known_args()
    if any(word.startswith("-") for word in words):
        parser.error(f"unrecognized arguments: {' '.join(words)}{advice(words[0], sys.argv)}")
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
    add(
        "--yes",
        action="store_true",
        help="with --from-step: also if rewards of users that were acknowledged are undone",
    )
    words = "with --resume: end the run at the step that it has reached, with a checkpoint and an evaluation"
    add("--end", action="store_true", help=words)
    add("--trust", action="store_true", help="with --resume or --fork: run code that another user's run names")
    add("--fork", type=Path, metavar="RUN_FOLDER", help="a new run from a checkpoint of this one, with its settings")
    add("--at-step", type=int, metavar="N", help="with --fork: the step of the checkpoint")
    words = "check all that a start checks and print the resolved configuration, without starting anything"
    add("--dry-run", action="store_true", help=words)
    add("--quiet", action="store_true", help="with --dry-run: leave out the configuration")
    words = f"keys from `areal keys` (default: {KEYS}; on one machine, keys of the run's own)"
    add("--keys", metavar="FOLDER", help=words)
    words = "changes to the configuration, e.g. max_staleness=4; with --role reward: options of the one --reward"
    add("overrides", nargs="*", metavar="key=value", help=words)


def add_options_of_role(add: Callable[..., object]) -> None:
    add("--role", action="append", type=role_named, help="start only this role (may be repeated)")
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


def role_named(name: str) -> str:
    """The name of a role of this project or of an installed package. Raises ArgumentTypeError for another name."""
    if name in ("master", "monitor") or is_role(name):
        return name
    roles = ", ".join(["monitor", *extensions.names("role")])
    raise argparse.ArgumentTypeError(f"there is no role {name!r}: roles are {roles}")


def main() -> int:
    arguments = parse()
    sys.stdout = cast(TextIO, LenientOutput(sys.stdout))
    sys.stderr = sentences_on(cast(TextIO, LenientOutput(sys.stderr)))
    raise_open_files()
    try:
        with explain(PermissionError, NOT_PERMITTED):
            return start(arguments)
    except UserError as error:
        print(shown(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def start(arguments: argparse.Namespace) -> int:
    roles = arguments.role or []
    if SUPERVISED in os.environ and not roles:
        stop_after_parent(int(os.environ[SUPERVISED]))
    elif SUPERVISED in os.environ:
        # A single rank has nothing to hand over, and would disturb the ranks of the next trainer.
        sign = signal.SIGKILL if "RANK" in os.environ else signal.SIGINT if roles == ["master"] else signal.SIGTERM
        die_with_parent(sign, int(os.environ[SUPERVISED]))
    if not arguments.resume and (arguments.end or arguments.from_step is not None):
        raise UserError("Name the run, with --resume RUN_FOLDER: --end and --from-step N are about one that has begun.")
    if (arguments.fork is None) != (arguments.at_step is None):
        raise UserError("Name the run and the step of its checkpoint: --fork RUN_FOLDER --at-step N.")
    if arguments.fork and (arguments.resume or arguments.config):
        raise UserError("A fork has the settings of its run: give --fork without --resume and FILE, and key=value.")
    if roles == ["master"] and SUPERVISED in os.environ:  # the supervisor has resolved and checked the configuration
        return run_master(config_of_run(arguments.resume, secrets=True))
    if arguments.dry_run and roles not in ([], ["master"]):
        raise UserError("--dry-run checks a run, or its master: leave out the other roles, they have no configuration.")
    if roles in ([], ["master"]):
        from areal.rewards.lookup import with_groups

        config = with_groups(configuration(arguments))
        if not roles:
            from actors.start.start_checks import on_this_machine

            config = on_this_machine(config)
        keep_keys(arguments.keys or config.network.keys)
        if arguments.dry_run:
            return dry_run(config, arguments)
        if roles:
            return run_master(config, arguments)
        return run_everything(config, arguments)
    return start_roles(roles, arguments)


def start_roles(roles: list[str], arguments: argparse.Namespace) -> int:
    """Start roles that join the run of a master. Raises UserError."""
    if "master" in roles:
        raise UserError("Start the master by itself (--role master --config FILE); the other roles need its address.")
    if arguments.config or arguments.resume or arguments.fork or (arguments.overrides and not arguments.reward):
        raise UserError("Only the master reads a configuration: give --config, --resume, --fork and key=value to it.")
    if arguments.overrides and len(arguments.reward) > 1:
        raise UserError("The options key=value belong to one reward: start an actor for each --reward that has some.")
    if not arguments.master:
        raise UserError(f"Give the address of the master: --role {roles[0]} --master tcp://HOST:PORT.")
    keep_keys(arguments.keys)
    if ("scorer" in roles) != bool(arguments.scorer):
        raise UserError("Name what a scorer serves, one of the run's `scorers`: --role scorer --scorer NAME.")
    if "monitor" in roles and roles != ["monitor"]:
        raise UserError("Start the monitor by itself (--role monitor): it shows one run.")
    if len(roles) == 1 and roles != ["monitor"]:  # before anything below imports numpy
        for name, value in role_of(roles[0]).environment.items():
            os.environ.setdefault(name, value)
    from actors.runtime.bound_addresses import check_place, find_master

    check_place(arguments.index, arguments.ports)  # now, because the master may be long in coming
    if arguments.reward:
        from areal.rewards.lookup import find

        for name in arguments.reward:
            find(name)
    arguments.master = find_master(arguments.master, arguments.wait)
    if "monitor" in roles:
        return run_monitor(arguments)
    return run_role(roles[0], arguments) if len(roles) == 1 else run_roles(roles, arguments)


def keep_keys(keys: str | Path | None) -> None:
    """Set the folder of the keys, for this process and all processes below it."""
    if keys:
        os.environ[KEYS] = str(keys)


def configuration(arguments: argparse.Namespace) -> Config:
    config = resolved(arguments)
    if run := arguments.resume or arguments.fork:
        from areal.base.plugins import announce_code

        announce_code(run, config.model_dump(mode="json"), arguments.trust)
    return config


def resolved(arguments: argparse.Namespace) -> Config:
    if arguments.resume:
        folder, from_step = arguments.resume, arguments.from_step
        end = end_of(folder, steps_trained(folder) if from_step is None else from_step) if arguments.end else []
        return configuration_to_resume(folder, arguments.config, [*arguments.overrides, *end], from_step)
    if arguments.fork:
        configuration_of_fork = extensions.need("ways_back", "configuration_of_fork", "--fork").load()
        forked: Config = configuration_of_fork(arguments.fork, arguments.at_step, arguments.overrides)
        return forked
    return load_config(arguments.config or DEFAULT_CONFIG, arguments.overrides)


def dry_run(config: Config, arguments: argparse.Namespace) -> int:
    """Print the configuration, and do all checks of a start. The verdict of the checks is the last block."""
    from actors.start.preflight import check_names
    from actors.start.start_checks import own_port, rehearse_start

    if not arguments.quiet:
        print(dump_config(config), flush=True)
    print("--- What the checks say:", file=sys.stderr)
    with own_port(config, bool(arguments.role) or port_is_named(arguments, config)) as config:
        rehearse_start(config, resume=bool(arguments.resume), alone=bool(arguments.role))
    check_names(config)
    print("The configuration and what it names were checked: the run can be started.", file=sys.stderr)
    return 0


def port_is_named(arguments: argparse.Namespace, config: Config) -> bool:
    """True if the user has asked for the master's port."""
    # The configuration of a run that is resumed or forked has all keys.
    of_run = (arguments.resume or arguments.fork) and not arguments.config
    in_file = "address" in config.master.model_fields_set and not of_run
    return in_file or any(override.startswith("master.address=") for override in arguments.overrides)


def run_everything(config: Config, arguments: argparse.Namespace) -> int:
    """Start the whole run on this machine, at a port that no other run uses."""
    from actors.start.start_checks import own_port

    with own_port(config, port_is_named(arguments, config)) as with_port:
        return check_and_start(with_port, arguments, config.master.address)


def check_and_start(config: Config, arguments: argparse.Namespace, default: str) -> int:
    """Check everything possible in advance, then start the whole run. The master reads the configuration from the run
    folder. default: the address of the master if its port was free."""
    from rich.console import Console

    from actors.start.start_checks import check_start, first_waits
    from areal.base.processes import timed
    from areal.storage.run_folder import store_configuration

    environments = check_start(config)
    print_lines([timed("configuration, model, rows, rewards and machine are checked")])
    if config.master.address != default:
        print_lines([f"{default} is in use: the master of this run listens at {config.master.address}."])
    network = claim_record(config, arguments)
    store_configuration(config)
    print_lines(first_waits(config))
    options = role_options(arguments, config.network.ports_text)
    if code := supervise(lambda supervisor: supervisor.run_everything(config, options, network), environments):
        return code
    if not (config.folder / "report.html").exists():  # the master died between summary and report
        keep_report(config.folder)
    if print_summary := extensions.part_of("desk", "summary"):
        print_summary(config.folder, Console())
    return 0


def claim_record(config: Config, arguments: argparse.Namespace) -> ZmqNetwork:
    """Claim the run's folder, and prepare the record if the run goes on or is a fork. Returns the network."""
    from actors.record.completeness import check_record
    from actors.runtime.bound_addresses import take_folder

    network = take_folder(config, bool(arguments.resume))
    if arguments.resume:
        print_lines(check_record(config, arguments.from_step, arguments.yes))
    if arguments.fork:
        fork = extensions.need("ways_back", "fork", "--fork").load()
        print_lines(fork(config, arguments.fork, arguments.at_step))
    return network


def print_lines(lines: Iterable[str]) -> None:
    """Print notes for the user about the start of a run."""
    for line in lines:
        print(shown(line), file=sys.stderr)


def run_roles(roles: list[str], arguments: argparse.Namespace) -> int:
    from areal.devices import deal_out

    config = ask_config(arguments)  # waits for the master here, where the wait is visible
    if arguments.scorer:  # the devices belong to the run's engines, even if the run starts no engine here
        scorer = scorer_of(config, arguments.scorer).model_copy(update={"count": roles.count("scorer")})
        update = {"scorers": {arguments.scorer: scorer}, "steps": max(1, config.steps)}
        config = config.model_copy(update=update)
    options = ["--master", arguments.master, "--wait", f"{arguments.wait:g}"]
    options += role_options(arguments, arguments.ports)
    rewards = [word for name in arguments.reward or [] for word in ("--reward", name)] + arguments.overrides
    further = {"reward": rewards, "scorer": ["--scorer", arguments.scorer or ""]}
    seconds = config.master.drain_seconds
    return supervise(lambda supervisor: supervisor.run_roles(roles, options, further, seconds), deal_out(config, roles))


def role_options(arguments: argparse.Namespace, ports: str) -> list[str]:
    """The options that a supervisor passes to its roles."""
    options = {"--host": arguments.host, "--bind": arguments.bind, "--ports": ports}
    return [word for option, value in options.items() if value for word in (option, value)]


def supervise(
    run: Callable[[Supervisor], Coroutine[Any, Any, Ending]], environments: Mapping[str, Mapping[str, str]]
) -> int:
    """Call `run` with a supervisor. Returns the exit code of this program."""
    from rich.console import Console

    from actors.runtime.supervisor import Supervisor

    async def supervised() -> int:
        supervisor = Supervisor(Console(), environments=environments)
        for sign in stop_signals():
            asyncio.get_running_loop().add_signal_handler(sign, supervisor.interrupt, sign)
        ending = await run(supervisor)
        if not ending.ok:
            print(shown(ending.reason), file=sys.stderr)
        return 0 if ending.ok else 2 if supervisor.user_error else 1

    return asyncio.run(supervised())


def run_master(config: Config, arguments: argparse.Namespace | None = None) -> int:
    """Run the master of a run. arguments: None if a supervisor has claimed the folder."""
    from actors.runtime.bound_addresses import open_network
    from actors.runtime.logs import configure_logging
    from actors.start.preflight import check_port
    from protocols.addresses import host_of

    configure_logging("master/0")
    check_port(config.master.address)
    tracker = extensions.part_of("trackers", "process")
    if tracker:
        tracker.check(config.observe)
    network = claim_record(config, arguments) if arguments else open_network(host_of(config.master.address))
    config, source = uvloop.run(prepare(config))
    config = config.model_copy(update={"run_dir": config.run_dir.resolve()})
    record = open_record(config, source)
    tracking = tracker and tracker.begin(config)
    serving = serve(config, network, *record, source)
    del source  # the master keeps the rows only for a sampler that needs them
    try:
        ending = uvloop.run(serving)
        if not ending.stopped:  # a scheduler that stops a run waits for a limited time before it kills: 30 s in Slurm
            keep_report(config.folder)
    except UserError:
        raise
    except Exception:  # the last resort: the error is logged, and the exit status says that the run failed
        structlog.get_logger().exception("failed")
        return 4
    finally:
        if tracking:
            tracking.finish()
    if not ending.ok:
        print(shown(ending.reason), file=sys.stderr)
    return 0 if ending.ok else 1


def open_record(config: Config, source: PromptSource) -> tuple[Journal, RunFolder]:
    """The journal of a run and the other records, once the disk takes them. Raises UserError if the rows changed."""
    from actors.record.completeness import check_rows_kept
    from actors.runtime.logs import write_log_file
    from areal.storage.disk import DiskRetry
    from areal.storage.journal import Journal
    from areal.storage.run_folder import RunFolder

    disk_retry = DiskRetry(config.folder, "the master")
    # The lock on the journal also guards the run folder.
    journal = disk_retry.write_in_thread(lambda: Journal.open(config.folder / "journal.db"), "the journal")
    if config.steps:
        disk_retry.write_in_thread(lambda: check_rows_kept(config, journal, source), "the journal")
    folder = disk_retry.write_in_thread(lambda: RunFolder(config, journal.run), "its records")
    write_log_file(folder.path / "logs" / "master-0.jsonl")
    return journal, folder


async def serve(
    config: Config, network: ZmqNetwork, journal: Journal, folder: RunFolder, source: PromptSource | None
) -> Ending:
    """Be the master of a run until the run has ended."""
    from actors.master.master import Master
    from actors.runtime import vitals
    from actors.runtime.bound_addresses import new_bus

    vitals.watch()
    bus, supervised = new_bus("master/0", network), SUPERVISED in os.environ
    master = Master(bus, config, journal=journal, folder=folder, source=source, supervised=supervised)
    source = None
    return await master.run()


def keep_report(folder: Path) -> None:
    """Have `areal report` write the report of an ended run. A failure of the report is no failure of the run."""
    command = tied(sys.executable, "-m", "areal", "report", str(folder.absolute()))
    try:
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=REPORT_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1].rstrip(".")
        print_lines([f"The report was not written ({why}): `areal report {folder}` writes it."])


async def prepare(config: Config) -> tuple[Config, PromptSource]:
    """Open and check the data, and make or download the models, which may take an hour. Other actors that ask the
    master are told so. Returns the configuration with the models' folders, and the data. Raises UserError."""
    from actors.runtime.bound_addresses import new_bus, open_network
    from actors.start.row_checks import check_rows
    from areal.data.sources import open_source
    from areal.models import with_folders
    from protocols.addresses import host_of
    from protocols.bus_errors import PreparingError
    from protocols.transport import Request

    doing = f"it opens {config.data.named}"

    def tell(now: str) -> None:
        nonlocal doing
        doing = now

    async def put_off(request: Request[Any]) -> Any:
        raise PreparingError(f"the master is preparing the run: {doing}")

    def stop(sign: signal.Signals) -> None:
        print(f"told to stop by {sign.name} before the run began: {doing}", file=sys.stderr)
        leave(1)

    for sign in stop_signals():  # a thread that makes or downloads a model cannot be cancelled
        asyncio.get_running_loop().add_signal_handler(sign, stop, sign)

    def crashed(error: BaseException) -> None:
        structlog.get_logger().error("handler failed", exc_info=error)

    async with new_bus("master/0", open_network(host_of(config.master.address))) as bus:
        bus.serve(config.master.address, put_off, crashed)
        source = await asyncio.to_thread(open_source, config.data, config.seed)
        if SUPERVISED not in os.environ:  # the supervisor has checked the rows
            await asyncio.to_thread(check_rows, config, source)
        return await asyncio.to_thread(with_folders, config, tell), source


def run_monitor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from actors.runtime.bound_addresses import new_bus
    from actors.runtime.membership import first_answer
    from protocols.membership_messages import AskStatus

    follow = extensions.need("terminal", "follow", "--role monitor").load()
    network = network_towards(arguments.master)

    async def watch() -> int:
        async with new_bus("monitor/?", network) as bus:
            await first_answer(bus, arguments.master, AskStatus(), arguments.wait)
            code: int = await follow(bus, arguments.master, Console())
            return code

    return asyncio.run(watch())


def run_role(role: str, arguments: argparse.Namespace) -> int:
    from actors.runtime import vitals
    from actors.runtime.logs import configure_logging

    configure_logging(role if arguments.index is None else f"{role}/{arguments.index}")
    config = ask_config(arguments)
    if role == "trainer":
        join_ranks(arguments, config)

    async def run() -> Ending:
        vitals.watch()
        if role in ("rollout_manager", "evaluator"):
            from actors.sampling.own_code import contained_task

            asyncio.get_running_loop().set_task_factory(contained_task)
        return await build(role, arguments).run()

    try:
        if role in ("generator", "scorer"):
            from areal.generation.engine_start import prepare

            prepare(config.generator if role == "generator" else scorer_of(config, arguments.scorer).engine)
        # The runner is never closed: closing waits for threads inside an engine, and nobody can cancel them.
        ending = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())
    except UserError as error:
        print(shown(str(error)), file=sys.stderr)
        leave(2)
    except Exception:  # as in `run_master`
        structlog.get_logger().exception("failed")
        leave(4)
    print(shown(ending.reason), file=sys.stderr)
    if SUPERVISED in os.environ and "RANK" not in os.environ and (ending.stopped or (ending.of_run and not ending.ok)):
        leave(5 if ending.stopped else 6)
    leave(3 if ending.fenced else 0 if ending.ok else 1)


def build(role: str, arguments: argparse.Namespace) -> Membership:
    """An actor of a role. Imports only the role's module, and so only the role's engine."""
    from actors.runtime.bound_addresses import ListenAddress, new_bus, open_network
    from actors.runtime.membership import Membership
    from protocols.addresses import host_of

    listen_address = ListenAddress.towards(arguments.master, arguments.host, arguments.bind, arguments.ports)
    network = open_network(host_of(arguments.master), listen_address.bind)
    with importing():
        kind = extensions.find("role", role)
    further: dict[str, dict[str, Any]] = {"reward": served_rewards(arguments), "scorer": {"name": arguments.scorer}}
    bus = new_bus(f"{role}/{'?' if arguments.index is None else arguments.index}", network)
    options = further.get(role, {})
    return Membership(kind, bus, arguments.master, arguments.index, listen_address, patience=arguments.wait, **options)


def served_rewards(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rewards that a reward actor is told to serve, and their options."""
    names = tuple(arguments.reward or ())
    return {"functions": names, "options": {name: overridden({}, arguments.overrides) for name in names}}


def join_ranks(arguments: argparse.Namespace, config: Config) -> None:
    """Become a rank of the trainer. In rank 0 the function returns, and the process becomes the actor; in other ranks
    the function does not return. Without torchrun, torchrun replaces a process with several ranks."""
    from areal.base.network_interfaces import choose_interface
    from areal.devices import set_allocator
    from protocols.addresses import host_of

    set_allocator()
    if "RANK" in os.environ:
        choose_interface(host_of(arguments.master).strip("[]"))
        if os.environ["RANK"] != "0":
            from actors.trainer.ranks import run_follower

            run_follower(config, lambda failure: ask_master(arguments, failure))
            leave(0)
    elif config.trainer.ranks > 1:
        os.environ[SUPERVISED] = str(os.getpid())  # the ranks die with torchrun, and torchrun replaces this process
        patience = config.master.drain_seconds + DRAIN_MARGIN_SECONDS
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(patience)))
        # The dashes keep torchrun from parsing our --master as torchrun's --master.
        os.execv(sys.executable, [*torchrun(config.trainer.ranks), "--", *sys.argv])


def scorer_of(config: Config, name: str) -> ScorerConfig:
    """The settings of a scorer. Raises UserError if the run has no scorer of this name."""
    if name not in config.scorers:
        names = ", ".join(config.scorers) or "none"
        raise UserError(f"The run has no scorer {name!r} (--scorer): its `scorers` are {names}.")
    return config.scorers[name]


def ask_config(arguments: argparse.Namespace) -> Config:
    """The configuration of the master, once the master answers. Raises UserError, also if this machine's model differs
    from the run's: a role with the wrong model would take the place of a role with the right model."""
    from areal.weights.model_files import check_same
    from protocols.membership_messages import AskConfig

    answer = ask_master(arguments, AskConfig())
    if not USES_MODEL.isdisjoint(arguments.role):
        check_same(Path(answer.values["model"]), answer.model)
    return from_message(answer.values)


def ask_master(arguments: argparse.Namespace, message: Message) -> Any:
    """The master's answer to a process that is no actor yet. Waits for the answer. Raises UserError."""
    from actors.runtime.membership import ask_once

    network = network_towards(arguments.master)
    return asyncio.run(ask_once(network, arguments.master, message, arguments.wait, arguments.role[0]))


def network_towards(master: str) -> ZmqNetwork:
    """The network to the master at an address. Raises UserError."""
    from actors.runtime.bound_addresses import host_towards, open_network
    from protocols.addresses import host_of

    host_towards(master)
    return open_network(host_of(master))


def leave(code: int) -> NoReturn:
    """End the process at once: a thread inside an engine cannot be cancelled, and nothing is left to save."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
