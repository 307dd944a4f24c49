"""Who may talk on the bus: keys that every node holds, and the door that lets in nobody without them (CURVE, ZAP).

A folder of keys holds *generations*, newest first: a key pair of those who listen and one of those who connect. Whoever
listens has the newest pair of the time he began; whoever connects tries each generation; any generation's pair is let
in. So old and new actors find each other until the older generation is retired. The file is read again when it changes.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import zmq
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator
from zmq.utils import z85

FILE_NAME = "keys.json"
# Without a domain of its own, libzmq would let everybody in while nobody answers its questions.
DOMAIN = b"areal"
ANSWERS = "inproc://zeromq.zap.01"
# ZAP's "temporary failure": the only refusal after which libzmq says nothing to the peer.
ACCEPTED, REFUSED_SILENTLY = b"200", b"300"
# A peer that has not proved who it is by then is cut off.
HANDSHAKE_MS = 5000
# An address that keeps on trying is logged this often, and this many addresses are remembered for that.
QUIET_SECONDS = 1.0
ADDRESSES_KEPT = 1024

log = structlog.get_logger()


class KeysError(Exception):
    """What is wrong with a folder of keys, in one sentence that says what to do."""


class Generation(BaseModel):
    """Secret keys as Z85; their public halves follow from them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: str
    client: str

    @field_validator("server", "client")
    @classmethod
    def _is_a_key(cls, value: str) -> str:
        if len(value) != 40:
            raise ValueError("a key has 40 characters")
        zmq.curve_public(value.encode())  # raises ZMQError, which the reader expects
        return value

    @classmethod
    def make(cls) -> Generation:
        return cls(server=zmq.curve_keypair()[1].decode(), client=zmq.curve_keypair()[1].decode())


_GENERATIONS = TypeAdapter(list[Generation])


class Keys:
    """Those in a folder, as they are now. Raises KeysError where there are none, or where others may read them."""

    def __init__(self, folder: Path) -> None:
        self._file = folder.absolute() / FILE_NAME
        self._version = _version(self._file)
        self._generations = _load(self._file)

    @property
    def generations(self) -> Sequence[Generation]:
        """Newest first, at least one. What cannot be read any more stays as it was."""
        version = _version(self._file)
        if version != self._version:
            self._version = version
            try:
                self._generations = _load(self._file)
            except KeysError as error:
                log.warning("the keys stay as they were", error=str(error))
        return self._generations

    def lets_in(self, public: bytes) -> bool:
        """Whether one who has proved to hold the secret half of this key (32 bytes) may connect."""
        return any(z85.encode(public) == zmq.curve_public(g.client.encode()) for g in self.generations)

    def listen(self, socket: zmq.Socket) -> None:
        """Make what is bound next a door for holders of the keys alone, as far as a `Doorkeeper` answers."""
        socket.curve_server = True
        socket.curve_secretkey = self.generations[0].server.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def connect(self, socket: zmq.Socket, generation: Generation) -> None:
        """Make what is connected next talk to holders of this generation's server key alone."""
        client = generation.client.encode()
        socket.curve_serverkey = zmq.curve_public(generation.server.encode())
        socket.curve_secretkey, socket.curve_publickey = client, zmq.curve_public(client)


def make_keys(folder: Path) -> Path:
    """The file with a first generation. Raises KeysError where there is one already."""
    file = folder / FILE_NAME
    if file.exists():
        raise KeysError(f"There are keys in {folder} already: --rotate adds new ones, --retire drops the old ones.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _write(file, [Generation.make()])


def rotate_keys(folder: Path) -> Path:
    """A new generation before the others, which stay valid. Raises KeysError."""
    file = folder / FILE_NAME
    return _write(file, [Generation.make(), *_load(file)])


def retire_keys(folder: Path) -> Path:
    """Only the newest generation stays valid. Raises KeysError."""
    file = folder / FILE_NAME
    return _write(file, _load(file)[:1])


def _load(file: Path) -> list[Generation]:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read()
    except FileNotFoundError:
        raise KeysError(
            f"There are no keys in {file.parent}: make them with `python -m areal keys {file.parent}` on one node, "
            f"and give every node a copy."
        ) from None
    except OSError as error:
        raise KeysError(f"The keys in {file} cannot be read ({error.strerror}): give this user the right to.") from None
    if mode & 0o077:
        raise KeysError(f"Others on this machine can read the keys in {file}: run `chmod 600 {file}`.")
    try:
        generations = _GENERATIONS.validate_json(text)
    except (ValidationError, zmq.ZMQError):
        generations = []
    if not generations:
        raise KeysError(f"{file} does not hold keys: copy it from another node again, or make new ones for all nodes.")
    return generations


def _write(file: Path, generations: list[Generation]) -> Path:
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump([generation.model_dump() for generation in generations], opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())
    return partial.replace(file)


def _version(file: Path) -> tuple[int, ...]:
    """Another one after each change."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


class Refusals:
    """Counts who was not let in, by reason, and logs it once per address and second."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._quiet: dict[str, float] = {}  # until when, by address

    def add(self, address: str, reason: str) -> None:
        """`address`: the peer's, or where that is not known the one that it came to."""
        self.counts[reason] += 1
        now = time.monotonic()
        if now < self._quiet.get(address, 0.0):
            return
        if len(self._quiet) >= ADDRESSES_KEPT:
            self._quiet.clear()
        self._quiet[address] = now + QUIET_SECONDS
        log.warning("a peer was refused", address=address, reason=reason, refused=self.counts.total())


class Doorkeeper:
    """Answers libzmq's question, for each peer that has finished a handshake, whether to let it in (ZeroMQ RFC 27)."""

    def __init__(self, keys: Keys, refusals: Refusals, answer: Callable[[list[bytes]], None]) -> None:
        self._keys = keys
        self._refusals = refusals
        self._answer = answer

    def asked(self, frames: list[bytes]) -> None:
        """One question, with the route of the answer before it."""
        route, empty, version, number, domain, address, _, mechanism, *credentials = frames
        known = mechanism == b"CURVE" and domain == DOMAIN and self._keys.lets_in(credentials[0])
        if not known:
            self._refusals.add(address.decode(errors="replace"), "unknown key")
        status = ACCEPTED if known else REFUSED_SILENTLY
        self._answer([route, empty, version, number, status, b"", b"", b""])
