"""Access to the bus: keys that every node holds, the check that admits only peers with these keys (CURVE, ZAP), and the
handshakes of sockets.

A folder of keys holds *generations*, newest first. A generation has one key pair for listening sockets and one for
connecting sockets. A listening socket uses the newest pair at the time of opening. A connecting socket tries one
generation after another. The pairs of all generations are admitted. So old and new actors can connect to each other
until the older generation is retired. The file is read again after a change.
"""

import asyncio
import functools
import json
import operator
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import structlog
import zmq
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

FILE_NAME = "keys.json"
# Without a ZAP domain, libzmq would admit every peer while no handler answers its requests.
DOMAIN = b"areal"
ANSWERS = "inproc://zeromq.zap.01"
# 300 is ZAP's "temporary failure", the only refusal after which libzmq sends the peer nothing.
ACCEPTED, REFUSED_SILENTLY = b"200", b"300"
# A peer is disconnected if its handshake takes longer.
HANDSHAKE_MS = 5000
# The reasons of failed handshakes. `keep_door` reports unknown keys.
HANDSHAKES_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "handshake aborted or too slow",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "wrong handshake protocol",
}
# Time between two attempts to connect to an address with different keys.
OTHER_KEYS_SECONDS = 0.2
# Refusals of an address are logged at most this often, for the newest ADDRESSES_KEPT addresses.
QUIET_SECONDS = 1.0
ADDRESSES_KEPT = 1024

log = structlog.get_logger()


class KeysError(Exception):
    """A folder of keys is unusable. The message is a sentence with the reason and the remedy."""


class KeyGeneration(BaseModel):
    """Secret keys in Z85. The public keys are computed from the secret keys."""

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
    def make(cls) -> "KeyGeneration":
        return cls(server=zmq.curve_keypair()[1].decode(), client=zmq.curve_keypair()[1].decode())


_GENERATIONS = TypeAdapter(list[KeyGeneration])


