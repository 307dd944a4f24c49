"""The addresses that actors bind and announce, and the network with its keys."""

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from areal.base.errors import UserError, explain
from areal.base.network_interfaces import own_address
from areal.base.processes import KEYS
from areal.config import Config
from areal.storage.claim import announce, check_room, claim, claimed_address
from protocols.addresses import (
    EVERY_INTERFACE,
    bracketed,
    host_of,
    is_loopback,
    is_number,
    on_this_machine,
    port_range,
)
from protocols.bus import Bus
from protocols.network import Network, ZmqNetwork
from protocols.security import FILE_NAME, Keys, KeysError, make_keys

# The folder, in a run folder, with keys for that run alone.
OWN_KEYS = "keys"
# After this time without a run in the folder, a role logs that it waits.
SILENCE_SECONDS, LOOK_SECONDS = 3.0, 0.2

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address of an actor. host: name or address for other actors. bind: the interface to listen on. ports: `*` for
    any free port, or a range such as 20000-20100.
    """

    host: str
    bind: str
    ports: str = "*"

    @classmethod
    def towards(
        cls, master: str, host: str | None = None, bind: str | None = None, ports: str = "*"
    ) -> "ListenAddress":
        """The address of an actor of this master's run. By default, `host` and `bind` are the address of the interface
        that leads to the master. Raises UserError for an invalid address."""
        nearest = host_towards(master)
        listens = bind or (host if host and is_number(host) else nearest)
        return cls(bracketed(host or (nearest if listens in EVERY_INTERFACE else listens)), bracketed(listens), ports)

    @property
    def address(self) -> str:
        """The address to bind."""
        return f"tcp://{self.bind}:{self.ports}"

    def reached_at(self, bound: str) -> str:
        """The address to announce to other actors, given the bound address."""
        return f"tcp://{self.host}:{bound.rpartition(':')[2]}"


def check_place(index: int | None, ports: str) -> None:
    """Raises UserError if no actor can have this index, or listen on these ports."""
    if index is not None and index < 0:
        raise UserError(f"--index is {index}: the indices of a role are 0, 1, 2, ...")
    first, last = port_range(ports) if re.fullmatch(r"\d+-\d+", ports) else (0, 0)
    if ports != "*" and not 0 < first <= last < 65536:
        raise UserError(f"--ports {ports!r} is not a range of ports: write FIRST-LAST, such as 20000-20100.")


def open_network(*hosts: str, keys: Path | None = None) -> ZmqNetwork:
    """The network of an actor that listens on, or connects to, `hosts`. The keys are in the folder `keys`, or else in
    the folder AREAL_KEYS. Raises UserError without a folder, or if the keys cannot be read."""
    if folder := keys or os.environ.get(KEYS):
        with explain(KeysError, "{why}"):
            return ZmqNetwork(Keys(Path(folder)))
    if beyond := [host for host in hosts if not is_loopback(host)]:
        raise UserError(
            f"{beyond[0]} is beyond this machine, where links need keys: make them with `areal keys FOLDER`, "
            f"copy the folder to every node, and give it to each role with --keys FOLDER or {KEYS}."
        )
    raise UserError(
        f"{hosts[0]} is this machine, where a run makes keys of its own: give its folder in place of the address, "
        f"--master runs/NAME, or its keys, --keys runs/NAME/{OWN_KEYS}."
    )


def new_bus(name: str, network: Network) -> Bus:
    """The bus of a process with this name, role/index. A random mark distinguishes earlier processes of the name."""
    return Bus(f"{name}#{secrets.token_hex(4)}", network)


def check_keys(config: Config) -> bool:
    """True if a run that this process starts makes its own keys. Raises UserError if needed keys are missing."""
    host = host_of(config.master.address)
    if is_loopback(host) and not os.environ.get(KEYS):
        return True
    open_network(host).close()
    return False


def take_folder(config: Config, resume: bool) -> ZmqNetwork:
    """Claim the folder of a run that this process starts, until the process ends. Returns the network of the run.

    If all actors are on this machine and the user has given no keys, the run makes keys in the run folder, and
    AREAL_KEYS names their folder from then on. Raises UserError.
    """
    host = host_of(config.master.address)
    makes_keys = check_keys(config)  # before anything is changed
    check_room(config.folder, resume)
    lock = claim(config.folder, resume)
    if makes_keys:
        keys = config.folder.absolute() / OWN_KEYS
        if not (keys / FILE_NAME).exists():
            make_keys(keys)
        os.environ[KEYS] = str(keys)
    announce(lock, config.master.address)
    return open_network(host)


def find_master(master: str, patience: float) -> str:
    """The address of the master that `locate` finds; AREAL_KEYS names the keys from then on."""
    address, keys = locate(master, patience)
    if keys:
        os.environ[KEYS] = str(keys)
    return address


def locate(master: str, patience: float) -> tuple[str, Path | None]:
    """The address of the master that the user has given: an address, or the folder of a run on this machine. For a
    folder, wait for a run to begin there, and also return the folder of the run's own keys, unless the user has given
    keys. Raises UserError if no run begins within `patience` seconds."""
    folder = Path(master)
    if master.startswith("tcp://") or not ("/" in master or folder.is_dir()):
        _wait(lambda: _is_known(master), patience, f"waiting for the name in {master}")  # `host_towards` raises
        return master, None
    if claimed_address(folder) is None:
        log.warning(
            f"no run is in progress in {folder}: waiting for one to begin there", seconds=patience, option="--wait"
        )
    if (address := _wait(lambda: claimed_address(folder), patience, f"waiting for the run in {folder}")) is None:
        raise UserError(
            f"No run is in progress in {folder} (waited {patience:g} s): start one with "
            f"`areal run --role master --config FILE`, or give the address of a master, tcp://HOST:PORT."
        )
    keys = None
    if not os.environ.get(KEYS) and is_loopback(host_of(address)):
        keys = folder.absolute() / OWN_KEYS
        if not (keys / FILE_NAME).exists():
            raise UserError(f"The run in {folder} was started with other keys than its own: give them with --keys.")
    return on_this_machine(address), keys


def _is_known(master: str) -> bool | None:
    """None while the name of the master's host is unknown: a cluster may give it only once the master is up."""
    try:
        host_towards(master)
    except UserError as error:  # the caller that needs the address gets the error, too
        return None if isinstance(error.__cause__, socket.gaierror) else False
    return True


def _wait(look: Callable[[], T | None], patience: float, warning: str) -> T | None:
    """The first value of `look` other than None; None after `patience` seconds. Logs the warning once."""
    start, warns = time.monotonic(), True
    while (value := look()) is None and (waited := time.monotonic() - start) < patience:
        if waited > SILENCE_SECONDS and warns:
            warns = False
            log.warning(warning, seconds=patience)
        time.sleep(LOOK_SECONDS)
    return value


def host_towards(master: str) -> str:
    """The address of the interface that leads to the master. Raises UserError if `master` is not a valid address."""
    host, _, port = master.removeprefix("tcp://").rpartition(":")
    if not master.startswith("tcp://") or not host or not port.isdigit():
        raise UserError(f"--master {master!r} is no address: write tcp://HOST:PORT, or a run folder, runs/NAME.")
    with explain(OSError, f"--master {master}: {{strerror}}: check the host name."):
        return bracketed(own_address(host.strip("[]"), int(port)))
