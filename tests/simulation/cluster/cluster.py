"""The simulated cluster of the scaling model: the real actors of one run, each a process on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import structlog
from structlog.typing import EventDict

from actors.generator.generator import Generator
from actors.master.master import Master
from actors.reward import Reward
from actors.rollout_manager.rollout_manager import RolloutManager
from actors.runtime import membership
from actors.runtime.bound_addresses import ListenAddress
from actors.runtime.membership import Membership
from actors.trainer.trainer import Trainer
from areal.config import Config
from areal.storage.journal import Journal
from areal.storage.rollouts import RolloutWriter
from areal.storage.spool import Spool
from protocols import transport
from protocols.bus import Bus
from protocols.codec import Frame, decode_body
from protocols.membership_messages import MembersChanged
from protocols.messages import Message
from simulation.cluster.costs import Costs
from simulation.cluster.engines import ModelEngine, ModelLearner, ModelRewards, ModelSource, ModelTokenizer
from simulation.cluster.lengths import Lengths
from simulation.cluster.loop import ProcessLoop, Scheduler, undisturbed
from simulation.cluster.network import SimNetwork, Wire
from simulation.cluster.setups import GRAIN, Setup

# Keep-alives of a stream are sent at longer intervals than in a real run (2 s), only to save simulation time.
SPACED: dict[str, Any] = {"KEEP_ALIVE_SECONDS": 60.0, "STREAM_SILENCE_SECONDS": 200.0}
# Until the measured steps heartbeats are too, for the same reason.
SPACED_HEARTBEAT_SECONDS = 4.0

MASTER = "tcp://master:5555"
# Durations of a commit of the journal or of the spool on a local NVMe disk, and of a message within a data centre.
DISK_SECONDS = 0.002
MESSAGE_SECONDS = 0.0002
# Limit of virtual time per step. A run of this model that takes longer hangs.
LONGEST_STEP_SECONDS = 200_000.0
# Period within which all processes start.
START_SECONDS = 10.0


class MeteredScheduler(Scheduler):
    """Measures the CPU time of each process: of its callbacks and its work in executors. The simulated network takes
    the place of ZeroMQ, and the threads that a real process has besides its event loop are not included."""

    def __init__(self) -> None:
        super().__init__()
        self.real_seconds: defaultdict[str, float] = defaultdict(float)
        self._begun = 0.0
        self._entered = 0.0
        self._current = ""

    def cpu(self) -> Counter[str]:
        """CPU seconds of each process so far. The CPU clock is slow to read, so callbacks are measured in wall time,
        and the wall times are scaled here so that their sum is the CPU time of this thread."""
        share = (time.thread_time() - self._begun) / (sum(self.real_seconds.values()) or 1.0)
        return Counter({name: seconds * share for name, seconds in self.real_seconds.items()})

    def run(self, until: float) -> None:
        self._begun, self._entered = time.thread_time(), time.perf_counter()
        super().run(until)

    def enter(self, loop: ProcessLoop | None) -> None:
        now = time.perf_counter()
        self.real_seconds[self._current] += now - self._entered
        self._entered, self._current = now, loop.name if loop else ""
        super().enter(loop)


class _Folder:
    """Replaces the run folder: passes the metrics of each step to the cluster."""

    path = Path("runs/scale")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    filling = ""

    def free_reserve(self) -> None:
        pass

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        self._cluster.stepped(metrics)

    def record_heartbeat(self, *args: Any) -> None:
        pass

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._cluster.fail(f"the run ended early: {summary['reason']}")


@dataclass(slots=True)
class Totals:
    """All totals at one moment of the run."""

    now: float
    cpu: Counter[str]
    messages: Counter[str]
    engines: Counter[str]
    learner: Counter[str]
    tokens: int
    logged: Counter[str]


class Cluster:
    """All processes of one set-up, from their start until the last measured step."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.costs = Costs(setup)
        self.config = config_of(setup)
        self.scheduler = MeteredScheduler()
        self.wire = Wire(self.scheduler, Random(setup.seed), MESSAGE_SECONDS)
        self.wire.watch = self._count
        self.messages: Counter[str] = Counter()
        self.logged: Counter[str] = Counter()
        self.steps: list[dict[str, Any]] = []
        self.engines: list[ModelEngine] = []
        self.learner = ModelLearner(self.costs)
        self._lengths = Lengths(setup)
        self._random = Random(setup.seed)
        self._loops: list[ProcessLoop] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._totals: list[Totals] = []
        self._failure: str | None = None
        self._end_spacing: Callable[[], Any]

    def run(self) -> tuple[Totals, Totals, float]:
        """Returns the totals at the beginning and at the end of the measured steps, and the CPU seconds of the
        simulation. Raises RuntimeError if an actor fails or the run makes no progress, and EndlessCallbacks."""
        setup = self.setup
        self._start("master", 0, 0.0)
        for role, number in (
            ("trainer", 1),
            ("reward", setup.rewards),
            ("generator", setup.generators),
            ("rollout_manager", setup.managers),
        ):
            for index in range(number):
                self._start(role, index, 0.1 + self._random.random() * START_SECONDS)
        begun = time.thread_time()
        spaced = patch.object(membership, "HEARTBEAT_SECONDS", SPACED_HEARTBEAT_SECONDS)
        self._end_spacing = spaced.stop
        events = patch("protocols.bus.decode_body", cache_of_events(decode_body))
        with _quiet(self.logged), patch.multiple(transport, **SPACED), events:
            spaced.start()
            try:
                self.scheduler.run((setup.warm_up + setup.steps) * LONGEST_STEP_SECONDS)
            finally:
                for loop in self._loops:
                    loop.bury()
                spaced.stop()
        if self._failure is not None or len(self._totals) < 2:
            raise RuntimeError(self._failure or f"the run makes no progress after {len(self.steps)} steps")
        start, end = self._totals
        return start, end, time.thread_time() - begun

    def fail(self, why: str) -> None:
        self._failure = self._failure or why
        self.scheduler.stopped = True

    def stepped(self, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)
        if len(self.steps) == self.setup.warm_up:
            self._end_spacing()
            self._mark()
        if len(self.steps) == self.setup.warm_up + self.setup.steps:
            self._mark()
            self.scheduler.stopped = True

    def _mark(self) -> None:
        engines: Counter[str] = Counter()
        for engine in self.engines:
            engines.update(engine.account())
        learner = self.learner
        self._totals.append(
            Totals(
                self.scheduler.now,
                self.scheduler.cpu(),
                self.messages.copy(),
                engines,
                learner.shares.copy(),
                learner.tokens,
                self.logged.copy(),
            )
        )

    def _count(self, source: SimNetwork, target: SimNetwork, frames: list[Frame], fate: str) -> None:
        self.messages[source.name] += 1
        self.messages[target.name] += 1

    # --- processes

    def _start(self, role: str, index: int, at: float) -> None:
        name = f"{role}-{index}"
        loop = ProcessLoop(self.scheduler, name, lambda: DISK_SECONDS)  # type: ignore[abstract]  # it has what asyncio needs
        loop.on_exception = lambda loop, context: self.fail(f"{loop.name}: {context.get('exception')!r}")
        self._loops.append(loop)
        identity = f"{role}/{'0' if role == 'master' else '?'}#{index:08x}"
        bus = Bus(identity, SimNetwork(self.wire, name, loop), secret=name.encode())
        self.scheduler.call_at(at, self._begin, role, index, bus, loop=loop)

    def _begin(self, role: str, index: int, bus: Bus) -> None:
        actor = self._make(role, index, bus)
        task = asyncio.get_running_loop().create_task(actor.run())
        task.add_done_callback(lambda task: self._ended(role, task))
        self._tasks.append(task)

    def _make(self, role: str, index: int, bus: Bus) -> Any:
        listen_address = ListenAddress(f"{role}-{index}", f"{role}-{index}")
        common: dict[str, Any] = {"index": index, "listen_address": listen_address, "keep_log": lambda path: None}
        match role:
            case "master":
                journal = Journal(_memory())
                return Master(bus, self.config, journal=journal, folder=_Folder(self))  # type: ignore[arg-type]
            case "trainer":
                return Membership(
                    Trainer,
                    bus,
                    MASTER,
                    **common,
                    start_learner=self._start_learner,
                    open_spool=lambda path: Spool(_memory()),
                    open_rollouts=lambda config: RolloutWriter(Path(), "none", 0, lambda sequences: []),
                )
            case "generator":
                return Membership(Generator, bus, MASTER, **common, start_engine=self._start_engine)
            case "reward":
                return Membership(Reward, bus, MASTER, **common, make_pool=self._make_pool)
        source, tokenizer = ModelSource(), ModelTokenizer()
        return Membership(
            RolloutManager,
            bus,
            MASTER,
            **common,
            open_source=lambda config, seed: source,
            load_tokenizer=lambda *_: tokenizer,
        )

    async def _start_engine(self, model: Path, config: Any, **options: Any) -> Any:
        engine = ModelEngine(self.costs, self._lengths)
        self.engines.append(engine)
        return engine

    async def _start_learner(self, *_: Any) -> Any:
        return self.learner

    def _make_pool(self, *args: Any) -> Any:
        return ModelRewards(self._random)

    def _ended(self, role: str, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        self.fail(f"a {role} ended: {error!r}" if error else f"a {role} ended: {task.result().reason}")


def cache_of_events(decode: Callable[[str, Sequence[Frame]], Message]) -> Callable[[str, Sequence[Frame]], Message]:
    """Decodes each event of the directory once, not for each of thousands of subscribers, who get the same frames."""
    last: tuple[Sequence[Frame], Message | None] = (), None

    def decode_once(kind: str, frames: Sequence[Frame]) -> Message:
        nonlocal last
        if kind != MembersChanged.kind:
            return decode(kind, frames)
        if last[1] is None or last[0] is not frames:
            last = frames, decode(kind, frames)
        assert last[1] is not None
        return last[1]

    return decode_once


def config_of(setup: Setup) -> Config:
    """The configuration of the run. Its lengths are in tokens of messages, each of which stands for GRAIN tokens."""
    return Config.model_validate(
        {
            "name": "scale",
            "model": "model",
            "seed": setup.seed,
            # More steps than are simulated: near its end a run starts no new groups, and that is not to be measured.
            "steps": setup.warm_up + setup.steps + 2 * (setup.max_staleness + 1),
            "batch_size": setup.batch_size,
            "group_size": setup.group_size,
            "max_staleness": setup.max_staleness,
            "run_ahead": setup.run_ahead,
            "observe": {"rollouts": "none"},  # their notes have times, which no two runs share
            "data": {"source": "addition", "eval_size": 0},
            "sampling": {"max_new_tokens": setup.max_new_tokens // GRAIN},
            "reward": {"functions": ["addition"], "count": setup.rewards},
            "generator": {
                "count": setup.generators,
                "max_concurrent_rollouts": setup.concurrent,
                "stream_interval": setup.chunk // GRAIN,
                "tensor_parallel": setup.llm.devices_an_engine,
            },
            "rollout_manager": {"count": setup.managers, "max_concurrent_groups": setup.groups_a_manager},
            "trainer": {"minibatches": setup.minibatches, "checkpoint_every": 1_000_000},
            "master": {"address": MASTER},
        }
    )


def _memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", check_same_thread=False)


@contextlib.contextmanager
def _quiet(logged: Counter[str]) -> Iterator[None]:
    """Count the actors' log lines instead of printing them, switch off garbage collection until the end of the block,
    and ignore errors of coroutines that are cut off."""

    def tally(logger: Any, method: str, event: EventDict) -> EventDict:
        logged[f"{method}: {event['event']}"] += 1
        raise structlog.DropEvent

    logging, unraisable = structlog.get_config(), sys.unraisablehook
    structlog.configure(processors=[tally], cache_logger_on_first_use=False)
    sys.unraisablehook = lambda unraisable: None
    try:
        with undisturbed(lambda stream: None):
            yield
    finally:
        structlog.configure(**logging)
        sys.unraisablehook = unraisable
