"""The hostile sender: malformed messages at every door, and what became of them.

    python tests/fuzz.py                                     # a million at all doors, half an hour on two cores
    python tests/fuzz.py --frames 20000 --doors master http
    python tests/fuzz.py --search FOLDER -max_total_time=300 # extra `fuzz`; then libFuzzer's options
    python tests/fuzz.py --search crash-...                  # a failure again

Each actor is a process of its own, as a user starts it, with its engine on a tiny model. One master stands alone, so
that frames can come from its members; the other actors are those of a run that goes on training meanwhile. `http` is
the OpenAI endpoint, `codec` what reads frames at each door. `answered`, `refused`: messages that came back; most frames
that cannot be read get none. The memory is that before, after a tenth, after half, and at the end.

With `--search`, libFuzzer looks for ways through the codec that nobody thought of: it varies frames that reach new
code, and keeps them in FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import yaml
import zmq
from fakes.scripted_policy import Session, byte_tokenizer
from support.malformed import Malformed, MalformedHttp
from support.networks import dealer, find_free_port, keys_folder

from areal.extensions.agents.openai_endpoint import OpenAIEndpoint
from protocols.bus_errors import MalformedError, ProtocolVersionError
from protocols.codec import Header, decode_body, decode_header, encode
from protocols.membership_messages import AskSnapshot, AskStatus, Join, Welcome
from protocols.messages import Failure, Message

ROOT = Path(__file__).parent.parent
ACTORS = ("master", "trainer", "generator", "reward", "rollout_manager", "evaluator")
DOORS = (*ACTORS, "http", "codec")
# Frames over one connection: between two, streams that nobody reads are given up.
BATCH = 5000
ANSWER_SECONDS = 60.0
START_SECONDS = 240.0
# Requests to one sample: its conversation only grows.
REQUESTS = 100
# A request that promises more than it holds is waited for.
SILENCE_SECONDS = 0.2
# Frames that libFuzzer begins with.
SEEDS = 400


# --- actors


@dataclass(slots=True)
class Door:
    """One actor's process and what was seen of it."""

    process: subprocess.Popen
    output: Path
    address: str
    sent: int = 0
    seconds: float = 0.0
    back: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    lines: int = 0

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def caller(self) -> Caller:
        return Caller(self.address, self.back, lambda: self.alive)

    def look(self) -> None:
        if self.alive:
            self.memory.append(psutil.Process(self.process.pid).memory_info().rss >> 20)


class Caller:
    """A connection to a door, without anything of the bus but the codec. What came back is counted."""

    def __init__(self, address: str, back: Counter[str], alive: Callable[[], bool] = lambda: True) -> None:
        self.token = secrets.token_bytes(16)
        self._back, self._alive = back, alive
        self._socket = dealer(zmq.Context.instance(), address)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, frames: list[bytes]) -> None:
        while self._alive():
            try:
                return self._socket.send_multipart(frames, zmq.DONTWAIT)
            except zmq.Again:
                self.receive()
                self._socket.poll(100, zmq.POLLIN | zmq.POLLOUT)

    def receive(self, id: str = "") -> Message | None:
        """Count what has come back; the answer to the request of this id, if it is among that."""
        answer = None
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            header = decode_header(frames)
            message = decode_body(header.kind, frames)
            self._back["refused" if isinstance(message, Failure) else "answered"] += 1
            answer = message if id and header.reply_to == id else answer
        return answer

    def ask(self, message: Message, sender: str = "stranger/0#1") -> Message | None:
        """The answer; None where the door is dead or stuck."""
        id, until = secrets.token_hex(8), time.monotonic() + ANSWER_SECONDS
        self.send(encode(Header(message.kind, sender, id=id, remaining_ms=10_000, token=self.token), message))
        while self._alive() and time.monotonic() < until:
            if answer := self.receive(id):
                return answer
            self._socket.poll(100)
        return None

    def flood(self, malformed: Malformed, frames: int) -> bool:
        """Whether the door still answers when it has read them."""
        for i in range(frames):
            self.send(malformed.frames())
            if not i % 20:
                self.receive()
        return self.ask(AskStatus()) is not None


