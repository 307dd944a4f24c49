"""The simulated cluster: its processes, the faults that happen to them, and a supervisor that restarts dead processes.

    result = simulate(seed)      # a Result; its `story` shows what led to a violation

The same seed gives the same simulation, callback for callback. Tracing takes time, so `simulate` runs a seed without a
trace, and repeats it with a trace only if it violates an invariant.
"""

from __future__ import annotations

import asyncio
import functools
import re
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, assert_never
from zlib import crc32

import numpy as np

from actors.generator.generator import Generator
from actors.master.master import Master
from actors.master.run_state import RunState
from actors.reward import Reward
from actors.runtime.actor import Ending
from actors.runtime.bound_addresses import ListenAddress
from actors.runtime.membership import Membership
from actors.scorer.scorer import Scorer
from actors.trainer.trainer import Trainer
from actors.ways_back import past_state
from actors.ways_back.rollback import undone_by
from areal.base.errors import UserError
from areal.generation.engine_process import EngineError
from areal.samples.trajectory import Trajectory
from areal.storage.run_folder import checkpoint_of
from areal.storage.saved_calls import unpacked
from areal.storage.spool import Spool
from areal.storage.spool_file import SpoolError
from protocols.codec import Frame, decode_body, decode_header
from protocols.messages import Generate, Message
from protocols.transport import fingerprint, token_for
from simulation import faults
from simulation.book import Violation
from simulation.cluster.loop import EndlessCallbacks
from simulation.cluster.network import SimNetwork
from simulation.engines import (
    Files,
    Mishaps,
    SimEngine,
    SimLearner,
    SimRewards,
    SimScorer,
    SimSource,
    SimTokenizer,
    TextTokenizer,
    Weights,
)
from simulation.failpoints import FailPoints
from simulation.faults import Plan
from simulation.incarnation import Incarnation, Process
from simulation.loop import RUNNING, FaultyLoop, WorldScheduler
from simulation.memory import check_actor
from simulation.model import (
    GATEWAYS,
    GROUPS,
    HANGS,
    MASTER,
    MODEL,
    SAMPLERS,
    SCORERS,
    SKIPS_FLAT,
    Model,
    config_of,
    draw_model,
    draw_scorers,
    with_gateways,
    with_hangs,
)
from simulation.network import FaultyNetwork, FaultyWire, Weather
from simulation.oracle import Oracle
from simulation.quiet import quiet
from simulation.replay import differences
from simulation.users import Users
from simulation.watched import (
    Disk,
    EvaluatorMembership,
    Folder,
    WatchedBus,
    WatchedEvaluator,
    WatchedGateway,
    WatchedJournal,
    WatchedManager,
    WatchedRollouts,
    WatchedSpool,
    empty_journal,
    empty_spool,
)

# Time that the other actors have to leave after the end of the master. Those that are left then get SIGTERM, and have
# LAST_SECONDS more.
AFTERMATH_SECONDS = 20.0
LAST_SECONDS = 12.0
# An event within this time after a fault has come near it.
NEAR_SECONDS = 1.0
# The share of the runs with large groups, whose managers die again and again, so that stored samples are used again.
SIBLINGS = 0.06
# Number of parts of all samples that a score of a group may have, which is one message.
GROUP_PARTS = 10_000
# Time after which the supervisor restarts a process that ended by itself.
SUPERVISOR_SECONDS = 0.3
# Approximate duration of a commit.
DISK_SECONDS = 0.005
# Interval of the checks of all actors' memory.
LOOK_SECONDS = 1.5
# Errors that may end an actor, which is then restarted: it cannot reach the master; the weights in a generator's engine
# are torn; an evaluator could score nothing, or not in time. (A trainer that was replaced may also end with a
# SpoolError, when its successor on the same disk has removed a group.)
FAILURES = {"generator": (UserError, EngineError), "evaluator": (UserError, RuntimeError)}
# How much longer a run may take that is resumed with more steps.
RESUMED_SECONDS = 60.0
STORY_LINES = 120


@dataclass(slots=True)
class Result:
    """The result of a seed. `digest`: a hash of the whole course of the simulation. `seconds`: its virtual time."""

    seed: int
    violation: str | None
    about: tuple[str, ...]
    digest: int
    seconds: float
    counters: Counter[str]
    trace: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.violation is None

    @property
    def story(self) -> str:
        """The lines of the trace about the groups or actors of the violation, and all faults."""
        names = "|".join(re.escape(name.partition("~")[0]) for name in self.about if name)
        pattern = re.compile(rf"(?<![\w.])({names})(?![\w.])" if names else ".")
        lines = [line for line in self.trace if pattern.search(line) or " !! " in line]
        return "\n".join([f"seed {self.seed}: {self.violation}", *lines[-STORY_LINES:]])


