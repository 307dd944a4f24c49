"""Free ports, and a network whose keys all processes of a test have."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import tempfile
from pathlib import Path

import zmq

from protocols.network import ZmqNetwork
from protocols.security import Keys, make_keys


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def keys_folder() -> str:
    """The keys of all networks of a test, also in the processes that it starts."""
    if "KEYS_OF_TESTS" not in os.environ:
        os.environ["KEYS_OF_TESTS"] = folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        make_keys(Path(folder))
    return os.environ["KEYS_OF_TESTS"]


@functools.cache
def keys() -> Keys:
    return Keys(Path(keys_folder()))


def network() -> ZmqNetwork:
    return ZmqNetwork(keys())


def dealer(context: zmq.Context, address: str) -> zmq.Socket:
    """A socket with the keys and without a bus, connected."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    keys().connect(socket, keys().generations[0])
    socket.connect(address)
    return socket
