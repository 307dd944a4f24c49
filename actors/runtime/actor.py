"""The base class of all actors but the master: message handlers, membership, heartbeats, and an orderly shutdown.

An actor joins the run, works, and leaves. It stops in these cases:

* it is told to (SIGTERM, SIGINT) and has handed over its work;
* the master says that the run has ended;
* the master has been silent for `master.lost_seconds`; a master that is restarted within that time is accepted;
* the master has fenced it: the master refuses its requests, and another process may have its place;
* its own code fails.

No task outlives `Actor.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import structlog

from actors.runtime import delays
from actors.runtime.addresses import Door, new_bus
from actors.runtime.logs import write_log_file
from actors.runtime.works import LOOK_SECONDS, Evidence, Works
from actors.watching import prometheus
from areal.config import Config, UserError, from_message
from areal.devices import CORES, settle
from areal.storage.disk import Patience
from protocols.addresses import host_of, reachable
from protocols.errors import BusError, BusyError, DeadlineError, FencedError, PreparingError, RefusedError, text_of
from protocols.messages import (
    AskSnapshot,
    DiskShortage,
    Engagement,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Leave,
    LoadColumns,
    Member,
    MembersChanged,
    Message,
    Policy,
    PolicyPublished,
    Shutdown,
    Snapshot,
    Span,
    State,
    Work,
)
from protocols.network import Network
from protocols.transport import Bus, Request, Subscriber

JOIN_SECONDS = 10.0
# After this time without an answer to the first request, the actor logs that it is waiting for the master.
SILENCE_SECONDS = 3.0
# While the master prepares the run: how often it is asked again, and how often the wait is logged.
PREPARING_ASK_SECONDS, PREPARING_TOLD_SECONDS = 1.0, 60.0
HEARTBEAT_SECONDS = 1.0
CONTROL_SECONDS = 10.0
LEAVE_SECONDS = 2.0
# A parked request is answered at the latest this long before its deadline.
PARK_MARGIN_SECONDS = CONTROL_SECONDS / 2
# Timeout of `teardown`: the whole shutdown has to fit into ten seconds.
TEARDOWN_SECONDS = 6.0
# Number of spans kept between two heartbeats; older ones are dropped.
SPANS_KEPT = 64

M = TypeVar("M", bound=Message)
T = TypeVar("T")
A = TypeVar("A")
log = structlog.get_logger()


def handles(kind: type[M]) -> Callable[[Callable[[A, Request[M]], T]], Callable[[A, Request[M]], T]]:
    """Mark a method as the handler of one kind of request: `async def` for one answer, an async generator for a
    stream. It gets the `Request`."""

    def mark(method: Callable[[A, Request[M]], T]) -> Callable[[A, Request[M]], T]:
        method.handled_kind = kind  # type: ignore[attr-defined]
        return method

    return mark


class HandlesRequests:
    """Finds the handler of a request by the kind of its message."""

    _handlers: ClassVar[dict[type[Message], str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        handlers = {m.handled_kind: name for name, m in vars(cls).items() if hasattr(m, "handled_kind")}
        cls._handlers = cls._handlers | handlers

    def dispatch(self, request: Request[Message]) -> Any:
        """The coroutine or async generator that answers the request. Raises RefusedError for a kind not served."""
        handler = self._handlers.get(type(request.message))
        if handler is None:
            raise RefusedError(f"{type(self).__name__} does not answer {request.message.kind!r}")
        return getattr(self, handler)(request)


class Signal:
    """Wakes all tasks that wait for a condition to become true."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Call this after every change that a condition may depend on."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], T]) -> T:
        """The first true value of `condition`."""
        while not (value := condition()):
            await self._event.wait()
        return value


