"""Simulated engines without a model: weights are a chain of hashes, and sampling and training take virtual time.

A token encodes its sequence and its position in it. Its log-prob encodes, as an exact float32, the token and the file
of weights that sampled it. A score depends on all sampled tokens and on the row. So when a group is trained, the
simulation can check that each token has its own log-prob and version, and each sample its own tokens and reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Protocol, Self
from zlib import crc32

import numpy as np

from areal.base.errors import UserError
from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.data.prompt_sources import PromptSource
from areal.data.rows import Row
from areal.generation.engine_process import EngineError, EngineStats
from areal.generation.engine_weights import LoadTimes
from areal.generation.offered_weights import WeightLoadError
from areal.rewards.functions import Result
from areal.rewards.worker import RewardFailed
from areal.samples.table import Finish, Generation, Tokens
from areal.samples.trajectory import Group, TokenScores, Trajectory
from areal.workflows.session import Session
from simulation.cluster.engines import ModelTokenizer

# A log-prob is -((serial + 1) * MARKS + mark) / SCALE; the mark is the token modulo the prime TOKEN_MARKS. That is
# exact in float32 for the first 4095 files that a simulation writes.
MARKS, TOKEN_MARKS = 4096, 4093
SCALE = float(1 << 24)
# A token is its position in the sequence plus POSITIONS times the mark of the sequence, from 1 to SEQUENCE_MARKS, plus
# END if the sequence ends with it by itself. A sequence that goes on elsewhere keeps its mark.
POSITIONS, SEQUENCE_MARKS, END = 4096, 999, 1 << 22
# The largest factor by which the tokens of a straggler are slower. Without it, a very slow sequence could not be told
# from one that hangs.
SLOWEST = 30.0
# Index of the first held-out row.
HELDOUT = 1_000_000
# Interval at which an engine that lets running sequences finish before a load checks whether they have.
FINISH_SECONDS = 0.05
# The name of the reward of groups.
TOGETHER = "together"
# Reward of one call of the workflow `branching`, beside the score of the sample.
CALL_REWARD = 0.5
# Bytes of the content of weights that depend only on what was trained. The bytes after them depend on the trainers that
# computed the steps, as the last bits of real weights do.
STEM_BYTES = 12


@dataclass(frozen=True, slots=True)
class Weights:
    """A file of weights. `serial`: a number of this file alone. `content`: the hashes in it (`next_content`). `writer`:
    the process that wrote it."""

    serial: int
    content: bytes
    writer: str
    folder: str


def logprobs_of(tokens: np.ndarray, serials: np.ndarray | int) -> np.ndarray:
    """What the files of weights with these serials give to the tokens: float32 [n]."""
    return ((tokens % TOKEN_MARKS + (serials + 1) * MARKS) / -SCALE).astype(np.float32)


def serials_of(logprobs: np.ndarray) -> np.ndarray:
    """The serials of the files of weights that sampled the tokens with these log-probs."""
    return (-logprobs * SCALE).astype(np.int64) // MARKS - 1


def tokens_at(position: int, n: int, mark: int) -> np.ndarray:
    """n tokens from `position` on, of the sequence with this mark. They encode both: exchanged, lost and repeated ones
    are found."""
    return np.arange(position, position + n, dtype=np.int32) + POSITIONS * mark


def are_of_one(tokens: np.ndarray) -> bool:
    """True if all sampled tokens are of the same sequence."""
    return len(set((tokens % END // POSITIONS).tolist())) <= 1


def ends_right(call: Generation) -> bool:
    """True if the last token of a call, and no other, is the end of a sequence, unless the call has ended for its
    length."""
    ends: list[int] = np.flatnonzero(call.tokens >= END).tolist()
    return ends == [len(call.tokens) - 1] * (call.finish == "stop")


def are_whole(tokens: np.ndarray, sampled: np.ndarray) -> bool:
    """True if every sampled token is at the position in the sequence that it encodes."""
    return bool((tokens[sampled] % POSITIONS == np.flatnonzero(sampled)).all())


class Files:
    """The weights and checkpoints on the file system that all processes share."""

    def __init__(self, model: str) -> None:
        self.written: list[Weights] = []
        self.folders: dict[str, Weights] = {}
        self.damaged: set[str] = set()
        self.model = self.write(model, b"", "nobody")

    def write(self, folder: str, content: bytes, writer: str) -> Weights:
        weights = Weights(len(self.written), content, writer, folder)
        self.written.append(weights)
        self.folders[folder] = weights
        self.damaged.discard(folder)
        return weights

    def forget(self, folder: str) -> None:
        self.folders.pop(folder, None)


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of the operations of engines, in virtual seconds, and the speed of sampling."""

    tokens_per_second: float = 40.0
    first_token: float = 0.02
    load: float = 0.05
    step: float = 0.3
    snapshot: float = 0.01
    write: float = 0.2
    save: float = 0.1
    restore: float = 0.1
    score: float = 0.02
    start: float = 0.2