def flood(door: Door, frames: int, malformed: Malformed, joins: bool) -> None:
    """Ends early where the door does not answer any more."""
    with door.caller() as hello:
        hello.ask(AskStatus())
    began = time.monotonic()
    door.look()
    lines = _lines(door)
    while door.sent < frames and not door.back["stuck"]:
        with door.caller() as caller:
            malformed.token = caller.token
            if joins:
                malformed.senders = ["stranger/0#1", *_joined(caller)]
            batch = min(BATCH, frames - door.sent)
            door.back["stuck"] += not caller.flood(malformed, batch)
            door.sent += batch
        if door.sent % (frames // 10 or 1) < BATCH:
            door.look()
    door.look()
    door.seconds = time.monotonic() - began
    door.lines = _lines(door) - lines


def _joined(caller: Caller) -> list[str]:
    """Identities of members."""
    roles = ("reward", "rollout_manager", "generator", "evaluator", "trainer")
    joins = [Join(role=role, index=None, address="tcp://127.0.0.1:1") for role in roles]
    answers = [caller.ask(join, f"{join.role}/?#{secrets.token_hex(4)}") for join in joins]
    return [answer.identity for answer in answers if isinstance(answer, Welcome)]


def _lines(door: Door) -> int:
    return door.output.read_bytes().count(b"\n")


class Cluster:
    """Processes of `run.py`, which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen] = []

    def start(self, name: str, address: str, *arguments: str) -> Door:
        output = self.folder / f"{name}.txt"
        with output.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "run.py"), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "AREAL_KEYS": keys_folder()},
                cwd=self.folder,
                start_new_session=True,
            )
        self._started.append(process)
        return Door(process, output, address)

    def master(self, name: str, **changes: object) -> Door:
        address = f"tcp://127.0.0.1:{find_free_port()}"
        config = {
            "name": name,
            "run_dir": str(self.folder),
            "model": str(self.folder / "tiny"),
            "steps": 1_000_000,
            "batch_size": 4,
            "group_size": 2,
            "max_staleness": 2,
            "sampling": {"max_new_tokens": 32},
            "data": {"source": "addition", "eval_size": 0},
            "reward": {"functions": ["addition"], "workers": 1},
            "generator": {"dtype": "float32", "threads": 1},
            "trainer": {"dtype": "float32", "threads": 1},
            "master": {"address": address, "stall_seconds": 1e6, **changes},
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        return self.start(name, address, "--role", "master", "--config", str(file))

    def stop(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def cluster() -> Iterator[Cluster]:
    from areal.data.warm_start import Recipe, build

    with tempfile.TemporaryDirectory() as folder:
        result = Cluster(Path(folder))
        build(result.folder / "tiny", recipe=Recipe(steps=2, short_steps=2), threads=1)
        try:
            yield result
        finally:
            result.stop()


def start_run(processes: Cluster) -> tuple[Door, dict[str, Door]]:
    """A run's master, and its other actors once each of them is at work."""
    master = processes.master("run")
    roles = [role for role in ACTORS if role != "master"]
    doors = {role: processes.start(role, "", "--role", role, "--master", master.address) for role in roles}
    with master.caller() as caller:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            values = caller.ask(AskStatus()).values
            healthy = {m["identity"].split("/")[0] for m in values["members"] if m["state"] == "healthy"}
            if set(roles) <= healthy and values["version"] >= 1:
                break
            time.sleep(1.0)
        else:
            sys.exit("the run did not begin:\n" + "".join(door.output.read_text()[-2000:] for door in doors.values()))
        for member in caller.ask(AskSnapshot()).members:
            doors[member.role].address = member.address
    return master, doors


def version_of(master: Door) -> int:
    with master.caller() as caller:
        return caller.ask(AskStatus()).values["version"]


def flood_actors(names: list[str], frames: int, seed: int) -> bool:
    """Whether none of them has died or got stuck. frames: to each."""
    unharmed = True
    with cluster() as processes:
        doors: dict[str, Door] = {}
        if "master" in names:
            doors["master"] = processes.master("alone", lease_seconds=20)
        if members := [name for name in names if name != "master"]:
            master, run = start_run(processes)
            doors |= {name: run[name] for name in members}
            version = version_of(master)
        for n, (name, door) in enumerate(doors.items()):
            flood(door, frames, Malformed(seed + n), joins=name == "master")
            print(row(name, door), flush=True)
            if not door.alive or door.back["stuck"]:
                unharmed = False
                print(door.output.read_text()[-6000:])
        if members:
            print(f"meanwhile the run has gone from version {version} to {version_of(master)}")
    return unharmed


# --- the endpoint


class Talkative(Session):
    """Its policy always says the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = byte_tokenizer()

    async def generate(self, tokens, max_new_tokens=None, keep=None, pictures=None):
        self.turns.append('yes <tool_call>{"name": "f", "arguments": {}}</tool_call>')
        return await super().generate(tokens, max_new_tokens, keep)


async def flood_http(requests: int, seed: int) -> Counter[str]:
    """How often each status came; `none` for a connection that was closed without one, `waits` for one that was left
    open, `hung` where the endpoint does not answer any more; and the memory of this process in MiB at its most."""
    endpoint, seen, began = OpenAIEndpoint("policy", "127.0.0.1"), Counter(), time.monotonic()
    session = Talkative()
    try:
        for first in range(0, requests, REQUESTS):
            async with endpoint.serve(session) as access:
                http = MalformedHttp(seed + first, access)
                port = urlsplit(access.base_url).port
                batch = [http.request() for _ in range(min(REQUESTS, requests - first))]
                for i in range(0, len(batch), 10):
                    seen.update(await asyncio.gather(*(_status(port, request) for request in batch[i : i + 10])))
                seen["sent"] += len(batch)
                session.prompts.clear()
                well = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.api_key}\r\n\r\n"
                seen["hung"] += await _status(port, well.encode()) != "200"
            if first == requests // 10 // REQUESTS * REQUESTS:
                seen["MiB early"] = _memory()
    finally:
        await endpoint.close()
    seen["MiB"], seen["per second"] = _memory(), int(seen["sent"] / (time.monotonic() - began))
    return seen


async def _status(port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(SILENCE_SECONDS):
            head = await reader.readline()
        return head.split()[1].decode() if head.startswith(b"HTTP/1.1 ") else "none"
    except TimeoutError:
        return "waits"
    except ConnectionError:
        return "none"
    finally:
        writer.close()


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


# --- the codec


def decode_or_refuse(frames: list[bytes]) -> str:
    """Frames may only be refused with a typed error, or decoded; what is decoded has to come out the same when it is
    encoded and decoded again."""
    try:
        header = decode_header(frames)
        message = decode_body(header.kind, frames)
    except (MalformedError, ProtocolVersionError):
        return "refused"
    again = [bytes(frame) for frame in encode(header, message)]
    assert decode_header(again) == header
    # Compared as bytes: arrays do not compare as one, and a number that is none equals nothing.
    assert [bytes(frame) for frame in encode(header, decode_body(header.kind, again))] == again
    return "decoded"


def flood_codec(frames: int, seed: int) -> Counter[str]:
    """How many frames were refused, and how many decoded."""
    malformed = Malformed(seed)
    return Counter(decode_or_refuse(malformed.frames()) for _ in range(frames))


def search(arguments: list[str]) -> None:
    """By libFuzzer, whose arguments they are: first a folder of frames, or a file."""
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install -e '.[fuzz]' (it needs Linux and Python 3.11 to 3.13)")
    if not arguments or arguments[0].startswith("-"):
        sys.exit("name a folder to keep the frames in, or a file to try again: python tests/fuzz.py --search FOLDER")
    if not (folder := Path(arguments[0])).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        malformed = Malformed(0)
        for i in range(SEEDS):
            frames = malformed.frames()
            if all(len(frame) < 1 << 16 for frame in frames):
                (folder / f"seed-{i}").write_bytes(b"".join(len(frame).to_bytes(2) + frame for frame in frames))
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and (function.__module__ or "").startswith("protocols."):
            atheris.instrument_func(function)
    atheris.Setup([sys.argv[0], *arguments], lambda data: decode_or_refuse(_frames_of(data)))
    atheris.Fuzz()


def _frames_of(data: bytes) -> list[bytes]:
    """Frames, each after its length in two bytes; what is left is the last one."""
    frames = []
    while len(data) > 2:
        size = int.from_bytes(data[:2])
        frames.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [*frames, data] if data else frames


# --- the table


def row(name: str, door: Door) -> str:
    last = len(door.memory) - 1
    memory = " > ".join(str(door.memory[i]) for i in (0, min(1, last), last // 2, last))
    fate = "stuck" if door.back["stuck"] else "alive" if door.alive else f"DEAD ({door.process.returncode})"
    return (
        f"{name:16} {door.sent:8} {door.sent / door.seconds:8.0f} {door.back['answered']:9} {door.back['refused']:9} "
        f"{door.lines:6} {memory:>26}  {fate}"
    )


def main() -> int:
    if sys.argv[1:2] == ["--search"]:
        return search(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="of all doors together")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a hundred frames a door: does it run?")
    arguments = parser.parse_args()
    doors, unharmed = arguments.doors, True
    frames = 100 if arguments.quick else arguments.frames // len(doors)
    print(f"{'door':16} {'frames':>8} {'per s':>8} {'answered':>9} {'refused':>9} {'log':>6} {'RSS in MiB':>26}")
    if "codec" in doors:
        print(f"{'codec':16} {frames:8}", dict(flood_codec(frames, arguments.seed)))
    if "http" in doors:
        seen = asyncio.run(flood_http(frames, arguments.seed))
        print(f"{'http':16} {seen['sent']:8} {seen['per second']:8}", dict(sorted(seen.items())))
        unharmed &= not (seen["500"] or seen["hung"])
    if actors := [door for door in doors if door in ACTORS]:
        unharmed &= flood_actors(actors, frames, arguments.seed)
    return 0 if unharmed else 1


if __name__ == "__main__":
    sys.exit(main())
