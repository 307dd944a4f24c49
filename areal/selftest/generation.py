"""The checks that need a generator: its log-probs, interruptions with exact versions, sleep, its speed.

The reference is transformers in fp32, with attention written out, one sequence at a time. It runs when the engine is
closed, since both may not fit into one device.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal.config import Config
from areal.generation.engine import Chunk, EngineError, GenerationEngine, LoadTimes, WeightLoadError
from areal.planning.split import GIB
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
WARM_UP_SECONDS, SPEED_SECONDS, RECOVERY_SECONDS = 2.0, 8.0, 60.0
RESIDUE, RESIDUE_BYTES = 0.25, 4 * GIB
"""What an engine or a trainer may keep of a GPU while the other one has the turn: this share of what it had, or so
much. Contexts, kernels and graphs stay."""
GPU_SHARE, HOST_SHARE = 0.8, 0.5
"""The reference is computed on the GPU if it takes no more than this share of what is free there; else on the CPU, if
it takes no more than this share of its memory."""


class GenerationChecks:
    """The generator of a self-test. config: of the run, with a folder as its model."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._started: GenerationEngine | None = None
        self._receiving: Receiving | None = None
        self._asleep: list[asyncio.Task[Sampled]] = []

    @property
    def _engine(self) -> GenerationEngine:
        assert self._started is not None
        return self._started

    async def start(self) -> list[Finding]:
        """Start the engine as the run does. Its KV cache is recomputed on new weights until `keep`: only then are
        log-probs those of one version."""
        started = time.perf_counter()
        generator = self._config.generator.model_copy(update={"interrupt": True})
        self._started = await GenerationEngine.start(
            Path(self._config.model), generator, version=0, lora=self._config.trainer.lora,
            sleeps=self._config.colocate, transfer=self._config.weights.backend,
        )  # fmt: skip
        self._engine.keeps_cache = False
        seconds = time.perf_counter() - started
        measured = f"{generator.devices} devices, {generator.dtype}, started in {seconds:.0f} s"
        return [Finding("generator", "ok", measured, values={"seconds": seconds})]

    async def sample(self, file: str) -> list[Finding]:
        """Sample some whole sequences into a file."""
        write(await sample(self._engine, self._config), Path(file))
        return []

    async def interrupt(self, published: str, file: str) -> list[Finding]:
        """Interrupt sequences by loading the weights in the folder `published` as version 1."""
        sequences, times = await interrupt(self._engine, self._config, Path(published), 1)
        write(sequences, Path(file))
        measured, values = _load_cost(times, size_of(Path(published)))
        return [Finding("load", "ok", f"{measured}, {times.sequences_interrupted} sequences", values=values)]

    async def keep(self, file: str) -> list[Finding]:
        """As `interrupt`, from version 1 back to the model's weights as version 2, but the KV cache is kept."""
        self._engine.keeps_cache = True
        sequences, _ = await interrupt(self._engine, self._config, Path(self._config.model), 2)
        self._engine.keeps_cache = False
        write(sequences, Path(file))
        return []

    async def sleep(self, sequences: bool) -> dict[str, Any]:
        """Have the engine leave the devices, if wanted in the middle of some sequences."""
        prompts, begun = _prompts(self._config), asyncio.Event()
        waiting = set(range(SEQUENCES if sequences else 0))

        def note(number: int) -> bool:
            waiting.discard(number)
            if not waiting:
                begun.set()
            return False

        async def sample_one(number: int) -> Sampled:
            parts: list[Chunk] = []
            await _follow(self._engine, self._config, prompts[number], 4 * TOKENS, parts, lambda: note(number))
            return _joined(prompts[number], parts)

        self._asleep = [asyncio.create_task(sample_one(number)) for number in waiting]
        if self._asleep:
            first: asyncio.Future[Any] = asyncio.ensure_future(begun.wait())
            await asyncio.wait([first, asyncio.gather(*self._asleep)], return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
        started = time.perf_counter()
        await self._engine.sleep()
        return {"seconds": time.perf_counter() - started, "sequences": sum(not task.done() for task in self._asleep)}

    async def wake(self, file: str) -> dict[str, Any]:
        """Undo `sleep`, and finish the sequences, into a file."""
        started = time.perf_counter()
        await self._engine.wake()
        seconds = time.perf_counter() - started
        write(await asyncio.gather(*self._asleep), Path(file))
        return {"seconds": seconds}

    async def receive(self, call: str, info: dict[str, Any]) -> list[Finding]:
        """Do a call by which the trainer sends its weights as version 2. Returns what went wrong."""
        self._receiving = self._receiving or Receiving(self._engine)
        try:
            await self._receiving.follow(call, info)
        except (WeightLoadError, EngineError) as error:
            return [Finding("transport", "FAILED", str(error), REPORT)]
        return []

    async def speed(self, of_token: float, peak_tflops: float | None) -> list[Finding]:
        """Tokens/s of a full engine, and a load of its own weights while it is full. of_token: operations of a token.
        peak_tflops: of one device."""
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
        self, sampled: str, interrupted: str, published: str, scratch: str, kept: str | None = None,
        slept: str | None = None, turns: dict[str, Any] | None = None,
    ) -> list[Finding]:  # fmt: skip
        """Compare all log-probs with those of the reference under both versions. scratch: an empty folder. kept:
        sequences of versions 1 and 2. slept: those that the engine slept in. turns: what `check_turns` takes."""
        old, new = read(Path(sampled)), read(Path(interrupted))
        between = read(Path(slept)) if slept else []
        base, dtype = Path(self._config.model), self._config.generator.dtype
        first = reference_logprobs(base, [*old, *between, *new], self._config)
        if first is None:
            why = "the model fits neither into one GPU nor into this machine in fp32"
            names = ["engine", "interruption", *(["kept cache"] if kept else [])]
            findings = [Finding(name, "skipped", why) for name in names]
            return [*findings, *([check_turns(turns, None, dtype)] if turns else [])]
        model = _model_of(base, Path(published), Path(scratch))
        second = reference_logprobs(model, new, self._config)
        findings = [
            check_engine(old, first[: len(old)], dtype),
            check_versions(new, first[len(old) + len(between) :], second or [], dtype),
        ]
        if kept:
            sequences = read(Path(kept))
            exact = kept_logprobs(model, base, sequences, self._config) or []
            recomputed = reference_logprobs(base, sequences, self._config) or []
            findings.append(check_kept(sequences, exact, recomputed, dtype))
        if turns:
            gap = _gap(between, first[len(old) : len(old) + len(between)]) if between else None
            findings.append(check_turns(turns, gap, dtype))
        return findings

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