@dataclass(slots=True)
class Mishaps:
    """Probabilities of failures of an engine or a reward, per call. `straggler_times`: how slow stragglers are.
    `wrong_columns`: of scorers that give numbers that are none, or too few."""

    load_fails: float = 0.0
    load_tears: float = 0.0
    score_fails: float = 0.0
    wrong_columns: float = 0.0
    straggler: float = 0.0
    straggler_times: float = 6.0


class Toil:
    """What the engine of one process works on, and since when, by the clock of its process. `to_hang`: the beginnings
    of the works that never end. `hangs`: those of them that have begun."""

    def __init__(self) -> None:
        self._since: dict[object, tuple[float, str]] = {}
        self.to_hang: set[str] = set()
        self.hangs: set[str] = set()

    def must_hang(self, what: str) -> bool:
        """Whether work that begins now never ends."""
        hangs = {beginning for beginning in self.to_hang if what.startswith(beginning)}
        self.hangs |= hangs
        return bool(hangs)

    def recover(self) -> None:
        """Work that begins from now on ends. But one loop of an engine samples all its sequences: if it hangs, it
        samples nothing any more, else sequences that hang would be hidden by the progress of later ones."""
        self.to_hang &= self.hangs & {"sampling"}

    @property
    def oldest(self) -> tuple[float, str] | None:
        """When the oldest work in progress began, and what it is."""
        return next(iter(self._since.values()), None)

    async def take(self, seconds: float, what: str) -> None:
        """Work on `what` for some seconds."""
        mark = object()
        self._since[mark] = asyncio.get_running_loop().time(), what
        try:
            await (asyncio.Event().wait() if self.must_hang(what) else asyncio.sleep(seconds))
        finally:
            del self._since[mark]


class Judge(Protocol):
    """Receives what learners do, and checks it (simulation.oracle)."""

    def computed(
        self, writer: str, content: bytes, version: int, groups: Sequence[Group], new_content: bytes
    ) -> None: ...

    def trained(self, writer: str, version: int, groups: Sequence[Group], mask_older_than: int | None) -> None: ...

    def uses_devices(self, resident: bool) -> None: ...

    def published(self, writer: str, weights: Weights) -> None: ...


