"""A million malformed messages at the doors of real actors, and what became of them.

    python tests/fuzz.py                                     # every door, half an hour on two cores
    python tests/fuzz.py --frames 20000 --doors master http

Each actor is a process of its own, as a user starts it, with its engine on a tiny model. One master stands alone, so
that frames can come from its members; the other actors are those of a run that goes on training meanwhile. `http` is
the OpenAI endpoint. `answered`, `refused`: messages that came back; most frames that cannot be read get none. The
memory is that before, after a tenth, after half, and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
import zmq

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import find_free_port  # noqa: E402
from flood_http import flood_http  # noqa: E402
from helpers import dealer, keys_folder  # noqa: E402
from malformed import Malformed  # noqa: E402

from protocols.codec import Header, decode_body, decode_header, encode  # noqa: E402
from protocols.messages import AskSnapshot, AskStatus, Failure, Join, Message, Welcome  # noqa: E402

DOORS = ("master", "trainer", "generator", "reward", "rollout_manager", "evaluator", "http")
# Frames over one connection: between two, streams that nobody reads are given up.
BATCH = 5000
ANSWER_SECONDS = 60.0
START_SECONDS = 240.0


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

    def look(self) -> None:
        if self.alive:
            self.memory.append(psutil.Process(self.process.pid).memory_info().rss >> 20)


class Caller:
    """A connection to a door, without anything of the bus but the codec."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.token = secrets.token_bytes(16)
        self._socket = dealer(zmq.Context.instance(), door.address)

    def close(self) -> None:
        self._socket.close()

    def send(self, frames: list[bytes]) -> None:
        while self._door.alive:
            try:
                return self._socket.send_multipart(frames, zmq.DONTWAIT)
            except zmq.Again:
                self.take()
                self._socket.poll(100, zmq.POLLIN | zmq.POLLOUT)

    def take(self, wanted: str = "") -> Message | None:
        """Count what has come back; the answer to the request of this id, if it is among that."""
        found = None
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            header = decode_header(frames)
            message = decode_body(header.kind, frames)
            self._door.back["refused" if isinstance(message, Failure) else "answered"] += 1
            found = message if wanted and header.reply_to == wanted else found
        return found

    def ask(self, message: Message, sender: str = "stranger/0#1") -> Message | None:
        """The answer; None where the door is dead or stuck."""
        id, until = secrets.token_hex(8), time.monotonic() + ANSWER_SECONDS
        self.send(encode(Header(message.kind, sender, id=id, remaining_ms=10_000, token=self.token), message))
        while self._door.alive and time.monotonic() < until:
            if answer := self.take(id):
                return answer
            self._socket.poll(100)
        return None