def parked(request: Request[Any]) -> asyncio.Timeout:
    """The timeout of a block in which a request that cannot be answered yet waits until it can."""
    return asyncio.timeout(max(0.0, request.remaining - PARK_MARGIN_SECONDS))


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an actor stopped. `ok`: the run reached its end, or the actor was told to leave and left. `fenced`: the
    master no longer accepts this incarnation; a new one may join. `stopped`: a signal told it to stop before the run's
    end."""

    ok: bool
    reason: str
    fenced: bool = False
    stopped: bool = False


class MasterLostError(BusError):
    """The master has not answered for `master.lost_seconds`."""


class _Stopped(Exception):
    """Ends the task group of an actor that is told to stop."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending


class Actor(HandlesRequests):
    """Base class of every role but the master. A subclass sets `role`, and implements `main` and `@handles` methods.

    After joining, `config` is the configuration of the run, `policy` the newest published policy, and `directory` the
    members of the run by identity.
    """

    role: ClassVar[str]

    def __init__(
        self, bus: Bus, master: str, index: int | None = None, door: Door | None = None, *,
        patience: float = JOIN_SECONDS, keep_log: Callable[[Path], None] = write_log_file,
        own_process: bool = True,
    ) -> None:  # fmt: skip
        """own_process: whether it has the process for itself, and so may settle it and leave on its signals."""
        self.bus = bus
        self.master = master
        self.index = index
        self.door = door or Door.towards(master)
        self.config: Config = None  # type: ignore[assignment]  # set when the actor joins
        self.policy: Policy = None  # type: ignore[assignment]
        self.directory: dict[str, Member] = {}
        self.state: State = "stale"
        self.activity = "starting"
        self._changed = Signal()
        self.outcome = ""
        self._patience = patience  # seconds to wait for the master to answer the first request
        self._keep_log = keep_log
        self._own_process = own_process
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[Ending] = loop.create_future()
        # Set by callbacks. They must not start tasks themselves, because the task group may already be ending.
        self._leave_sign: asyncio.Future[Ending] = loop.create_future()
        self._crash: asyncio.Future[None] = loop.create_future()
        self._sequence = 0
        self._numbers: dict[str, float] = {}  # for Prometheus, updated with each heartbeat
        self._master_waits = 0.0  # when the master has last said that it cannot answer yet, by the loop's clock
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._works = Works(loop.time)
        self._events: Subscriber | None = None
        self._tasks: asyncio.TaskGroup | None = None

    # --- for subclasses

    async def setup(self) -> None:
        """Load what the role needs. The actor is `stale` meanwhile."""

    async def main(self) -> None:
        """The work of the role. After it returns, the actor stays in the run until the run ends."""

    async def teardown(self) -> None:
        """Release what `setup` acquired. Called once, also if `setup` failed."""

    async def hand_over(self) -> None:
        """Finish or hand over the work in progress, while the actor is draining. The limit is
        `master.drain_seconds`. May set `outcome`, the end of the sentence that says why the actor has left."""

    def serves(self) -> tuple[str, ...]:
        """Names of the rewards that this actor serves, for the directory."""
        return ()

    def stats(self) -> dict[str, float]:
        """Gauges and counters for the heartbeat."""
        return {}

    def engagement(self) -> Engagement | None:
        """The load of a generator, for the heartbeat; None for other roles."""
        return None

    def note_loads(self, loads: LoadColumns) -> None:
        """Called after each heartbeat of a rollout manager with the loads of the generators."""

    # --- what subclasses use

    async def ask_master(self, message: Message, answer: type[M], park: float = 0.0) -> M:
        """The master's answer to `message`. The request is resent until a master answers, also a restarted one.

        park: seconds for which the master may keep the request until it can answer. Raises BusError, and
        MasterLostError after `master.lost_seconds` of silence. A master that says that it waits for its disk is not
        silent.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                return await self.ask(self.master, message, answer, park + CONTROL_SECONDS)
            except PreparingError:
                self._master_waits = loop.time()
                await asyncio.sleep(PREPARING_ASK_SECONDS)
            except DeadlineError:
                heard = max(began, self._master_waits)
                if loop.time() - heard - park >= self.config.master.lost_seconds:
                    raise MasterLostError(
                        f"the master at {self.master} has been silent for {loop.time() - heard:.0f} s"
                    ) from None

    async def ask(self, address: str, message: Message, answer: type[M], timeout: float = CONTROL_SECONDS) -> M:
        """The answer of the actor at `address`. Raises BusError."""
        result = await self.bus.peer(address).ask(message, timeout)
        if not isinstance(result, answer):
            raise BusError(f"{address} answered {message.kind!r} with {result.kind!r}")
        return result

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` concurrently with `main`. If it raises, the actor fails. Raises BusyError if the actor is ending:
        its handlers still answer then."""
        if self._tasks is not None:
            with contextlib.suppress(RuntimeError):  # its tasks are being cancelled
                return self._tasks.create_task(work, name=name)
        work.close()
        raise BusyError("this actor is ending")

    def working(
        self, what: str, kind: str = "", evidence: Evidence = lambda: 0.0
    ) -> contextlib.AbstractContextManager[None]:
        """Mark the block as work of this actor: the master counts a run as stalled only while no actor works. A block
        that waits for other actors is not work.

        kind: of works that take about as long. The master ends an actor whose work stands still for far longer than
        those of this kind before; empty if the block has deadlines of its own. evidence: moves while the work is alive.
        """
        return self._works.working(what, kind, evidence)

    async def on_disk(self, what: str, write: Callable[..., T], *arguments: Any) -> T:
        """Do a write in a thread, and again until the disk has room for it. what: is written."""
        with self.working(f"writing {what}", "disk", lambda: Patience.refusals):
            return await self._disk.write(lambda: asyncio.to_thread(write, *arguments), what)

    def works(self) -> tuple[Work, ...]:
        """The operations in progress, for the heartbeat; none while the actor only waits."""
        return self._works.report()

    def took(self, what: str, began: float, seconds: float) -> None:
        """Report to the master, for the displays of the run, that `what` took `seconds`. `began`: by the clock of this
        actor's event loop."""
        self._spans.append(Span(name=what, began=began, seconds=seconds))

    def with_role(self, role: str, healthy: bool = True) -> list[Member]:
        return [m for m in self.directory.values() if m.role == role and (m.state == "healthy" or not healthy)]

    async def become_healthy(self) -> None:
        """Become healthy, and send a heartbeat at once, because other actors wait for it."""
        self.settle()
        self.state = "healthy"
        await self._beat()

    def settle(self) -> None:
        """Move the process to the cores that are meant for it."""
        if self._own_process:
            settle(CORES)

    async def until(self, condition: Callable[[], T]) -> T:
        """The first true value of `condition`, which depends on the directory or the policy."""
        return await self._changed.until(condition)

    def stop(self, ending: Ending) -> None:
        """End the actor. Only the first call has an effect."""
        if not self._stop.done():
            self._stop.set_result(ending)

    def drain(self, ending: Ending) -> bool:
        """End the actor once it has handed over its work. Returns False if there is none: it has not started yet."""
        if self.state == "healthy":
            self.state = "draining"
            self._leave_sign.set_result(ending)
        return self.state == "draining"

    @property
    def leaving(self) -> bool:
        return self._leave_sign.done()

    # --- life

    async def run(self) -> Ending:
        """Join, work and leave. Returns why the actor stopped. Raises what the role's own code raised, and UserError if
        no master answers."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT) if self._own_process else ():
            loop.add_signal_handler(sign, self.leave, sign.name)
        try:
            if not await self._join_unless_stopped(self.door.reached_at(self._serve())):
                return self._stop.result()
            ending = await self._live()
            if not ending.fenced:
                await self._tell_master(ending.reason)
            return ending
        finally:
            try:
                async with asyncio.timeout(TEARDOWN_SECONDS):
                    await self.teardown()
            except TimeoutError:
                log.warning("teardown took too long", seconds=TEARDOWN_SECONDS)
            await self.bus.close()

    def _serve(self) -> str:
        try:
            return self.bus.serve(self.door.address, self.dispatch, self._on_crash)
        except OSError as error:
            raise UserError(
                f"The {self.role} cannot listen at {self.door.address} ({error.strerror}): change --bind, --host or "
                f"--ports."
            ) from None

    async def _join_unless_stopped(self, address: str) -> bool:
        """Join the run. Returns False if the actor was told to leave before a master answered."""
        joining = asyncio.create_task(self._join(address), name="join")
        ends: list[asyncio.Future[Any]] = [joining, self._stop]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                await joining
            return joining.done()
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _join(self, address: str) -> None:
        join = Join(role=self.role, index=self.index, address=address)
        welcome = await first_answer(self.bus, self.master, join, self._patience)
        self.bus.identity.name = welcome.identity
        self.config = from_message(welcome.config)
        self.index = int(welcome.identity.split("/")[1].split("#")[0])
        self._disk = Patience(self.config.folder, f"the {self.role.replace('_', ' ')}")
        if self._own_process:
            self._keep_log(self.config.folder / "logs" / f"{self.role}-{self.index}.jsonl")
        prometheus.serve(self.config.observe, self.role, self.index, lambda: self._numbers)
        await self._take_snapshot(welcome.snapshot)

    async def _live(self) -> Ending:
        """Raises what the role's own code raised."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.spawn(self._heartbeat(), "heartbeat")
                self.spawn(self._look_at_works(), "works")
                self.spawn(self._drain_when_told(), "drain")
                self.spawn(_raise_from(self._crash), "crash")
                self.spawn(self._work(), self.role)
                raise _Stopped(await self._stop)  # the task group cancels everything else
        except BaseExceptionGroup as group:
            match first_error(group):
                case _Stopped() as stopped:
                    return stopped.ending
                case FencedError() as error:
                    return Ending(False, f"fenced: {error}", fenced=True)
                case MasterLostError() as error:
                    return Ending(False, str(error))
                case error:
                    await self._tell_master(f"{type(error).__name__}: {error}")
                    raise error from None
        finally:
            self._tasks = None
        raise AssertionError("unreachable")

    async def _work(self) -> None:
        with self.working("starting", "start", self._works.unless_other("start", lambda: self._master_waits)):
            await self.setup()
        await self.main()

    async def _tell_master(self, reason: str) -> None:
        """The actor leaves, for this reason."""
        with contextlib.suppress(BusError):
            await self.ask(self.master, Leave(reason=text_of(reason)), Message, LEAVE_SECONDS)

    def _on_crash(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        if self._tasks is None:
            self.stop(Ending(False, f"a handler failed: {type(error).__name__}: {error}"))
        elif not self._crash.done():
            self._crash.set_exception(error)

    def leave(self, by: str) -> None:
        """Have the actor hand over its work and leave the run. A second call ends it at once."""
        ending = Ending(True, f"told to leave by {by}", stopped=True)
        if self.leaving or not self.drain(ending):
            self.stop(ending)

    def _run_ended(self, end: Shutdown) -> None:
        """The master has ended the run."""
        self.stop(Ending(end.ok, end.reason))

    async def _drain_when_told(self) -> None:
        ending = await self._leave_sign
        self.activity = "draining"
        await self._beat()
        try:
            async with asyncio.timeout(self.config.master.drain_seconds):
                await self.hand_over()
        except TimeoutError:
            log.warning("could not hand over everything", seconds=self.config.master.drain_seconds)
        self.stop(replace(ending, reason=f"{ending.reason}{self.outcome}"))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._beat()

    async def _look_at_works(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._works.look()

    async def _beat(self) -> None:
        short = self._disk.shortage
        beat = Heartbeat(
            state=self.state, serves=self.serves(), activity=str(short or self.activity)[:512],
            shortage=DiskShortage(**asdict(short) | {"waits": short.waits[:512]}) if short else None,
            stats=self.stats() | delays.longest(), engagement=self.engagement(), works=self.works(),
            ended=self._works.take_ended(), spans=tuple(self._spans), clock=asyncio.get_running_loop().time(),
        )  # fmt: skip
        self._spans.clear()
        self._numbers = {"healthy": float(beat.state == "healthy"), **beat.stats}
        answer = await self.ask_master(beat, HeartbeatAnswer)
        if answer.ended:
            self._run_ended(answer.ended)
        if answer.loads is not None:
            self.note_loads(answer.loads)
        if answer.sequence > self._sequence:
            # An event was lost or has not arrived yet, or the master was restarted. The snapshot is newer in each case.
            await self._take_snapshot(await self.ask_master(AskSnapshot(), Snapshot))

    # --- events

    def _on_event(self, sequence: int, event: Message) -> None:
        if sequence <= self._sequence:
            return
        match event:
            case PolicyPublished():
                self._take_policy(event.policy)
            case MembersChanged():
                self._update_directory({m.identity: m for m in event.changed}, event.gone)
            case Shutdown():
                self._run_ended(event)
        if sequence == self._sequence + 1:  # after a gap, only a snapshot has what was missed
            self._sequence = sequence
        self._changed.notify()

    async def _take_snapshot(self, snapshot: Snapshot) -> None:
        events = reachable(snapshot.events, host_of(self.master))
        if self._events is None or self._events.address != events:
            if self._events is not None:
                await self._events.close()
            self._events = self.bus.subscribe(events, self._on_event)
        if snapshot.sequence >= self._sequence:
            self._sequence = snapshot.sequence
            self._take_policy(snapshot.policy)
            listed = {member.identity: member for member in snapshot.members}
            self._update_directory(listed, [identity for identity in self.directory if identity not in listed])
            self._changed.notify()

    def _take_policy(self, policy: Policy) -> None:
        # A late event must not bring back an older policy.
        if self.policy is None or policy.identity > self.policy.identity:
            self.policy = policy

    def _update_directory(self, changed: dict[str, Member], gone: Sequence[str]) -> None:
        self.directory |= changed
        for identity in gone:
            if member := self.directory.pop(identity, None):
                self.bus.forget(member.address)


async def first_answer(bus: Bus, master: str, message: Message, patience: float) -> Any:
    """The master's answer to the first request. While the master says that it is preparing, wait without a deadline.
    Raises UserError if no answer comes within `patience` seconds, or if the master refuses."""
    loop = asyncio.get_running_loop()
    telling = loop.call_later(
        SILENCE_SECONDS, lambda: log.warning("waiting for the master", address=master, seconds=patience)
    )
    last_logged = -PREPARING_TOLD_SECONDS
    try:
        while True:
            try:
                return await bus.peer(master).ask(message, patience)
            except PreparingError as error:
                telling.cancel()
                if loop.time() - last_logged >= PREPARING_TOLD_SECONDS:
                    last_logged = loop.time()
                    log.info("waiting for the master", address=master, why=str(error))
                await asyncio.sleep(PREPARING_ASK_SECONDS)
    except DeadlineError:
        raise UserError(
            f"No master answers at {master} (waited {patience:g} s): start one with "
            f"`python run.py --role master --config FILE`, check the address given with --master, "
            f"and check that both have the same keys (--keys, network.keys)."
        ) from None
    except BusError as error:
        raise UserError(f"The master at {master} refused the request: {error}") from None
    finally:
        telling.cancel()


async def ask_once(network: Network, master: str, message: Message, patience: float, role: str = "monitor") -> Any:
    """The master's answer to a request of a process that is no actor of a `role` yet. Raises UserError, as
    `first_answer` does."""
    bus = new_bus(f"{role}/?", network)
    try:
        return await first_answer(bus, master, message, patience)
    finally:
        await bus.close()


async def _raise_from(future: asyncio.Future[Any]) -> None:
    await future


def first_error(error: BaseException) -> BaseException:
    """The first exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
