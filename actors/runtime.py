"""What every actor is made of: a front door, a place in the master's directory, heartbeats, and a clean end.

An actor joins, works, and leaves. It stops on SIGTERM or SIGINT, when the master says that the run is over, when the
master has been silent for `LOST_MASTER_SECONDS`, or when its own code fails. No task outlives `Actor.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import structlog

from actors.logs import write_log_file
from areal.config import Config, UserError
from protocols.errors import BusError, DeadlineError, RefusedError
from protocols.messages import (
    AskSnapshot,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Leave,
    Member,
    MembersChanged,
    Message,
    Policy,
    PolicyPublished,
    Shutdown,
    Snapshot,
)
from protocols.transport import Request, ZmqBus

JOIN_SECONDS = 10.0
HEARTBEAT_SECONDS = 1.0
CONTROL_SECONDS = 10.0
LOST_MASTER_SECONDS = 30.0
LEAVE_SECONDS = 2.0
# What `teardown` may take: the whole stop has to fit into ten seconds.
TEARDOWN_SECONDS = 6.0

M = TypeVar("M", bound=Message)
log = structlog.get_logger()


def handles(kind: type[Message]) -> Callable[[Callable], Callable]:
    """Mark a method as the handler of one kind of request: `async def` for one answer, an async generator for a
    stream. It gets the `Request`."""

    def mark(method: Callable) -> Callable:
        method.handled_kind = kind  # type: ignore[attr-defined]
        return method

    return mark


class HandlesRequests:
    """Finds the handler of a request by the kind of its message."""

    def __init__(self) -> None:
        methods = (method for _, method in inspect.getmembers(self, callable) if hasattr(method, "handled_kind"))
        self._handlers: dict[type[Message], Callable] = {method.handled_kind: method for method in methods}

    def dispatch(self, request: Request) -> Any:
        """The coroutine or async iterator that answers the request. Raises RefusedError for a kind not served."""
        handler = self._handlers.get(type(request.message))
        if handler is None:
            raise RefusedError(f"{type(self).__name__} does not answer {request.message.kind!r}")
        return handler(request)


class Signal:
    """Wakes everybody who waits for something to become true."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """To be called after every change that a condition may depend on."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`."""
        while not (value := condition()):
            await self._event.wait()
        return value


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an actor stopped. `ok`: the run reached its end."""

    ok: bool
    reason: str


class _Stopped(Exception):
    """Ends the task group of an actor that is told to stop."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending


