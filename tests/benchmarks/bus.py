"""The bus against bare pyzmq and against Ray: round trips and bytes per second between two processes.

    python tests/benchmarks/bus.py --json bus.json

Every contestant moves the same content: a heartbeat and its answer, and arrays of 1 MiB. Ours is a real `Bus` on each
side, with validated messages, deadlines and answers kept for repeated requests, encrypted with CURVE, and both ends
prove who they are (docs/security.md). Bare pyzmq is a DEALER and a ROUTER of `zmq.asyncio` with msgpack and nothing
else: no validation, no deadline, no credit; a single asker does without request ids there. It runs twice, in the clear
and with CURVE. Ray is calls of an async actor, in the clear, with `ray.get` where there is a single asker. All
processes stand at the same time, and in every round each contestant does the same work, one after another.

`ratio` is ours over pyzmq in the clear for small round trips, with one asker or with 64, whichever is less;
`ratio_arrays` is ours over pyzmq with CURVE for arrays, fetched or streamed, whichever is less.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio
from results import ratio, show, write

from protocols.bus import Bus
from protocols.membership_messages import Heartbeat, HeartbeatAnswer, Policy
from protocols.messages import Message
from protocols.network import ZmqNetwork
from protocols.security import Keys, make_keys
from protocols.transport import Request
from protocols.weight_messages import FetchWeights, WeightChunk

try:
    import ray
except ImportError:
    ray = None

ASKERS = 64
DEADLINE = 60.0
MEBIBYTE = (np.arange(1 << 20) % 251).astype(np.uint8)
STATS = {f"gauge_{i}": float(i) for i in range(6)}
HEARTBEAT = {"state": "healthy", "serves": ("addition",), "activity": "generating", "stats": STATS}
POLICY = {"lineage": 0, "version": 3, "folder": "/run/weights/v3"}
ANSWER = {"policy": POLICY, "sequence": 7, "ended": False}


class Contestant:
    """Two processes; this is the one that asks. `name` is how the table calls it."""

    name: str

    async def close(self) -> None:
        raise NotImplementedError

    async def ask(self) -> Any:
        """A heartbeat's round trip."""
        raise NotImplementedError

    async def ask_alone(self) -> Any:
        """The same, where nobody else asks."""
        return await self.ask()

    async def fetch(self) -> np.ndarray:
        """1 MiB, in answer to a small message."""
        raise NotImplementedError

    async def stream(self, count: int) -> AsyncIterator[np.ndarray]:
        """`count` times 1 MiB, in answer to a small message."""
        raise NotImplementedError
        yield


# --- ours


class Ours(Contestant):
    name = "ours"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        keys = make_keys(Path(self._folder.name)).parent
        self._server, address = serve(functools.partial(_serve_bus, keys=keys))
        self._bus = Bus("generator/0#1f4a9c07", ZmqNetwork(Keys(keys)))
        self._peer = self._bus.peer(address)

    async def close(self) -> None:
        await self._bus.close()
        stop(self._server)
        self._folder.cleanup()

    async def ask(self) -> Message:
        return await self._peer.ask(Heartbeat(**HEARTBEAT), DEADLINE)

    async def fetch(self) -> np.ndarray:
        return (await self._peer.ask(_fetch(1), DEADLINE)).data

    async def stream(self, count: int) -> AsyncIterator[np.ndarray]:
        async for part in self._peer.stream(_fetch(count), DEADLINE):
            yield part.data


def _fetch(parts: int) -> FetchWeights:
    return FetchWeights(lineage=0, version=parts, first=0, base=None)


def _serve_bus(ready: Connection, keys: Path) -> None:
    async def main() -> None:
        bus = Bus("master/0#77d02be3", ZmqNetwork(Keys(keys)))
        ready.send(bus.serve("tcp://127.0.0.1:*", _handle, _raise))
        await asyncio.Event().wait()

    asyncio.run(main())


def _handle(request: Request) -> Awaitable[Message] | AsyncIterator[Message]:
    if isinstance(request.message, Heartbeat):
        return _beat()
    return _chunk() if request.message.version == 1 else _chunks(request.message.version)


async def _beat() -> HeartbeatAnswer:
    return HeartbeatAnswer(policy=Policy(**POLICY), sequence=7)


