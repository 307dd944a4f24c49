"""How long new weights take to reach the generators, and how long those stand still for them.

A trainer (this process) changes 5 % of the elements of a synthetic bf16 model, writes it as the trainer does, and each
receiver (a process of its own) fetches it as a generator does and copies it from the file into memory that is there,
which is all that a generator interrupts its sequences for. All of them share this machine, its cores and its disk.

  folder          all read one folder on the disk
  /dev/shm        all read one folder in memory
  stream          through the bus, from receiver to receiver, all of it
  stream, delta   the same, but only what has changed
  direct          from the trainer straight into the memory of each, which is interrupted until all has landed

In every round these are timed as well: a plain copy of the file on the disk, one from memory to memory, and one over a
bare TCP connection into a file of the first receiver.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import runs  # noqa: F401  # it makes the tests' modules known
import structlog
import uvloop
from results import ratio, show, write
from safetensors.numpy import save_file

from actors.direct.direct_weights import DirectSender
from actors.runtime.directory import Directory
from actors.weights.weight_service import WeightFetcher, WeightServer
from areal.config.engine_sections import WeightsConfig
from areal.devices import transfer_backend
from areal.weights.chunks import CHUNK_BYTES, HeldVersion, Manifest, difference
from areal.weights.folders import atomic_folder, remove_folder
from areal.weights.model_files import WEIGHTS_FILE
from protocols.bus import Bus
from protocols.membership_messages import Member, Policy
from protocols.transport import Request
from protocols.weight_messages import FetchWeights

# isort: split
from fakes.transfer_end import TransferEnd
from support.networks import network

SIZES = {"1M": 1_100_000, "135M": 134_515_008, "1.5B": 1_543_714_304}
# Each holds the weights in memory, and all share these cores: more of the largest size say nothing.
RECEIVERS = {"1M": (1, 2, 4), "135M": (1, 2, 4), "1.5B": (1,)}
WAYS = {
    "folder": {"transport": "folder"},
    "/dev/shm": {"transport": "folder"},
    "stream": {"transport": "stream", "delta": False},
    "stream, delta": {"transport": "stream", "delta": True},
    "direct": {"transport": "direct"},
}
LOOPBACK = "tcp://127.0.0.1:*"
CHANGED, TENSOR, PATTERN = 0.05, 1 << 24, 1 << 24
VERSIONS_KEPT = 2


class Model:
    """bf16 weights, as the integers that hold them."""

    def __init__(self, elements: int) -> None:
        rng = np.random.default_rng(0)
        block = 0.02 * rng.standard_normal(PATTERN, np.float32)
        self.flat = np.resize((block.view(np.uint32) >> 16).astype(np.uint16), elements)
        self._pattern = (rng.random(PATTERN) < CHANGED).astype(np.uint16)

    def step(self) -> None:
        """Change the last bit of some elements."""
        self._pattern = np.roll(self._pattern, 12_345)
        for start in range(0, len(self.flat), PATTERN):
            part = self.flat[start : start + PATTERN]
            part ^= self._pattern[: len(part)]

    def write(self, folder: Path) -> Manifest:
        """As the trainer publishes."""
        with atomic_folder(folder) as partial:
            tensors = {f"w{i:04}": self.flat[i : i + TENSOR] for i in range(0, len(self.flat), TENSOR)}
            save_file(tensors, partial / WEIGHTS_FILE)
        return Manifest.of(folder)


class Trainer:
    """Publishes versions to receivers that it starts."""

    def __init__(self, model: Model, folder: Path, config: dict[str, Any]) -> None:
        self._model = model
        self._folder = folder
        self._config = config
        self._server = WeightServer(VERSIONS_KEPT)
        self._directory = Directory(Policy(lineage=0, version=0, folder=""))
        self._direct = DirectSender(transfer_backend(), self._directory, "127.0.0.1", VERSIONS_KEPT)
        self._version = 0
        self._receivers: list[asyncio.subprocess.Process] = []
        self._members: list[Member] = []

    @contextlib.asynccontextmanager
    async def with_receivers(self, count: int) -> AsyncIterator[None]:
        bus = Bus("trainer/0#x", network())
        address = bus.serve(LOOPBACK, self._handle, _crash)
        self._members = [_member("trainer", 0, address)]
        try:
            for index in range(count):
                setup = {"index": index, "folder": str(self._folder), "weights": self._config}
                receiver = await asyncio.create_subprocess_exec(
                    sys.executable,
                    __file__,
                    "--receiver",
                    json.dumps(setup),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                self._receivers.append(receiver)
                address = json.loads(await receiver.stdout.readline())["address"]
                self._members.append(_member("generator", index, address))
            self._directory.update({member.identity: member for member in self._members}, ())
            yield
        finally:
            self._direct.close()
            for receiver in self._receivers:
                receiver.stdin.close()
            await asyncio.gather(*(receiver.wait() for receiver in self._receivers))
            await bus.close()
            shutil.rmtree(self._folder)

    async def plain_hop(self) -> float:
        """Seconds of the last version's bytes over TCP to the first receiver, which writes them into a file."""
        file = self._folder / f"v{self._version}" / WEIGHTS_FILE
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._receivers[0].stdin.write(json.dumps({"tcp": listening.getsockname()[1]}).encode() + b"\n")
            await asyncio.to_thread(_send_plainly, listening, file)
        return json.loads(await self._receivers[0].stdout.readline())["seconds"]

    def _handle(self, request: Request) -> Any:
        return (self._server if isinstance(request.message, FetchWeights) else self._direct).dispatch(request)

    async def hand_over(self) -> dict[str, float]:
        """Seconds of a new version: until it is written, until all have it (`seconds`), and of the longest pause and
        the longest fetch."""
        self._model.step()
        self._version += 1
        folder, payload = self._folder / f"v{self._version}", self._bytes_sent
        started = time.perf_counter()
        manifest = await asyncio.to_thread(self._model.write, folder)
        published = time.perf_counter()
        if self._config["transport"] == "stream":
            self._server.offer((0, self._version), HeldVersion(folder, manifest))
        policy = Policy(lineage=0, version=self._version, folder=str(folder), stamp=manifest.stamp)
        self._direct.offer(policy)
        order = {"policy": policy.model_dump_json(), "members": [m.model_dump_json() for m in self._members]}
        for receiver in self._receivers:
            receiver.stdin.write(json.dumps(order).encode() + b"\n")
        answers = [json.loads(await receiver.stdout.readline()) for receiver in self._receivers]
        ended = time.perf_counter()
        await asyncio.to_thread(remove_folder, self._folder / f"v{self._version - VERSIONS_KEPT}")
        return {
            "seconds": ended - started,
            "publish_seconds": published - started,
            "fetch_seconds": max(answer["fetch_seconds"] for answer in answers),
            "pause_seconds": max(answer["pause_seconds"] for answer in answers),
            "trainer_sent": (self._bytes_sent - payload) / manifest.size,
        }

    @property
    def _bytes_sent(self) -> int:
        return self._server.bytes_sent + self._direct.bytes_sent


