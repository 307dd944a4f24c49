"""Checks of a node's links: weights over the bus, keys and ports, and the way to a master. For `areal selftest`."""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

from actors.runtime.bound_addresses import ListenAddress, find_master, new_bus, open_network
from actors.start.preflight import check_port
from actors.watching.run_status import status_of
from actors.weights.weight_service import WeightFetcher, WeightServer
from areal.base.errors import UserError
from areal.base.network_interfaces import ANYWHERE, GLOO, interface_towards
from areal.base.processes import KEYS
from areal.config import Config, from_message
from areal.config.engine_sections import WeightsConfig
from areal.extensions.selftest.disk_checks import check_folder
from areal.extensions.selftest.findings import Finding, judged
from areal.storage.claim import ADDRESS
from areal.weights.chunks import HeldVersion, Manifest
from areal.weights.model_files import WEIGHTS_FILE
from protocols.addresses import host_of, is_loopback
from protocols.bus import Bus
from protocols.bus_errors import BusError, PreparingError
from protocols.membership_messages import AskConfig, Configuration, Member, Policy
from protocols.network import ZmqNetwork
from protocols.security import Keys, KeysError, make_keys
from protocols.transport import ask_until

LOOPBACK = "tcp://127.0.0.1:*"
SLOWEST = 20e6
"""Bytes a second over loopback; slower streaming counts as broken."""
ANSWER_SECONDS, ASKS = 10.0, 10
CLOCK_SECONDS = 1.0
"""Largest difference of two nodes' clocks: with a larger difference, logs and traces would not fit together."""

Ask = Callable[..., Any]


class Receiver:
    """The generator's end of a stream of weights, in a separate process."""

    async def receive(self, sender: str, keys: str, policy: str, folder: str) -> dict[str, float]:
        """Fetch the policy's weights as a generator does. Returns seconds and bytes."""
        trainer = Member(identity="trainer/0#selftest", role="trainer", index=0, address=sender, state="healthy")
        published, config = Policy.model_validate_json(policy), WeightsConfig(transport="stream", delta=False)
        async with Bus("generator/0#selftest", ZmqNetwork(Keys(Path(keys)))) as bus:
            fetcher = WeightFetcher(
                bus, 0, config, Path(folder), lambda role: [trainer] if role == trainer.role else [], lambda: published
            )
            started = time.perf_counter()
            with closing(fetcher):
                await fetcher.fetch(published)
            return {"seconds": time.perf_counter() - started, "bytes": fetcher.bytes_received}


def check_streams(ask: Ask, folder: Path, size: int) -> list[Finding]:
    """Send a file of `size` random bytes to the process behind `ask`, a `Receiver`."""
    with tempfile.TemporaryDirectory(dir=folder) as parent:
        version, keys = Path(parent, "version"), Path(parent, "keys")
        version.mkdir()
        (version / WEIGHTS_FILE).write_bytes(os.urandom(size))
        make_keys(keys)
        return [asyncio.run(_stream(ask, version, keys))]


async def _stream(ask: Ask, version: Path, keys: Path) -> Finding:
    server, crashes = WeightServer(2), []  # type: tuple[WeightServer, list[BaseException]]
    async with Bus("trainer/0#selftest", ZmqNetwork(Keys(keys))) as bus:
        address = bus.serve(LOOPBACK, server.dispatch, crashes.append)
        manifest = Manifest.of(version)
        server.offer((0, 1), HeldVersion(version, manifest))
        policy = Policy(lineage=0, version=1, folder=str(version), stamp=manifest.stamp)
        received = await asyncio.to_thread(
            ask, "receive", sender=address, keys=str(keys), policy=policy.model_dump_json(), folder=str(version.parent)
        )
    rate = received["bytes"] / received["seconds"]
    return judged(
        "stream",
        rate >= SLOWEST and received["bytes"] == manifest.size and not crashes,
        f"{received['bytes'] / 1e9:.2g} GB in {received['seconds']:.2f} s, {rate / 1e9:.2f} GB/s over loopback",
        "Weights hardly pass the bus on this machine: look for a firewall or a process that takes all cores.",
        bytes_per_second=rate,
    )


def check_this_node(config: Config) -> list[Finding]:
    """The keys and the ports of the configuration, on this node."""
    host = host_of(config.master.address)
    return [_keys(config.network.keys or os.environ.get(KEYS), host), _port(config.master.address)]