class SimEngine:
    """Samples `pace.tokens_per_second` in each sequence, with the interface of
    areal.generation.generation_engine.GenerationEngine. The `seed` draws the marks of sequences.

    `on_load` is called with each version before it is loaded. `unloadable`: the folders that failed to load once."""

    def __init__(
        self,
        files: Files,
        weights: Weights,
        version: int,
        config: GeneratorConfig,
        pace: Pace,
        mishaps: Mishaps,
        random: Random,
        seed: int,
        toil: Toil,
        tell: Callable[[str], None] | None,
        on_load: Callable[[SimEngine, int], None],
    ) -> None:
        self.version = version
        self.max_model_len = 1 << 20
        self.unloadable: set[str] = set()
        self._files = files
        self._weights = weights
        self._interval = config.stream_interval
        self._room = config.max_concurrent_rollouts
        self._pace = pace
        self._mishaps = mishaps
        self._random = random
        self._marks = Random(seed)
        self._tell = tell
        self._toil = toil
        self._on_load = on_load
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, _Stream] = {}
        self._serial = itertools.count()
        self._tokens_generated = 0
        self._paused = False
        self.asleep = False
        self.on_sampling: Callable[[str, SamplingConfig], None] = lambda request, sampling: None
        self._loading = asyncio.Lock()  # also held while it sleeps
        self._finishes_first = not config.interrupt
        self._admits = asyncio.Event()
        self._admits.set()
        self._error: EngineError | None = None

    async def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingConfig,
        *,
        max_new_tokens: int | None = None,
        first_version: int | None = None,
        pictures: Sequence[Any] = (),
        cache_salt: str = "",
        whole: bool = False,
    ) -> AsyncGenerator[Generation, None]:
        await self._admits.wait()
        if self._error is not None:
            raise self._error
        self.on_sampling(request_id, sampling)
        limit = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        length = 1 + int(self._random.expovariate(2.0 / sampling.max_new_tokens))
        if self._mishaps.straggler and self._random.random() < self._mishaps.straggler:
            slow = min(SLOWEST, 1.0 + self._random.paretovariate(1.2) * self._mishaps.straggler_times)
        else:
            slow = 1.0
        key = next(self._serial)
        mark = tokens[-1] // POSITIONS or self._marks.randint(1, SEQUENCE_MARKS)
        stream = self._streams[key] = _Stream(
            self,
            request_id,
            len(tokens),
            mark,
            min(length, limit),
            length <= limit,
            slow / self._pace.tokens_per_second,
        )
        try:
            stream.go_on(self._pace.first_token)
            while True:
                chunk = await stream.next_chunk()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            stream.stop()
            self._streams.pop(key, None)

    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores:
        await self._admits.wait()
        if self._error is not None:
            raise self._error
        return TokenScores(np.zeros(len(tokens) - 1, np.float32), version=self.version)

    async def sleep(self) -> None:
        await self._loading.acquire()
        self._paused = True
        for stream in self._streams.values():
            stream.stop()
        await self._toil.take(self._pace.snapshot, "falling asleep")
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False
        await self._toil.take(self._pace.snapshot, "waking")
        self._paused = False
        for stream in self._streams.values():
            stream.go_on(self._pace.first_token)
        self._loading.release()

    async def load(self, folder: Path, version: int) -> LoadTimes:
        if self._error is not None:
            raise self._error
        self._on_load(self, version)
        weights = self._files.folders.get(str(folder))
        if weights is None or (self._mishaps.load_fails and self._random.random() < self._mishaps.load_fails):
            self.unloadable.add(str(folder))
            raise WeightLoadError(f"{folder} cannot be read")
        async with self._loading, self.drained():
            return await self._swap(folder, version)

    async def receive(
        self, version: int, calls: AsyncGenerator[tuple[str, dict[str, Any]], None], lost: asyncio.Event
    ) -> LoadTimes:
        raise WeightLoadError("a simulated engine has no process group: its generator loads the files")

    async def _swap(self, folder: Path, version: int) -> LoadTimes:
        if str(folder) not in self._files.folders:
            raise WeightLoadError(f"{folder} was removed while sequences were being finished")
        weights: Weights | None = None
        started = sum(stream.begun for stream in self._streams.values())
        self._paused = True
        for stream in self._streams.values():
            stream.stop()
        try:
            await self._toil.take(self._pace.load * (0.5 + self._random.random()), f"loading {folder}")
            weights = self._files.folders.get(str(folder))  # a folder may be removed while it is read
            tears = self._mishaps.load_tears and self._random.random() < self._mishaps.load_tears
            if tears or weights is None:
                raise self._fail(EngineError(f"Loading {folder} failed half-way, so the weights may be torn"))
        finally:
            self._paused = False
            self._admits.set()
            if weights is not None and self._error is None:
                self._weights, self.version = weights, version
                for stream in self._streams.values():
                    stream.go_on(self._pace.first_token)
        if self._tell is not None:
            self._tell(f"engine: loaded {folder} as version {version}, interrupted {started}")
        return LoadTimes(0.0, self._pace.load, 0.0, started, 0)

    @property
    def folder(self) -> str:
        """Where the engine's weights came from."""
        return self._weights.folder

    @property
    def finishes(self) -> bool:
        """True while the engine lets running sequences finish before a load."""
        return not self._admits.is_set()

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        if not self._finishes_first or not self._admits.is_set():
            yield
            return
        self._admits.clear()
        try:
            while any(stream.unfinished for stream in self._streams.values()):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(FINISH_SECONDS)
            yield
        finally:
            self._admits.set()

    def stats(self) -> EngineStats:
        running = min(len(self._streams), self._room)
        return EngineStats(running, len(self._streams) - running, running / self._room, self._tokens_generated, 0)

    def hand_over(self, request_ids: Collection[str] | None = None) -> None:
        """Make these streams (None: all streams, also future ones) yield the tokens that they have, and then fail."""
        error = EngineError("The engine hands over.")
        for stream in self._streams.values():
            if request_ids is None or stream.name in request_ids:
                stream.fail(error)
        if request_ids is None:
            self._fail(error)

    async def close(self) -> None:
        self._fail(EngineError("The engine was closed."))
        await asyncio.sleep(0.01)

    def _fail(self, error: EngineError) -> EngineError:
        self._error = first = self._error or error
        for stream in self._streams.values():
            stream.fail(first)
        return first