class Keys:
    """The current keys of a folder. Raises KeysError if the folder has no keys, or if other users may read the keys."""

    def __init__(self, folder: Path) -> None:
        self._file = folder.absolute() / FILE_NAME
        self._version = _version(self._file)
        self._generations = _load(self._file)

    @property
    def generations(self) -> Sequence[KeyGeneration]:
        """Newest first, at least one generation. If the file can no longer be read, the last keys stay valid."""
        version = _version(self._file)
        if version != self._version:
            self._version = version
            try:
                self._generations = _load(self._file)
            except KeysError as error:
                log.warning("the key file cannot be read, the old keys stay valid", error=str(error))
        return self._generations

    def lets_in(self, public: bytes) -> bool:
        """True if a peer with the secret key of `public` (32 bytes) may connect."""
        return any(z85.encode(public) == zmq.curve_public(g.client.encode()) for g in self.generations)

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Admit only holders of the keys, by `keep_door`, to the next bound address; without it, nobody."""
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True
        socket.curve_secretkey = self.generations[0].server.encode()

    def connect(self, socket: zmq.Socket[bytes], generation: KeyGeneration) -> None:
        """Let `socket` connect, from the next call on, only to servers with the server key of `generation`."""
        client = generation.client.encode()
        socket.curve_serverkey = zmq.curve_public(generation.server.encode())
        socket.curve_secretkey, socket.curve_publickey = client, zmq.curve_public(client)


def make_keys(folder: Path) -> Path:
    """Write the file with a first generation; returns the file's path. Raises KeysError if the file exists."""
    file = folder / FILE_NAME
    if file.exists():
        raise KeysError(f"There are keys in {folder} already: --rotate adds new ones, --retire drops the old ones.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _write(file, [KeyGeneration.make()])


def rotate_keys(folder: Path) -> Path:
    """Put a new generation before the old generations, which stay valid; returns the file's path. Raises KeysError."""
    file = folder / FILE_NAME
    return _write(file, [KeyGeneration.make(), *_load(file)])


def retire_keys(folder: Path) -> Path:
    """Remove all generations except the newest; returns the file's path. Raises KeysError."""
    file = folder / FILE_NAME
    return _write(file, _load(file)[:1])


def _load(file: Path) -> list[KeyGeneration]:
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            text = opened.read()
    except FileNotFoundError:
        raise KeysError(
            f"There are no keys in {file.parent}: make them with `areal keys {file.parent}` on one node, "
            f"and give every node a copy."
        ) from None
    except OSError as error:
        raise KeysError(f"The keys in {file} cannot be read ({error.strerror}): let this user read it.") from None
    # A file of another user, such as a secret that Kubernetes mounts, is read through the file's group.
    if status.st_mode & (0o077 if status.st_uid == os.geteuid() else 0o007):
        raise KeysError(f"Other users of this machine can read the keys in {file}: run `chmod 600 {file}`.")
    generations = []
    with suppress(ValidationError, zmq.ZMQError):
        generations = _GENERATIONS.validate_json(text)
    if not generations:
        raise KeysError(f"{file} does not hold keys: copy it from another node again, or make new ones for all nodes.")
    return generations


def _write(file: Path, generations: list[KeyGeneration]) -> Path:
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump([generation.model_dump() for generation in generations], opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())
    return partial.replace(file)


def _version(file: Path) -> tuple[int, ...]:
    """A value that differs after every change of the file."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


class Refusals:
    """Counts refused peers by reason, and logs them at most once per address and second."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._quiet: dict[str, float] = {}  # by address: the time from which a refusal is logged again

    def add(self, address: str, reason: str) -> None:
        """`address`: the address of the peer or, if unknown, the address that the peer connected to."""
        self.counts[reason] += 1
        now = time.monotonic()
        if now < self._quiet.get(address, 0.0):
            return
        if len(self._quiet) >= ADDRESSES_KEPT:
            self._quiet.clear()
        self._quiet[address] = now + QUIET_SECONDS
        log.warning("a peer was refused", address=address, reason=reason, refused=self.counts.total())


def keep_door(frames: list[bytes], keys: Keys, refusals: Refusals) -> list[bytes]:
    """The answer to libzmq's ZAP request (ZeroMQ RFC 27) whether a peer with a finished handshake holds the keys.
    Request and answer begin with the route of the answer."""
    route, empty, version, number, domain, address, _, mechanism, *credentials = frames
    admitted = domain == DOMAIN and mechanism == b"CURVE" and keys.lets_in(credentials[0])
    if not admitted:
        refusals.add(address.decode(errors="replace"), "unknown key")
    status = ACCEPTED if admitted else REFUSED_SILENTLY
    return [route, empty, version, number, status, b"", b"", b""]


class Watch:
    """Calls `handle` with each message of a socket inside this process, until closed."""

    def __init__(self, socket: zmq.Socket[bytes], handle: Callable[[list[bytes]], object]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.call_soon(self._read)  # libzmq announces nothing until a read has found the socket empty

    def close(self) -> None:
        """Close the socket; does nothing on a closed socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        # Read until the socket is empty: libzmq does not announce messages that arrive meanwhile.
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._handle(frames)


class Handshakes(Watch):
    """Calls `tell` with the handshake events of `socket` that are in `events`."""

    def __init__(
        self, socket: zmq.Socket[bytes], events: Iterable[zmq.Event], tell: Callable[[zmq.Event], None]
    ) -> None:
        self._watched = socket
        address = f"inproc://handshakes-{socket.fileno()}"
        socket.monitor(address, functools.reduce(operator.or_, events))
        monitor = socket.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.set_hwm(0)  # no limit: libzmq would block if the queue were full
        monitor.connect(address)
        super().__init__(monitor, lambda frames: tell(cast(zmq.Event, parse_monitor_message(frames)["event"])))

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        super().close()


class Approach(Handshakes):
    """Connects a socket with each generation of the keys in turn, until the other end accepts a generation."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, keys: Keys, on_lost: Callable[[], None]) -> None:
        # CLOSED is the event of a socket that could not be connected.
        events = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED, zmq.Event.CLOSED
        super().__init__(socket, [*HANDSHAKES_FAILED, *events], self._ended)
        self._address = address
        self._keys = keys
        self._on_lost = on_lost
        self._connected = self._close_expected = False
        self._timer: asyncio.TimerHandle | None = None
        self._connect(keys.generations[0])

    def close(self) -> None:
        self._wait()
        super().close()

    def _ended(self, event: zmq.Event) -> None:
        if event == zmq.Event.CLOSED:
            # The first CLOSED after a disconnect() may be of the attempt before; a refused connection is tried again.
            if not self._close_expected:
                self._on_lost()
            self._close_expected = False
        elif event == zmq.Event.DISCONNECTED:
            if self._connected:  # else a handshake failed, and other keys are tried
                self._on_lost()
            self._connected = False
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._wait()
        elif self._timer is None:
            self._timer = self._loop.call_later(OTHER_KEYS_SECONDS, self._try_next)

    def _wait(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _try_next(self) -> None:
        self._timer = None
        self._watched.disconnect(self._address)
        self._close_expected = True
        generations = self._keys.generations  # the file may have changed; if `_tried` was retired, the newest is next
        place = generations.index(self._tried) + 1 if self._tried in generations else 0
        self._connect(generations[place % len(generations)])

    def _connect(self, generation: KeyGeneration) -> None:
        self._tried = generation
        self._keys.connect(self._watched, generation)
        self._watched.connect(self._address)
