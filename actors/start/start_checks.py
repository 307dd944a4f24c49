"""Checks of a start of a run on this machine, before a process is started or a file written."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors.runtime.bound_addresses import check_keys
from actors.start.preflight import check, check_options, free_port
from areal.base.errors import UserError
from areal.config import Config
from areal.config.roles import ROLES
from areal.devices import deal_out, visible_devices
from areal.models import lacks_quickstart
from areal.storage.claim import check_free, check_room
from protocols.addresses import host_of, is_loopback
from protocols.messages import MAX_SERVED


def on_this_machine(config: Config) -> Config:
    """`config` with the values of `auto` on the devices of this machine."""
    return config.for_device(cuda=bool(visible_devices()))


@contextmanager
def own_port(config: Config, named_by_user: bool) -> Iterator[Config]:
    """`config` with a free port of the master if the default port is in use, for example by another run on this
    machine. Other starts do not take the port before the end of the block."""
    if named_by_user or not is_loopback(host_of(config.master.address)):
        yield config
        return
    with free_port(config.master.address) as address:
        yield config.model_copy(update={"master": config.master.model_copy(update={"address": address})})


def roles_here(config: Config) -> list[str]:
    """The roles of a run on one machine, an entry for each process."""
    return [name for name, role in ROLES.items() for _ in range(role.started(config))]


def check_start(config: Config, *, rows: bool = True, weights: bool = True) -> dict[str, dict[str, str]]:
    """Check everything possible before a run is started on this machine. rows, weights: see `preflight.check`. Returns
    environment variables for the actors, by actor's name. Raises UserError."""
    if len(config.own_rewards) > MAX_SERVED:
        raise UserError(f"reward.functions names more than {MAX_SERVED} rewards, the most of an actor: leave some out.")
    check(config, weights=weights, rows=rows)
    roles = roles_here(config)
    environments = deal_out(config, roles)
    ports, processes = config.network.ports, len(roles)
    if ports and ports[1] - ports[0] <= processes:
        raise UserError(
            f"network.ports has {ports[1] - ports[0] + 1} ports, but each of {processes} processes listens at one, and "
            f"the master at one more: give {processes + 1}."
        )
    return environments


def rehearse_start(config: Config, *, resume: bool, rows: bool = True, alone: bool = False) -> None:
    """Do the checks of a start, and check that the run's folder can be taken, without any change. alone: the master is
    started by itself. Raises UserError."""
    if alone:
        check(config, weights=False, rows=rows, machine=False)
    else:
        check_start(config, rows=rows, weights=False)
    check_options(config)
    check_keys(config)
    check_room(config.folder, resume)
    check_free(config.folder, resume)


def first_waits(config: Config) -> list[str]:
    """Sentences on the slow parts of a start of a run on this machine."""
    cuda = bool(visible_devices())
    waits = []
    if lacks_quickstart(config):
        waits.append("The quickstart's model is made first, once, for one to two minutes.")
    if cuda and not config.generator.enforce_eager:
        waits.append("vLLM compiles for the GPU, minutes at the first start (not with generator.enforce_eager=true).")
    more = ", and the first time twice as long" if waits else ""
    logs = config.folder / "logs"
    return [*waits, f"The engines are loaded, which takes half a minute or more{more}. Logs: {logs}."]
