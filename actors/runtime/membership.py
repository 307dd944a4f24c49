"""An actor's place in the run: joining, the role, heartbeats, the master's events, draining and leaving.

An actor stops in these cases:

* a signal (SIGTERM, SIGINT, SIGHUP) stops the actor, which first hands over its work;
* the master says that the run has ended;
* the master has been silent for `master.lost_seconds`; a master restarted within that time is accepted;
* the master has fenced the actor: the master refuses its requests, and another process may have its place;
* the actor's own code fails.

No task outlives `Membership.run`. While an actor is in the run it has these loops, besides those of its role:

| loop | waits for | unblocks |
|---|---|---|
| heartbeat | 1 s | the master's clock of silence; the routing of rollout managers. The answer may ask for a snapshot |
| events | a message of the master: a policy, members, the end | all that waits for a version, a member or the end |
| requests | a request, each handled in a task of its own | its asker |
| works | 1 s | the master's watch: for how long each work has stood still |
| drain | SIGTERM | the successor of its work; then the actor leaves |
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import structlog

from actors.runtime import vitals
from actors.runtime.actor import CONTROL_SECONDS, Actor, Ending, HandlesRequests, M, first_error
from actors.runtime.bound_addresses import ListenAddress, new_bus
from actors.runtime.directory import Directory, EventFeed
from actors.runtime.logs import write_log_file
from actors.runtime.works import LOOK_SECONDS, Evidence, Works, nothing
from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.base.processes import stop_signals
from areal.config import Config, from_message
from areal.devices import CORES, settle
from areal.storage.disk import DiskRetry
from protocols.bus import Bus
from protocols.bus_errors import BusError, BusyError, DeadlineError, FencedError, PreparingError, RefusedError, text_of
from protocols.membership_messages import (
    AskSnapshot,
    DiskShortage,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Leave,
    Shutdown,
    Snapshot,
    Span,
    State,
    Welcome,
    actor_name,
)
from protocols.messages import Message
from protocols.network import Network
from protocols.transport import Request, ask_until

JOIN_SECONDS = 10.0
# After this time without an answer to the first request, the actor logs that it waits for the master.
SILENCE_SECONDS = 3.0
# The interval of log lines while the master prepares the run.
PREPARING_TOLD_SECONDS = 60.0
HEARTBEAT_SECONDS = 1.0
LEAVE_SECONDS = 2.0
# Timeout of closing the role's resources: the whole shutdown has to fit into ten seconds.
TEARDOWN_SECONDS = 6.0
# Number of spans kept between two heartbeats; older spans are dropped.
SPANS_KEPT = 64

Ask = Callable[..., Awaitable[Any]]
"""`Membership.ask`, or `ask_master`."""
Spawn = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]
T = TypeVar("T")
log = structlog.get_logger()


class MasterLostError(BusError):
    """The master has not answered for `master.lost_seconds`."""


class _Stopped(Exception):
    """Ends the task group of an actor that is told to stop."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending


class Membership:
    """An actor's place in a run. A role gets the membership at its making, and hands its parts only what they use.

    Set once the actor has joined: `config`, the configuration of the run; `directory`, the members and the policy;
    `works`, the actor's work in progress; `disk`, which waits for room on the actor's disk. `used` is closed when the
    actor ends. `outcome`: the end of the sentence on why the actor left. `alert`: a sentence for the user.
    """

    config: Config
    directory: Directory
    disk: DiskRetry

    def __init__(
        self,
        kind: type[Actor],
        bus: Bus,
        master: str,
        index: int | None = None,
        listen_address: ListenAddress | None = None,
        *,
        patience: float = JOIN_SECONDS,
        keep_log: Callable[[Path], None] = write_log_file,
        own_process: bool = True,
        **options: Any,
    ) -> None:
        """patience: seconds to wait for the master's answer to the first request. own_process: True if the process is
        the actor's alone, so that the actor may settle it and obey its signals. options: of the role."""
        self.kind, self.bus, self.master, self.index = kind, bus, master, index
        self.listen_address = listen_address or ListenAddress.towards(master)
        self.role = Actor()  # until the role is made
        self.state: State = "starting"
        self.activity = "starting"
        self.outcome = self.alert = ""
        self.engine_seed = 0
        self.used = AsyncExitStack()
        self._options = options
        self._patience = patience
        self._keep_log = keep_log
        self._own_process = own_process
        loop = asyncio.get_running_loop()
        self.works = Works(loop.time)
        self.stopped: asyncio.Future[Ending] = loop.create_future()
        # Set by callbacks. Callbacks must not start tasks, because the task group may already be ending.
        self.leave_sign: asyncio.Future[Ending] = loop.create_future()
        self._crash: asyncio.Future[None] = loop.create_future()
        self._parts: dict[HandlesRequests, None] = {}
        self._numbers: dict[str, float] = {}  # for Prometheus, updated with every heartbeat
        self._master_waits = 0.0  # when the master last answered that it cannot answer yet, by the loop's clock
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._tasks: asyncio.TaskGroup | None = None

    async def ask_master(self, message: Message, answer: type[M], park: float = 0.0) -> M:
        """The master's answer to `message`. The request is resent until a master answers, perhaps after a restart.

        park: seconds for which the master may keep the request before it answers. Raises BusError, and MasterLostError
        after `master.lost_seconds` of silence. A master that reports a wait for its disk is not silent.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()

        def again(error: BusError) -> bool:
            if isinstance(error, PreparingError):
                self._master_waits = loop.time()
            elif isinstance(error, DeadlineError):
                silent = loop.time() - max(began, self._master_waits)
                if silent - park >= self.config.master.lost_seconds:
                    raise MasterLostError(f"the master at {self.master} has been silent for {silent:.0f} s") from None
            return isinstance(error, PreparingError | DeadlineError)

        return await ask_until(lambda: self.ask(self.master, message, answer, park + CONTROL_SECONDS), again)

    async def ask(self, address: str, message: Message, answer: type[M], timeout: float = CONTROL_SECONDS) -> M:
        """The answer of the actor at `address`. Raises BusError."""
        result = await self.bus.peer(address).ask(message, timeout)
        if not isinstance(result, answer):
            raise BusError(f"{address} answered {message.kind!r} with {result.kind!r}")
        return result

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` concurrently with `main`. An exception fails the actor. Raises BusyError in an ending actor."""
        if self._tasks is not None:
            with contextlib.suppress(RuntimeError):  # the group's tasks are being cancelled
                return self._tasks.create_task(work, name=name)
        work.close()
        raise BusyError("this actor is ending")

    def serve(self, part: HandlesRequests) -> None:
        """Have a part answer requests, perhaps before the role is made."""
        self._parts[part] = None

    def working(
        self, what: str, kind: str = "", evidence: Evidence = nothing
    ) -> contextlib.AbstractContextManager[None]:
        """Mark the block as work of this actor: the master counts a run as stalled only while no actor works. A block
        that waits for other actors is not work.

        kind: works of a kind take about as long. The master ends an actor whose work stands still for far longer than
        earlier works of the kind; empty if the block has deadlines of its own. evidence: moves with the work.
        """
        return self.works.working(what, kind, evidence)

    async def on_disk(self, what: str, write: Callable[..., T], *arguments: Any, optional: bool = False) -> T:
        """Do a write in a thread, and repeat it until the disk has room. what: the written thing, also the kind of
        work, since durations differ. optional: nobody needs the write in the end, so it never counts as a hang."""
        with self.working(f"writing {what}", "" if optional else what, lambda: DiskRetry.refusals):
            return await self.disk.write(lambda: asyncio.to_thread(write, *arguments), what)

    def took(self, what: str, began: float, seconds: float) -> None:
        """Report to the master, for the displays of the run, that `what` took `seconds`. `began`: by the clock of this
        actor's event loop."""
        self._spans.append(Span(name=what, began=began, seconds=seconds))

    async def become_healthy(self) -> None:
        """Become healthy, and send a heartbeat at once: other actors wait for the actor."""
        self.settle()
        self.state = "healthy"
        await self.beat()

    def settle(self) -> None:
        """Move the process to the cores meant for actors."""
        if self._own_process:
            settle(CORES)

    def stop(self, ending: Ending) -> None:
        """End the actor. Only the first call has an effect."""
        if not self.stopped.done():
            self.stopped.set_result(ending)

    def leave(self, by: str) -> None:
        """Have the actor hand over its work and leave the run. A second call ends the actor at once."""
        ending = Ending(True, f"told to leave by {by}", stopped=True)
        if self.leaving or not self._drain(ending):
            self.stop(ending)

    @property
    def leaving(self) -> bool:
        return self.leave_sign.done()

    async def run(self) -> Ending:
        """Join, work and leave. Returns the ending. Raises the role's exceptions, and UserError without a master."""
        loop = asyncio.get_running_loop()
        for sign in stop_signals() if self._own_process else ():
            loop.add_signal_handler(sign, self.leave, sign.name)
        try:
            if not await self._join_unless_stopped(self.listen_address.reached_at(self._listen())):
                return self.stopped.result()
            ending = await self._live()
            if not ending.fenced:
                await self._tell_master(ending.reason)
            return ending
        finally:
            try:
                async with asyncio.timeout(TEARDOWN_SECONDS):
                    await self.used.aclose()
            except TimeoutError:
                log.warning("teardown took too long", seconds=TEARDOWN_SECONDS)
            await self.bus.close()

    def _listen(self) -> str:
        with explain(
            OSError,
            f"The {self.kind.role} cannot listen at {self.listen_address.address} ({{strerror}}): "
            f"change --bind, --host or --ports.",
        ):
            return self.bus.serve(self.listen_address.address, self._dispatch, self._on_crash)

    def _dispatch(self, request: Request[Message]) -> Any:
        for part in self._parts:
            if part.answers(request.message):
                return part.dispatch(request)
        message = f"this {self.kind.role} does not answer {request.message.kind!r}"
        raise RefusedError(message) if self.role in self._parts else BusyError(f"{message} yet: it is starting")

    async def _join_unless_stopped(self, address: str) -> bool:
        """Join the run. Returns False if the actor was told to leave before a master answered."""
        joining = asyncio.create_task(self._join(address), name="join")
        ends: list[asyncio.Future[Any]] = [joining, self.stopped]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                await joining
            return joining.done()
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _join(self, address: str) -> None:
        role = self.kind.role
        join = Join(role=role, index=self.index, address=address)
        welcome: Welcome = await first_answer(self.bus, self.master, join, self._patience)
        self.bus.identity.name = welcome.identity
        self.config = from_message(welcome.config)
        name = actor_name(welcome.identity)
        self.index = int(name.split("/")[1])
        # Different at each start: with the same seed an engine would repeat its random numbers.
        self.engine_seed = crc32(f"{self.config.seed}/{name}/{welcome.start}".encode())
        self.disk = DiskRetry(self.config.folder, f"the {role.replace('_', ' ')}")
        if self._own_process:
            self._keep_log(self.config.folder / "logs" / f"{role}-{self.index}.jsonl")
        if self.config.observe.prometheus_port:
            serve = extensions.need("prometheus", "serve", "observe.prometheus_port").load()
            serve(self.config.observe, role, self.index, lambda: self._numbers)
        self._events = EventFeed(self.bus, self.master, welcome.snapshot, self._run_ended)
        self.directory = self._events.directory
        await self._events.take(welcome.snapshot)

    async def _live(self) -> Ending:
        """Raises exceptions of the role's code."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.spawn(self._heartbeat(), "heartbeat")
                self.spawn(self._look_at_works(), "works")
                self.spawn(self._drain_when_told(), "drain")
                self.spawn(asyncio.wait_for(self._crash, None), "crash")
                self.spawn(self._work(), self.kind.role)
                raise _Stopped(await self.stopped)  # the task group cancels everything else
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
        with self.working("starting", "start", self.works.unless_other("start", lambda: self._master_waits)):
            self.role = await self.kind.start(self, **self._options)
            self.serve(self.role)
            await self.role.catch_up()
        await self.role.main()

    async def _tell_master(self, reason: str) -> None:
        """Tell the master that the actor leaves, and the reason."""
        with contextlib.suppress(BusError):
            await self.ask(self.master, Leave(reason=text_of(reason)), Message, LEAVE_SECONDS)

    def _on_crash(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        if self._tasks is None:
            self.stop(Ending(False, f"a handler failed: {type(error).__name__}: {error}"))
        elif not self._crash.done():
            self._crash.set_exception(error)

    def _drain(self, ending: Ending) -> bool:
        """End the actor after a hand-over of its work. Returns False if the actor is still starting."""
        if self.state == "healthy":
            self.state = "draining"
            self.leave_sign.set_result(ending)
        return self.state == "draining"

    def _run_ended(self, end: Shutdown) -> None:
        """The master has ended the run."""
        ending = Ending(end.ok, end.reason, of_run=True)
        if not (end.stopped and self.kind.drains_at_a_stop and self._drain(replace(ending, ok=False))):
            self.stop(ending)

    async def _drain_when_told(self) -> None:
        ending = await self.leave_sign
        self.activity = "draining"
        await self.beat()
        try:
            async with asyncio.timeout(self.config.master.drain_seconds):
                await self.role.hand_over()
        except TimeoutError:
            log.warning("could not hand over everything", seconds=self.config.master.drain_seconds)
        self.stop(replace(ending, reason=f"{ending.reason}{self.outcome}"))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self.beat()

    async def _look_at_works(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.works.look()

    async def beat(self) -> None:
        """Send a heartbeat. Raises BusError, and FencedError if another process has this actor's place."""
        short, role = self.disk.shortage, self.role
        beat = Heartbeat(
            state=self.state,
            serves=role.serves(),
            activity=str(short or self.activity)[:512],
            shortage=DiskShortage(**asdict(short) | {"waits": short.waits[:512]}) if short else None,
            alert=self.alert[:1024],
            stats=role.stats() | vitals.numbers(),
            engagement=role.engagement(),
            works=(*role.works(), *self.works.report()),
            ended=self.works.take_ended(),
            spans=tuple(self._spans),
            clock=asyncio.get_running_loop().time(),
        )
        self._spans.clear()
        self._numbers = {"healthy": float(beat.state == "healthy"), **beat.stats}
        answer = await self.ask_master(beat, HeartbeatAnswer)
        if answer.ended:
            self._run_ended(answer.ended)
        if answer.loads is not None:
            self.role.note_loads(answer.loads)
        if answer.sequence > self._events.sequence:
            # An event was lost or has not arrived yet, or the master was restarted. The snapshot is newer in all cases.
            await self._events.take(await self.ask_master(AskSnapshot(), Snapshot))