def _member(role: str, index: int, address: str) -> Member:
    return Member(identity=f"{role}/{index}#x", role=role, index=index, address=address, state="healthy")


def _send_plainly(listening: socket.socket, file: Path) -> None:
    connection, _ = listening.accept()
    with connection, file.open("rb", buffering=0) as data:
        while part := data.read(CHUNK_BYTES):
            connection.sendall(part)


def _receive_plainly(port: int, file: Path) -> float:
    part = memoryview(bytearray(CHUNK_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection, file.open("wb", buffering=0) as copy:
        started = time.perf_counter()
        while received := connection.recv_into(part):
            copy.write(part[:received])
        seconds = time.perf_counter() - started
    file.unlink()
    return seconds


def _crash(error: BaseException) -> None:
    raise error


async def receive(setup: dict[str, Any]) -> None:
    """A receiver's life: a line in for each policy, a line out once it is in memory."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # answers go to the standard output
    defaults: dict[str, Any] = {"members": []}
    bus, config = Bus(f"generator/{setup['index']}#x", network()), WeightsConfig(**setup["weights"])

    def members(role: str) -> list[Member]:
        return [member for member in defaults["members"] if member.role == role]

    fetcher = WeightFetcher(bus, setup["index"], config, Path(setup["folder"]), members, lambda: defaults["policy"])

    def serve(request: Request) -> Any:
        return fetcher.serve(request)

    print(json.dumps({"address": bus.serve(LOOPBACK, serve, _crash)}), flush=True)
    memory = np.empty(0, np.uint8)
    end: TransferEnd | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if "tcp" in order:
            file = Path(setup["folder"], f"plain-{setup['index']}")
            print(json.dumps({"seconds": await asyncio.to_thread(_receive_plainly, order["tcp"], file)}), flush=True)
            continue
        defaults["members"] = [Member.model_validate_json(member) for member in order["members"]]
        policy = defaults["policy"] = Policy.model_validate_json(order["policy"])
        if config.direct:
            end = end or TransferEnd(bus, defaults["members"][0])
            paused = await end.receive(policy)
            print(json.dumps({"pause_seconds": paused, "fetch_seconds": paused}), flush=True)
            continue
        began = time.perf_counter()
        folder = await fetcher.fetch(policy)
        fetched = time.perf_counter() - began
        file = np.memmap(folder / WEIGHTS_FILE, np.uint8, "r")
        if len(memory) != len(file):
            memory = np.zeros(len(file), np.uint8)
        started = time.perf_counter()
        await asyncio.to_thread(np.copyto, memory, file)
        print(json.dumps({"pause_seconds": time.perf_counter() - started, "fetch_seconds": fetched}), flush=True)
    await bus.close()
    fetcher.close()


def plain_copies(model: Model, folder: Path) -> dict[str, float]:
    """Seconds of copying the model's bytes: a file on the disk, synced, and memory."""
    folder.mkdir()
    model.flat.tofile(folder / "a")
    started = time.perf_counter()
    shutil.copyfile(folder / "a", folder / "b")
    with (folder / "b").open("rb") as file:
        os.fsync(file.fileno())
    copied = time.perf_counter()
    shutil.rmtree(folder)
    target = np.zeros_like(model.flat)
    begun = time.perf_counter()
    np.copyto(target, model.flat)
    return {"file": copied - started, "memory": time.perf_counter() - begun}


def sent_shares() -> dict[str, dict[str, float]]:
    """Bytes of a difference over those of the weights, for a step of Adam's size lr on fp32 master weights."""
    import torch

    torch.manual_seed(0)
    values_before = torch.randn(4 * CHUNK_BYTES) * 0.02
    move = torch.randn(len(values_before)).sign()

    def share(dtype: Any, lr: float) -> float:
        old, new = (w.to(dtype).view(torch.uint8).numpy().tobytes() for w in (values_before, values_before + lr * move))
        parts = [slice(i, i + CHUNK_BYTES) for i in range(0, len(new), CHUNK_BYTES)]
        return sum(len(difference(new[part], old[part]) or new[part]) for part in parts) / len(new)

    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return {name: {f"{lr:g}": share(dtype, lr) for lr in (1e-6, 5e-6, 2e-5)} for name, dtype in dtypes.items()}


async def measure(name: str, options: argparse.Namespace, disk: Path) -> list[dict[str, Any]]:
    """Every way to every number of receivers, for one size."""
    model, results = Model(SIZES[name]), []
    for count in options.receivers or RECEIVERS[name]:
        for way, config in WAYS.items():
            place = Path("/dev/shm") if way == "/dev/shm" else disk
            folder = Path(tempfile.mkdtemp(dir=place))
            rounds = []
            trainer = Trainer(model, folder, config)
            async with trainer.with_receivers(count):
                await trainer.hand_over()  # fills memory, and is the base of the first difference
                for _ in range(options.rounds):
                    copies = await asyncio.to_thread(plain_copies, model, disk / "copies")
                    copies["tcp"] = await trainer.plain_hop()
                    rounds.append(await trainer.hand_over() | {f"copy_{kind}": s for kind, s in copies.items()})
            results.append({"size": name, "receivers": count, "way": way, "rounds": rounds})
            seconds, pause = (median(r[key] for r in rounds) for key in ("seconds", "pause_seconds"))
            print(f"{name}, {count} receivers, {way}: {seconds:.3f} s, pause {pause:.3f} s", flush=True)
    return results


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as disk:
        figures = [case for name in options.sizes for case in uvloop.run(measure(name, options, Path(disk)))]
    shares = sent_shares()
    columns = ["seconds", "publish_seconds", "fetch_seconds", "pause_seconds", "trainer_sent"]
    columns += ["copy_file", "copy_memory", "copy_tcp"]
    medians = [{key: median(r[key] for r in case["rounds"]) for key in columns} for case in figures]
    judged = next(c for c in figures if (c["size"], c["way"]) == (options.sizes[-1], "stream"))
    first = judged["receivers"]
    share, spread = ratio(*([r[key] for r in judged["rounds"]] for key in ("copy_file", "seconds")))
    of = f"{judged['size']}, {first} receiver(s)"
    what = f"a plain file copy's seconds / those of a whole hand-over by stream, {of}"
    hops = {
        f"a plain copy's seconds, {kind}, / those of fetching by stream, {of}": ratio(
            *([r[key] for r in judged["rounds"]] for key in (f"copy_{kind}", "fetch_seconds"))
        )
        for kind in ("file", "tcp")
    }
    show(
        f"New weights, {options.rounds} rounds (medians)",
        [
            "",
            "receivers",
            "s until all have it",
            "of that, writing",
            "fetching",
            "pause s",
            "trainer sent",
            "file copy",
            "memory",
            "TCP",
        ],
        [
            [f"{case['size']}, {case['way']}", case["receivers"], *numbers.values()]
            for case, numbers in zip(figures, medians, strict=True)
        ],
        [
            *(
                f"{what}: {share:.3f} ({spread[0]:.3f} to {spread[1]:.3f})"
                for what, (share, spread) in [(what, (share, spread)), *hops.items()]
            ),
            *(
                f"a difference in {dtype}, of all bytes: " + ", ".join(f"{s:.1%} at lr {lr}" for lr, s in of.items())
                for dtype, of in shares.items()
            ),
        ],
    )
    results = {"ratio": share, "spread": spread, "ratio_is": what, "hops": hops, "difference_shares": shares}
    results["cases"] = figures
    write(results, options.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--receivers", nargs="+", type=int, help="default: 1, 2 and 4, of 1.5B 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one round of the smallest size: does it run?")
    parser.add_argument("--receiver", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.receivers, options.rounds = ["1M"], [1, 2], 1
    return options


if __name__ == "__main__":
    options = arguments()
    if options.receiver:
        uvloop.run(receive(options.receiver))
    else:
        compare(options)