async def _chunk() -> WeightChunk:
    return WeightChunk(number=0, data=MEBIBYTE, difference=False)


async def _chunks(count: int) -> AsyncIterator[WeightChunk]:
    for _ in range(count):
        yield await _chunk()


def _raise(error: BaseException) -> None:
    raise error


# --- bare pyzmq


class Pyzmq(Contestant):
    name = "pyzmq asyncio"
    encrypted = False

    def __init__(self) -> None:
        keys = zmq.curve_keypair() if self.encrypted else None
        self._server, address = serve(functools.partial(_serve_pyzmq, keys=keys))
        self._context = zmq.asyncio.Context()
        self._alone, self._shared = (self._context.socket(zmq.DEALER) for _ in range(2))
        for socket in (self._alone, self._shared):
            if keys:
                socket.curve_serverkey = keys[0]
                socket.curve_publickey, socket.curve_secretkey = keys
            socket.connect(address)
        self._pack = msgpack.Packer().pack
        self._ids = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reader.cancel()
        self._context.destroy(linger=0)
        stop(self._server)

    async def ask(self) -> Any:
        id = b"%d" % next(self._ids)
        self._waiting[id] = answer = asyncio.get_running_loop().create_future()
        await self._shared.send_multipart([id, self._pack(HEARTBEAT)])
        return await answer

    async def _read(self) -> None:
        while True:
            id, body = await self._shared.recv_multipart()
            self._waiting.pop(id).set_result(msgpack.unpackb(body))

    async def ask_alone(self) -> Any:
        await self._alone.send_multipart([b"", self._pack(HEARTBEAT)])
        _, body = await self._alone.recv_multipart()
        return msgpack.unpackb(body)

    async def fetch(self) -> np.ndarray:
        async for array in self.stream(1):
            return array

    async def stream(self, count: int) -> AsyncIterator[np.ndarray]:
        await self._alone.send_multipart([b"", self._pack({"parts": count})])
        for _ in range(count):
            _, body, frame = await self._alone.recv_multipart(copy=False)
            yield np.frombuffer(frame.buffer, msgpack.unpackb(body.buffer)["dtype"])


class Curve(Pyzmq):
    name = "pyzmq, CURVE"
    encrypted = True


def _serve_pyzmq(ready: Connection, keys: tuple[bytes, bytes] | None) -> None:
    async def main() -> None:
        socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        if keys:
            socket.curve_publickey, socket.curve_secretkey = keys
            socket.curve_server = True
        ready.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        pack = msgpack.Packer().pack
        while True:
            route, id, body = await socket.recv_multipart()
            request = msgpack.unpackb(body)
            if "parts" not in request:
                await socket.send_multipart([route, id, pack(ANSWER)])
            for _ in range(request.get("parts", 0)):
                await socket.send_multipart([route, id, pack({"dtype": "uint8"}), MEBIBYTE], copy=False)

    asyncio.run(main())


# --- Ray


class RayActor(Contestant):
    name = "Ray"

    def __init__(self) -> None:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        self._actor = ray.remote(_RayServer).options(max_concurrency=2 * ASKERS).remote()
        ray.get(self._actor.beat.remote(HEARTBEAT))

    async def close(self) -> None:
        ray.shutdown()

    async def ask(self) -> Any:
        return await self._actor.beat.remote(HEARTBEAT)

    async def ask_alone(self) -> Any:
        return ray.get(self._actor.beat.remote(HEARTBEAT))

    async def fetch(self) -> np.ndarray:
        return ray.get(self._actor.fetch.remote())

    async def stream(self, count: int) -> AsyncIterator[np.ndarray]:
        for part in self._actor.stream.options(num_returns="streaming").remote(count):
            yield ray.get(part)


class _RayServer:
    async def beat(self, message: dict[str, Any]) -> dict[str, Any]:
        return ANSWER

    async def fetch(self) -> np.ndarray:
        return MEBIBYTE

    async def stream(self, count: int) -> AsyncIterator[np.ndarray]:
        for _ in range(count):
            yield MEBIBYTE


# --- what is measured


async def alone(contestant: Contestant, count: int) -> float:
    """Round trips per second of a single asker."""
    return await rate(count, times(count, contestant.ask_alone))