async def interrupt(
    engine: GenerationEngine, config: Config, folder: Path, version: int
) -> tuple[list[Sampled], LoadTimes]:
    """Sequences that went on from the version before to the weights in `folder`, `version`, and what the load took."""
    parts: list[list[Chunk]] = [[] for _ in range(SEQUENCES)]
    prompts, begun = _prompts(config), asyncio.Event()
    waiting = set(range(SEQUENCES))

    def enough(number: int) -> bool:
        waiting.discard(number)
        if not waiting:
            begun.set()
        return sum(int((chunk.versions >= version).sum()) for chunk in parts[number]) >= AFTER

    async def sample_one(number: int) -> None:
        await _follow(engine, config, prompts[number], LONGEST, parts[number], lambda: enough(number))
        enough(number)

    tasks = [asyncio.create_task(sample_one(number)) for number in range(SEQUENCES)]
    everything = asyncio.gather(*tasks)
    first: asyncio.Future[Any] = asyncio.ensure_future(begun.wait())
    await asyncio.wait([first, everything], return_when=asyncio.FIRST_COMPLETED)
    first.cancel()
    times = await engine.load(folder, version)
    await everything
    return [_joined(prompt, chunks) for prompt, chunks in zip(prompts, parts, strict=True)], times


@dataclass(frozen=True, slots=True)
class BusyLoad:
    """A load while the engine was full: what it took; sequences that ran; seconds until each had the next tokens."""

    times: LoadTimes
    sequences: int
    recovery_seconds: float


