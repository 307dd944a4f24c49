"""The checks that need a generator: log-probs, interruptions with exact versions, sleep, speed.

The reference runs after the engine is closed, since a device may not have room for both.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from areal.config import Config
from areal.devices import transfer_backend, visible_devices
from areal.extensions.selftest.disk_checks import size_of
from areal.extensions.selftest.findings import REPORT, Finding
from areal.extensions.selftest.reference_models import kept_logprobs, model_of, reference_logprobs
from areal.extensions.selftest.sequences import Sampled, read, write
from areal.extensions.selftest.transfer_checks import Receiving
from areal.extensions.selftest.verdicts import (
    RECOVERY_SECONDS,
    BusyLoad,
    check_busy_load,
    check_engine,
    check_kept,
    check_received,
    check_turns,
    check_versions,
    gap_of,
    load_cost,
)
from areal.generation.engine_process import EngineError
from areal.generation.engine_weights import LoadTimes
from areal.generation.generation_engine import GenerationEngine
from areal.generation.offered_weights import WeightLoadError
from areal.samples.table import Generation, TokenTable, joined

SEQUENCES, TOKENS, LONGEST = 8, 64, 1024
"""How many sequences are compared; the tokens of each sequence; the most tokens of an interrupted sequence."""
AFTER = 32
"""Tokens for which an interrupted sequence goes on under the new weights."""
WARM_UP_SECONDS, SPEED_SECONDS = 2.0, 8.0
GOING_ON = 0.9
"""Share of a full engine's sequences that go on after a load. Not all: the KV cache may have room for fewer."""