class Actor(HandlesRequests):
    """Base of every role but the master. Subclasses set `role` and write `main`, and handlers with `@handles`.

    After joining, `config` is the run's, `policy` the newest published one, `members` the directory.
    """

    role: ClassVar[str]

    def __init__(self, bus: ZmqBus, master: str, index: int | None = None, host: str | None = None) -> None:
        super().__init__()
        self.bus = bus
        self.master = master
        self.index = index
        self.host = host or host_towards(master)
        self.config: Config = None  # type: ignore[assignment]  # known from joining on
        self.policy: Policy = None  # type: ignore[assignment]
        self.members: tuple[Member, ...] = ()
        self.state = "stale"
        self.activity = "starting"
        self._changed = Signal()
        self._stop: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._sequence = 0
        self._events = ""
        self._tasks: asyncio.TaskGroup

    # --- for subclasses

    async def setup(self) -> None:
        """Load what the role needs; heartbeats say `stale` until it returns."""

    async def main(self) -> None:
        """The role's own work; the actor lives on after it returns, until the run ends."""

    async def teardown(self) -> None:
        """Release what `setup` took. Called once, also where `setup` failed."""

    def serves(self) -> tuple[str, ...]:
        """Names of what this actor offers, for the directory."""
        return ()

    def stats(self) -> dict[str, float]:
        """Gauges and counters for the heartbeat."""
        return {}

    # --- what subclasses use

    async def ask_master(self, message: Message, answer: type[M], timeout: float = CONTROL_SECONDS) -> M:
        """The master's answer. Raises BusError."""
        return await self.ask(self.master, message, answer, timeout)

    async def ask(self, address: str, message: Message, answer: type[M], timeout: float = CONTROL_SECONDS) -> M:
        """The answer of the actor at `address`. Raises BusError."""
        result = await self.bus.peer(address).ask(message, timeout)
        if not isinstance(result, answer):
            raise BusError(f"{address} answered {message.kind!r} with {result.kind!r}")
        return result

    def spawn(self, work: Coroutine, name: str) -> asyncio.Task:
        """Run beside `main`; a failure of it is the actor's failure."""
        return self._tasks.create_task(work, name=name)

    def with_role(self, role: str, healthy: bool = True) -> list[Member]:
        return [m for m in self.members if m.role == role and (m.state == "healthy" or not healthy)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the directory or the policy makes `condition` true."""
        await self._changed.until(condition)

    def stop(self, ok: bool, reason: str) -> None:
        """End the actor; the first reason counts."""
        if not self._stop.done():
            self._stop.set_result(Ending(ok, reason))

    # --- life

    async def run(self) -> Ending:
        """Join, work, leave. Raises what the role's own code raised, or UserError where no master answers."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self.stop, False, f"told to stop by {sign.name}")
        try:
            address = self.bus.serve(f"tcp://{self.host}:*", self.dispatch, self._crashed)
            await self._join(address)
            ending = await self._live()
            await self._leave(ending.reason)
            return ending
        except BaseExceptionGroup as group:
            error = first_error(group)
            await self._leave(f"{type(error).__name__}: {error}")
            raise error from None
        finally:
            try:
                async with asyncio.timeout(TEARDOWN_SECONDS):
                    await self.teardown()
            except TimeoutError:
                log.warning("teardown took too long", seconds=TEARDOWN_SECONDS)
            await self.bus.close()

    async def _join(self, address: str) -> None:
        join = Join(role=self.role, index=self.index, address=address)
        welcome = await first_answer(self.bus, self.master, join)
        self.bus.identity.name = welcome.identity
        self.config = Config.model_validate(welcome.config)
        self.index = int(welcome.identity.split("/")[1].split("#")[0])
        write_log_file(self.config.folder / "logs" / f"{self.role}-{self.index}.jsonl")
        self._events = welcome.events
        self._believe(welcome.snapshot)

    async def _live(self) -> Ending:
        ending: Ending
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.bus.subscribe(self._events, self._on_event)
                self.spawn(self._heartbeat(), "heartbeat")
                self.spawn(self._work(), self.role)
                raise _Stopped(await self._stop)  # the task group cancels everything else
        except* _Stopped as stopped:
            ending = first_error(stopped).ending
        return ending

    async def _work(self) -> None:
        await self.setup()
        await self.main()

    async def _leave(self, reason: str) -> None:
        with contextlib.suppress(BusError):
            await self.ask_master(Leave(reason=reason[:4096]), Message, LEAVE_SECONDS)

    def _crashed(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        if not self._stop.done():
            self.spawn(_raise(error), "handler")

    async def _heartbeat(self) -> None:
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while True:
            beat = Heartbeat(state=self.state, serves=self.serves(), activity=self.activity[:512], stats=self.stats())
            try:
                answer = await self.ask_master(beat, HeartbeatAnswer, LOST_MASTER_SECONDS)
            except DeadlineError:
                return self.stop(False, f"the master at {self.master} has been silent for {loop.time() - heard:.0f} s")
            except RefusedError as error:
                return self.stop(False, f"the master refused the heartbeat: {error}")
            heard = loop.time()
            if answer.ended:
                return self.stop(True, "the run is over")
            if answer.sequence > self._sequence:
                # An event was lost, or is still on its way; either way the snapshot is newer.
                self._believe(await self.ask_master(AskSnapshot(), Snapshot))
                self._changed.notify()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    # --- events

    def _on_event(self, sequence: int, event: Message) -> None:
        if sequence <= self._sequence:
            return
        complete = sequence == self._sequence + 1
        match event:
            case PolicyPublished():
                self.policy = event.policy
            case MembersChanged():
                self.members = event.members
            case Shutdown():
                self.stop(event.ok, event.reason)
        if complete:
            self._sequence = sequence
        self._changed.notify()

    def _believe(self, snapshot: Snapshot) -> None:
        self.policy, self.members, self._sequence = snapshot.policy, snapshot.members, snapshot.sequence


async def first_answer(bus: ZmqBus, master: str, message: Message) -> Any:
    """The master's answer to the first thing said to it. Raises UserError where none comes."""
    try:
        return await bus.peer(master).ask(message, JOIN_SECONDS)
    except DeadlineError:
        raise UserError(
            f"No master answers at {master} (waited {JOIN_SECONDS:g} s): start it with "
            f"`python run.py --role master --config FILE`, or check the address given to --master."
        ) from None
    except BusError as error:
        raise UserError(f"The master at {master} refused: {error}") from None


async def _raise(error: BaseException) -> None:
    raise error


def first_error(error: BaseException) -> BaseException:
    """The first exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def incarnation() -> str:
    """Fresh at each start, so that an actor that came back is never taken for the one before it."""
    return secrets.token_hex(4)


def host_towards(master: str) -> str:
    """The address of the interface that leads to the master. Raises UserError for an address that is none."""
    import socket

    host, _, port = master.removeprefix("tcp://").rpartition(":")
    if not master.startswith("tcp://") or not host or not port.isdigit():
        raise UserError(f"--master {master!r} is not an address: write tcp://HOST:PORT.")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing: only asks the kernel for the route
            name = probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"--master {master}: {error.strerror or error}: check the host's name.") from None
    return f"[{name}]" if ":" in name else name