async def speed(engine: GenerationEngine, config: Config) -> tuple[float, BusyLoad | None]:
    """Tokens a second while as many sequences run as the engine takes, and a load of the model's weights then. None:
    the engine takes adapters."""
    prompts = _prompts(config)
    count = config.generator.max_concurrent_rollouts
    arrived = [0] * count

    async def keep_busy(number: int) -> None:
        def note() -> bool:
            arrived[number] += 1
            return False

        while True:
            await _follow(engine, config, prompts[number % SEQUENCES], None, [], note)

    tasks = [asyncio.create_task(keep_busy(n)) for n in range(count)]
    load = None
    try:
        await asyncio.wait(tasks, timeout=WARM_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        started, tokens_at_start = time.perf_counter(), engine.stats().tokens_generated
        failed_tasks: set[asyncio.Task[None]] = set()
        while (
            not failed_tasks and engine.stats().tokens_generated == tokens_at_start
        ):  # a busy machine may take longer for the first
            failed_tasks, _ = await asyncio.wait(tasks, timeout=SPEED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        rate = (engine.stats().tokens_generated - tokens_at_start) / (time.perf_counter() - started)
        if not failed_tasks and not config.trainer.lora:
            times = await engine.load(Path(config.model), engine.version)
            seconds, failed_tasks = await _recovery(tasks, arrived)
            load = BusyLoad(times, times.sequences_interrupted, seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in failed_tasks:  # it has failed: none ends by itself
        task.result()
    return rate, load


async def _recovery(tasks: list[asyncio.Task[None]], arrived: list[int]) -> tuple[float, set[asyncio.Task[None]]]:
    """Wait until every sequence has more chunks than have `arrived` now. Returns the seconds, and tasks that ended."""
    started, before = time.perf_counter(), [*arrived]
    while any(now == then for now, then in zip(arrived, before, strict=True)):
        ended, _ = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        if ended or time.perf_counter() - started > RECOVERY_SECONDS:
            return time.perf_counter() - started, ended
    return time.perf_counter() - started, set()


def check_busy_load(load: BusyLoad | None, size: int) -> Finding:
    """Whether all sequences of a full engine went on after a load. size: bytes of the weights."""
    if load is None:
        return Finding("busy load", "skipped", "an engine with adapters cannot load the model's own weights")
    measured, values = _load_cost(load.times, size)
    return judged(
        "busy load",
        load.recovery_seconds < RECOVERY_SECONDS,
        f"{load.sequences} sequences: {measured}; all went on within {load.recovery_seconds:.2f} s",
        f"Some sequences of a full engine do not go on within {RECOVERY_SECONDS:.0f} s after a load: lower "
        "generator.max_concurrent_rollouts, and report it.",
        sequences=load.sequences,
        recovery_seconds=load.recovery_seconds,
        **values,
    )


def check_kept(
    sequences: Sequence[Sampled], exact: Sequence[np.ndarray], recomputed: Sequence[np.ndarray], dtype: str
) -> Finding:
    """Whether the tokens of version 2 have the log-probs that they have on the KV cache of version 1, `exact`, and not
    those on a cache of their own version, `recomputed`, of all tokens."""
    limit = LAYERS * GAP[dtype]
    after = [s.versions == 2 for s in sequences]
    crossing = [n for n, s in enumerate(sequences) if set(s.versions.tolist()) == {1, 2}]
    if len(crossing) < SEQUENCES // 4:
        return Finding("kept cache", "skipped", f"only {len(crossing)} of {len(sequences)} sequences were interrupted")
    sampled = np.concatenate([sequences[n].logprobs[after[n]] for n in crossing])
    gap = _mean(np.abs(sampled - np.concatenate([exact[n] for n in crossing])))
    other = _mean(np.abs(sampled - np.concatenate([recomputed[n][after[n]] for n in crossing])))
    return judged(
        "kept cache",
        gap <= limit,
        f"{len(crossing)} sequences: {gap:.1e} nats from new weights on the old KV cache (at most {limit:g}), "
        f"{other:.1e} from a recomputed one",
        "With generator.kv_on_update=keep the engine does not go on from the KV cache that it had: set it to "
        "recompute, and report it.",
        gap=gap,
        gap_to_recomputed=other,
        crossing=len(crossing),
    )


def check_turns(facts: dict[str, Any], gap: float | None, dtype: str) -> Finding:
    """Whether trainer and generator leave each other the devices. gap: of log-probs of sequences that the engine slept
    in; None: not compared.

    facts: `sleep_seconds`, `wake_seconds`, `offload_seconds`; on a GPU the free bytes `before` the engine started,
    while it was `running` and `asleep`, and in `offloaded` what the trainer had before and after."""
    limit = LAYERS * GAP[dtype]
    before, running, asleep = ((facts.get(name) or {}).get("bytes") for name in ("before", "running", "asleep"))
    had, has = facts.get("offloaded") or (0.0, 0.0)
    parts, left = [], True
    if before is not None and running is not None and asleep is not None:
        left = before - asleep <= max(RESIDUE * (before - running), RESIDUE_BYTES) and has <= max(
            RESIDUE * had, RESIDUE_BYTES
        )
        parts.append(
            f"the engine asleep keeps {(before - asleep) / GIB:.1f} of {(before - running) / GIB:.1f} GiB, the trainer "
            f"away {has / GIB:.1f} of {had / GIB:.1f}"
        )
    parts.append(", ".join(f"{name} {facts[f'{name}_seconds']:.2f} s" for name in ("sleep", "wake", "offload")
                           if f"{name}_seconds" in facts))  # fmt: skip
    parts.append("log-probs not compared" if gap is None else f"after it {gap:.1e} nats (at most {limit:g})")
    return judged(
        "turns",
        left and (gap is None or gap <= limit),
        "; ".join(part for part in parts if part),
        "Trainer and generator do not leave each other the GPU, or sequences go on wrongly after it: report it."
        if left or gap is None
        else "With colocate=true memory stays taken: report it, and set generator.memory_share lower.",
        gap=gap,
        **facts,
    )


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

    from areal.selftest.references import logprobs_alone

    if (model := _reference(folder)) is None:
        return None
    logprobs = []
    with torch.no_grad():
        for sequence in sequences:
            logps = logprobs_alone(model, _tokens(sequence, model.device), config.sampling.temperature)
            logprobs.append(logps[len(sequence.prompt) - 1 :].cpu().numpy())
    return logprobs


def kept_logprobs(old: Path, new: Path, sequences: Sequence[Sampled], config: Config) -> list[np.ndarray] | None:
    """Log-probs of the tokens of version 2 of each sequence under the model in `new`, on the KV cache that the model in
    `old` has made of the tokens before; fp32. None: no room."""
    import torch

    ends = [len(s.prompt) + int((s.versions < 2).sum()) - 1 for s in sequences]  # the last token has no KV yet
    caches = []
    with torch.no_grad():
        if (model := _reference(old)) is None:
            return None
        for sequence, end in zip(sequences, ends, strict=True):
            tokens = _tokens(sequence, model.device)[None, :end]
            caches.append(model(input_ids=tokens, use_cache=True).past_key_values if end else None)
        del model
        model = _reference(new)
        logprobs = []
        for sequence, end, cache in zip(sequences, ends, caches, strict=True):
            tokens = _tokens(sequence, model.device)
            logits = model(input_ids=tokens[None, end:], past_key_values=cache, use_cache=True).logits[0, :-1]
            logps = torch.log_softmax(logits / config.sampling.temperature, -1)
            logprobs.append(logps.gather(1, tokens[end + 1 :, None])[:, 0].cpu().numpy())
    return logprobs


def _reference(folder: Path) -> Any:
    """The model in `folder` in fp32, on the GPU or else on the CPU. None: there is no room."""
    import torch
    from transformers import AutoModelForCausalLM

    from areal.planning.command import count_parameters

    size = 4 * count_parameters(str(folder))
    device = torch.device("cpu")
    if torch.cuda.is_available() and size <= GPU_SHARE * torch.cuda.mem_get_info()[0]:
        device = torch.device("cuda")
    elif size > HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return None
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.to(device).eval()


def _tokens(sequence: Sampled, device: Any) -> Any:
    """Prompt and completion, int64 [T]."""
    import torch

    return torch.from_numpy(np.concatenate([sequence.prompt, sequence.tokens])).long().to(device)


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