class _Stream:
    """One sequence, whose next token has the position `at`. `rate`: seconds per token. Sampled tokens are counted only
    when the stream stops or a chunk is due."""

    def __init__(self, engine: SimEngine, name: str, at: int, mark: int, length: int, stops: bool, rate: float) -> None:
        self.name = name
        self._engine = engine
        self._at = at
        self._mark = mark
        self._left = length
        self._stops = stops
        self._rate = rate
        self._parts: list[tuple[int, Weights, int]] = []
        self._since: float | None = None
        self._timer: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineError | None = None
        self.begun = False

    @property
    def _buffered(self) -> int:
        return sum(n for n, _, _ in self._parts)

    @property
    def unfinished(self) -> bool:
        return bool(self._left) and self._error is None

    @property
    def _has_chunk(self) -> bool:
        return not self._left or self._error is not None or self._buffered >= self._engine._interval

    def go_on(self, prefill: float) -> None:
        """Start to sample the next chunk, after a prefill of so many seconds."""
        engine = self._engine
        if self._has_chunk:
            self.notify()
        elif not engine._paused and self._since is None and not engine._toil.must_hang("sampling"):
            loop = engine._loop
            self._since = loop.time() + prefill
            due = min(engine._interval - self._buffered, self._left)
            self._timer = loop.call_at(self._since + (due + 0.01) * self._rate, self._wake)

    def stop(self) -> None:
        """Stop sampling. The tokens sampled so far are kept."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._since is not None:
            engine = self._engine
            n = min(self._left, max(0, int((engine._loop.time() - self._since) / self._rate)))
            self._since = None
            if n:
                self.begun = True
                self._left -= n
                engine._tokens_generated += n
                self._parts.append((n, engine._weights, engine.version))

    def fail(self, error: EngineError) -> None:
        self.stop()
        if self._left:
            self._error = error
        self.notify()

    async def next_chunk(self) -> Generation:
        """The tokens since the last chunk. Raises EngineError if there are none and none will follow."""
        while not self._has_chunk:
            self._waiter = self._engine._loop.create_future()
            await self._waiter
        if not self._parts:
            assert self._error is not None
            raise self._error
        parts, self._parts = self._parts, []
        self.go_on(0.0)
        n = sum(part[0] for part in parts)
        tokens = tokens_at(self._at, n, self._mark)
        self._at += n
        finish: Finish | None = None if self._left else ("stop" if self._stops else "length")
        tokens[-1] += END * (finish == "stop")
        if len(parts) == 1:
            _, weights, version = parts[0]
            logprobs, versions = logprobs_of(tokens, weights.serial), np.full(n, version, np.int32)
        else:
            counts = [part[0] for part in parts]
            logprobs = logprobs_of(tokens, np.repeat([part[1].serial for part in parts], counts))
            versions = np.repeat(np.array([part[2] for part in parts], np.int32), counts)
        return Generation(tokens, logprobs, versions, finish)

    def _wake(self) -> None:
        self.stop()
        self.go_on(0.0)

    def notify(self) -> None:
        """Wake the reader of the stream."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SimLearner:
    """A learner with the interface that the trainer needs. Its weights are a hash chain of the trained groups.

    `hand`: what this trainer's own way of computing adds to each step; empty: nothing, as on one machine in fp32."""

    def __init__(
        self,
        files: Files,
        judge: Judge,
        writer: str,
        pace: Pace,
        random: Random,
        toil: Toil,
        doubtful: float,
        hand: bytes,
    ) -> None:
        self._toil = toil
        self._hand = hand
        self._files = files
        self._judge = judge
        self._writer = writer
        self._pace = pace
        self._random = random
        self._doubtful = doubtful
        self._content = self._snapshot = files.model.content
        self._folder = Path()
        self._checkpoint = Path(), self._content
        self.resident = True  # on the devices
        self.values = self.whole_logprobs = None
        self.work_done = 0
        self.vocab_size = 1 << 31

    async def step(
        self, groups: Sequence[Group], *, version: int, temperature: float, mask_older_than: int | None
    ) -> dict[str, float | None]:
        self._judge.trained(self._writer, version, groups, mask_older_than)
        self._judge.uses_devices(self.resident)
        await self._take(self._pace.step, f"step {version + 1}")
        self._judge.uses_devices(self.resident)
        self.work_done += 1
        old_content, self._content = self._content, next_content(self._content, groups, self._hand)
        self._judge.computed(self._writer, old_content, version, groups, self._content)
        share = 0.0 if is_doubtful(self._content, self._doubtful) else 1.0
        return {"loss": 0.0, "effective_sample_size": share, "logprob_gap": None}

    async def snapshot(self, folder: Path) -> None:
        self._judge.uses_devices(self.resident)
        await self._take(self._pace.snapshot, "a snapshot")
        self._snapshot, self._folder = self._content, folder

    async def finish_snapshot(self) -> None:
        folder = self._folder
        await self._take(self._pace.write, f"writing {folder}")
        # If another snapshot has replaced this one meanwhile, the file contains the newer one.
        self._judge.published(self._writer, self._files.write(str(folder), self._snapshot, self._writer))

    async def save(self, folder: Path, run: str) -> None:
        self._judge.uses_devices(self.resident)
        await self._take(self._pace.snapshot, "a copy for a checkpoint")
        self._checkpoint = folder, self._content

    async def finish_save(self) -> None:
        folder, content = self._checkpoint
        await self._take(self._pace.save, f"saving {folder}")
        self._files.write(str(folder), content, self._writer)

    async def load(self, folder: Path, run: str) -> None:
        self._judge.uses_devices(self.resident)
        await self._take(self._pace.restore, f"loading {folder}")
        if str(folder) in self._files.damaged:
            raise UserError(f"The checkpoint {folder} is damaged.")
        self._content = self._files.folders[str(folder)].content

    async def offload(self) -> None:
        self.resident = False
        await self._take(self._pace.snapshot, "moving to host memory")

    async def reload(self) -> None:
        await self._take(self._pace.snapshot, "moving to the devices")
        self.resident = True

    async def forget(self, folder: Path) -> None:
        self._files.forget(str(folder))

    def close(self) -> None:
        pass

    async def _take(self, seconds: float, what: str) -> None:
        await self._toil.take(seconds * (0.5 + self._random.random()), what)


