"""How the system scales: the real actors on virtual time, with engines that are formulas.

    report = run(Setup(devices=512))          # `python -m areal simulate --devices 8,32,128,512`

Master, managers, generators, rewards and trainer are the real ones, and so is every message between them. What an
engine does in a second is computed, from parameters that stand in `Hardware` and `Llm`, each with its source.
docs/scaling.md has the formulas in words, and what came out.

One token of a message stands for GRAIN tokens of the model: the control plane neither sees tokens nor cares, and a
batch of the paper would be 0.7 GB.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import structlog
from rich.console import Console
from rich.table import Table

from actors.generator import Generator
from actors.master import Master
from actors.reward import Reward
from actors.rollout_manager import RolloutManager
from actors.simulation.engines import Mishaps, Pace, SimRewards, SimSource, SimTokenizer
from actors.simulation.loop import ProcessLoop, Scheduler
from actors.simulation.network import SimNetwork, Weather, Wire
from actors.simulation.quiet import garbage_kept, replaced
from actors.trainer import Trainer
from areal.config import Config, SamplingConfig, UserError
from areal.engines.generation import Chunk, EngineError, EngineStats, LoadTimes
from areal.journal import Journal
from areal.spool import Spool
from areal.trajectory import Group
from protocols import transport
from protocols.network import Frame
from protocols.transport import Bus

GRAIN = 64
# Tokens of a sequence in one message. The default of `generator.stream_interval` is 16: more messages, to the managers
# alone. Time between keep-alives of a stream: 2 s in a real run. Both only spare the simulation's own time.
CHUNK = 1024
SPACED = {"KEEP_ALIVE_SECONDS": 60.0, "STREAM_SILENCE_SECONDS": 200.0}

MASTER = "tcp://master:5555"
# A commit of the journal or of the spool on a local NVMe disk, and a message within a data centre.
DISK_SECONDS = 0.002
WEATHER = Weather(latency=0.0002, jitter=0.0002)
# What no run of this model may take: something hangs.
LONGEST_STEP_SECONDS = 200_000.0
# Within which all processes start.
START_SECONDS = 10.0
GENERATING_SHARE = 0.75
# A device takes 3.6 s for a micro-batch of 16k tokens with 7B.
MICROBATCH_SECONDS = 3.6


@dataclass(frozen=True, slots=True)
class Hardware:
    """One H800 (the paper's: 8 in a node, NVLink inside, RoCE with 3.2 Tb/s a node between them)."""

    peak_flops: float = 989e12
    """bf16, dense: NVIDIA's data sheet of the H100/H800 SXM."""
    memory: float = 80e9
    memory_bandwidth: float = 3.35e12
    """Bytes/s, the same data sheet."""
    memory_share: float = 0.85
    """Of the memory, for weights and KV cache of an engine."""
    bandwidth_reached: float = 0.8
    """Of the memory bandwidth, by decoding kernels: what STREAM-like tests reach on an H100 is 0.87."""
    decode_overhead: float = 8e-3
    """Seconds of a decoding step beside reading memory (scheduling, sampling, launches). Fitted to the paper's 1.5B run
    at eta 0 (see docs/scaling.md)."""
    allreduce: float = 15e-6
    """Seconds of one all-reduce of a decoding step between the devices of an engine; two a layer."""
    prefill_utilisation: float = 0.5
    """Of the peak, by prefill: compute-bound, large matrices."""
    network_bandwidth: float = 50e9
    """Bytes/s a device: 400 Gb/s."""
    devices_a_node: int = 8
    write_bandwidth: float = 5e9
    """Bytes/s with which rank 0 writes a file of weights: one client of a parallel file system. Assumed."""
    read_bandwidth: float = 10e9
    """Bytes/s with which a node reads a file of weights; its engines share what is in the page cache. Assumed."""
    storage_bandwidth: float = 400e9
    """Bytes/s of the shared file system, all nodes together. Assumed."""
    pause_seconds: float = 0.05
    """Stopping and starting an engine around a load."""
    spool_bandwidth: float = 2e9
    """Bytes/s with which the trainer reads its batch from the spool."""


@dataclass(frozen=True, slots=True)
class Llm:
    """A model of the paper: DeepSeek-R1-Distill-Qwen. The sizes are those of its config.json."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_size: int
    training_utilisation: float
    """MFU of training, fitted to the paper (docs/scaling.md): 1.5B: 371.7 k tokens/s on 128 devices; 7B: 250 steps in
    25.4 h on 192."""
    devices_an_engine: int
    """Tensor-parallel size of generation; our choice."""

    @property
    def weight_bytes(self) -> float:
        return 2.0 * self.parameters

    @property
    def kv_bytes(self) -> float:
        """Of one token."""
        return 2.0 * 2 * self.layers * self.kv_heads * self.head_size

    def training_flops(self, tokens: int) -> float:
        """Of one sequence: a forward pass for the proximal log-probs, then forward and backward; causal attention."""
        return 8.0 * self.parameters * tokens + 8.0 * self.layers * self.hidden * tokens**2


MODELS = {
    "1.5b": Llm("1.5b", 1.54e9, 28, 1536, 2, 128, training_utilisation=0.20, devices_an_engine=1),
    "7b": Llm("7b", 7.6e9, 28, 3584, 4, 128, training_utilisation=0.31, devices_an_engine=2),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """One run. The defaults are the paper's for mathematics: 512 prompts x 16 samples, 4 minibatches, eta 8, 16k."""

    devices: int
    llm: Llm = MODELS["7b"]
    max_staleness: int = 8
    run_ahead: str = "auto"
    warm_up: int = 4
    """Steps before those that count."""
    steps: int = 8
    """Steps that count."""
    batch_size: int = 512
    group_size: int = 16
    minibatches: int = 4
    prompt_tokens: int = 1024
    max_new_tokens: int = 15 * 1024
    length_median: float = 6200.0
    length_sigma: tuple[float, float] = (0.5, 0.62)
    """Log-normal lengths: spread between prompts, and between the samples of one; together 0.8. With the paper's limit
    of 27k, 9.3k tokens a sample are trained, as its step times and its throughput say."""
    concurrent: int = 128
    """Sequences an engine runs at once."""
    seed: int = 0
    hardware: Hardware = field(default_factory=Hardware)

    @property
    def generators(self) -> int:
        return max(1, round(self.devices * GENERATING_SHARE / self.llm.devices_an_engine))

    @property
    def trainer_devices(self) -> int:
        return max(1, self.devices - self.generators * self.llm.devices_an_engine)

    @property
    def managers(self) -> int:
        """One for every 32 devices."""
        return max(1, self.devices // 32)

    @property
    def rewards(self) -> int:
        return max(1, self.devices // 128)

    @property
    def groups_a_manager(self) -> int:
        return max(1, self.generators * self.concurrent // self.group_size // self.managers + 1)


# ----------------------------------------------------------------------------------------------------------- formulas


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take in seconds, for one set-up."""

    setup: Setup

    def decode_step(self, sequences: int, context: float) -> float:
        """One token for each of `sequences`, which have `context` tokens together: reads all weights and their KV."""
        llm, hardware, n = self.setup.llm, self.setup.hardware, self.setup.llm.devices_an_engine
        read = (llm.weight_bytes + context * llm.kv_bytes) / (
            n * hardware.memory_bandwidth * hardware.bandwidth_reached
        )
        compute = 2 * llm.parameters * sequences / (n * hardware.peak_flops * hardware.prefill_utilisation)
        talk = 2 * llm.layers * hardware.allreduce if n > 1 else 0.0
        return hardware.decode_overhead + talk + max(read, compute)

    def prefill(self, tokens: float) -> float:
        llm, hardware = self.setup.llm, self.setup.hardware
        flops = 2 * llm.parameters * tokens
        return flops / (llm.devices_an_engine * hardware.peak_flops * hardware.prefill_utilisation)

    @property
    def kv_capacity(self) -> float:
        """Tokens that an engine has room for."""
        llm, hardware = self.setup.llm, self.setup.hardware
        room = llm.devices_an_engine * hardware.memory * hardware.memory_share - llm.weight_bytes
        return room / llm.kv_bytes

    @property
    def load(self) -> float:
        """All engines read the new weights at about the same time, each node once."""
        setup, hardware = self.setup, self.setup.hardware
        nodes = max(1.0, setup.generators * setup.llm.devices_an_engine / hardware.devices_a_node)
        each = min(hardware.read_bandwidth, hardware.storage_bandwidth / nodes)
        return hardware.pause_seconds + setup.llm.weight_bytes / each

    @property
    def publish(self) -> float:
        """Rank 0 gathers the weights and writes them."""
        hardware = self.setup.hardware
        return self.setup.llm.weight_bytes * (1 / hardware.network_bandwidth + 1 / hardware.write_bandwidth)

    @property
    def gradients(self) -> float:
        """The optimizer steps' all-reduces of fp32 gradients, over a ring of nodes."""
        setup, hardware = self.setup, self.setup.hardware
        if setup.trainer_devices == 1:
            return 0.0
        at_once = min(setup.trainer_devices, hardware.devices_a_node) * hardware.network_bandwidth
        return setup.minibatches * 2 * 4 * setup.llm.parameters / at_once

    def fetch(self, tokens: int) -> float:
        return 12 * tokens / self.setup.hardware.spool_bandwidth

    def training(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Seconds of computing, and those that even shares would take. Dealt out as areal.packing does: longest first,
        to the rank with the fewest tokens."""
        setup, llm = self.setup, self.setup.llm
        rate = setup.hardware.peak_flops * llm.training_utilisation
        seconds = even = 0.0
        part = -(-len(lengths) // setup.minibatches)
        for first in range(0, len(lengths), part):
            ranks = [(0, rank) for rank in range(setup.trainer_devices)]
            work = [0.0] * setup.trainer_devices
            for tokens in sorted(lengths[first : first + part], reverse=True):
                load, rank = ranks[0]
                heapreplace(ranks, (load + tokens, rank))
                work[rank] += llm.training_flops(tokens)
            seconds += max(work) / rate
            even += sum(work) / len(work) / rate
        return seconds, even

    def generating_bound(self, mean_context: float) -> float:
        """Tokens/s of all engines, each full and never interrupted."""
        setup = self.setup
        sequences = min(setup.concurrent, int(self.kv_capacity / mean_context))
        return setup.generators * sequences / self.decode_step(sequences, sequences * mean_context)


class Lengths:
    """How long each completion gets: a function of the seed, the prompt, and which sample of it this is. So runs that
    differ in their devices or settings have the same work to do."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._asked: Counter[int] = Counter()

    def next(self, prompt: int) -> tuple[int, bool]:
        """Of the next sample of this prompt: tokens, a multiple of GRAIN, and whether it was cut."""
        setup, sample = self._setup, self._asked[prompt]
        self._asked[prompt] += 1
        between, within = setup.length_sigma
        of_prompt = Random(f"{setup.seed}:{prompt}").gauss(0.0, between)
        of_sample = Random(f"{setup.seed}:{prompt}:{sample}").gauss(0.0, within)
        wanted = setup.length_median * 2.718281828 ** (of_prompt + of_sample)
        if wanted > setup.max_new_tokens:
            return setup.max_new_tokens, True
        return max(1, round(wanted / GRAIN)) * GRAIN, False


# ------------------------------------------------------------------------------------------------------------ engines


class _Stream:
    """One sequence in an engine: `left` tokens after the chunk that is being sampled, which is done at `begin + due`
    steps of the engine. `parts` of it are of earlier versions."""

    __slots__ = ("begin", "chunks", "context", "cut", "due", "labelled", "left", "parts", "waiter")

    def __init__(self, context: int, length: int, cut: bool) -> None:
        self.context = context
        self.left = length
        self.cut = cut
        self.begin = 0.0
        self.due = 0
        self.labelled = 0
        self.parts: list[tuple[int, int]] = []
        self.chunks: deque[Chunk] = deque()
        self.waiter: asyncio.Future | None = None

    def go_on(self, begin: float, most: int) -> float:
        """Sample the next chunk from engine step `begin`; returns the step at which it is there."""
        self.begin, self.due = begin, min(most, self.left)
        self.left -= self.due
        self.labelled = 0
        return begin + self.due

    def label(self, done: int, version: int) -> None:
        """The first `done` tokens of this chunk are there; those without a version were sampled by this one."""
        new = done // GRAIN - self.labelled
        if new > 0:
            self.parts.append((version, new))
            self.labelled += new

    def emit(self, version: int) -> None:
        self.label(self.due, version)
        versions, counts = np.array(self.parts, np.int32).T
        versions = np.repeat(versions, counts)
        self.parts.clear()
        n = len(versions)
        finish = None if self.left else ("length" if self.cut else "stop")
        self.chunks.append(Chunk(np.zeros(n, np.int32), np.zeros(n, np.float32), versions, finish))
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class ModelEngine:
    """Processor sharing: every running sequence gets a token in each decoding step, and the step takes the longer the
    more run. Time is told in steps, so that one timer, for the next chunk that will be done, is enough."""

    def __init__(self, costs: Costs, lengths: Lengths) -> None:
        self.version = 0
        self.tokens = 0.0
        self.sequence_seconds = self.busy_seconds = self.load_seconds = 0.0
        self._costs = costs
        self._setup = costs.setup
        self._lengths = lengths
        self._loop = asyncio.get_running_loop()
        self._running: dict[_Stream, None] = {}
        self._waiting: dict[_Stream, None] = {}
        self._due: list[tuple[float, int, _Stream]] = []
        self._serial = count()
        self._steps = 0.0
        self._context = 0.0
        self._at = self._loop.time()
        self._step_seconds = 1.0
        self._stalled_until = 0.0
        self._paused = False
        self._timer: Any = None
        self._error: EngineError | None = None

    async def generate(self, request_id: str, tokens: Sequence[int], sampling: SamplingConfig) -> AsyncIterator[Chunk]:
        prompt = tokens[1]  # SimTokenizer's prompts are their number between two marks
        stream = _Stream(self._setup.prompt_tokens, *self._lengths.next(prompt))
        self._waiting[stream] = None
        self._advance()
        self._admit()
        self._plan()
        try:
            while True:
                while not stream.chunks:
                    if self._error is not None:
                        raise self._error
                    stream.waiter = self._loop.create_future()
                    await stream.waiter
                chunk = stream.chunks.popleft()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._forget(stream)

    async def load(self, folder: Path, version: int) -> LoadTimes:
        """Pause, read, and prefill every running sequence again."""
        self._advance()
        self._paused = True
        self._plan()
        await asyncio.sleep(self._costs.load)
        self._advance()
        interrupted = len(self._running)
        for stream in self._running:
            stream.label(min(stream.due, int(self._steps - stream.begin)), self.version)
        self.version = version
        self._paused = False
        prefill = self._costs.prefill(self._context)
        self._stall(prefill)
        self._admit()
        self._plan()
        self.load_seconds += self._costs.load + prefill
        return LoadTimes(0.0, self._costs.load, prefill, interrupted)

    def stats(self) -> EngineStats:
        use = self._context / self._costs.kv_capacity
        return EngineStats(len(self._running), len(self._waiting), use, int(self.tokens))

    async def close(self) -> None:
        self._error = EngineError("The engine was closed.")
        for stream in [*self._running, *self._waiting]:
            if stream.waiter is not None and not stream.waiter.done():
                stream.waiter.set_result(None)

    def account(self) -> dict[str, float]:
        """Totals up to now."""
        self._advance()
        return {
            "tokens": self.tokens,
            "sequence_seconds": self.sequence_seconds,
            "busy_seconds": self.busy_seconds,
            "load_seconds": self.load_seconds,
        }

    def _advance(self) -> None:
        """Count the steps until now."""
        now, n = self._loop.time(), len(self._running)
        self.sequence_seconds += n * (now - self._at)
        if n:
            self.busy_seconds += now - self._at
        began = max(self._at, self._stalled_until)
        if n and not self._paused and now > began:
            steps = (now - began) / self._step_seconds
            self._steps += steps
            self._context += steps * n
            self.tokens += steps * n
        self._at = now

    def _plan(self) -> None:
        """Be called when the next chunk is done, if nothing changes before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2] not in self._running:
            heappop(self._due)
        if self._paused or not self._due:
            return
        self._step_seconds = self._costs.decode_step(len(self._running), self._context)
        begins = max(self._at, self._stalled_until)
        left = max(0.0, self._due[0][0] - self._steps)
        self._timer = self._loop.call_at(begins + left * self._step_seconds, self._chunk_done)

    def _chunk_done(self) -> None:
        self._timer = None
        self._advance()
        self._steps = max(self._steps, self._due[0][0])
        while self._due and self._due[0][0] <= self._steps:
            at, _, stream = heappop(self._due)
            if stream not in self._running:
                continue
            stream.context += stream.due
            stream.emit(self.version)
            if stream.left:
                heappush(self._due, (stream.go_on(at, CHUNK), next(self._serial), stream))
            else:
                self._forget(stream)
        self._admit()
        self._plan()

    def _admit(self) -> None:
        """Begin what waits, while there is room. A first, short chunk tells at once which version has begun it."""
        setup = self._setup
        while self._waiting and len(self._running) < setup.concurrent and not self._paused:
            stream = next(iter(self._waiting))
            if self._running and self._context + stream.context > self._costs.kv_capacity:
                return
            del self._waiting[stream]
            self._running[stream] = None
            self._context += stream.context
            heappush(self._due, (stream.go_on(self._steps, GRAIN), next(self._serial), stream))
            self._stall(self._costs.prefill(setup.prompt_tokens) / setup.group_size)  # the group shares its prompt

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, self._at) + seconds

    def _forget(self, stream: _Stream) -> None:
        self._waiting.pop(stream, None)
        if stream in self._running:
            del self._running[stream]
            self._context = max(0.0, self._context - stream.context)


class ModelLearner:
    """Takes the time that training takes. `shares`: where the seconds went."""

    def __init__(self, costs: Costs) -> None:
        self.shares: Counter[str] = Counter()
        self.tokens = 0
        self._costs = costs
        self._work_done = 0.0
        self._since: float | None = None

    @property
    def work_done(self) -> int:
        """Micro-batches, about one every MICROBATCH_SECONDS while a step is computed."""
        running = 0.0 if self._since is None else asyncio.get_running_loop().time() - self._since
        return int(self._work_done + running / MICROBATCH_SECONDS)

    async def step(
        self, groups: Sequence[Group], *, version: int, temperature: float, mask_older_than: int | None
    ) -> dict[str, float | None]:
        setup = self._costs.setup
        sampled = [int(t.sampled.sum()) * GRAIN for group in groups for t in group.trajectories]
        lengths = [setup.prompt_tokens + n for n in sampled]
        seconds, even = self._costs.training(lengths)
        shares = {
            "computing": even,
            "uneven shares": seconds - even,
            "gradients": self._costs.gradients,
            "fetching": self._costs.fetch(sum(lengths)),
        }
        self._since = asyncio.get_running_loop().time()
        await asyncio.sleep(sum(shares.values()))
        self._since = None
        self._work_done += 1 + sum(shares.values()) / MICROBATCH_SECONDS
        self.shares.update(shares)
        self.tokens += sum(sampled)
        return {"loss": 0.0}

    async def publish(self, folder: Path) -> None:
        await asyncio.sleep(self._costs.publish)
        self.shares["publishing"] += self._costs.publish

    async def forget(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------ cluster


class MeteredScheduler(Scheduler):
    """Adds up the time of each process: of its callbacks and its work in executors, with the simulated network in place
    of ZeroMQ, and without the threads that a real process has beside its loop."""

    def __init__(self) -> None:
        super().__init__()
        self.real_seconds: Counter[str] = Counter()
        self._begun = 0.0

    def cpu(self) -> Counter[str]:
        """CPU seconds of each process so far. The clock of the CPU is slow to read, so it is read here only, and what
        others took of this core meanwhile is shared out evenly."""
        share = (time.thread_time() - self._begun) / (self.real_seconds.total() or 1.0)
        return Counter({name: seconds * share for name, seconds in self.real_seconds.items()})

    def run(self, until: float) -> None:
        """As `Scheduler.run`, for a cluster in which nobody dies."""
        ready, timers, clock, current = self.ready, self.timers, time.perf_counter, None
        self._begun = time.thread_time()
        seconds, mark = self.real_seconds, clock()
        try:
            while not self.stopped:
                while ready and not self.stopped:
                    callback, args, loop, context, _ = ready.popleft()
                    if callback is None:
                        continue
                    if loop is not current:
                        now = clock()
                        seconds[current.name if current else ""] += now - mark
                        current, mark = loop, now
                        asyncio._set_running_loop(loop)
                    self.callbacks += 1
                    if context is None:
                        callback(*args)
                    else:
                        context.run(callback, *args)
                if not timers or timers[0][0] > until:
                    return
                when, _, handle = heappop(timers)
                self.now = max(self.now, when)
                ready.append(handle)
        finally:
            asyncio._set_running_loop(None)


class _Folder:
    """The run folder: keeps the metrics of each step, and tells the cluster."""

    path = Path("runs/scale")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        self._cluster.stepped(metrics)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._cluster.fail(f"the run ended early: {summary['reason']}")


@dataclass(slots=True)
class _Mark:
    """Totals at one moment."""

    now: float
    cpu: Counter[str]
    messages: Counter[str]
    engines: Counter[str]
    learner: Counter[str]
    tokens: int
    logged: Counter[str]


class Cluster:
    """All processes of one set-up, from their start until the last step that counts."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.costs = Costs(setup)
        self.config = config_of(setup)
        self.scheduler = MeteredScheduler()
        self.wire = Wire(self.scheduler, Random(setup.seed))
        self.wire.weather = WEATHER
        self.wire.watch = self._count
        self.messages: Counter[str] = Counter()
        self.logged: Counter[str] = Counter()
        self.steps: list[dict[str, Any]] = []
        self.engines: list[ModelEngine] = []
        self.learner = ModelLearner(self.costs)
        self.master: Master
        self._lengths = Lengths(setup)
        self._random = Random(setup.seed)
        self._loops: list[ProcessLoop] = []
        self._tasks: list[asyncio.Task] = []
        self._marks: list[_Mark] = []
        self._failure: str | None = None

    def run(self) -> Report:
        """Raises RuntimeError where an actor fails or the run does not get on."""
        setup = self.setup
        self._start("master", 0, 0.0)
        for role, number in (
            ("trainer", 1), ("reward", setup.rewards), ("generator", setup.generators),
            ("rollout_manager", setup.managers),
        ):  # fmt: skip
            for index in range(number):
                self._start(role, index, 0.1 + self._random.random() * START_SECONDS)
        begun = time.thread_time()
        with _quiet(self.logged), replaced(transport, **SPACED):
            try:
                self.scheduler.run((setup.warm_up + setup.steps) * LONGEST_STEP_SECONDS)
            finally:
                for loop in self._loops:
                    loop.bury()
        if self._failure is not None or len(self._marks) < 2:
            raise RuntimeError(self._failure or f"nothing moves any more after {len(self.steps)} steps")
        return Report.of(self, *self._marks, time.thread_time() - begun)

    def fail(self, why: str) -> None:
        self._failure = self._failure or why
        self.scheduler.stopped = True

    def stepped(self, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)
        if len(self.steps) == self.setup.warm_up:
            self._mark()
        if len(self.steps) == self.setup.warm_up + self.setup.steps:
            self._mark()
            self.scheduler.stopped = True

    def _mark(self) -> None:
        engines: Counter[str] = Counter()
        for engine in self.engines:
            engines.update(engine.account())
        learner = self.learner
        self._marks.append(
            _Mark(
                self.scheduler.now, self.scheduler.cpu(), self.messages.copy(), engines, learner.shares.copy(),
                learner.tokens, self.logged.copy(),
            )
        )  # fmt: skip

    def _count(self, source: SimNetwork, target: SimNetwork, frames: list[Frame], fate: str) -> None:
        self.messages[source.name] += 1
        self.messages[target.name] += 1

    # --- processes

    def _start(self, role: str, index: int, at: float) -> None:
        name = f"{role}-{index}"
        loop = ProcessLoop(self.scheduler, name, 0.0, lambda: DISK_SECONDS)
        loop.on_exception = lambda loop, context: self.fail(f"{loop.name}: {context.get('exception')!r}")
        self._loops.append(loop)
        identity = f"{role}/{'0' if role == 'master' else '?'}#{index:08x}"
        bus = Bus(identity, SimNetwork(self.wire, name, loop))
        self.scheduler.call_at(at, self._begin, role, index, bus, loop=loop)

    def _begin(self, role: str, index: int, bus: Bus) -> None:
        actor = self._make(role, index, bus)
        task = asyncio.get_running_loop().create_task(actor.run())
        task.add_done_callback(lambda task: self._ended(role, task))
        self._tasks.append(task)

    def _make(self, role: str, index: int, bus: Bus) -> Any:
        common = {"index": index, "host": f"{role}-{index}", "keep_log": lambda path: None}
        match role:
            case "master":
                journal = Journal(_memory())
                self.master = Master(bus, self.config, journal=journal, folder=_Folder(self))  # type: ignore[arg-type]
                return self.master
            case "trainer":
                return Trainer(
                    bus, MASTER, **common, start_learner=self._start_learner, open_spool=lambda path: Spool(_memory())
                )
            case "generator":
                return Generator(bus, MASTER, **common, start_engine=self._start_engine)
            case "reward":
                return Reward(bus, MASTER, **common, make_pool=self._make_pool)
        source, tokenizer = SimSource(), SimTokenizer()
        return RolloutManager(
            bus, MASTER, **common, open_source=lambda config, seed: source, load_tokenizer=lambda name: tokenizer
        )

    async def _start_engine(self, model: Path, config: Any, *, version: int, seed: int) -> Any:
        engine = ModelEngine(self.costs, self._lengths)
        self.engines.append(engine)
        return engine

    async def _start_learner(self, config: Config) -> Any:
        return self.learner

    def _make_pool(self, *args: Any) -> Any:
        return SimRewards(Pace(), Mishaps(), self._random)

    def _ended(self, role: str, task: asyncio.Task) -> None:
        error = None if task.cancelled() else task.exception()
        self.fail(f"a {role} ended: {error!r}" if error else f"a {role} ended: {task.result().reason}")


def config_of(setup: Setup) -> Config:
    """The run's configuration; lengths in it are in tokens of messages."""
    return Config.model_validate(
        {
            "name": "scale",
            "model": "model",
            "seed": setup.seed,
            # Of steps that never come: the end of a run, at which nothing new begins, is not what is measured.
            "steps": setup.warm_up + setup.steps + 2 * (setup.max_staleness + 1),
            "batch_size": setup.batch_size,
            "group_size": setup.group_size,
            "max_staleness": setup.max_staleness,
            "run_ahead": setup.run_ahead,
            "data": {"source": "addition", "eval_size": 0},
            "sampling": {"max_new_tokens": setup.max_new_tokens // GRAIN},
            "reward": {"functions": ["addition"], "count": setup.rewards},
            "generator": {
                "count": setup.generators,
                "max_concurrent_rollouts": setup.concurrent,
                "stream_interval": CHUNK // GRAIN,
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
    """The actors' logs are only counted, garbage waits until the run is over, and what is cut off ends silently."""

    def tally(logger: Any, method: str, event: dict[str, Any]) -> Any:
        logged[f"{method}: {event['event']}"] += 1
        raise structlog.DropEvent

    logging, unraisable = structlog.get_config(), sys.unraisablehook
    structlog.configure(processors=[tally], cache_logger_on_first_use=False)
    sys.unraisablehook = lambda unraisable: None
    try:
        with garbage_kept(lambda stream: None):
            yield
    finally:
        structlog.configure(**logging)
        sys.unraisablehook = unraisable


# ------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True, slots=True)
class Load:
    """Of one process: messages in and out, and CPU seconds, a second of the run."""

    messages: float
    cores: float


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a set-up. Rates are completion tokens a second, of the steps that count."""

    setup: Setup
    throughput: float
    training_bound: float
    """With even shares and nothing to wait for."""
    generating_bound: float
    """With every engine full and never interrupted."""
    age_bound: float
    """eta + 1 batches in the time that the longest completion takes at the pace of these engines, as busy as they were:
    infinite where there is no bound on the age."""
    step_seconds: float
    shares: dict[str, float]
    """Of a step's time, by what the trainer did. `starved`: fewer than a batch were ready. `stragglers`: a batch was,
    but rule 3 held it back for groups that would be too old afterwards. `control`: the rest."""
    staleness_mean: float
    staleness_max: int
    alive: float
    """Groups, in batches."""
    sequences: float
    """An engine, on average."""
    engines_idle: float
    engines_loading: float
    """Shares of the time."""
    master: Load
    manager: Load
    """The busiest one."""
    generator: Load
    """The busiest one."""
    trainer: Load
    cpu_seconds: float
    """Of the simulation."""
    logged: dict[str, int]
    digest: tuple[Any, ...]
    """Everything above that is simulated: the same for the same set-up."""

    @classmethod
    def of(cls, cluster: Cluster, start: _Mark, end: _Mark, cpu_seconds: float) -> Report:
        setup, costs = cluster.setup, cluster.costs
        seconds = end.now - start.now
        steps = cluster.steps[setup.warm_up :]
        tokens, learner, engines = end.tokens - start.tokens, end.learner - start.learner, end.engines - start.engines
        waited = sum(step["trainer_wait_seconds"] for step in steps)
        starved = min(waited, sum(step["starved_seconds"] for step in steps))
        spent = dict(learner) | {"starved": starved, "stragglers": waited - starved}
        spent["control"] = seconds - sum(spent.values())
        engine_seconds = seconds * setup.generators
        sequences = engines["sequence_seconds"] / engine_seconds
        mean = tokens / (len(steps) * setup.batch_size * setup.group_size)
        pace = costs.decode_step(round(sequences), sequences * (setup.prompt_tokens + mean * 0.7))
        bare = learner["computing"] + learner["publishing"] + learner["gradients"] + learner["fetching"]

        def load(role: str) -> Load:
            names = [name for name in end.messages if name.rpartition("-")[0] == role]
            messages = max(end.messages[name] - start.messages[name] for name in names)
            return Load(messages / seconds, max(end.cpu[name] - start.cpu[name] for name in names) / seconds)

        staleness = [step["staleness_mean"] for step in steps]
        simulated = {
            "throughput": tokens / seconds,
            "training_bound": tokens / bare,
            "generating_bound": costs.generating_bound(setup.prompt_tokens + mean / 2),
            "age_bound": (setup.max_staleness + 1) * tokens / len(steps) / (setup.max_new_tokens * pace),
            "step_seconds": seconds / len(steps),
            "shares": {name: value / seconds for name, value in spent.items()},
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(step["staleness_max"] for step in steps),
            "alive": sum(step["groups_alive"] for step in steps) / len(steps) / setup.batch_size + 1,
            "sequences": sequences,
            "engines_idle": 1 - engines["busy_seconds"] / engine_seconds,
            "engines_loading": engines["load_seconds"] / engine_seconds,
            "logged": dict(end.logged),
        }
        return cls(
            setup=setup, **simulated, master=load("master"), manager=load("rollout_manager"),
            generator=load("generator"), trainer=load("trainer"), cpu_seconds=cpu_seconds,
            digest=(tuple(map(repr, simulated.items())), cluster.wire.digest),
        )  # fmt: skip

    @property
    def bound(self) -> float:
        """What the pools could do at best."""
        return min(self.training_bound, self.generating_bound)

    @property
    def limit(self) -> str:
        """What the trainer's time beside even computing goes to, most of all."""
        name = max((name for name in self.shares if name != "computing"), key=lambda name: self.shares[name])
        return f"{name} {self.shares[name]:.1%}"


def run(setup: Setup) -> Report:
    """Simulate one set-up. Raises RuntimeError where the run breaks off."""
    return Cluster(setup).run()


def run_sizes(setups: Sequence[Setup], console: Console) -> list[Report]:
    """Simulate set-ups that differ in their devices, and print what came of each; the smallest one is the measure of
    the ideal."""
    reports = []
    for setup in sorted(setups, key=lambda setup: setup.devices):
        with console.status(f"{setup.devices} devices"):
            reports.append(run(setup))
        last = reports[-1]
        console.print(
            f"{setup.devices} devices: {last.throughput:,.0f} tokens/s ({last.cpu_seconds:.0f} s of CPU)",
            highlight=False,
        )
    for table in (_throughput(reports), _time(reports), _load(reports)):
        console.print(table)
    for report in reports:
        if unusual := {k: n for k, n in report.logged.items() if k.startswith(("warning", "error"))}:
            console.print(f"{report.setup.devices} devices, logged: {unusual}", highlight=False)
    return reports


def parse_devices(text: str) -> list[int]:
    """Sizes of `8,32,128`. Raises UserError."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 4:
        raise UserError(f"--devices {text!r} is not a list of numbers of 4 and more, such as 8,32,128,512.")
    return sizes


def devices_for(generators: int, llm: Llm) -> int:
    """Of a run with this number of engines."""
    return max(4, round(generators * llm.devices_an_engine / GENERATING_SHARE))


def _throughput(reports: Sequence[Report]) -> Table:
    first = reports[0]
    table = Table(
        "devices", "engines", "tokens/s", "of the ideal", "training bound", "generating bound", "age bound",
        "staleness mean", "max", "alive, batches", title=_title(first.setup), title_justify="left",
    )  # fmt: skip
    for r in reports:
        ideal = first.throughput * r.setup.devices / first.setup.devices
        table.add_row(
            f"{r.setup.devices}", f"{r.setup.generators} x {r.setup.llm.devices_an_engine}", f"{r.throughput:,.0f}",
            f"{r.throughput / ideal:.3f}", f"{r.training_bound:,.0f}", f"{r.generating_bound:,.0f}",
            f"{r.age_bound:,.0f}", f"{r.staleness_mean:.2f}", f"{r.staleness_max}", f"{r.alive:.1f}",
        )  # fmt: skip
    return table


def _time(reports: Sequence[Report]) -> Table:
    names = list(dict.fromkeys(name for report in reports for name in report.shares))
    table = Table(
        "devices", "step, s", *names, "sequences an engine", "engines idle", "loading",
        title="Where a step's time goes", title_justify="left",
    )  # fmt: skip
    for r in reports:
        shares = (f"{r.shares.get(name, 0.0):.1%}" for name in names)
        table.add_row(
            f"{r.setup.devices}", f"{r.step_seconds:,.1f}", *shares, f"{r.sequences:.0f}", f"{r.engines_idle:.1%}",
            f"{r.engines_loading:.1%}",
        )  # fmt: skip
    return table


def _load(reports: Sequence[Report]) -> Table:
    table = Table(
        "devices", "master: messages/s", "cores", "managers", "busiest: messages/s", "cores", "trainer: cores",
        "limit", title="Load of the control plane", title_justify="left",
    )  # fmt: skip
    for r in reports:
        table.add_row(
            f"{r.setup.devices}", f"{r.master.messages:,.1f}", f"{r.master.cores:.4f}", f"{r.setup.managers}",
            f"{r.manager.messages:,.1f}", f"{r.manager.cores:.4f}", f"{r.trainer.cores:.4f}", r.limit,
        )  # fmt: skip
    return table


def _title(setup: Setup) -> str:
    return (
        f"{setup.llm.name}, {setup.batch_size} x {setup.group_size} samples of up to "
        f"{setup.prompt_tokens + setup.max_new_tokens:,} tokens, eta {setup.max_staleness}, "
        f"run_ahead {setup.run_ahead}, seed {setup.seed}"
    )
