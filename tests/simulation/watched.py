"""The real bus, journal and evaluator, with hooks for the oracle and for fail-points; and the simulated disks."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from actors.evaluator.evaluator import Evaluator
from actors.gateway.gateway import Gateway
from actors.rollout_manager.group_run import GroupRun
from actors.rollout_manager.rollout_manager import RolloutManager
from actors.runtime.membership import Membership
from actors.sampling.sampling import Sampling
from actors.sampling.sessions import SampleSession
from areal.data.rows import Row
from areal.samples.trajectory import Trajectory
from areal.storage.events import GONE
from areal.storage.journal import Journal
from areal.storage.rollouts import Rollout, RolloutWriter
from areal.storage.saved_calls import unpacked
from areal.storage.spool import Spool, SpoolPart, StoredGroup
from areal.storage.spooled_calls import SpooledCalls
from areal.workflows.session import Session
from protocols.attempt_messages import StoreCalls
from protocols.bus import Bus
from protocols.codec import Frame, Header
from protocols.evaluation_messages import AskEvaluation, EvaluationDone, RowsScored
from protocols.messages import Message, Permit, StoreSamples
from protocols.transport import Peer
from simulation.engines import HELDOUT, TalkTokenizer, Toil
from simulation.oracle import Oracle

M = TypeVar("M", bound=Message)


FULL = 2  # of SQLite's `synchronous`: each commit is synced


class Disk(sqlite3.Connection):
    """A database that outlives the processes that use it. `close` only rolls back what is not committed; `scrap` closes
    the database. `full`: it commits nothing. `lose_power`: what was committed without being synced is lost."""

    full = False
    synced: bytes | None = None
    """What the disk had when a process began to commit without a sync; None: everything was synced."""

    def note_synced(self) -> None:
        """A process has opened the database, and has set how it commits."""
        ((synchronous,),) = self.execute("PRAGMA synchronous").fetchall()
        self.synced = None if synchronous >= FULL else self.serialize()

    def lose_power(self) -> None:
        self.rollback()
        if self.synced is not None:
            self.deserialize(self.synced)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> Literal[False]:
        if self.full and kind is None and self.in_transaction:
            self.rollback()
            refusal = sqlite3.OperationalError("database or disk is full")
            refusal.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise refusal
        return super().__exit__(kind, *error)

    def close(self) -> None:
        self.rollback()

    def scrap(self) -> None:
        super().close()


class WatchedBus(Bus):
    """The real bus. `watch` wraps its handlers, and may kill the process in them. `on_start` is called with (sender,
    id, token) of each request whose handler is called. `on_ask`, if it is set, is called with each request before it is
    sent."""

    watch: Callable[[Callable[..., Any]], Callable[..., Any]]
    on_start: Callable[[tuple[str, str, bytes]], None]
    on_ask: Callable[[Message], None] | None = None

    def peer(self, address: str) -> Peer:
        peer, on_ask = super().peer(address), self.on_ask
        if on_ask is not None and "ask" not in vars(peer):  # a new one
            ask = peer.ask

            async def watched(message: Message, timeout: float) -> Message:
                on_ask(message)
                return await ask(message, timeout)

            peer.ask = watched  # type: ignore[method-assign]
        return peer

    def serve(self, address: str, handle: Callable[..., Any], on_crash: Callable[..., Any]) -> str:
        bound = super().serve(address, self.watch(handle), on_crash)
        assert self.server is not None  # set by `serve`
        start, on_start = self.server._start, self.on_start

        def watched(key: tuple[str, str, bytes], route: Frame, header: Header, frames: list[Frame]) -> None:
            on_start(key)
            start(key, route, header, frames)

        self.server._start = watched  # type: ignore[method-assign]
        return bound


class WatchedJournal(Journal):
    """The real journal, which reports its events to the oracle. `marks`: for each task, the number of events in the
    journal when the task last added one."""

    oracle: Oracle
    marks: dict[asyncio.Task[Any] | None, int]

    def read(self) -> tuple[dict[str, Any] | None, list[tuple[str, dict[str, Any]]]]:
        snapshot, events = super().read()
        self.oracle.master_starts(snapshot.pop("position") if snapshot else 0, events)
        return snapshot, events

    def append(self, kind: str, body: dict[str, Any]) -> None:
        super().append(kind, body)
        self.oracle.appended(kind, body)
        self.marks[asyncio.current_task()] = len(self.oracle.events)

    def compact(self, snapshot: dict[str, Any]) -> None:
        super().compact({**snapshot, "position": len(self.oracle.events)})

    async def durable(self, wait_for_room: bool = True) -> None:
        appended = len(self.oracle.events)
        await super().durable(wait_for_room)
        self.oracle.committed(appended)


class WatchedCalls(SpooledCalls):
    """The real store of calls. `on_calls` is called with the id of the group of which calls are stored."""

    on_calls: Callable[[str], None]

    def put(self, group_id: str, *arguments: Any) -> None:
        super().put(group_id, *arguments)
        self.on_calls(group_id)

    def move(self, group_id: str, samples: Iterable[tuple[str, int]]) -> None:
        super().move(group_id, samples)
        self.on_calls(group_id)


class WatchedSpool(Spool):
    """The real spool. `on_put` is called with the id of the group and the place of each sample that is stored, and
    `on_move` with the id and the place of each sample that becomes one of another group, and with that group's id.
    `meanwhile`: other threads may do something between two changes of a call."""

    unfinished: WatchedCalls
    meanwhile: Callable[[], None]
    on_put: Callable[[str, int], None]
    on_move: Callable[[str, int, str], None]

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.unfinished = WatchedCalls(self._file)

    def put_all(self, parts: Mapping[int, SpoolPart], size: int) -> StoredGroup:
        stored = super().put_all(parts, size)
        for place, part in parts.items():
            self.on_put(part.group.id, place)
        return stored

    def complete(self, group_id: str, size: int) -> StoredGroup:
        self.meanwhile()
        return super().complete(group_id, size)

    def move(self, group_id: str, samples: Iterable[tuple[str, int]], size: int) -> None:
        samples = list(samples)
        super().move(group_id, samples, size)
        for earlier, place in samples:
            self.on_move(earlier, place, group_id)


class WatchedRollouts(RolloutWriter):
    """The real writer of rollouts, which writes into `written`. `may_write`: whether its trainer is that of the run. In
    a run folder the lock on the spool sees to this: a trainer opens the rollouts once the one before has closed them.
    Here trainers overlap, so each reads them when it becomes that of the run."""

    def __init__(self, written: list[Rollout], may_write: Callable[[], bool]) -> None:
        self._written, self._may_write = written, may_write
        super().__init__(Path(), "all", 0, lambda sequences: [])

    def assign(self, run: str) -> None:
        self.__init__(self._written, self._may_write)  # type: ignore[misc]
        super().assign(run)

    def earlier(self) -> Iterator[tuple[int, list[str]]]:
        return ((rollout.step or 0, [rollout.group.id]) for rollout in self._written)

    def store(self, rollouts: Sequence[Rollout]) -> None:
        if self._may_write():
            self._written += rollouts


class WatchedGroup(GroupRun):
    """The real group. begins: is called with each sample that begins."""

    begins: Callable[[Permit, int, SampleSession], None]

    async def _run_sample(self, place: int, session: SampleSession, *arguments: Any) -> Any:
        self.begins(self.permit, place, session)
        return await super()._run_sample(place, session, *arguments)


class WatchedManager(RolloutManager):
    """The real rollout manager, which reports its samples to the oracle. Its workflow may hang."""

    oracle: Oracle
    toil: Toil

    @classmethod
    async def start(cls, *member: Any, **options: Any) -> Self:
        oracle, toil = options.pop("oracle"), options.pop("toil")
        manager = await super().start(*member, **options)
        manager.oracle, manager.toil = oracle, toil
        return manager

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._places: dict[SampleSession, tuple[Permit, int]] = {}
        workflow = self._workflow

        async def hanging(session: Session, row: Row) -> Trajectory:
            sample = await workflow(session, row)
            if self.toil.must_hang("workflow"):
                await asyncio.Event().wait()
            return sample

        self._workflow = hanging
        ask_trainer = self.sampling.ask_trainer

        async def watched(request: Message, answer: type[M]) -> M:
            if isinstance(request, StoreCalls):
                self.oracle.saves(request.prompt_index, request.place, unpacked(request.frame.data))
            return await ask_trainer(request, answer)

        self.sampling.ask_trainer = watched  # type: ignore[method-assign]

    def _group_of(self, permit: Permit) -> GroupRun:
        parts = self.member, self.sampling, self._rows, self._saved, self.run_workflow
        group = WatchedGroup(permit, *parts)
        group.begins = self._begins
        return group

    def _begins(self, permit: Permit, place: int, session: SampleSession) -> None:
        self.oracle.begins(permit.group, place)
        self._places[session] = permit, place

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        permit, place = self._places.pop(session)
        self.oracle.goes_on(permit.group, permit.prompt_index, place, session.saved_calls)
        done = await super().run_workflow(session, row)
        self.oracle.sampled(row, done, session.calls)
        self.oracle.used(permit.group, session.saved_calls)
        return done


@dataclass
class Door:
    """What stands for the endpoint of a gateway: its requests in progress."""

    requests: set[asyncio.Task[Any]] = field(default_factory=set)

    async def listen(self) -> int:
        return 0

    async def close(self) -> None:
        for request in self.requests:
            request.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)


class WatchedGateway(Gateway):
    """The real gateway, watched. Users come through its `door`, in place of HTTP."""

    oracle: Oracle
    toil: Toil

    @classmethod
    async def start(cls, member: Membership, **options: Any) -> Self:
        users = member.config.gateway.serve == "evaluated"
        gateway = cls(member, Sampling(member, TalkTokenizer(), users))
        gateway.oracle, gateway.toil = options["oracle"], options["toil"]
        return gateway

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.door = Door()
        self._endpoint = cast(Any, self.door)
        self.member.used.push_async_callback(self.door.close)
        ask_trainer = self.sampling.ask_trainer

        async def watched(request: Message, answer: type[M]) -> M:
            if isinstance(request, StoreSamples):
                self.oracle.made(request.group, Trajectory.of_frame(request.samples[0].frame.data))
            return await ask_trainer(request, answer)

        self.sampling.ask_trainer = watched  # type: ignore[method-assign]


class WatchedEvaluator(Evaluator):
    """The real evaluator, which reports its samples to the oracle."""

    oracle: Oracle
    toil: Toil
    seen: dict[int, list[Trajectory]]
    kept: dict[int, tuple[Sequence[float], int]]

    @classmethod
    async def start(cls, *member: Any, **options: Any) -> Self:
        oracle, toil = options.pop("oracle"), options.pop("toil")
        evaluator = await super().start(*member, **options)
        evaluator.oracle, evaluator.toil = oracle, toil
        return evaluator

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        done = await super().run_workflow(session, row)
        self.oracle.sampled(row, done, session.calls, trains=False)
        self.seen.setdefault(row.index - HELDOUT, []).append(done)
        return done


class EvaluatorMembership(Membership):
    """That of a watched evaluator: the oracle sees its results."""

    async def ask_master(self, message: Message, *rest: Any) -> Any:
        evaluator: Any = self.role
        if isinstance(message, AskEvaluation):
            evaluator.seen = {}
            answer = await super().ask_master(message, *rest)
            evaluator.kept = answer.scored.by_row() if answer.scored else {}
            return answer
        if isinstance(message, RowsScored):
            evaluator.oracle.scored(message.version, message.scored.by_row(), evaluator.seen)
        elif isinstance(message, EvaluationDone):
            evaluator.oracle.evaluated(message, evaluator.kept, evaluator.seen)
        return await super().ask_master(message, *rest)


class Folder:
    """A replacement of the run folder, which keeps nothing on disk. `on_gone` is called with the name of each actor
    that the master removes, and why. `activity`: what the master has last said of itself."""

    def __init__(
        self, path: Path, on_summary: Callable[[dict[str, Any]], None], on_gone: Callable[[str, str], None]
    ) -> None:
        self.path = path
        self.activity = "the master has said nothing"
        self.filling = ""
        self.write_summary = on_summary
        self._on_gone = on_gone

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        pass

    def free_reserve(self) -> None:
        pass

    append_evaluation = append_metrics

    def record_heartbeat(self, actor: str, state: str, activity: str, *_: Any) -> None:
        if actor == "master/0":
            self.activity = activity
        if state == GONE:
            self._on_gone(actor, activity)


@functools.cache
def empty_journal() -> bytes:
    """The contents of a disk with a new journal."""
    return _contents_of(Journal)


@functools.cache
def empty_spool() -> bytes:
    """The contents of a disk with a new spool."""
    return _contents_of(Spool)


def _contents_of(store: Callable[[sqlite3.Connection], Any]) -> bytes:
    """The contents of the database of a new store. Callers cache them: not every simulation has to create them."""
    connection = sqlite3.connect(":memory:")
    store(connection)
    return connection.serialize()