class GenerationChecks:
    """The generator of a self-test. config: the run's configuration, with a folder as its model."""

    _engine: GenerationEngine  # set by `start`

    def __init__(self, config: Config) -> None:
        self._config = config.for_device(cuda=bool(visible_devices()))
        self._receiving: Receiving | None = None
        self._asleep: list[asyncio.Task[Sampled]] = []

    async def start(self) -> list[Finding]:
        """Start the engine as the run does. The KV cache is recomputed after a load, so log-probs are exact."""
        started = time.perf_counter()
        generator = self._config.generator.model_copy(update={"interrupt": True})
        self._engine = await GenerationEngine.start(
            Path(self._config.model),
            generator,
            version=0,
            lora=self._config.trainer.lora,
            sleeps=self._config.colocate,
            transfer=transfer_backend() if self._config.weights.direct else None,
        )
        self._engine.weights.keeps_cache = False
        seconds = time.perf_counter() - started
        measured = f"{generator.devices} devices, {generator.dtype}, started in {seconds:.0f} s"
        return [Finding("generator", "ok", measured, values={"seconds": seconds})]

    async def sample(self, file: str) -> list[Finding]:
        """Sample some whole sequences into a file."""
        write(await sample(self._engine, self._config), Path(file))
        return []

    async def interrupt(self, published: str, file: str) -> list[Finding]:
        """Interrupt sequences: load the weights in the folder `published` as version 1."""
        sequences, times = await interrupt(self._engine, self._config, Path(published), 1)
        write(sequences, Path(file))
        measured, values = load_cost(times, size_of(Path(published)))
        return [Finding("load", "ok", f"{measured}, {times.sequences_interrupted} sequences", values=values)]

    async def keep(self, file: str) -> list[Finding]:
        """Interrupt sequences of version 1: load the model's own weights as version 2, and keep the KV cache."""
        self._engine.weights.keeps_cache = True
        sequences, _ = await interrupt(self._engine, self._config, Path(self._config.model), 2)
        self._engine.weights.keeps_cache = False
        write(sequences, Path(file))
        return []

    async def sleep(self, sequences: bool) -> dict[str, Any]:
        """Have the engine leave the devices. sequences: whether the engine is sampling some sequences then."""
        self._asleep = await begin(self._engine, self._config, 4 * TOKENS) if sequences else []
        started = time.perf_counter()
        await self._engine.sleep()
        return {"seconds": time.perf_counter() - started, "sequences": sum(not task.done() for task in self._asleep)}

    async def wake(self, file: str) -> dict[str, Any]:
        """Undo `sleep`, finish the sequences, and write them into a file."""
        started = time.perf_counter()
        await self._engine.wake()
        seconds = time.perf_counter() - started
        write(await asyncio.gather(*self._asleep), Path(file))
        return {"seconds": seconds}

    async def receive(self, call: str, info: dict[str, Any]) -> list[Finding]:
        """Make a call by which the trainer sends its weights as version 2. Returns a failure, or an empty list."""
        self._receiving = self._receiving or Receiving(self._engine)
        try:
            await self._receiving.follow(call, info)
        except (WeightLoadError, EngineError) as error:
            return [Finding("transport", "FAILED", str(error), REPORT)]
        return []

    async def speed(self, of_token: float, peak_tflops: float | None) -> list[Finding]:
        """Measure the tokens/s and a load of a full engine. of_token: operations a token. peak_tflops: of a device."""
        rate, load = await speed(self._engine, self._config)
        tflops = rate * of_token / 1e12 / self._config.generator.devices
        mfu = tflops / peak_tflops if peak_tflops else None
        return [
            Finding(
                "generation",
                "ok",
                f"{rate:,.0f} tokens/s, {self._config.generator.max_concurrent_rollouts} sequences, {tflops:.3g} "
                f"TFLOP/s a device" + ("" if mfu is None else f", MFU {mfu:.1%}"),
                values={"tokens_per_second": rate, "tflops": tflops, "mfu": mfu},
            ),
            check_busy_load(load, size_of(Path(self._config.model))),
        ]

    async def close(self) -> list[Finding]:
        """End the engine's process."""
        await self._engine.close()
        return []

    def compare(
        self,
        sampled: str,
        interrupted: str,
        published: str,
        scratch: str,
        kept_file: str | None = None,
        slept: str | None = None,
        turns: dict[str, Any] | None = None,
    ) -> list[Finding]:
        """Compare all log-probs with the reference under both versions. sampled, interrupted, slept, kept_file
        (versions 1 and 2): files of sequences. scratch: an empty folder. turns: the facts for `check_turns`."""
        old, new = read(Path(sampled)), read(Path(interrupted))
        between = read(Path(slept)) if slept else []
        base, dtype = Path(self._config.model), self._config.generator.dtype
        first = reference_logprobs(base, [*old, *between, *new], self._config)
        if first is None:
            why = "the model fits neither into one GPU nor into this machine in fp32"
            names = ["engine", "interruption", *(["kept cache"] if kept_file else [])]
            findings = [Finding(name, "skipped", why) for name in names]
            return [*findings, *([check_turns(turns, None, dtype)] if turns else [])]
        model = model_of(base, Path(published), Path(scratch))
        second = reference_logprobs(model, new, self._config)
        findings = [
            check_engine(old, first[: len(old)], dtype),
            check_versions(new, first[len(old) + len(between) :], second or [], dtype),
        ]
        if kept_file:
            sequences = read(Path(kept_file))
            exact = kept_logprobs(model, base, sequences, self._config) or []
            recomputed = reference_logprobs(base, sequences, self._config) or []
            findings.append(check_kept(sequences, exact, recomputed, dtype))
        if turns:
            gap = gap_of(between, first[len(old) : len(old) + len(between)]) if between else None
            findings.append(check_turns(turns, gap, dtype))
        return findings

    async def compare_received(self, received: str, published: str, scratch: str) -> list[Finding]:
        """Compare log-probs sampled by received weights with the reference. scratch: an empty folder."""
        assert self._receiving is not None
        sequences = read(Path(received))
        model = model_of(Path(self._config.model), Path(published), Path(scratch))
        exact = reference_logprobs(model, sequences, self._config)
        measured, values = load_cost(await self._receiving.times(), size_of(Path(published)))
        measured = f"{transfer_backend()}: {measured}"
        if exact is None:
            return [Finding("transport", "ok", f"{measured}; the model is too large to compare", values=values)]
        return [check_received(sequences, exact, self._config.generator.dtype, measured, values)]


async def sample(engine: GenerationEngine, config: Config) -> list[Sampled]:
    """Sample some whole sequences with the engine's present weights."""
    return await asyncio.gather(*await begin(engine, config, TOKENS))


async def interrupt(
    engine: GenerationEngine, config: Config, folder: Path, version: int
) -> tuple[list[Sampled], LoadTimes]:
    """Sample sequences, and meanwhile load the weights in `folder` as `version`. Returns sequences and load times."""

    def enough(parts: Sequence[Generation]) -> bool:
        return sum(int((chunk.versions >= version).sum()) for chunk in parts) >= AFTER

    tasks = await begin(engine, config, LONGEST, enough)
    times = await engine.load(folder, version)
    return await asyncio.gather(*tasks), times


