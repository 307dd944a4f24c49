"""The checks that need a generator: its log-probs, an interruption with exact versions, its speed.

The reference is transformers in fp32, with attention written out, one sequence at a time. It runs when the engine is
closed, since both may not fit into one device.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from areal.config import Config
from areal.generation.engine import Chunk, EngineError, GenerationEngine, LoadTimes, WeightLoadError
from areal.selftest.disk import size_of
from areal.selftest.findings import GAP, LAYERS, REPORT, Finding, judged
from areal.selftest.sequences import Sampled, read, write
from areal.selftest.transport import Receiving
from areal.weights.folders import ADAPTER_FILE, copy_model_files, write_index, write_weights

SEQUENCES, TOKENS, LONGEST = 8, 64, 1024
"""Sequences that are compared, and how many tokens of each; most tokens of one that is interrupted."""
AFTER = 32
"""Tokens that an interrupted sequence goes on for under the new weights."""
APART = 4
"""How many times the tolerance lies between log-probs of the same tokens under both versions, at least."""
EDGE = 2
"""How many times the tolerance the few tokens beside an interruption may be off in the mean."""
WARM_UP_SECONDS, SPEED_SECONDS = 2.0, 8.0
GPU_SHARE, HOST_SHARE = 0.8, 0.5
"""The reference is computed on the GPU if it takes no more than this share of what is free there; else on the CPU, if
it takes no more than this share of its memory."""


class GenerationChecks:
    """The generator of a self-test. config: of the run, with a folder as its model."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._started: GenerationEngine | None = None
        self._receiving: Receiving | None = None

    @property
    def _engine(self) -> GenerationEngine:
        assert self._started is not None
        return self._started

    async def start(self) -> list[Finding]:
        """Start the engine. Its KV cache is recomputed on new weights, whatever the run does: only then are log-probs
        those of one version."""
        started = time.perf_counter()
        generator = self._config.generator.model_copy(update={"kv_on_update": "recompute", "interrupt": True})
        self._started = await GenerationEngine.start(
            Path(self._config.model), generator, version=0, lora=self._config.trainer.lora,
            transfer=self._config.weights.backend,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        measured = f"{generator.devices} devices, {generator.dtype}, started in {seconds:.0f} s"
        return [Finding("generator", "ok", measured, values={"seconds": seconds})]

    async def sample(self, file: str) -> list[Finding]:
        """Sample some whole sequences into a file."""
        write(await sample(self._engine, self._config), Path(file))
        return []

    async def interrupt(self, published: str, file: str) -> list[Finding]:
        """Interrupt sequences by loading the weights in the folder `published` as version 1."""
        sequences, times = await interrupt(self._engine, self._config, Path(published))
        write(sequences, Path(file))
        measured, values = _load_cost(times, size_of(Path(published)))
        return [Finding("load", "ok", f"{measured}, {times.sequences_interrupted} sequences", values=values)]

    async def receive(self, call: str, info: dict[str, Any]) -> list[Finding]:
        """Do a call by which the trainer sends its weights as version 2. Returns what went wrong."""
        self._receiving = self._receiving or Receiving(self._engine)
        try:
            await self._receiving.follow(call, info)
        except (WeightLoadError, EngineError) as error:
            return [Finding("transport", "FAILED", str(error), REPORT)]
        return []

    async def speed(self, of_token: float, peak_tflops: float | None) -> list[Finding]:
        """Tokens/s of a full engine. of_token: operations of a token. peak_tflops: of one device."""
        rate = await speed(self._engine, self._config)
        tflops = rate * of_token / 1e12 / self._config.generator.devices
        mfu = tflops / peak_tflops if peak_tflops else None
        return [
            Finding(
                "generation",
                "ok",
                f"{rate:,.0f} tokens/s, {self._config.generator.max_concurrent_rollouts} sequences, {tflops:.3g} "
                f"TFLOP/s a device" + ("" if mfu is None else f", MFU {mfu:.1%}"),
                values={"tokens_per_second": rate, "tflops": tflops, "mfu": mfu},
            )
        ]

    async def close(self) -> list[Finding]:
        """End the engine's process."""
        await self._engine.close()
        return []

    def compare(self, sampled: str, interrupted: str, published: str, scratch: str) -> list[Finding]:
        """Compare all log-probs with those of the reference under both versions. scratch: an empty folder."""
        old, new = read(Path(sampled)), read(Path(interrupted))
        base = Path(self._config.model)
        first = reference_logprobs(base, [*old, *new], self._config)
        if first is None:
            why = "the model fits neither into one GPU nor into this machine in fp32"
            return [Finding(name, "skipped", why) for name in ("engine", "interruption")]
        second = reference_logprobs(_model_of(base, Path(published), Path(scratch)), new, self._config)
        dtype = self._config.generator.dtype
        return [
            check_engine(old, first[: len(old)], dtype),
            check_versions(new, first[len(old) :], second or [], dtype),
        ]

    async def compare_received(self, received: str, published: str, scratch: str) -> list[Finding]:
        """Compare the log-probs of sequences that were sampled by weights received from the trainer with those of the
        reference. scratch: an empty folder."""
        assert self._receiving is not None
        sequences = read(Path(received))
        model = _model_of(Path(self._config.model), Path(published), Path(scratch))
        exact = reference_logprobs(model, sequences, self._config)
        measured, values = _load_cost(await self._receiving.times(), size_of(Path(published)))
        measured = f"{self._config.weights.backend}: {measured}"
        if exact is None:
            return [
                Finding("transport", "ok", f"{measured}; the model is too large to compare log-probs", values=values)
            ]
        return [check_received(sequences, exact, self._config.generator.dtype, measured, values)]


async def sample(engine: GenerationEngine, config: Config) -> list[Sampled]:
    """Some whole sequences, by the weights that the engine has."""
    parts: list[list[Chunk]] = [[] for _ in range(SEQUENCES)]
    prompts = _prompts(config)
    await asyncio.gather(*(_follow(engine, config, prompts[n], TOKENS, parts[n]) for n in range(SEQUENCES)))
    return [_joined(prompt, chunks) for prompt, chunks in zip(prompts, parts, strict=True)]


async def interrupt(engine: GenerationEngine, config: Config, published: Path) -> tuple[list[Sampled], LoadTimes]:
    """Sequences that went on from version 0 to the weights in `published`, version 1, and what the load took."""
    parts: list[list[Chunk]] = [[] for _ in range(SEQUENCES)]
    prompts, begun = _prompts(config), asyncio.Event()
    waiting = set(range(SEQUENCES))

    def enough(number: int) -> bool:
        waiting.discard(number)
        if not waiting:
            begun.set()
        return sum(int((chunk.versions > 0).sum()) for chunk in parts[number]) >= AFTER

    async def sample_one(number: int) -> None:
        await _follow(engine, config, prompts[number], LONGEST, parts[number], lambda: enough(number))
        enough(number)

    tasks = [asyncio.create_task(sample_one(number)) for number in range(SEQUENCES)]
    everything = asyncio.gather(*tasks)
    first: asyncio.Future[Any] = asyncio.ensure_future(begun.wait())
    await asyncio.wait([first, everything], return_when=asyncio.FIRST_COMPLETED)
    first.cancel()
    times = await engine.load(published, 1)
    await everything
    return [_joined(prompt, chunks) for prompt, chunks in zip(prompts, parts, strict=True)], times


async def speed(engine: GenerationEngine, config: Config) -> float:
    """Tokens a second while as many sequences run as the engine takes."""
    prompts = _prompts(config)

    async def keep_busy(number: int) -> None:
        while True:
            await _follow(engine, config, prompts[number % SEQUENCES], None, [])

    tasks = [asyncio.create_task(keep_busy(n)) for n in range(config.generator.max_concurrent_rollouts)]
    try:
        await asyncio.wait(tasks, timeout=WARM_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        started, tokens_at_start = time.perf_counter(), engine.stats().tokens_generated
        failed_tasks: set[asyncio.Task[None]] = set()
        while (
            not failed_tasks and engine.stats().tokens_generated == tokens_at_start
        ):  # a busy machine may take longer for the first
            failed_tasks, _ = await asyncio.wait(tasks, timeout=SPEED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        rate = (engine.stats().tokens_generated - tokens_at_start) / (time.perf_counter() - started)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in failed_tasks:  # it has failed: none ends by itself
        task.result()
    return rate


def check_engine(sequences: Sequence[Sampled], exact: Sequence[np.ndarray], dtype: str) -> Finding:
    """Whether log-probs are those of the reference, `exact`, on weights that were never exchanged."""
    gap, limit = _gap(sequences, exact), LAYERS * GAP[dtype]
    return judged(
        "engine",
        gap <= limit,
        f"log-probs of the generator, {dtype}: {gap:.1e} nats from transformers in fp32 (at most {limit:g})",
        "vLLM computes other log-probs than transformers: set generator.enforce_eager=true and try again; report it.",
        gap=gap,
        dtype=dtype,
    )


def check_received(
    sequences: Sequence[Sampled], exact: Sequence[np.ndarray], dtype: str, measured: str, values: dict[str, Any]
) -> Finding:
    """Whether log-probs are those of the reference, `exact`, on the weights that the trainer sent. measured, values:
    what the transfer took."""
    gap, limit = _gap(sequences, exact), LAYERS * GAP[dtype]
    return judged(
        "transport",
        gap <= limit,
        f"{measured}; log-probs after it: {gap:.1e} nats from the reference (at most {limit:g})",
        "After a direct transfer the engine does not have the trainer's weights: set weights.transport=folder, and "
        "report it.",
        gap=gap,
        **values,
    )


def check_versions(
    sequences: Sequence[Sampled], old: Sequence[np.ndarray], new: Sequence[np.ndarray], dtype: str
) -> Finding:
    """Whether each token of sequences that were interrupted has the log-prob of the version that it names.

    old, new: of all tokens under versions 0 and 1. Tokens beside the interruption are also judged by themselves, since
    a version that changes one token too early or too late is wrong for a single token of each sequence.
    """
    limit = LAYERS * GAP[dtype]
    named = np.concatenate([s.versions for s in sequences])
    logprobs, under = np.concatenate([s.logprobs for s in sequences]), (np.concatenate(old), np.concatenate(new))
    ends = np.cumsum([len(s.versions) for s in sequences])
    changes = np.flatnonzero(np.diff(named) == 1) + 1
    changes = np.setdiff1d(changes, ends)  # at an end, the next sequence begins
    beside = np.concatenate([changes - 1, changes])
    right = np.where(named == 1, under[1], under[0])
    gap = {version: _mean(np.abs(logprobs - right)[named == version]) for version in (0, 1)}
    other_gap = {version: _mean(np.abs(logprobs - under[1 - version])[named == version]) for version in (0, 1)}
    edge = _mean(np.abs(logprobs - right)[beside])
    exact = bool(np.isin(named, (0, 1)).all()) and all((np.diff(s.versions) >= 0).all() for s in sequences)
    values = {"gap": gap, "gap_to_other_version": other_gap, "gap_beside": edge, "crossing": len(changes)}
    if not exact:
        kinds = sorted(set(named.tolist()))
        measured = f"tokens of the versions {kinds}, where only 0 and 1 in this order can be"
        advice = "The engine names wrong versions: take the version of vLLM that pyproject.toml names, and report it."
        return Finding("interruption", "FAILED", measured, advice, values)
    if len(changes) < SEQUENCES // 4:
        measured = f"only {len(changes)} of {len(sequences)} sequences were interrupted"
        advice = (
            "Too few sequences were long enough to be interrupted: try again, and with --config and a model that "
            "answers at length."
        )
        return Finding("interruption", "FAILED", measured, advice, values)
    measured = f"{gap[0]:.1e} nats before, {gap[1]:.1e} after, {edge:.1e} beside it (at most {limit:g})"
    right_ones = gap[0] <= limit and gap[1] <= limit and edge <= EDGE * limit
    if right_ones and not min(other_gap.values()) >= APART * limit:
        away = min(other_gap.values())
        return Finding("interruption", "skipped", f"{measured}; the other version is only {away:.1e} away", "", values)
    return judged(
        "interruption",
        right_ones,
        f"{len(changes)} sequences: {measured}; under the other version {other_gap[0]:.1f}, {other_gap[1]:.1f}",
        "After new weights are loaded, tokens do not have the log-probs of the version that they name: if `engine` is "
        "ok, loading leaves old weights in place (such as a head that is not packed again) or versions are told one "
        "off; take the version of vLLM that pyproject.toml names, and report it.",
        **values,
    )


def reference_logprobs(folder: Path, sequences: Sequence[Sampled], config: Config) -> list[np.ndarray] | None:
    """Log-probs [n] of the sampled tokens of each sequence under the model in `folder`, in fp32. None: no room."""
    import torch
    from transformers import AutoModelForCausalLM

    from areal.planning.command import count_parameters
    from areal.selftest.references import logprobs_alone

    size = 4 * count_parameters(str(folder))
    device = torch.device("cpu")
    if torch.cuda.is_available() and size <= GPU_SHARE * torch.cuda.mem_get_info()[0]:
        device = torch.device("cuda")
    elif size > HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return None
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    logprobs = []
    with torch.no_grad():
        for sequence in sequences:
            tokens = torch.from_numpy(np.concatenate([sequence.prompt, sequence.tokens])).long().to(device)
            logps = logprobs_alone(model, tokens, config.sampling.temperature)
            logprobs.append(logps[len(sequence.prompt) - 1 :].cpu().numpy())
    return logprobs


def _model_of(base: Path, published: Path, folder: Path) -> Path:
    """Make `folder` a model folder with the published weights."""
    copy_model_files(base, folder, dtype="float32")
    if (published / ADAPTER_FILE).is_file():
        from areal.weights.lora import merged_tensors

        write_weights(dict(merged_tensors(base, published)), folder)
    else:
        files = sorted(published.absolute().glob("*.safetensors"))
        for file in files:
            (folder / file.name).symlink_to(file)
        if len(files) > 1:  # several ranks have written a shard each
            write_index(folder)
    return folder


async def _follow(
    engine: GenerationEngine, config: Config, prompt: np.ndarray, tokens: int | None, parts: list[Chunk],
    enough: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Sample a continuation of at most `tokens` tokens into `parts`, until it is `enough`."""
    room = engine.max_model_len - len(prompt)
    stream = engine.generate(
        "selftest", prompt.tolist(), config.sampling, max_new_tokens=room if tokens is None else min(tokens, room)
    )
    async with aclosing(stream):
        async for chunk in stream:
            parts.append(chunk)
            if enough():
                return


def _joined(prompt: np.ndarray, chunks: Sequence[Chunk]) -> Sampled:
    tokens, logprobs, versions = (
        np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("tokens", "logprobs", "versions")
    )
    return Sampled(prompt, tokens, logprobs, versions)


def _prompts(config: Config) -> list[np.ndarray]:
    """Random tokens, of several lengths."""
    from areal.selftest.synthetic import sizes_of

    random, vocabulary = np.random.default_rng(0), sizes_of(config.model).vocab_size
    return [random.integers(2, vocabulary, 5 + 7 * n) for n in range(SEQUENCES)]


def _gap(sequences: Sequence[Sampled], exact: Sequence[np.ndarray]) -> float:
    """Mean difference of log-probs, in nats."""
    return float(np.abs(np.concatenate([s.logprobs - e for s, e in zip(sequences, exact, strict=True)])).mean())


def _load_cost(times: LoadTimes, size: int) -> tuple[str, dict[str, Any]]:
    """What loading `size` bytes took, as text and as values."""
    seconds = times.load_seconds
    rate, pause = size / 1e9 / seconds, times.pause_seconds
    measured = f"{size / 1e9:.3g} GB in {seconds:.2f} s, {rate:.3g} GB/s; paused {pause:.3f} s"
    return measured, {"bytes": size, "pause_seconds": times.pause_seconds, "load_seconds": seconds}


def _mean(values: np.ndarray) -> Any:
    return float(values.mean()) if len(values) else 0.0
