"""The engines of the scaling model, one that samples and one that trains. They take the time that the formulas give.

Prompts, tokens and scores are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np

from areal.config.engine_sections import SamplingConfig
from areal.data.rows import Row
from areal.generation.engine_process import EngineStats
from areal.generation.engine_weights import LoadTimes
from areal.rewards.functions import Result
from areal.samples.table import Finish, Generation
from areal.samples.trajectory import Group, TokenScores
from simulation.cluster.costs import Costs
from simulation.cluster.lengths import Lengths
from simulation.cluster.setups import GRAIN

# Time of a device for a micro-batch of 16k tokens with 7B.
MICROBATCH_SECONDS = 3.6
# Time of a score, and at most of the start of a reward actor.
SCORE_SECONDS, REWARD_START_SECONDS = 0.02, 0.2


class ModelSequence:
    """One sequence in an engine. The chunk that is being sampled is complete at step `begin + due` of the engine, and
    `left` tokens follow after it. `parts`: (version, number of message tokens) of the chunk so far, of which the first
    `labelled` message tokens have a version."""

    __slots__ = ("begin", "chunks", "context", "cut", "due", "labelled", "left", "parts")

    def __init__(self, context: int, length: int, cut: bool) -> None:
        self.context = context
        self.left = length
        self.cut = cut
        self.begin = 0.0
        self.due = 0
        self.labelled = 0
        self.parts: list[tuple[int, int]] = []
        self.chunks: asyncio.Queue[Generation] = asyncio.Queue()

    def go_on(self, begin: float, limit: int) -> float:
        """Sample the next chunk from engine step `begin` on. Returns the step at which it is complete."""
        self.begin, self.due = begin, min(limit, self.left)
        self.left -= self.due
        self.labelled = 0
        return begin + self.due

    def label(self, sampled: int, version: int) -> None:
        """The first `sampled` tokens of this chunk are there. Those of them without a version get this one."""
        new = sampled // GRAIN - self.labelled
        if new > 0:
            self.parts.append((version, new))
            self.labelled += new

    def emit(self, version: int) -> None:
        self.label(self.due, version)
        versions, counts = np.array(self.parts, np.int32).T
        versions = np.repeat(versions, counts)
        self.parts.clear()
        n = len(versions)
        finish: Finish | None = None if self.left else ("length" if self.cut else "stop")
        self.chunks.put_nowait(Generation(np.zeros(n, np.int32), np.zeros(n, np.float32), versions, finish))


class ModelEngine:
    """An engine with processor sharing: every running sequence gets one token in each decoding step, and a step takes
    longer the more sequences run. Progress is counted in steps, so that a single timer is enough, for the next chunk
    that will be complete."""

    def __init__(self, costs: Costs, lengths: Lengths) -> None:
        self.version = 0
        self.max_model_len = costs.setup.prompt_tokens + costs.setup.max_new_tokens
        self._totals = dict.fromkeys(("tokens", "sequence_seconds", "busy_seconds", "load_seconds"), 0.0)
        self._costs = costs
        self._setup = costs.setup
        self._lengths = lengths
        self._loop = asyncio.get_running_loop()
        self._running: dict[ModelSequence, None] = {}
        self._waiting: dict[ModelSequence, None] = {}
        self._due: list[tuple[float, int, ModelSequence]] = []
        self._serial = count()
        self._steps = 0.0
        self._context = 0.0
        self._at = self._loop.time()
        self._step_seconds = 1.0
        self._stalled_until = 0.0
        self._paused = False
        self._timer: Any = None

    async def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingConfig,
        *,
        first_version: int | None = None,
        pictures: Sequence[Any] = (),
        cache_salt: str = "",
        whole: bool = False,
    ) -> AsyncIterator[Generation]:
        prompt = tokens[1]  # ModelTokenizer encodes a prompt as its number between two special tokens
        stream = ModelSequence(self._setup.prompt_tokens, *self._lengths.next(prompt))
        self._waiting[stream] = None
        self._advance()
        self._admit()
        self._plan()
        try:
            while True:
                chunk = await stream.chunks.get()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._forget(stream)

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Does nothing: the modelled engines interrupt their sequences."""
        yield

    async def load(self, folder: Path, version: int) -> LoadTimes:
        """Pause, read the weights, and prefill all running sequences again."""
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
        self._totals["load_seconds"] += self._costs.load + prefill
        return LoadTimes(0.0, self._costs.load, prefill, interrupted, int(self._context))

    def stats(self) -> EngineStats:
        use = self._context / self._costs.kv_capacity
        return EngineStats(len(self._running), len(self._waiting), use, int(self._totals["tokens"]), 0)

    async def score(self, request_id: str, tokens: Sequence[int]) -> TokenScores:
        """Log-probs of 0: nobody compares them."""
        return TokenScores(np.zeros(len(tokens) - 1, np.float32), version=self.version)

    def hand_over(self, request_ids: Collection[str] | None = None) -> None:
        """Does nothing: a sequence that should move stays on this engine. (On another one, its length would be drawn
        again.)"""

    async def close(self) -> None:
        """Does nothing: a generator that closes its engine has ended, and so has the simulation."""

    def account(self) -> dict[str, float]:
        """The totals of this engine up to now."""
        self._advance()
        return self._totals

    def _advance(self) -> None:
        """Update the counters for the steps up to now."""
        now, n = self._loop.time(), len(self._running)
        self._totals["sequence_seconds"] += n * (now - self._at)
        if n:
            self._totals["busy_seconds"] += now - self._at
        began = max(self._at, self._stalled_until)
        if n and not self._paused and now > began:
            steps = (now - began) / self._step_seconds
            self._steps += steps
            self._context += steps * n
            self._totals["tokens"] += steps * n
        self._at = now

    def _plan(self) -> None:
        """Set the timer for the next chunk that will be complete, assuming that no other change comes before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2] not in self._running:
            heappop(self._due)
        if self._paused or not self._due:
            return
        self._step_seconds = self._costs.decode_step(len(self._running), self._context)
        begins = max(self._at, self._stalled_until)
        steps = max(0.0, self._due[0][0] - self._steps)
        self._timer = self._loop.call_at(begins + steps * self._step_seconds, self._chunk_done)

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
                heappush(self._due, (stream.go_on(at, self._setup.chunk), next(self._serial), stream))
            else:
                self._forget(stream)
        self._admit()
        self._plan()

    def _admit(self) -> None:
        """Start waiting sequences while there is room. Their first chunk is short, so that the rollout manager learns
        at once which version sampled the first token."""
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

    def _forget(self, stream: ModelSequence) -> None:
        self._waiting.pop(stream, None)
        if stream in self._running:
            del self._running[stream]
            self._context = max(0.0, self._context - stream.context)


class ModelLearner:
    """A learner that takes the time that training takes. `shares`: the seconds spent on each part."""

    def __init__(self, costs: Costs) -> None:
        self.shares: Counter[str] = Counter()
        self.tokens = 0
        self._costs = costs
        self._work_done = 0.0
        self.vocab_size = 1 << 31
        self.values = self.whole_logprobs = None
        self._since: float | None = None

    @property
    def work_done(self) -> int:
        """Number of micro-batches: about one every MICROBATCH_SECONDS while a step is computed."""
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

    async def snapshot(self, folder: Path) -> None:
        await asyncio.sleep(self._costs.snapshot)
        self.shares.update({"publishing": self._costs.snapshot})

    async def finish_snapshot(self) -> None:
        await asyncio.sleep(self._costs.write)

    async def forget(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass


class ModelRewards:
    """A reward pool whose scores depend only on the completion."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def __aenter__(self) -> Self:
        await asyncio.sleep(REWARD_START_SECONDS * self._random.random())
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def score_all(
        self, name: str, prompt: str, completions: Sequence[str], row: object, tokens: object = None
    ) -> list[Result]:
        await asyncio.sleep(SCORE_SECONDS * (0.5 + self._random.random()))
        return [Result(len(completion) % 7 / 7, {}) for completion in completions]


class ModelSource:
    """A source of prompts. The text of a prompt is its index."""

    def row(self, index: int) -> Row:
        return Row(index, f"{index}", "answer", None, {"prompt": f"{index}", "answer": "answer"})

    heldout = row


class ModelTokenizer:
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1, int(text) % 32_000, 2]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return f"{len(tokens)} tokens from {int(tokens[0]) if len(tokens) else 0}"