def is_doubtful(content: bytes, share: float) -> bool:
    """True if the step that led to these weights has metrics beyond the guard's limits. `share`: the share of steps for
    which this is so."""
    return bool(content) and content[0] < 256 * share


def stem(content: bytes) -> bytes:
    """The part of the content of weights that depends only on what was trained."""
    return content[:STEM_BYTES]


def next_content(content: bytes, groups: Sequence[Group], hand: bytes) -> bytes:
    """The content of the weights after a step on `groups`. `hand`: of the trainer that computes it."""
    digest = blake2b(stem(content), digest_size=STEM_BYTES)
    for group in groups:
        digest.update(group.id.encode())
        for part in group.trajectories:
            digest.update(np.ascontiguousarray(part.tokens).data)
            digest.update(np.ascontiguousarray(part.logprobs).data)
            digest.update(np.ascontiguousarray(part.versions).data)
            digest.update(repr((part.reward, part.branches)).encode())
    return digest.digest() + (blake2b(content[STEM_BYTES:] + hand, digest_size=4).digest() if hand else b"")


class SimTokenizer(ModelTokenizer):
    """The text of tokens names all of them, as a checksum."""

    def decode(self, tokens: Sequence[int] | np.ndarray, *, skip_special_tokens: bool) -> str:
        return f"{len(tokens)} tokens, {crc32(np.asarray(tokens, np.int32).tobytes()):08x}"


