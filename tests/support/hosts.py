"""Hosts of their own on one machine: network namespaces, and a wire between them that delays, loses and can be cut.

Each host has an address, the kernel's own TCP, and private folders in the place of those it would otherwise share. What
it sends comes out of a TUN device, and one thread carries it on. Needs root. Nothing outlives the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from areal.storage.records import read_records
from protocols.security import make_keys

RUN_PY = Path(__file__).parents[2] / "run.py"
# The hosts are new: nobody has it yet.
MASTER_PORT = 29000
STEP_SECONDS = 240
STOP_SECONDS = 15

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
DEVICE = "tun0"
# Fewer packets, and so less work for the thread, than with the 1500 bytes of Ethernet.
LARGEST_PACKET = 9000
IPV4 = 4
DESTINATION = slice(16, 20)


class Wire:
    """Carries packets between hosts, which are counted from 0. A host in `cut` hears and is heard by nobody."""

    def __init__(self, hosts: int, delay: float, loss: float, seed: int) -> None:
        """`delay`: seconds, each way; `loss`: share of the packets. Raises OSError, CalledProcessError."""
        self.cut: set[int] = set()
        self._delay = delay
        self._loss = loss
        self._random = random.Random(seed)
        self._under_way: deque[tuple[float, int, int, bytes]] = deque()  # when it arrives, from whom, to whom, what
        self._namespaces: list[int] = []
        self._devices: list[int] = []
        with ThreadPoolExecutor(1) as elsewhere:  # a namespace is a thread's
            for host in range(hosts):
                elsewhere.submit(self._make, host).result()
        self._numbers = {bytes([10, 77, 0, host + 1]): host for host in range(hosts)}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire")
        self._thread.start()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str], private: Path, folder: Path) -> list[str]:
        """What runs `command` on a host, where `folder` is the host's own: `private`, as others see it."""
        mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
        namespace = f"--net=/proc/{os.getpid()}/fd/{self._namespaces[host]}"
        return ["nsenter", namespace, "unshare", "--mount", "sh", "-c", mount, str(private), str(folder), *command]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for descriptor in [*self._devices, *self._namespaces]:
            os.close(descriptor)

    def _make(self, host: int) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        self._namespaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        self._devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(self._devices[-1], TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        for words in (
            "link set lo up",
            f"addr add {self.address(host)}/24 dev {DEVICE}",
            f"link set {DEVICE} up mtu {LARGEST_PACKET}",
            f"route add default dev {DEVICE}",
        ):
            subprocess.run(["ip", *words.split()], check=True)

    def _carry(self) -> None:
        while not self._ended.is_set():
            now = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now:
                _, sender, receiver, packet = self._under_way.popleft()
                if not self.cut & {sender, receiver}:
                    os.write(self._devices[receiver], packet)
            wait = min(0.1, self._under_way[0][0] - now) if self._under_way else 0.1
            for device in select.select(self._devices, [], [], max(0.0, wait))[0]:
                self._take(device)

    def _take(self, device: int) -> None:
        """Everything that a host has sent."""
        while True:
            try:
                packet = os.read(device, LARGEST_PACKET)
            except BlockingIOError:
                return
            receiver = self._numbers.get(packet[DESTINATION]) if packet[0] >> 4 == IPV4 else None
            if receiver is not None and self._random.random() >= self._loss:
                arrives = time.monotonic() + self._delay
                self._under_way.append((arrives, self._devices.index(device), receiver, packet))


@contextmanager
def wire(hosts: int, *, delay: float = 0.02, loss: float = 0.01, seed: int = 0) -> Iterator[Wire]:
    """`hosts` new ones, for as long as the context lasts. What still runs on them then has no network any more."""
    carrier = Wire(hosts, delay, loss, seed)
    try:
        yield carrier
    finally:
        carrier.close()


class SpreadRun:
    """A run whose roles are on hosts that share only its keys and the model; the first host has the master alone.

    Host N's own run folders lie in folder/host-N, what it has printed in folder/host-N.out.
    """

    def __init__(
        self, network: Wire, roles: Sequence[Sequence[str]], folder: Path, configuration: Sequence[str]
    ) -> None:
        """roles: of each host. configuration: the master's arguments, with a name and a model."""
        self.network = network
        self._hosts = [folder / f"host-{host}" for host in range(len(roles))]
        self._processes: list[subprocess.Popen] = []
        shared = folder / "runs"
        keys = make_keys(folder / "keys").parent
        for host_folder in (shared, *self._hosts):
            host_folder.mkdir()
        first = [f"run_dir={shared}", f"master.address=tcp://*:{MASTER_PORT}", "weights.transport=stream"]
        arguments = ["--master", f"tcp://{network.address(0)}:{MASTER_PORT}"]
        for host, own_roles in enumerate(roles):
            words = [word for role in own_roles for word in ("--role", role)]
            words += ["--keys", str(keys), *(arguments if host else [*configuration, *first])]
            command = network.command(host, [sys.executable, str(RUN_PY), *words], self._hosts[host], shared)
            with self._hosts[host].with_suffix(".out").open("w") as out:
                self._processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))

    @property
    def output(self) -> str:
        """What all hosts have printed so far."""
        return "\n".join(f"--- {host.name}\n{host.with_suffix('.out').read_text()}" for host in self._hosts)

    def folder(self, host: int, name: str) -> Path:
        """The run folder as this host sees it."""
        return self._hosts[host] / name

    def wait_for_step(self, name: str, step: int) -> None:
        """Raises RuntimeError where it does not come."""
        deadline = time.monotonic() + STEP_SECONDS
        while sum(1 for _ in read_records(self.folder(0, name) / "metrics.jsonl")) < step:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"step {step} did not come:\n{self.output}")
            time.sleep(0.05)

    def cut_off(self, host: int, seconds: float) -> None:
        """For so long, nothing comes from or to this host."""
        self.network.cut.add(host)
        time.sleep(seconds)
        self.network.cut.remove(host)

    def wait(self, timeout: float) -> list[int]:
        """The exit codes, once every host has ended. Raises TimeoutExpired."""
        return [process.wait(timeout) for process in self._processes]

    def close(self) -> None:
        """Kill what still runs."""
        remaining = [process for process in self._processes if process.poll() is None]
        for process in remaining:
            process.terminate()
        for process in remaining:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
