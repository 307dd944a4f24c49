"""The master: keeps the directory of actors and the policy version, grants permits, and chooses the batches to train.

The master never handles a token or a weight. It writes every change to the journal on disk before it answers a request
or publishes an event that depends on the change. So a restarted master knows everything that it has told other actors.
A request that cannot be answered yet is parked until it can be, or until shortly before its deadline.

| loop | waits for | unblocks |
|---|---|---|
| handlers | `AskPermits`: room in the ledger | rollout managers |
| | `AskBatch`: the commit of the step before, B ready groups, rule 3 | the trainer |
| | `AskEvaluation`: a version that is due, and its holder | the evaluator |
| journal | changes that are not on disk yet | every answer and event that depends on them |
| announce | an event in the outbox, then the journal | the events loop of every actor |
| look for the dead | 5 s | removes the silent at whose address nobody listens |
| watch | 1 s | fences the silent and those that hang, ends leases, remedies a stalled run |
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from actors.master import changes
from actors.master.accounts import evaluation_record, summary
from actors.master.disks import Disks
from actors.master.hangs import Hangs
from actors.master.members import next_event
from actors.master.memory import Memory
from actors.master.rollout_requests import RolloutRequests
from actors.master.run_control import Records, RunControl
from actors.master.training_requests import TrainingRequests
from actors.runtime import vitals
from actors.runtime.actor import Ending, HandlesRequests, first_error, handles
from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.base.processes import stop_signals
from areal.base.secrets import without_secrets
from areal.config import Config
from areal.data.prompt_sources import PromptSource
from areal.devices import CORES, settle
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_state import LedgerError
from areal.storage.disk import DiskShortageError, Shortage
from areal.storage.events import GONE
from areal.storage.journal import Journal
from areal.storage.records import flat
from areal.weights.model_files import digests_of
from protocols.addresses import host_of, is_loopback
from protocols.bus_errors import ForgedError, MalformedError, PreparingError, RefusedError, text_of
from protocols.messages import (
    AskConfig,
    AskSnapshot,
    AskStatus,
    Configuration,
    ConnectionLost,
    Done,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Leave,
    Member,
    MembersChanged,
    Message,
    Permits,
    Shutdown,
    Snapshot,
    Status,
    Welcome,
    actor_name,
)
from protocols.transport import Bus, Publisher, Request, fingerprint

WATCH_SECONDS = 1.0
# A member that has missed some heartbeats: its process may be suspended. Until it is heard or fenced, nothing stalls.
SILENT_SECONDS = 5.0
# Membership changes within this time are published as one event.
GATHER_SECONDS = 0.05
# How long the master waits, after the end of the run, for the other actors to leave.
FAREWELL_SECONDS = 5.0
# Pause before the master exits, so that the answer to the last actor's Leave is still sent.
LAST_WORDS_SECONDS = 0.2
# Size of the range of event sequence numbers of one master. A restarted master uses the next range.
EVENTS_OF_ONE_MASTER = 1 << 32
T = TypeVar("T")
log = structlog.get_logger()


class Master(HandlesRequests):
    """The master of a run; there is one. `config.model` has to be a folder. The run ends when the last step is trained,
    its checkpoint is saved and the last version is evaluated. If `journal` holds events of an earlier master of the
    run, this master continues from them. `source`: the rows, needed by every `data.sampler` but shuffle. `supervised`:
    it is stopped by SIGINT alone."""

    def __init__(
        self,
        bus: Bus,
        config: Config,
        *,
        journal: Journal,
        folder: Records,
        source: PromptSource | None = None,
        supervised: bool = False,
    ) -> None:
        if source is None and config.steps and config.data.sampler != "shuffle":
            raise ValueError(f"data.sampler={config.data.sampler} chooses from rows, and the master was given none")
        self._run = run = RunControl(config, journal, folder, source)
        self.config, self.journal, self.folder = config, journal, folder
        self.state, self.members = run.state, run.members
        self._supervised = supervised
        self.bus = bus
        of_extensions = (requests(run) for requests in extensions.find_own("requests"))
        self._parts: Sequence[HandlesRequests] = self, TrainingRequests(run), RolloutRequests(run), *of_extensions
        self._trainer_may_end = False  # the run is stopped, and the trainer has time to save a checkpoint
        self._events: Publisher
        self._numbers: dict[str, float] = {}  # for Prometheus, updated every second
        self._hangs = Hangs(self.members, config.master.hang_seconds)
        self._disks = Disks()
        self._memory = Memory(self.state, self.members)
        self._model = digests_of(Path(config.model))

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    # --- life

    async def run(self) -> Ending:
        """Serve until the run has ended. Returns how it ended. Raises UserError if the address is already in use."""
        loop = asyncio.get_running_loop()
        stop = self._stop_run
        if self._supervised:
            loop.add_signal_handler(signal.SIGINT, stop, "the supervisor")
            loop.add_signal_handler(signal.SIGTERM, _ignore_signal, signal.SIGTERM.name)
        else:
            for sign in stop_signals():
                loop.add_signal_handler(sign, stop, sign.name)
        try:
            self._take_over()
            self._open()
            settle(CORES)
            async with asyncio.TaskGroup() as tasks:
                works = {"records": self._repeat_records(), "watch": self._watch(), "announce": self._announce()}
                works["look for the dead"] = self._look_for_the_dead()
                helpers = [tasks.create_task(work, name=name) for name, work in works.items()]
                await self._run.end_if_complete()
                ending = await self._run.end
                await self._say_farewell(ending)
                for helper in helpers:
                    helper.cancel()
            return ending
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            await self.bus.close()
            self.journal.close()

    def _take_over(self) -> None:
        """Continue from the state in the journal. All leases are renewed, and every member counts as heard from now."""
        self.state.emit(changes.MasterStarted())
        self.ledger.change_settings(self.state.settings)
        self.ledger.leases.renew_all(self._run.now(), self.config.master.lease_seconds)
        self._run.evaluations.hold_version_0()
        if self.ledger.version not in self.journal.kept_versions():
            self._run.keep_state()
        if self.state.masters > 1:
            self._run.meter.begin()
            log.info(
                "the master continues from its journal",
                version=self.ledger.version,
                alive=len(self.ledger.state.groups),
                members=list(self.state.members),
            )

    async def _repeat_records(self) -> None:
        """Write what the master before has not written, before any other record."""
        if self.state.last_step:
            await self._run.record_step(self.state.last_step)
        for evaluation in list(self.state.evaluations.values()):
            await self._run.record("an evaluation", self.folder.append_evaluation, evaluation_record(evaluation))

    def _open(self) -> None:
        address = self.config.master.address
        first = self.state.masters * EVENTS_OF_ONE_MASTER
        try:
            self.bus.serve(address, self.dispatch, self._on_crash)
            self._events = self.bus.publisher(f"tcp://{host_of(address)}:{self.config.network.ports_text}", first)
        except OSError as error:
            raise UserError(
                f"The master cannot listen at {error.filename} ({error.strerror}): stop the process that uses the "
                f"port, or choose another port with master.address=tcp://HOST:PORT or network.ports."
            ) from None
        if self.config.observe.prometheus_port:
            serve = extensions.need("prometheus", "serve", "observe.prometheus_port").load()
            serve(self.config.observe, "master", 0, lambda: self._numbers)
        log.info("master ready", address=address, run=str(self.folder.path))

    def dispatch(self, request: Request[Message]) -> Awaitable[Message]:
        """The answer to a request. It is returned only after every change behind it is on disk. Raises ForgedError if
        the sender is a member and the request is not from it."""
        if request.sender in self.state.members and not request.sender.endswith(f"#{fingerprint(request.token)}"):
            log.warning("a request in the name of another was refused", kind=request.message.kind, name=request.sender)
            raise ForgedError(f"this {request.message.kind!r} is not from {request.sender}, whom it names as sender")
        part = next((part for part in self._parts if part.answers(request.message)), self)
        answer = HandlesRequests.dispatch(part, request)
        return answer if isinstance(request.message, AskStatus) else self._durably(request.sender, answer)

    async def _durably(self, sender: str, answer: Awaitable[Message]) -> Message:
        """Raises PreparingError while the journal waits for its disk."""
        # The request was invalid, and the ledger is unchanged.
        with explain(LedgerError, "{why}", RefusedError):
            result = await answer
        try:
            await self.journal.durable(wait_for_room=False)
        except DiskShortageError as error:
            if isinstance(result, Permits):
                self.ledger.leases.withdraw(sender, [permit.group for permit in result.permits])
            raise PreparingError(str(error)) from None
        return result

    def _shortages(self) -> Iterator[Shortage]:
        """Who waits for a disk now."""
        yield from filter(None, (self.journal.shortage, self._run.disk_retry.shortage))
        for last in self.members.heartbeats.last.values():
            if short := last.beat.shortage:
                yield Shortage(**short.model_dump())

    async def _announce(self) -> None:
        """Publish events in order, each one only after the changes that it reports are on disk."""
        while True:
            await self._run.mail.until(lambda: self._run.outbox)
            if isinstance(self._run.outbox[0], MembersChanged):
                await asyncio.sleep(GATHER_SECONDS)
            event = next_event(self._run.outbox)
            await self.journal.durable()
            try:
                self._events.publish(event)
            except MalformedError as error:  # the others see that one is missing, and ask for a snapshot
                log.error("an event cannot be sent", kind=event.kind, error=str(error))

    def _on_crash(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        self._run.end_if(f"the master failed: {type(error).__name__}: {error}")

    def _stop_run(self, by: str) -> None:
        """The first signal lets the trainer save a checkpoint, a second one ends the run at once."""
        self._trainer_may_end = not self._run.end.done() and not self._run.shortage
        self._run.finish(False, f"told to stop by {by}", stopped=True)
        self._run.changed.notify()

    async def _let_trainer_end(self, ending: Ending) -> None:
        """Serve the trainer until it has left, for at most `master.drain_seconds`."""
        self._run.send_out(self._shutdown(ending))
        here = self.members.with_role
        try:
            async with asyncio.timeout(self.config.master.drain_seconds):
                await self._run.changed.until(lambda: not (self._trainer_may_end and here("trainer", healthy=False)))
        except TimeoutError:
            log.warning("the trainer has not left", seconds=self.config.master.drain_seconds)
        self._trainer_may_end = False

    async def _say_farewell(self, ending: Ending) -> None:
        self.folder.free_reserve()
        if self._trainer_may_end:
            await self._let_trainer_end(ending)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                numbers = summary(self.config, self.state, ending, self._run.meter.tokens_sampled)
                await self._run.record("the summary", self.folder.write_summary, numbers)
        except TimeoutError:
            log.error("the run ends without a summary", why=str(self._run.shortage))
        if self._run.shortage:  # events wait for the journal, and this one would for ever
            self._events.publish(self._shutdown(ending))
        else:
            self._run.send_out(self._shutdown(ending))
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._run.changed.until(lambda: not self.state.members)
        except TimeoutError:
            log.warning("some actors have not left", members=list(self.state.members))
        await asyncio.sleep(LAST_WORDS_SECONDS)

    # --- watching

    async def _watch(self) -> None:
        """Every second: remove silent or hanging actors, expire leases, abandon a late evaluation, react to a stall."""
        last = self._run.now()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (absent := self._run.now() - last - WATCH_SECONDS) > WATCH_SECONDS:
                log.warning("the master process was suspended", seconds=absent)
                self._run.suspended += absent
                self.ledger.leases.renew_all(self._run.now(), self.config.master.lease_seconds)
            last = now = self._run.now()
            for identity, silence in self.members.heartbeats.silent(self.config.master.lease_seconds):
                self._remove(identity, f"silent for {silence:.0f} s")
            for identity, hang in self._hangs.find():
                self._remove(identity, hang)
            if lost := self.ledger.leases.expire(now):
                log.warning("leases expired", groups=lost)
            self._run.evaluations.watch()
            self._run.progress.servers.look()
            self._run.changed.notify()
            self._disks.look([*self._shortages()], now)
            self._memory.look()
            if (
                self._run.shortage
                or self._run.progress.longest_work()
                or self.members.heartbeats.silent(SILENT_SECONDS)
            ):
                self._run.progress.note_progress()
            self._run.end_if(self._run.failures.verdict(self.ledger.state.counters, now))
            self.state.compact_if_due()
            counts = self._run.admission.counts()
            numbers = vitals.numbers()
            doing = "; ".join([str(self._run.shortage or self._run.progress.who_waits()), *self._hangs.alerts.values()])
            self.folder.record_heartbeat("master/0", "healthy", doing, counts | numbers)
            self._numbers = {
                **{f"groups_{name}": float(n) for name, n in counts.items()},
                **{f"step_{name}": value for name, value in flat(self.state.last_step or {}).items() if name != "step"},
                "version": float(self.ledger.version),
                **numbers,
            }
            self._remedy_stall()

    def _remedy_stall(self) -> None:
        match self._run.progress.remedy():
            case "end":
                self._run.end_if(self._run.progress.describe_stall())
            case "fence":
                suspects, stall = self._run.progress.suspects(), self._run.progress.describe_stall()
                log.warning("stalled: fencing the actors that the run waits for", waits=stall, members=suspects)
                for identity in suspects:
                    self._remove(identity, f"the run waits for it: {stall}")
            case "requeue":
                owners = [identity for identity, member in self.state.members.items() if member.role != "gateway"]
                released = [group for owner in owners for group in self.ledger.leases.release(owner)]
                log.warning("stalled: groups are re-queued", waits=self._run.progress.describe_stall(), groups=released)
                self._run.evaluations.abandon("the run made no progress")
                self._run.changed.notify()

    def _snapshot(self) -> Snapshot:
        return self.members.snapshot(self._events.sequence, self._events.address)

    # --- membership

    @handles(Join)
    async def join(self, request: Request[Join]) -> Welcome:
        join, mark = request.message, fingerprint(request.token)
        member = self.members.find_joined(join, mark) or self._admit(self.members.new_entry(join, mark))
        start = f"{self.state.masters}/{self.members.starts[actor_name(member.identity)]}"
        config = self.config.model_dump(mode="json")
        return Welcome(identity=member.identity, start=start, config=config, snapshot=self._snapshot())

    def _admit(self, member: Member) -> Member:
        place = f"{actor_name(member.identity)}#"
        for occupant in [identity for identity in self.state.members if identity.startswith(place)]:
            self._remove(occupant, f"replaced by {member.identity}")
        self.members.add(member)
        log.info("joined", actor=member.identity, address=member.address)
        if member.role == "generator" and not self._run.end.done():
            self._run.evaluations.hold_version_0(member)
        first = next(iter(self.state.members.values()))
        if is_loopback(host_of(first.address)) != is_loopback(host_of(member.address)):
            log.warning("some actors listen where no other host reaches them: use --host", joined=member.identity)
        return member

    @handles(Heartbeat)
    async def heartbeat(self, request: Request[Heartbeat]) -> HeartbeatAnswer:
        member, beat = self._run.member(request), request.message
        last = self.members.heartbeats.last[member.identity]
        changed = self.members.update(member, beat)
        self.members.heartbeats.record(member.identity, beat)
        self._hangs.hear(member, beat)
        fresh = self._run.meter.count(beat.stats, None if last.restored else last.beat.stats)
        if beat.stats.get("samples_scored", 0.0) > 0:
            self._run.failures.any_succeeded = True
        worked = beat.stats.get("work_done", 0.0) > last.beat.stats.get("work_done", 0.0)
        if changed or worked or fresh["tokens_generated"] > 0:
            self._run.progress.note_progress()
        name, spans = actor_name(member.identity), [(span.name, span.began, span.seconds) for span in beat.spans]
        self.folder.record_heartbeat(name, beat.state, beat.activity, beat.stats, beat.clock, spans)
        return HeartbeatAnswer(
            policy=self.state.policy,
            sequence=self._events.sequence,
            ended=self._shutdown(self._run.end.result()) if self._run.end.done() else None,
            loads=self.members.heartbeats.loads_for(member.identity)
            if member.role in ("rollout_manager", "gateway")
            else None,
        )

    @handles(Leave)
    async def leave(self, request: Request[Leave]) -> Done:
        if request.sender in self.state.members:
            self._remove(request.sender, request.message.reason)
        return Done()

    @handles(ConnectionLost)
    async def connection_lost(self, request: Request[ConnectionLost]) -> Done:
        """Remove a member at once, and not only when its lease ends, if its machine says that nobody listens at its
        address, and it is not heard either."""
        self._run.member(request)
        await self._remove_if_dead(request.message.identity, SILENT_SECONDS)
        return Done()

    async def _look_for_the_dead(self) -> None:
        """Nobody has a connection to some members that would be lost with them, such as a rollout manager."""
        while True:
            await asyncio.sleep(SILENT_SECONDS)
            silent = self.members.heartbeats.silent(2 * SILENT_SECONDS)
            await asyncio.gather(*(self._remove_if_dead(identity, 0.0) for identity, _ in silent))

    async def _remove_if_dead(self, identity: str, seconds: float) -> None:
        """Remove a member if nobody listens at its address, and it is not heard for so long either."""
        member, last = self.state.members.get(identity), self.members.heartbeats.last.get(identity)
        if member and await self.bus.network.refuses(member.address):
            await asyncio.sleep(seconds)
            if self.members.heartbeats.last.get(identity) is last:
                self._remove(identity, f"nobody listens at {member.address}")

    @handles(AskSnapshot)
    async def ask_snapshot(self, request: Request[AskSnapshot]) -> Snapshot:
        return self._snapshot()

    @handles(AskConfig)
    async def ask_config(self, request: Request[AskConfig]) -> Configuration:
        return Configuration(values=without_secrets(self.config.model_dump(mode="json")), model=self._model)

    def _shutdown(self, ending: Ending) -> Shutdown:
        return Shutdown(ok=ending.ok, reason=text_of(ending.reason), stopped=self._trainer_may_end)

    def _remove(self, identity: str, reason: str) -> None:
        self._run.progress.await_successor()
        self._run.evaluations.lose_member(self.state.members[identity])
        self.members.remove(identity, reason)
        self.folder.record_heartbeat(actor_name(identity), GONE, reason, {})
        released = self.ledger.leases.release(identity)
        if not self._run.end.done():
            self._run.evaluations.hold_version_0()
            log.warning("left", actor=identity, reason=reason, released=released)

    # --- monitoring

    @handles(AskStatus)
    async def ask_status(self, request: Request[AskStatus]) -> Status:
        since = request.message.since
        return Status(
            values={
                "run": self.config.name,
                "time": time.time(),
                "version": self.ledger.version,
                "lineage": self.state.lineage,
                "steps": self.config.steps,
                "max_staleness": self.config.max_staleness,
                "rewards": self.config.reward.functions | self.state.rewards_of(self.ledger.state.prompts.next_prompt),
                **self._run.admission.counts(),
                "waiting": str(self._run.shortage or self._run.progress.describe()),
                "alerts": self._alerts(),
                "metrics": self.state.last_step,
                "recent": [] if since is None else self._run.meter.recent(since),
                "accuracy": {
                    str(version): evaluation.accuracy
                    for version, evaluation in self.state.evaluations.items()
                    if evaluation.accuracy is not None
                },
                "members": self.members.status_rows(),
                "ended": self._run.end.done(),
                "events": self._events.address,
            }
        )

    def _alerts(self) -> list[str]:
        """What the user of the run is told on its console, in the order in which it began within each kind."""
        disks = filter(None, (self.folder.filling, self._disks.alert))
        pauses = filter(None, [self._run.progress.servers.pause])
        return [
            *self._run.failures.firsts.values(),
            *self._hangs.alerts.values(),
            *self._memory.alerts.values(),
            *filter(None, (last.beat.alert for last in self.members.heartbeats.last.values())),
            *disks,
            *pauses,
        ]


def _ignore_signal(sign: str) -> None:
    """Somebody else than the supervisor sent a signal, perhaps to all processes of the run."""
    log.warning(f"the master ignores {sign}: what stops the run is a signal to its supervisor")