class TalkTokenizer(SimTokenizer):
    """Also takes what users write, and what was said to them."""

    model_max_length = 1 << 20

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        words = text if text.isdecimal() else f"{crc32(text.encode())}"
        return super().encode(words, add_special_tokens=add_special_tokens)


def score_of(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The score of a completion."""
    return crc32(f"{prompt} {completion} {row.get('answer')}".encode()) % 7 / 7


def together(prompt: str, completions: Sequence[str]) -> list[float]:
    """The scores of the completions of a group, each of which depends on all."""
    return [crc32(f"{prompt} {number} {[*completions]}".encode()) % 5 / 5 for number in range(len(completions))]


class SimRewards:
    """A reward pool whose scores depend only on the row and the completion, or those of its group (TOGETHER). `parts`:
    the number of parts of each score, and the length of the text of each failure."""

    def __init__(self, pace: Pace, mishaps: Mishaps, random: Random, toil: Toil, parts: int = 0) -> None:
        self._toil = toil
        self._parts = {f"part {number}": 1.0 for number in range(parts)}
        self._words = "the simulated reward raised an error" + "!" * parts
        self._pace = pace
        self._mishaps = mishaps
        self._random = random

    async def __aenter__(self) -> Self:
        await self._toil.take(self._pace.start * self._random.random(), "starting")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def score_all(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: Tokens | None = None
    ) -> list[Result]:
        await self._toil.take(self._pace.score * (0.5 + self._random.random()), "scoring")
        if self._mishaps.score_fails and self._random.random() < self._mishaps.score_fails:
            raise RewardFailed(self._words, "raised")
        if name == TOGETHER:
            return [Result(score, self._parts) for score in together(prompt, completions)]
        (completion,) = completions
        return [Result(score_of(prompt, completion, row), self._parts)]


# The scorers of a simulation: a teacher, a reference, and a reward model or judge; the weight of the last one and its
# highest verdict.
TEACHER, REFERENCE, LIKED, LIKED_WEIGHT, LIKED_MOST = "wise", "first", "liked", 0.1, 8
JUDGED = f"judge/{LIKED}"
"""The reward of LIKED where it is a judge."""


class SimScorer:
    """The engine of the scorer of this name, whose results depend only on the name and the tokens (`taught`, `liked`).
    It may refuse a row, as pools of rewards fail."""

    def __init__(self, name: str, pace: Pace, mishaps: Mishaps, random: Random, toil: Toil) -> None:
        self._name = name
        self._pace = pace
        self._mishaps = mishaps
        self._random = random
        self._toil = toil
        self._steps = 0

    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores:
        logprobs = await self._give(taught(np.array(tokens), self._name))
        return TokenScores(logprobs, *likely(np.array(tokens), logprobs, top_k))

    async def classify(self, request_id: str, tokens: Sequence[int], activation: bool) -> np.ndarray:
        return await self._give(np.array([liked(bytes(tokens))], np.float32))

    async def generate(
        self, request_id: str, tokens: Sequence[int], sampling: SamplingConfig
    ) -> AsyncGenerator[Generation, None]:
        """What a judge writes; wrong columns are no verdict."""
        column = await self._give(np.array([LIKED_MOST * liked(bytes(tokens))]))
        text = np.frombuffer("".join(f"{verdict:g}" for verdict in column).encode(), np.uint8).astype(np.int32)
        yield Generation(text, np.zeros(len(text), np.float32), np.zeros(len(text), np.int32), "stop")

    async def _give(self, column: np.ndarray) -> np.ndarray:
        await self._toil.take(self._pace.score * (0.5 + self._random.random()), "scoring")
        self._steps += 1
        if self._mishaps.score_fails and self._random.random() < self._mishaps.score_fails:
            raise ValueError("the simulated scorer cannot take these tokens")
        if self._mishaps.wrong_columns and self._random.random() < self._mishaps.wrong_columns:
            return column * np.float32(np.nan) if self._random.random() < 0.5 else column[:-1]
        return column

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0.0, 0, 0, steps=self._steps)

    async def close(self) -> None:
        pass


def taught(tokens: np.ndarray, name: str) -> np.ndarray:
    """The log-probs that the simulated scorer gives all tokens but the first, each of which encodes all before it:
    float32 [n - 1]."""
    return ((len(name) + tokens.astype(np.int64).cumsum()[1:] % TOKEN_MARKS) / -SCALE).astype(np.float32)


def likely(tokens: np.ndarray, logprobs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens that the simulated scorer gives all tokens but the first, and their log-probs."""
    numbers = np.arange(count)
    return tokens[1 : len(logprobs) + 1, None].astype(np.int32) + numbers.astype(np.int32), (
        logprobs[:, None] - numbers.astype(np.float32)
    )


def liked(text: bytes) -> float:
    """The score that the simulated reward model or judge gives."""
    return crc32(text) % LIKED_MOST / LIKED_MOST


class TextTokenizer:
    """That of the reward model and the judge."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> bytes:
        return text.encode()

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode()


class SimSource(PromptSource):
    """A source of prompts, of `size` rows in each epoch. The text of a prompt is its training index. `bytes_a_row`:
    size of another field of each row."""

    def __init__(self, bytes_a_row: int = 0, size: int | None = None) -> None:
        super().__init__([])
        self.size = self.rows = size
        self._more = {"tests": "t" * bytes_a_row} if bytes_a_row else {}

    def key(self, index: int) -> int:
        return index if self.size is None else index % self.size

    def row(self, index: int) -> Row:
        answer = f"answer {index}"
        return Row(index, f"{index}", answer, None, {"prompt": f"{index}", "answer": answer, **self._more})

    def heldout(self, i: int) -> Row:
        return self.row(HELDOUT + i)


async def branching(session: Session, row: Row) -> Trajectory:
    """A workflow that asks twice at the same time, goes on from one of the answers, repeats a part of it, and begins
    anew. How much of what comes when depends on what was sampled, and on the time, as an environment may."""
    prompt = np.array(session.tokenizer.encode(row.prompt, add_special_tokens=False), np.int32)
    first, second = await asyncio.gather(session.generate(prompt, 4), session.generate(prompt, 3))
    longer = np.concatenate([prompt, first.tokens, [0] * (1 + int(asyncio.get_running_loop().time() * 10) % 3)])
    again = longer[: len(prompt) + len(first.tokens) // 2]
    await asyncio.gather(session.generate(longer, 4), session.generate(again, 2))
    await session.generate(np.arange(1, 3))
    session.reward(second, CALL_REWARD)
    return session.trajectory(await session.score(text_of(session.calls)))


def text_of(calls: Sequence[Generation]) -> str:
    """What is scored of a sample: the text of all its calls."""
    return SimTokenizer().decode(np.concatenate([call.tokens for call in calls]), skip_special_tokens=True)


def reward_of(row: Row, calls: Sequence[Generation], branches: bool, rewards: Collection[str]) -> float:
    """The reward of a sample of `branching`, or else of a single call, in a run with these rewards."""
    text = text_of(calls)
    model = LIKED_WEIGHT * liked(f"{row.prompt}{text}".encode()) if {LIKED, JUDGED} & {*rewards} else 0.0
    return score_of(f"{row.prompt}", text, row.fields) + model + CALL_REWARD * branches