class World:
    """One simulation. `traced`: record a readable line for every message and event. `extra`: a fault beside those of
    the plan, which may come after its end."""

    def __init__(
        self,
        seed: int,
        model: Model | None = None,
        plan: Plan | None = None,
        traced: bool = False,
        extra: faults.Fault | None = None,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.model = model or draw_model(self.random)
        self.plan = plan or faults.draw(self.random, self.model.processes, self.model.faults_until)
        if plan is None:
            faults.add_resume(Random(f"resume {seed}"), self.plan)
            faults.add_damage(Random(f"damage {seed}"), self.plan)
        siblings = Random(f"siblings {seed}")
        if model is None and plan is None and siblings.random() < SIBLINGS:
            self.model = replace(self.model, group_size=4, managers=2, max_new_tokens=30, concurrent=16)
            faults.add_manager_kills(siblings, self.plan)
        hangs = Random(f"hang {seed}")
        if model is None and plan is None and hangs.random() < HANGS:
            self.model = with_hangs(self.model)
            self.plan.faults.append(faults.draw_hang(hangs, self.model.processes, self.plan.until))
        if model is None:
            self.model = replace(self.model, save_every=Random(f"save {seed}").choice((0, 2, 8)))
            groups = Random(f"groups {seed}").random() < GROUPS and not self.model.branching
            parts = min(self.model.reward_parts, GROUP_PARTS // self.model.group_size if groups else GROUP_PARTS)
            self.model = replace(self.model, groups=groups, reward_parts=parts)
            sampler = Random(f"sampler {seed}").choice(tuple(SAMPLERS))
            self.model = replace(self.model, sampler=sampler, size=3 if sampler == SKIPS_FLAT else None)
        scorers = Random(f"scorers {seed}")
        if model is None and plan is None and scorers.random() < SCORERS:
            judge = Random(f"judge {seed}").random() < 0.5
            self.model = replace(self.model, scorers=draw_scorers(scorers), judge=judge)
            faults.add_scorer_faults(scorers, self.plan, len(self.model.scorers))
        gates = Random(f"gateways {seed}")
        if model is None and plan is None and not self.model.scorers and gates.random() < GATEWAYS:
            self.model = with_gateways(self.model, gates)
            faults.add_gateway_faults(gates, self.plan, self.model.gateways)
            if not self.model.managers:
                faults.rename(self.plan, "rollout_manager", "gateway-0")
        self.plan.faults += [extra] if extra else []
        self.config = config_of(self.model)
        self._source = SimSource(self.model.bytes_a_row, self.model.size)
        self.scheduler = WorldScheduler()
        self.wire = FaultyWire(self.scheduler, self.random)
        self.files = Files(MODEL)
        self.oracle = Oracle(self.config, self.files, self.scheduler, self.fail, self.model.doubtful)
        self.oracle.scores_fail = self.plan.mishaps.score_fails + self.plan.mishaps.wrong_columns > 0.0
        self.oracle.causes = self._causes()
        self.oracle.spooled, self.oracle.busy, self.oracle.heard = self._spooled, self._busy, self._see_generators
        self.oracle.samples_of, self.oracle.has_calls = self._samples_of, self._has_calls
        self.oracle.stored_calls = self._stored_calls
        self.oracle.clocks_jump = any(isinstance(fault, faults.ClockJump | faults.Pause) for fault in self.plan.faults)
        self.violation: Violation | None = None
        self.trace: list[str] | None = [] if traced else None
        self.processes = {name: Process(name) for name in self.model.processes}
        self.incarnations: list[Incarnation] = []
        self.counters: Counter[str] = Counter()
        self.folder = Folder(self.config.folder, self._decided, self._removed)
        self.spooled_by: dict[str, tuple[Incarnation, float]] = {}  # who put each group on the trainer's disk, and when
        self.stored: dict[tuple[str, int], float] = {}  # when the sample was, by group and place
        self.summary: dict[str, Any] = {}
        self.over = self._buried = False
        self._points = FailPoints(self)
        self._threads = Random(f"threads {seed}")
        self._users: FaultyLoop | None = None
        if traced:
            self.wire.watch = self._trace_message

    # --- the course of a simulation

    def run(self) -> Result:
        """Simulate until the run has ended and all actors have left, or until an invariant is violated."""
        self._schedule_faults()
        self._look_around()
        for process in self.processes.values():
            delay = 0.0 if process.role == "master" else self.random.random() * 0.2
            self.scheduler.call_at(delay, self.start, process)
        if self.model.gateways:
            self._users = FaultyLoop(self.scheduler, "users", 0.0, lambda: 0.0)  # type: ignore[abstract]
            self._users.on_exception = self._unhandled
            Users(self, self.model.users, self._users)
        resumes = sum(isinstance(fault, faults.Resume) for fault in self.plan.faults)
        last = max([self.plan.until, *(fault.at for fault in self.plan.faults)])
        deadline = last + self.model.patience + resumes * RESUMED_SECONDS
        with quiet(self):
            try:
                self.scheduler.run(deadline)
                if not self.over and self.violation is None:
                    self.fail(Violation(f"no progress: {self._who_waits()}"))
            except EndlessCallbacks as stuck:
                self.fail(Violation(str(stuck)))
            finally:
                self._bury()
        violation = self.violation
        self.counters.update({f"near {pair}": number for pair, number in self.oracle.pairs.items()})
        return Result(
            self.seed,
            violation.what if violation else None,
            violation.about if violation else (),
            crc32(repr((self.scheduler.callbacks, round(self.scheduler.now, 9))).encode(), self.wire.digest),
            self.scheduler.now,
            self.counters,
            self.trace or [],
        )

    def _causes(self) -> set[str]:
        """What the faults of the plan may make a group fail of."""
        hangs = any(isinstance(fault, faults.Hang) and fault.work == "workflow" for fault in self.plan.faults)
        fails = self.oracle.scores_fail
        happen = {"reward": fails, "scorer": fails, "workflow": hangs}
        return {cause for cause, may in happen.items() if may}

    def fail(self, violation: Violation) -> None:
        """The first violation ends the simulation."""
        if self.violation is None:
            self.violation = violation
            self.say("world", f"VIOLATION: {violation.what}")
        self.scheduler.stopped = True

    def say(self, who: str, what: str) -> None:
        if self.trace is not None and not self._buried:
            self.trace.append(f"{self.scheduler.now:9.4f} {who:<18} {what}")

    def fault(self, what: str) -> None:
        self.say("world", f" !! {what}")

    def _disturb(self, seconds: float = 0.0) -> None:
        """For so long, messages may be lost, and actors may be away."""
        self.oracle.disturbed_until = max(self.oracle.disturbed_until, self.scheduler.now + seconds)

    def _look_around(self) -> None:
        """Check the memory and the policy of all actors, every LOOK_SECONDS."""
        for life in self.incarnations:
            if life.alive and life.actor is not None:
                try:
                    check_actor(life, self.model, len(self.processes))
                except Violation as violation:
                    self.fail(violation)
        self.oracle.look()
        self.scheduler.call_at(self.scheduler.now + LOOK_SECONDS, self._look_around)

    def _who_waits(self) -> str:
        """Which actor waits for which: the master's status line, and the activity of each other actor."""
        running = [
            life for process in self.processes.values() if (life := process.running) and life.alive and life.actor
        ]
        actors = [life for life in running if life.role != "master"]
        words = [f"{life.process.name} ({life.actor.state}): {life.actor.activity}" for life in actors]
        return "; ".join([self.folder.activity, *words])

    # --- processes

    def start(self, process: Process) -> None:
        """Start a process under this name."""
        if self.over:
            return
        process.lives += 1
        offset = self.random.uniform(0.0, 1000.0)  # each process has its own clock, with its own offset
        loop = FaultyLoop(  # type: ignore[abstract]  # asyncio needs only the methods that this loop has
            self.scheduler, f"{process.name}~{process.lives}", offset, lambda: self._latency(process)
        )
        loop.on_exception = self._unhandled
        network = FaultyNetwork(self.wire, process.name, loop)
        life = Incarnation(process, loop, network, fingerprint(token_for(MASTER, loop.name.encode())))
        process.running = life
        self.incarnations.append(life)
        self._disturb()
        self.fault(f"{process.name} starts as #{life.mark}")
        loop.call_soon(self._begin, life)

    def _begin(self, life: Incarnation) -> None:
        life.task = asyncio.get_running_loop().create_task(self._live(life))
        life.task.add_done_callback(lambda task: self._ended(life, task))

    async def _live(self, life: Incarnation) -> Ending:
        identity = f"{life.role}/{'0' if life.role == 'master' else '?'}#{life.mark}"
        life.bus = WatchedBus(identity, life.network, secret=life.loop.name.encode())
        life.bus.watch = functools.partial(self._points.watched, life)
        life.bus.on_start = functools.partial(self.oracle.called, life.loop.name)
        if life.role == "rollout_manager":
            life.bus.on_ask = functools.partial(self._asks, life)
        life.actor = self._make(life)
        ending: Ending = await life.actor.run()
        return ending

    def _make(self, life: Incarnation) -> Any:
        if life.role == "master":
            return self._make_master(life)
        common: dict[str, Any] = {
            "index": life.process.index,
            "listen_address": ListenAddress(life.process.name, life.process.name),
            "keep_log": _keep_no_log,
        }
        match life.role:
            case "trainer":
                seams: dict[str, Any] = {
                    "start_learner": lambda *_: self._start_learner(life),
                    "open_spool": lambda path: self._open_spool(life),
                    "open_rollouts": lambda config: self._open_rollouts(life),
                }
                return Membership(Trainer, life.bus, MASTER, **common, **seams)
            case "generator":
                return Membership(
                    Generator,
                    life.bus,
                    MASTER,
                    **common,
                    start_engine=lambda *args, **kw: self._start_engine(life, *args, **kw),
                )
            case "reward":
                return Membership(Reward, life.bus, MASTER, **common, make_pool=lambda *args: self._rewards(life))
            case "scorer":
                name = self.model.scorers[life.process.index % len(self.model.scorers)]
                return Membership(
                    Scorer,
                    life.bus,
                    MASTER,
                    **common,
                    name=name,
                    start_engine=lambda *_, **__: self._start_scorer(life, name),
                    load_tokenizer=lambda _: TextTokenizer(),
                )
        common["open_source"] = lambda config, seed: self._source
        common["load_tokenizer"] = lambda *_: SimTokenizer()
        common |= {"oracle": self.oracle, "toil": life.toil}
        if life.role == "rollout_manager":
            return Membership(WatchedManager, life.bus, MASTER, **common)
        if life.role == "gateway":
            return Membership(WatchedGateway, life.bus, MASTER, **common)
        return EvaluatorMembership(WatchedEvaluator, life.bus, MASTER, **common)

    def _make_master(self, life: Incarnation) -> Master:
        journal = WatchedJournal(disk := self._disk(life, empty_journal()))
        disk.note_synced()
        journal.oracle, journal.marks = self.oracle, {}
        self.oracle.clock = lambda: life.loop.time() - life.loop.excused
        boss = Master(life.bus, self.config, journal=journal, folder=self.folder, source=self._source)
        if not any(isinstance(fault, faults.Resume) for fault in self.plan.faults):  # else the settings may differ
            self._check_restored(boss)
        self.oracle.ledger = boss.ledger
        self.oracle.spooled_samples = self._spooled_samples
        life.network.on_publish = self.oracle.published
        return boss

    def _check_restored(self, boss: Master) -> None:
        """A master that begins with a snapshot has the same state as one that replays all events of the run."""
        events = self.oracle.events
        if boss.journal.size < len(events) and (forgotten := differences(boss.state, events, self._source)):
            self.fail(Violation(f"the master has restored another state than its journal has: {forgotten}", "master-0"))

    async def _start_engine(
        self,
        life: Incarnation,
        model: Path,
        config: Any,
        *,
        version: int,
        seed: int,
        lora: Any,
        sleeps: bool,
        transfer: Any,
        routes: bool,
        kept_words: int,
        kept_logprobs: bool,
    ) -> SimEngine:
        await life.toil.take(self.model.pace.start * (0.5 + self.random.random()), "starting")
        self.oracle.engine_starts(life.loop.name, seed)
        tell = None if self.trace is None else lambda what: self.say(life.process.name, what)
        life.engine = SimEngine(
            self.files,
            self.files.model,
            version,
            config,
            self.model.pace,
            self.plan.mishaps,
            self.random,
            seed,
            life.toil,
            tell,
            functools.partial(self._loads, life),
        )
        life.engine.on_sampling = self.oracle.sampling
        return life.engine

    async def _start_scorer(self, life: Incarnation, name: str) -> SimScorer:
        await life.toil.take(self.model.pace.start * (0.5 + self.random.random()), "starting")
        return SimScorer(name, self.model.pace, self.plan.mishaps, self.random, life.toil)

    def _rewards(self, life: Incarnation) -> SimRewards:
        return SimRewards(self.model.pace, self.plan.mishaps, self.random, life.toil, self.model.reward_parts)

    def _asks(self, life: Incarnation, message: Message) -> None:
        """A rollout manager sends a request."""
        if isinstance(message, Generate):
            versions = {new.job: new.min_version for new in message.sequences}
            for group, running in life.actor.role._groups.items():
                for call in (call for session in running.sessions for call in session.running):
                    if call.number in versions:
                        self.oracle.asked(group, versions[call.number])

    def _see_generators(self) -> None:
        """A policy was published a moment ago: each generator that knows of it has loaded it, or is about to."""
        for life in self.incarnations:
            engine = life.engine
            if engine is not None and life.alive and life.actor.state == "healthy":
                actor = life.actor
                me, newest = actor.directory.members.get(life.bus.identity.name), actor.directory.policy.folder
                # Not so while it waits for the answer to a heartbeat that it has to send before it goes on.
                generates = actor.activity.startswith("generating") and life.toil.oldest is None
                idle = generates and not engine.finishes and me is not None and me.held is None
                if idle and engine.folder != newest:
                    self.fail(Violation(f"{life.process.name} has {engine.folder}, but knows of {newest}", life.mark))

    def see_sleepers(self, trainer: Incarnation, resident: bool) -> None:
        """The trainer computes on the devices: its weights are there, and all generators that it knows sleep."""
        if not resident:
            self.fail(Violation(f"{trainer.process.name} computes with weights in host memory", trainer.mark))
        members = trainer.actor.directory.members
        for life in self.incarnations:
            if life.engine and life.alive and not life.engine.asleep and life.bus.identity.name in members:
                self.fail(Violation(f"{life.process.name} is awake while {trainer.process.name} computes", life.mark))

    def _loads(self, life: Incarnation, engine: SimEngine, version: int) -> None:
        me = life.actor.directory.members.get(life.bus.identity.name)
        held = me.held if me is not None else None
        if held is not None and (engine.version == held.version or held.folder not in engine.unloadable):
            self.oracle.loads(life.process.name, version, engine.version, held.version)

    async def _start_learner(self, life: Incarnation) -> SimLearner:
        await life.toil.take(self.model.pace.start * (0.5 + self.random.random()), "starting")
        hand = life.loop.name.encode() if self.model.redo_differs else b""
        return SimLearner(
            self.files,
            _Judge(self, life),
            life.loop.name,
            self.model.pace,
            self.random,
            life.toil,
            self.model.doubtful,
            hand,
        )

    def _open_spool(self, life: Incarnation) -> Spool:
        spool = WatchedSpool(disk := self._disk(life, empty_spool()))
        disk.note_synced()
        spool.on_put, spool.on_move = functools.partial(self._puts, life), functools.partial(self._moves, life)
        spool.meanwhile = functools.partial(life.loop.overlap, self._threads)
        spool.unfinished.on_calls = functools.partial(self._puts_calls, life)
        return spool

    def _open_rollouts(self, life: Incarnation) -> WatchedRollouts:
        return WatchedRollouts(life.process.rollouts, lambda: life.bus.identity.name == self.oracle.disk.trainer)

    def _puts(self, life: Incarnation, group: str, place: int) -> None:
        self.spooled_by[group] = life, self.scheduler.now
        self.stored.setdefault((group, place), self.scheduler.now)

    def _puts_calls(self, life: Incarnation, group: str) -> None:
        self.oracle.stores_calls(group)
        self.spooled_by[group] = life, self.scheduler.now

    def _moves(self, life: Incarnation, earlier: str, place: int, group: str) -> None:
        self.counters["reused"] += 1
        self._puts(life, group, place)

    def _ended(self, life: Incarnation, task: asyncio.Task[Any]) -> None:
        """The main task of a process has ended by itself."""
        if task.cancelled():
            how, ok = "was cancelled", False
            self.fail(Violation(f"{life.process.name} was cancelled", life.process.name))
        elif error := task.exception():
            how, ok = f"raised {type(error).__name__}: {error}", False
            expected = FAILURES.get(life.role, (UserError,))
            if not isinstance(error, expected if life.process.running is life else (*expected, SpoolError)):
                self.counters["crashed"] += 1
                self.fail(Violation(f"{life.process.name} {how}", life.process.name, life.mark))
        else:
            how, ok = f"ended: {task.result().reason}", task.result().ok
        self.fault(f"{life.process.name}#{life.mark} {how}")
        leftover = [task for task in life.loop.pending_tasks() if task is not life.task]
        if leftover:
            names = ", ".join(f"{task.get_name()}" for task in leftover)
            self.fail(Violation(f"{life.process.name} has ended, but these tasks are left: {names}", life.process.name))
        if life.role == "master":
            self._master_ended(how, ok)
        elif life.left_calmly_at == self.oracle.disturbed_until:  # there was no fault since
            self.oracle.trainer_left(life.process.name)
        self._gone(life, silent=False)
        is_over = life.stays_away or (ok and life.restart_after is None)
        life.ended = is_over and not life.stays_away
        if life.process.running is life and not is_over:
            self._restart(life.process, life.restart_after or SUPERVISOR_SECONDS)

    def _decided(self, summary: dict[str, Any]) -> None:
        """The master has written its summary, and is about to tell the other actors that the run has ended."""
        self.summary = summary
        if summary["ok"] and (life := self._running("master-0")):
            self.oracle.check_summary(summary)
            self.oracle.check_receipts(life.actor.state.sessions.receipts, "at the end")
        if not self.model.farewell:
            self._master_ended(summary["reason"], summary["ok"])
            self.scheduler.stopped = True

    def _master_ended(self, how: str, ok: bool) -> None:
        if ok:
            self.oracle.ended(self.processes["trainer-0"].rollouts)
        else:
            self.oracle.stopped(how)
            self.counters["stopped"] += 1
        self.over = True
        self._calm()
        now = self.scheduler.now
        self.scheduler.call_at(now + AFTERMATH_SECONDS, self._tell_the_rest)
        self.scheduler.call_at(now + AFTERMATH_SECONDS + LAST_SECONDS, self._see_the_rest)

    def _tell_the_rest(self) -> None:
        for life in self.incarnations:
            if life.alive and not life.loop.send_signal(signal.SIGTERM):
                self.kill(life, None)

    def _see_the_rest(self) -> None:
        survivors = [life.process.name for life in self.incarnations if life.alive]
        if survivors:
            self.fail(Violation(f"{', '.join(survivors)} did not leave after the end of the run", *survivors))
        self.scheduler.stopped = True

    def kill(self, life: Incarnation, restart_after: float | None, silent: bool = False) -> None:
        """Kill a process between two callbacks, like `kill -9`. The supervisor restarts it after `restart_after`
        seconds; None: never. `silent`: its machine dies with it."""
        if not life.alive:
            return
        self.counters["killed"] += 1
        self.fault(f"{life.process.name}#{life.mark} is killed{' with its machine' if silent else ''}")
        self._gone(life, silent)
        if restart_after is not None and life.process.running is life and not life.stays_away:
            self._restart(life.process, restart_after)

    def _gone(self, life: Incarnation, silent: bool) -> None:
        self._disturb()
        life.loop.kill()
        life.network.die(silent)
        if life.process.disk is not None:
            (life.process.disk.lose_power if silent else life.process.disk.rollback)()
        if self.over and not any(peer.alive for peer in self.incarnations):
            self.scheduler.stopped = True

    def _restart(self, process: Process, delay: float) -> None:
        self.scheduler.call_at(self.scheduler.now + delay, self.start, process)

    def _disk(self, life: Incarnation, new: bytes) -> Disk:
        """The database of the process. If it has none yet, one with the contents `new` is created."""
        if life.process.disk is None:
            life.process.disk = sqlite3.connect(":memory:", factory=Disk)
            life.process.disk.deserialize(new)
        return life.process.disk

    def _spooled_samples(self, group: str) -> Sequence[Trajectory] | None:
        """The samples of a group on the trainer's disk; None if the group is not there."""
        disk = self.processes["trainer-0"].disk
        rows = disk.execute("SELECT frame FROM parts WHERE id = ?", (group,)).fetchall() if disk else []
        samples = [Trajectory.of_frame(frame) for (frame,) in rows]
        return samples if len(samples) == self.oracle.memory.size(group, self.config.group_size) else None

    def _samples_of(self, prompt: int) -> dict[tuple[str, int], float]:
        """The samples of a prompt on the trainer's disk, and when they were stored."""
        disk = self.processes["trainer-0"].disk
        rows = disk.execute("SELECT id, place FROM parts WHERE prompt_index = ?", (prompt,)) if disk else []
        return {(group, place): self.stored[group, place] for group, place in rows}

    def _has_calls(self, group: str, place: int) -> bool:
        disk = self.processes["trainer-0"].disk
        key = "id = ? AND place = ?"
        return bool(disk and disk.execute(f"SELECT 1 FROM unfinished WHERE {key}", (group, place)).fetchone())

    def _stored_calls(self, group: str) -> list[np.ndarray]:
        disk = self.processes["trainer-0"].disk
        frames = disk.execute("SELECT frame FROM unfinished WHERE id = ?", (group,)) if disk else []
        return [call.sampled.tokens for (frame,) in frames for call in unpacked(frame)]

    def _spooled(self, trainer: str) -> tuple[Mapping[str, int], Collection[str]]:
        disk = self.processes["trainer-0"].disk
        kinds = dict(disk.execute("SELECT id, 0 FROM unfinished")) if disk else {}
        kinds |= dict(disk.execute("SELECT id, count(*) FROM parts GROUP BY id")) if disk else {}
        trainers = [life for life in self.incarnations if life.role == "trainer" and life.alive]
        stored = {group for life in trainers for group, number in life.storing.items() if number}
        if not any(life.bus.identity.name == trainer for life in trainers):
            stored |= set(kinds)  # the trainer has died, and the next one empties the spool when it starts
        # One that does not know yet that it was replaced may put groups on the disk, which both of them have here.
        for current in trainers:
            checkpoints = getattr(current.actor.role, "_checkpoints", None)
            if checkpoints is not None and checkpoints.in_progress:  # it forgets them once the master has answered
                stored |= {group for groups in self.oracle.disk.batches.values() for group in groups}
            if current.bus.identity.name == trainer:
                foreign = (group for group in kinds if self.spooled_by[group][0] is not current)
                stored |= {group for group in foreign if self.spooled_by[group][1] >= current.began}
        return kinds, stored

    def _busy(self, seconds: float) -> str:
        for life in self.incarnations:
            if life.alive and life.loop.state is RUNNING and (oldest := life.toil.oldest):
                began, what = oldest
                worked = life.loop.time() - began
                is_member = life.bus.identity.name in self.oracle.memory.members
                if is_member and worked > seconds and self.scheduler.now - self.oracle.disturbed_until > seconds:
                    return f"{life.process.name} has been at work for {worked:.1f} s, {what}"
        return ""

    def _removed(self, name: str, reason: str) -> None:
        """The master has removed a member."""
        identity = self.oracle.removed(reason)
        if "no progress" in reason:
            self.oracle.remedied(f"{name} is fenced")
        life, model = self.processes[name.replace("/", "-")].running, self.model
        if reason.startswith("it hangs") and not (life and life.toil.hangs):
            self.fail(Violation(f"{name} is fenced, because {reason}, but nothing hangs in it", name))
        if reason.startswith("nobody listens") and life and life.alive and life.bus.identity.name == identity:
            self.fail(Violation(f"{name} is removed, because {reason}, but it lives", name))
        if reason.startswith("silent") and life is not None and life.alive and life.loop.state is RUNNING:
            heard = model.lease_seconds + 2 * model.heartbeat_seconds < self.scheduler.now - self.oracle.disturbed_until
            if heard and life.bus.identity.name in self.oracle.memory.members:
                self.fail(Violation(f"{name} is fenced as {reason}, but nothing keeps it from being heard", name))

    def _latency(self, process: Process) -> float:
        return DISK_SECONDS * (0.2 + self.random.random()) + process.slower * self.random.random()

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.fail(Violation(f"{loop.name}: {context.get('message')}: {type(error).__name__}: {error}", loop.name))

    def _bury(self) -> None:
        self._buried = True
        hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
        for loop in [*(life.loop for life in self.incarnations), *([self._users] if self._users else [])]:
            loop.bury()
        sys.unraisablehook = hook
        for process in self.processes.values():
            if process.disk is not None:
                process.disk.scrap()

    # --- faults

    def _schedule_faults(self) -> None:
        for fault in self.plan.faults:
            self.scheduler.call_at(fault.at, self._befall, fault)
        self.scheduler.call_at(self.plan.until, self._calm)

    def _befall(self, fault: faults.Fault) -> None:
        if self.over:
            return
        self.fault(f"{fault}")
        calm = self.oracle.disturbed_until < self.scheduler.now
        self._disturb(_seconds_of(fault))
        self.counters[type(fault).__name__.lower()] += 1
        now = self.scheduler.now
        self._come_near(type(fault).__name__.lower())
        match fault:
            case faults.Kill(_, name, restart_after, silent, steps):
                if life := self._running(name):
                    life.loop.on_fuse = functools.partial(self.kill, life, restart_after, silent)
                    life.loop.fuse = steps + 1
                    life.loop.call_soon(_nothing)
            case faults.Leave(_, name, restart_after):
                if life := self._running(name):
                    life.restart_after = restart_after
                    life.stays_away = restart_after is None
                    if calm and self._has_time_to_save(life):
                        life.left_calmly_at = now
                    if not life.loop.send_signal(signal.SIGTERM):
                        self.kill(life, restart_after)
            case faults.Pause(_, name, seconds, replaced):
                if life := self._running(name):
                    life.loop.pause()
                    self.scheduler.call_at(now + seconds, life.loop.resume)
                    if replaced:
                        self._restart(life.process, seconds / 2)
            case faults.Arrive(_, name):
                self.processes[name] = Process(name)
                self.start(self.processes[name])
            case faults.Replace(_, name):
                if life := self._running(name):
                    self.start(life.process)
            case faults.Partition(_, side, other, seconds, one_way):
                for a in side:
                    for b in other:
                        self.wire.cut(a, b)
                        if not one_way:
                            self.wire.cut(b, a)
                self.scheduler.call_at(now + seconds, self.wire.heal)
            case faults.Reset(_, one_name, other_name):
                self.wire.reset(one_name, other_name)
            case faults.Storm(_, weather, seconds):
                self.wire.weather = weather
                self.scheduler.call_at(now + seconds, self._clear_up, weather)
            case faults.SlowDisk(_, name, slower, seconds):
                self.processes[name].slower = slower
                self.scheduler.call_at(now + seconds, self._speed_up, name)
            case faults.FullDisk(_, name, seconds):
                self.processes[name].limit_disk(True)
                self.scheduler.call_at(now + seconds, self.processes[name].limit_disk, False)
            case faults.ClockJump(_, name, seconds):
                if life := self._running(name):
                    life.loop.jump(seconds)
            case faults.Resume():
                self._resume(fault)
            case faults.Damage():
                self._damage()
            case faults.Hang(_, name, work):
                if life := self._running(name):
                    life.toil.to_hang.add(work)
            case _:
                assert_never(fault)

    def _come_near(self, fault: str) -> None:
        """The fault happens now: events soon afterwards are counted with it."""
        self.oracle.fault, self.oracle.fault_until = fault, self.scheduler.now + NEAR_SECONDS

    def _has_time_to_save(self, life: Incarnation) -> bool:
        """True if a trainer that is told to leave can end its step and save a checkpoint before it has to end."""
        pace, works = self.model.pace, life.role == "trainer" and life.actor.state == "healthy"
        quick = 4 * (pace.step + pace.write + pace.save) < self.model.drain_seconds
        return works and quick and not life.toil.to_hang and self._running("master-0") is not None

    def _resume(self, fault: faults.Resume) -> None:
        if self.over:
            return
        if fault.back is not None and not self.oracle.disk.checkpoint:
            self.scheduler.call_at(self.scheduler.now + 0.1, self._resume, fault)
            return
        self._come_near("resume")
        for life in self.incarnations:
            if life.ended and life.process.running is life:
                self._restart(life.process, SUPERVISOR_SECONDS * self.random.random())
            self.kill(life, SUPERVISOR_SECONDS * self.random.random())
        if fault.back is not None:
            self._go_back(fault.back, fault.spool_lost)
        version = self.oracle.memory.version
        self.model = replace(self.model, steps=max(1, version, self.model.steps + fault.more_steps))
        bound = max(fault.max_staleness, int(0 < self.model.share < 1))  # beside a batch of rows, sessions need room
        self.config = self.oracle.config = config_of(replace(self.model, max_staleness=bound))
        # What is alive may have been admitted by either bound.
        self.model = replace(self.model, max_staleness=max(self.model.max_staleness, bound))

    def _go_back(self, number: int, spool_lost: bool) -> None:
        """The run goes back to a checkpoint that it has kept, if there is one."""
        master, trainer = self.processes["master-0"], self.processes["trainer-0"]
        if master.disk is None:
            return
        master.limit_disk(False)
        trainer.limit_disk(False)
        journal = WatchedJournal(master.disk)
        journal.oracle, journal.marks = self.oracle, {}
        state = RunState(self.config, journal)
        folders = {version: f"{checkpoint_of(self.config.folder, version)}" for version in journal.kept_versions()}
        versions = [version for version, folder in folders.items() if folder in self.files.folders]
        versions = [v for v in versions if v <= state.checkpoint_version and folders[v] not in self.files.damaged]
        if not versions:
            return
        version = versions[-1 - min(number, len(versions) - 1)]
        self.fault(f"the run goes back to version {version}")
        self.counters["went back"] += 1
        if spool_lost and trainer.disk is not None:
            trainer.disk.executescript("DELETE FROM parts; DELETE FROM unfinished")
        whole_group = f"CASE WHEN prompt_index < 0 THEN 1 ELSE {self.model.group_size} END"
        complete = f"SELECT id FROM parts GROUP BY id HAVING count(*) = {whole_group}"
        spooled = {group for (group,) in trainer.disk.execute(complete)} if trainer.disk else set()
        undone = undone_by(journal.kept(version))
        trainer.rollouts[:] = [rollout for rollout in trainer.rollouts if not undone(rollout.group.id)]
        past_state.return_to(state, journal.kept(version), spooled)
        self.oracle.went_back(version, spooled)
        self.oracle.check_receipts(state.sessions.receipts, "after the way back")
        journal.compact(state.dump())
        journal._pending.write(journal._connection)
        if trainer.disk is not None:
            spool = Spool(trainer.disk)
            spool.forget([group for group in spool.ids() if not state.ledger.state.needs_payload(group)])

    def _damage(self) -> None:
        book, life = self.oracle.disk, self._running("trainer-0")
        if book.covered < book.checkpoint and life:
            self._come_near("damage")
            self.files.damaged.add(str(checkpoint_of(self.config.folder, book.checkpoint)))
            self.kill(life, SUPERVISOR_SECONDS)
        elif not self.over:
            self.scheduler.call_at(self.scheduler.now + 0.1, self._damage)

    def _running(self, name: str) -> Incarnation | None:
        life = self.processes[name].running
        return life if life is not None and life.alive else None

    def _clear_up(self, weather: Weather) -> None:
        if self.wire.weather is weather:
            self.wire.weather = Weather()

    def _speed_up(self, name: str) -> None:
        self.processes[name].slower = 0.0

    def _calm(self) -> None:
        """End all faults: from now on, nothing fails any more."""
        self.fault("faults end")
        self.wire.weather = Weather()
        self.wire.heal()
        calm = Mishaps()
        for name in Mishaps.__slots__:
            setattr(self.plan.mishaps, name, getattr(calm, name))
        for process in self.processes.values():
            process.slower = 0.0
            process.limit_disk(False)
        for life in self.incarnations:
            life.loop.resume()
            life.loop.before_work = life.loop.after_work = life.network.on_answer = None
            life.loop.fuse = 0
            life.toil.recover()

    # --- the trace

    def _trace_message(self, source: SimNetwork, target: SimNetwork, frames: list[Frame], fate: str) -> None:
        try:
            header = decode_header(frames)
        except Exception:
            frames = frames[1:]
            header = decode_header(frames)
        body = decode_body(header.kind, frames)
        fields = ", ".join(f"{name}={_short(value)}" for name, value in body.__dict__.items())
        number = f"{header.sender}:{header.id}" if header.id else f"re {header.reply_to or header.part}"
        again = f" attempt {header.attempt}" if header.attempt else ""
        self.say(source.name, f"-> {target.name}: {header.kind}({fields}) [{number}{again}] {fate}")


class _Judge:
    """Passes the reports of one process's learner to the oracle."""

    def __init__(self, world: World, life: Incarnation) -> None:
        self._world = world
        self._one = life

    def trained(self, writer: str, version: int, groups: Sequence[Any], mask_older_than: int | None) -> None:
        if self._one.alive:
            self._world.say(self._one.process.name, f"learner: step {version} on {[group.id for group in groups]}")
            self._world.oracle.trained(writer, version, groups, mask_older_than)

    def uses_devices(self, resident: bool) -> None:
        """The learner computes on devices that it may share with generators."""
        if self._world.config.colocate and self._one.alive:
            self._world.see_sleepers(self._one, resident)

    def computed(self, writer: str, content: bytes, version: int, groups: Sequence[Any], new_content: bytes) -> None:
        self._world.oracle.computed(writer, content, version, groups, new_content)

    def published(self, writer: str, weights: Weights) -> None:
        self._world.say(self._one.process.name, f"learner: wrote {weights.folder}")
        self._world.oracle.wrote(writer, weights)


def _nothing() -> None:
    pass


def _seconds_of(fault: faults.Fault) -> float:
    """How long the fault and what it delays last."""
    match fault:
        case faults.Storm(_, weather, seconds):
            return seconds + 2 * weather.delay_seconds
        case faults.SlowDisk(_, _, slower, seconds):
            return seconds + slower
        case faults.Pause(_, _, seconds) | faults.Partition(_, _, _, seconds) | faults.FullDisk(_, _, seconds):
            return seconds
    return 0.0


def _keep_no_log(path: Path) -> None:
    pass


def _short(value: Any) -> str:
    text = " ".join(repr(value.tolist() if hasattr(value, "tolist") else value).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def simulate(seed: int, model: Model | None = None, plan: Plan | None = None, *, traced: bool = False) -> Result:
    """Simulate one seed. In some, a fault then comes right before an event that has happened. If an invariant is
    violated, the result has a trace."""
    world = World(seed, model, deepcopy(plan))
    result, extra = world.run(), None
    random = Random(f"aim {seed}")
    if result.ok and model is None and plan is None and random.random() < faults.AIMED:
        # The same again until the fault comes.
        extra = faults.draw_before(random, world.model.processes, world.model.faults_until, world.oracle.times)
        earlier, result = result, World(seed, extra=extra).run()
        result.counters.update(earlier.counters)
    if traced or not result.ok:
        result = replace(World(seed, model, deepcopy(plan), True, extra).run(), counters=result.counters)
    return result