async def begin(
    engine: GenerationEngine,
    config: Config,
    tokens: int,
    enough: Callable[[Sequence[Generation]], bool] = lambda parts: False,
) -> list[asyncio.Task[Sampled]]:
    """Begin to sample sequences of at most `tokens` tokens each. A sequence ends early when its chunks are `enough`.
    Returns the tasks once every sequence has a first token or has ended."""
    prompts, begun = _prompts(config), [asyncio.Event() for _ in range(SEQUENCES)]

    async def sample_one(number: int) -> Sampled:
        parts: list[Generation] = []
        try:
            async with _continued(engine, config, prompts[number], tokens) as chunks:
                async for chunk in chunks:
                    parts.append(chunk)
                    begun[number].set()
                    if enough(parts):
                        break
        finally:
            begun[number].set()
        return _joined(prompts[number], parts)

    tasks = [asyncio.create_task(sample_one(number)) for number in range(SEQUENCES)]
    for event in begun:
        await event.wait()
    return tasks


async def speed(engine: GenerationEngine, config: Config) -> tuple[float, BusyLoad | None]:
    """Return the tokens/s of a full engine, and a load by the full engine. With adapters the load is None."""
    prompts = _prompts(config)
    count = config.generator.max_concurrent_rollouts
    arrived = [0] * count

    async def keep_busy(number: int) -> None:
        while True:
            async with _continued(engine, config, prompts[number % SEQUENCES]) as chunks:
                async for _ in chunks:
                    arrived[number] += 1

    tasks = [asyncio.create_task(keep_busy(n)) for n in range(count)]
    load = None
    try:
        await asyncio.wait(tasks, timeout=WARM_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        started, tokens_at_start = time.perf_counter(), engine.stats().tokens_generated
        failed_tasks: set[asyncio.Task[None]] = set()
        # A busy machine may take longer for the first token.
        while not failed_tasks and engine.stats().tokens_generated == tokens_at_start:
            failed_tasks, _ = await asyncio.wait(tasks, timeout=SPEED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        rate = (engine.stats().tokens_generated - tokens_at_start) / (time.perf_counter() - started)
        if not failed_tasks and not config.trainer.lora:
            running = engine.stats().running  # the rest may wait for KV cache
            least = max(1, int(GOING_ON * running))
            await _recovery(tasks, arrived, least)  # a busy machine may not have sampled for all sequences yet
            times = await engine.load(Path(config.model), engine.version)
            seconds, failed_tasks = await _recovery(tasks, arrived, least)
            load = BusyLoad(times, seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in failed_tasks:  # no task ends by itself, so an ended task has failed
        task.result()
    return rate, load


async def _recovery(
    tasks: list[asyncio.Task[None]], arrived: list[int], least: int
) -> tuple[float, set[asyncio.Task[None]]]:
    """Wait until `least` sequences have more chunks than `arrived` counts now. Returns the seconds, and ended tasks."""
    started, chunks = time.perf_counter(), [*arrived]
    while sum(now > then for now, then in zip(arrived, chunks, strict=True)) < least:
        ended, _ = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        if ended or time.perf_counter() - started > RECOVERY_SECONDS:
            return time.perf_counter() - started, ended
    return time.perf_counter() - started, set()


def _continued(
    engine: GenerationEngine, config: Config, prompt: np.ndarray, tokens: float = math.inf
) -> aclosing[AsyncGenerator[Generation, None]]:
    """Return a stream that continues the prompt by at most `tokens` tokens."""
    limit = int(min(tokens, engine.max_model_len - len(prompt)))
    return aclosing(engine.generate("selftest", prompt.tolist(), config.sampling, max_new_tokens=limit))


def _joined(prompt: np.ndarray, parts: Sequence[Generation]) -> Sampled:
    table = TokenTable(joined(parts))
    return Sampled(prompt, table.tokens, table.logprobs, table.versions)


def _prompts(config: Config) -> list[np.ndarray]:
    """Return prompts of several lengths, made of random tokens."""
    from areal.extensions.selftest.synthetic import sizes_of

    random, vocabulary = np.random.default_rng(0), sizes_of(config.model).vocab_size
    return [random.integers(2, vocabulary, 5 + 7 * n) for n in range(SEQUENCES)]