def flood(door: Door, frames: int, malformed: Malformed, joins: bool) -> None:
    """Ends early where the door does not answer any more."""
    hello = Caller(door)
    hello.ask(AskStatus())
    hello.close()
    began = time.monotonic()
    door.look()
    before = _lines(door)
    while door.sent < frames:
        caller = Caller(door)
        malformed.token = caller.token
        if joins:
            malformed.senders = ["stranger/0#1", *_joined(caller)]
        for i in range(min(BATCH, frames - door.sent)):
            caller.send(malformed.frames())
            if not i % 20:
                caller.take()
            door.sent += 1
        stuck = caller.ask(AskStatus()) is None
        caller.close()
        if stuck:
            door.back["stuck"] += door.alive
            break
        if door.sent % (frames // 10 or 1) < BATCH:
            door.look()
    door.look()
    door.seconds = time.monotonic() - began
    door.lines = _lines(door) - before


def _joined(caller: Caller) -> list[str]:
    """Identities of members."""
    roles = ("reward", "rollout_manager", "generator", "evaluator", "trainer")
    joins = [Join(role=role, index=None, address="tcp://127.0.0.1:1") for role in roles]
    answers = [caller.ask(join, f"{join.role}/?#{secrets.token_hex(4)}") for join in joins]
    return [answer.identity for answer in answers if isinstance(answer, Welcome)]


def _lines(door: Door) -> int:
    return door.output.read_bytes().count(b"\n")


# --- actors


class Cluster:
    """Processes of `run.py`, which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen] = []

    def start(self, name: str, address: str, *arguments: str) -> Door:
        output = self.folder / f"{name}.txt"
        with output.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "run.py"), *arguments], stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "AREAL_KEYS": keys_folder()}, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return Door(process, output, address)

    def master(self, name: str, **changes: object) -> Door:
        address = f"tcp://127.0.0.1:{find_free_port()}"
        config = {
            "name": name, "run_dir": str(self.folder), "model": str(self.folder / "tiny"), "steps": 1_000_000,
            "batch_size": 4, "group_size": 2, "max_staleness": 2, "sampling": {"max_new_tokens": 32},
            "data": {"source": "addition", "eval_size": 0}, "reward": {"functions": ["addition"], "workers": 1},
            "generator": {"dtype": "float32", "threads": 1}, "trainer": {"dtype": "float32", "threads": 1},
            "master": {"address": address, "stall_seconds": 1e6, **changes},
        }  # fmt: skip
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
    from areal.data import quickstart

    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(Path(folder))
        quickstart.build(made.folder / "tiny", recipe=quickstart.Recipe(steps=2, short_steps=2), threads=1)
        try:
            yield made
        finally:
            made.stop()


def whole_run(made: Cluster) -> tuple[Door, dict[str, Door]]:
    """A run's master, and its other actors once each of them is at work."""
    master = made.master("run")
    roles = [role for role in DOORS if role not in ("master", "http")]
    doors = {role: made.start(role, "", "--role", role, "--master", master.address) for role in roles}
    caller, until = Caller(master), time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        values = caller.ask(AskStatus()).values
        healthy = {m["identity"].split("/")[0]: m for m in values["members"] if m["state"] == "healthy"}
        if set(roles) <= set(healthy) and values["version"] >= 1:
            break
        time.sleep(1.0)
    else:
        sys.exit("the run did not begin:\n" + "".join(door.output.read_text()[-2000:] for door in doors.values()))
    snapshot = caller.ask(AskSnapshot())
    for member in snapshot.members:
        doors[member.role].address = member.address
    caller.close()
    return master, doors


def version_of(master: Door) -> int:
    caller = Caller(master)
    try:
        return caller.ask(AskStatus()).values["version"]
    finally:
        caller.close()


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="of all doors together")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    each, failed = arguments.frames // len(arguments.doors), 0
    print(f"{'door':16} {'frames':>8} {'per s':>8} {'answered':>9} {'refused':>9} {'log':>6} {'RSS in MiB':>26}")
    if "http" in arguments.doors:
        failed += not report_http(asyncio.run(flood_http(each, arguments.seed)))
    with cluster() as made:
        doors: dict[str, Door] = {}
        if "master" in arguments.doors:
            doors["master"] = made.master("alone", lease_seconds=20)
        if others := [door for door in arguments.doors if door not in ("master", "http")]:
            master, run = whole_run(made)
            doors |= {name: run[name] for name in others}
            before = version_of(master)
        for n, (name, door) in enumerate(doors.items()):
            flood(door, each, Malformed(arguments.seed + n, run="run"), joins=name == "master")
            print(row(name, door), flush=True)
            if not door.alive or door.back["stuck"]:
                failed += 1
                print(door.output.read_text()[-6000:])
        if others:
            print(f"meanwhile the run has gone from version {before} to {version_of(master)}")
    return min(failed, 1)


def report_http(seen: Counter[str]) -> bool:
    print(f"{'http':16} {seen['sent']:8} {seen['per second']:8}", dict(sorted(seen.items())))
    return not (seen["500"] or seen["hung"])


if __name__ == "__main__":
    sys.exit(main())
