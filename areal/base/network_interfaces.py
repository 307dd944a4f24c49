"""The address of this machine for other hosts, and the network interface for the ranks of a trainer."""

import ipaddress
import os
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil

GLOO = "GLOO_SOCKET_IFNAME"
# An address of no host (RFC 5737): the way to it is the default route.
ANYWHERE = "192.0.2.1"


def choose_interface(*hosts: str) -> None:
    """Have gloo listen at the interface towards the first of `hosts` that is on another machine, or at the interface of
    the default route. Does nothing if the trainer is on one host, or if the user has named an interface.

    By default gloo listens at the address of the host's own name, 127.0.1.1 in the /etc/hosts of Debian and Ubuntu.
    NCCL chooses an interface by itself, and never loopback.
    """
    on_several = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_several and GLOO not in os.environ and (name := interface_towards((*hosts, ANYWHERE))):
        os.environ[GLOO] = name


def interface_towards(hosts: Iterable[str]) -> str | None:
    """Return the name of the interface (IPv4) to the first of `hosts` that is not behind loopback; None if all are."""
    for host in hosts:
        with suppress(OSError):
            address = own_address(host, family=socket.AF_INET)
            if not ipaddress.ip_address(address).is_loopback:
                interfaces = psutil.net_if_addrs().items()
                return next((name for name, owns in interfaces if address in [entry.address for entry in owns]), None)
    return None


def own_address(host: str, port: int = 1, family: int = socket.AF_UNSPEC) -> str:
    """Return this machine's address on the way to `host`, without brackets. Raises OSError without a way to `host`."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: only asks the kernel for the route
        address: str = probe.getsockname()[0]
        return address
