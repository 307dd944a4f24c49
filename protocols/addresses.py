"""Addresses on the bus: parses and builds tcp://HOST:PORT. Nothing here uses the network.

>>> reachable("tcp://*:5555", through="node0")
'tcp://node0:5555'
>>> host_of("tcp://[::1]:5555")
'[::1]'
"""

import ipaddress

EVERY_INTERFACE = ("*", "0.0.0.0", "[::]", "::")


def port_range(ports: str) -> tuple[int, ...]:
    return tuple(int(port) for port in ports.split("-"))


def host_of(address: str) -> str:
    """The host in tcp://HOST:PORT. An IPv6 address keeps its brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def bracketed(host: str) -> str:
    """`host` as written in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def reachable(address: str, through: str) -> str:
    """`address` with the host `through` if it listens on every interface, else unchanged."""
    if host_of(address) not in EVERY_INTERFACE:
        return address
    return f"tcp://{through}:{address.rpartition(':')[2]}"


def on_this_machine(address: str) -> str:
    """The address of the master for actors on the master's machine. `address`: where the master listens."""
    return reachable(address, "127.0.0.1")


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a socket bound to `host`. False for all host names other than localhost."""
    return ipaddress.ip_address(host.strip("[]")).is_loopback if is_number(host) else host == "localhost"


def is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