def _keys(keys: str | Path | None, host: str) -> Finding:
    if keys is None and is_loopback(host):
        return Finding("keys", "ok", "a run on one machine makes its own")
    try:
        open_network(host).close() if keys is None else Keys(Path(keys))
    except (KeysError, UserError) as error:
        return Finding("keys", "FAILED", "", str(error))
    return Finding("keys", "ok", f"in {keys}")


def _port(address: str) -> Finding:
    try:
        check_port(address)
    except UserError as error:
        return Finding("port", "FAILED", "", str(error))
    return Finding("port", "ok", f"a master can listen at {address}")


def check_way_to(master: str) -> list[Finding]:
    """The way from this node to the master of a run: keys, round trip, clocks, ports, the shared folder."""
    try:
        address = find_master(master, ANSWER_SECONDS)
        listen_address = ListenAddress.towards(address)
        network = open_network(host_of(address))
    except UserError as error:
        return [Finding("master", "FAILED", "", str(error))]
    findings = asyncio.run(_ask_master(address, network))
    return [*findings, _port(listen_address.address.replace("*", "0")), _interface(host_of(address))]


def _interface(master: str) -> Finding:
    """Check that a rank of a trainer on several nodes can listen for the other ranks."""
    if is_loopback(master) and GLOO not in os.environ:
        return Finding("interface", "skipped", "the master listens for this node alone")
    name = os.environ.get(GLOO) or interface_towards((master.strip("[]"), ANYWHERE))
    is_usable = name in {there for _, there in socket.if_nameindex()} - {"lo"}
    return judged(
        "interface",
        is_usable,
        f"ranks of a trainer on several nodes listen on {name}",
        f"Set {GLOO} (and NCCL_SOCKET_IFNAME) to this node's interface towards the trainer's other nodes.",
    )


async def _ask_master(master: str, network: ZmqNetwork) -> list[Finding]:
    trips, offsets = [], []
    try:
        async with new_bus("monitor/0", network) as bus:
            ask = partial(status_of, bus, master, ANSWER_SECONDS)
            await ask_until(ask, lambda error: isinstance(error, PreparingError), pause=0.2, seconds=ANSWER_SECONDS)
            for _ in range(ASKS):
                begun, sent_at = time.perf_counter(), time.time()
                status = await ask()
                trips.append(time.perf_counter() - begun)
                offsets.append(status["time"] - sent_at - trips[-1] / 2)
            answer = await bus.peer(master).ask(AskConfig(), ANSWER_SECONDS)
    except BusError as error:
        return [
            Finding(
                "master",
                "FAILED",
                f"{master}: {error}",
                "Start the master first, check the address and the firewall, and give both nodes the same keys "
                "(AREAL_KEYS, docs/security.md).",
            )
        ]
    offset, trip = median(offsets), median(trips)
    return [
        Finding("master", "ok", f"{master} answers in {1000 * trip:.1f} ms", values={"round_trip_seconds": trip}),
        judged(
            "clock",
            abs(offset) <= CLOCK_SECONDS,
            f"{offset:+.3f} s ahead of this node's",
            "Set both clocks by NTP (chrony): the nodes' logs and traces would not fit together.",
            seconds=offset,
        ),
        _shared_folder(from_message(cast(Configuration, answer).values), master),
    ]


def _shared_folder(config: Config, master: str) -> Finding:
    if (transport := config.weights.transport) != "folder":
        return Finding("shared folder", "skipped", f"weights.transport is {transport}: only master and trainer do")
    folder = config.folder.absolute()
    try:
        there = (folder / ADDRESS).read_text().strip().rpartition(":")[2]
    except OSError as error:
        return Finding(
            "shared folder",
            "FAILED",
            f"{folder}: {error.strerror}",
            "Mount run_dir at the same path on this node as on the master's, for the same user, or set "
            "weights.transport=stream.",
        )
    if there != master.rpartition(":")[2]:
        return Finding(
            "shared folder",
            "FAILED",
            f"{folder} is of another run",
            "Mount the master's run_dir here: this node has a folder of its own at that path.",
        )
    try:
        return check_folder("shared folder", folder, 0)
    except OSError as error:
        return Finding("shared folder", "FAILED", f"{folder}: {error.strerror}", "Let this node's user write to it.")