async def together(contestant: Contestant, count: int) -> float:
    """Round trips per second of many askers at once."""
    return await rate(count, asyncio.gather(*(times(count // ASKERS, contestant.ask) for _ in range(ASKERS))))


async def fetched(contestant: Contestant, count: int) -> float:
    """MB/s of single answers."""
    return await rate(count * MEBIBYTE.nbytes / 1e6, times(count, contestant.fetch))


async def streamed(contestant: Contestant, count: int) -> float:
    """MB/s of one stream."""

    async def take() -> None:
        assert [array async for array in contestant.stream(count) if array[-1] != MEBIBYTE[-1]] == []

    return await rate(count * MEBIBYTE.nbytes / 1e6, take())


async def times(count: int, call: Callable[[], Awaitable[Any]]) -> None:
    for _ in range(count):
        await call()


async def rate(amount: float, work: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await work
    return amount / (time.perf_counter() - started)


# What is measured: its name, how, and how often in a round.
MEASURES = {
    "round trips/s, 1 asker": (alone, 4096),
    f"round trips/s, {ASKERS} askers": (together, 8192),
    "MB/s, request and reply": (fetched, 128),
    "MB/s, streamed": (streamed, 128),
}
SMALL, ARRAYS = list(MEASURES)[:2], list(MEASURES)[2:]


def serve(server: Callable[[Connection], None]) -> tuple[multiprocessing.process.BaseProcess, str]:
    """A process that runs `server`, and the address that it tells."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=server, args=(there,), daemon=True)
    process.start()
    if not here.poll(DEADLINE):
        raise TimeoutError(f"{server} did not start within {DEADLINE:g} s")
    return process, here.recv()


def stop(process: multiprocessing.process.BaseProcess) -> None:
    process.terminate()
    process.join()


async def measure(rounds: int, share: float) -> dict[str, dict[str, list[float]]]:
    """For each measure and contestant its rates, one a round, after a round that warms up."""
    async with AsyncExitStack() as stack:
        contestants = [make() for make in (Ours, Pyzmq, Curve, *([RayActor] if ray else []))]
        for contestant in contestants:
            stack.push_async_callback(contestant.close)
        rates = {measure: {contestant.name: [] for contestant in contestants} for measure in MEASURES}
        for _ in range(rounds + 1):
            for measure, (how, count) in MEASURES.items():
                for contestant in contestants:
                    rates[measure][contestant.name].append(await how(contestant, int(count * share)))
    return {measure: {name: results[1:] for name, results in by.items()} for measure, by in rates.items()}


def compare(options: argparse.Namespace) -> None:
    rates = asyncio.run(measure(options.rounds, 1 / 32 if options.quick else 1.0))
    remainder = [name for name in rates[SMALL[0]] if name != Ours.name]
    ratios = {
        neighbour: {measure: ratio(by[Ours.name], by[neighbour]) for measure, by in rates.items()}
        for neighbour in remainder
    }
    small = {neighbour: min(by[measure] for measure in SMALL) for neighbour, by in ratios.items()}
    arrays = min(ratios[Curve.name][measure] for measure in ARRAYS)
    results = {"rounds": options.rounds, "ratio": small[Pyzmq.name][0], "spread": small[Pyzmq.name][1]}
    results |= {"ratio_arrays": arrays[0], "spread_arrays": arrays[1]}
    if ray:
        results |= {"ratio_ray": small[RayActor.name][0], "spread_ray": small[RayActor.name][1]}
    results["rows"] = [
        {"of": measure, "rates": {name: median(figures) for name, figures in by.items()}}
        | {"ratios": {neighbour: ratios[neighbour][measure] for neighbour in ratios}}
        for measure, by in rates.items()
    ]
    show(
        f"{options.rounds} rounds",
        ["", *rates[SMALL[0]], *(f"ours / {neighbour}" for neighbour in ratios)],
        [
            [measure, *(f"{median(figures):,.0f}" for figures in by.values()), *(ratios[o][measure][0] for o in ratios)]
            for measure, by in rates.items()
        ],
        [f"ours / {name}, round trips: {r:.2f} ({low:.2f} to {high:.2f})" for name, (r, (low, high)) in small.items()]
        + ([] if ray else ["Without Ray, which is not installed: pip install -e '.[bench]'"]),
    )
    write(results, options.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="times that every contestant does all the work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one round of little work: does it run?")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    return options


if __name__ == "__main__":
    compare(arguments())