async def first_answer(bus: Bus, master: str, message: Message, patience: float) -> Any:
    """The master's answer to the first request. There is no deadline while the master answers that it is preparing.
    Raises UserError if no answer comes within `patience` seconds, or if the master refuses."""
    loop = asyncio.get_running_loop()
    telling = loop.call_later(
        SILENCE_SECONDS, lambda: log.warning("waiting for the master", address=master, seconds=patience)
    )
    last_logged = -PREPARING_TOLD_SECONDS

    def again(error: BusError) -> bool:
        nonlocal last_logged
        if isinstance(error, PreparingError):
            telling.cancel()
            if loop.time() - last_logged >= PREPARING_TOLD_SECONDS:
                last_logged = loop.time()
                log.info("waiting for the master", address=master, why=str(error))
        return isinstance(error, PreparingError)

    try:
        return await ask_until(lambda: bus.peer(master).ask(message, patience), again)
    except DeadlineError:
        raise UserError(
            f"No master answers at {master} (waited {patience:g} s): start one with "
            f"`areal run --role master --config FILE`, check the address given with --master, "
            f"and check that both have the same keys (--keys, network.keys)."
        ) from None
    except BusError as error:
        raise UserError(f"The master at {master} refused the request: {error}") from None
    finally:
        telling.cancel()


async def ask_once(network: Network, master: str, message: Message, patience: float, role: str = "monitor") -> Any:
    """The master's answer to a process that is no actor of a `role` yet. Raises UserError as `first_answer`."""
    async with new_bus(f"{role}/?", network) as bus:
        return await first_answer(bus, master, message, patience)
