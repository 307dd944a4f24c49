"""The address of this machine at which others reach it, and the network interface that the ranks of a trainer use."""

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
    """Have gloo listen at the interface towards the first of `hosts` that is not on this one, or else at that of the
    default route, if this rank's trainer is on several hosts and the user has named none.

    By itself gloo listens at the address that the host's own name has, which is 127.0.1.1 in the /etc/hosts of Debian
    and Ubuntu. NCCL chooses an interface by itself, and no loopback one.
    """
    on_several = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_several and GLOO not in os.environ and (name := interface_towards((*hosts, ANYWHERE))):
        os.environ[GLOO] = name


def interface_towards(hosts: Iterable[str]) -> str | None:
    """The name of the interface (IPv4) to the first of `hosts` that loopback does not lead to; None: there is none."""
    for host in hosts:
        with suppress(OSError):
            address = own_address(host, family=socket.AF_INET)
            if not ipaddress.ip_address(address).is_loopback:
                interfaces = psutil.net_if_addrs().items()
                return next((name for name, owns in interfaces if address in [entry.address for entry in owns]), None)
    return None


def own_address(host: str, port: int = 1, family: int = socket.AF_UNSPEC) -> str:
    """The address of this machine on the way to `host`, without brackets. Raises OSError if there is no way to it."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: only asks the kernel for the route
        address: str = probe.getsockname()[0]
        return address
