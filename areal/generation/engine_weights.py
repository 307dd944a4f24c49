"""The weights of an engine: their version, and how new weights replace old weights while sequences are running.

New weights come as files (`load`) or straight from the trainer (`receive`). In both cases the scheduler is paused, so
every sequence stops between two tokens, and resumed once the weights are in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from areal.config.engine_sections import GeneratorConfig
from areal.generation.engine_process import EngineError, EngineProcess, EngineSequences
from areal.generation.offered_weights import EngineModel, WeightLoadError, check_offer, check_shapes

FINISH = "finish_weight_update"  # the last call of a direct transfer

# The number of the only adapter.
ADAPTER = 1

# Timeout of one call of a transfer: TRANSFER_SECONDS plus a second for ELEMENTS_PER_SECOND elements, or plus
# TIMES_THE_LAST times the duration of the last transfer. A slower engine is stuck.
TRANSFER_SECONDS, ELEMENTS_PER_SECOND, TIMES_THE_LAST = 90.0, 25e6, 10.0
# If the sender is gone in the middle of a call, the engine is ended after this time. gloo notices a loss within the
# time, NCCL never does.
LOST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """The cost of one load of new weights.

    pause_seconds: until the engine was paused; with `generator.interrupt: false`, this includes finishing the running
    sequences. load_seconds: until the weights were in place. resume_seconds: until sequences continued.
    sequences_interrupted: sequences stopped mid-way. tokens_recomputed: tokens of the stopped sequences, prompt and
    sampled; 0 if the KV cache is kept. A common prefix counts for each sequence, though vLLM computes it once.
    """

    pause_seconds: float
    load_seconds: float
    resume_seconds: float
    sequences_interrupted: int
    tokens_recomputed: int


@dataclass(frozen=True, slots=True)
class _Pause:
    """start, reached: times of `time.perf_counter`. sequences, recomputed: as in `LoadTimes`."""

    start: float
    reached: float
    sequences: int
    recomputed: int


class EngineWeights:
    """The weights of one engine.

    version: the policy version that samples the next tokens. keeps_cache: whether sequences keep their KV cache on new
    weights (`kv_on_update: keep`). torn_since: start of a transfer that has failed or is unfinished; None: the weights
    are whole.
    """

    def __init__(
        self,
        process: EngineProcess,
        sequences: EngineSequences,
        config: GeneratorConfig,
        model: EngineModel,
        version: int,
    ) -> None:
        self._process, self._core, self._sequences = process, process.core, sequences
        self._config, self._model = config, model
        self.version = version
        self.keeps_cache = config.kv_on_update == "keep"
        self.torn_since: float | None = None
        # By version, the salt of the version's last load. A rollback may load other weights under a number.
        self._salts = {version: "start"}
        self._loads = itertools.count()
        self._loading = asyncio.Lock()
        self._drained_since: float | None = None
        self._elements_per_second = ELEMENTS_PER_SECOND  # the least speed of a transfer

    def salt(self, user: str = "", first_version: int | None = None) -> str | None:
        """The salt of a request: requests share the KV cache of a prefix only if their salts are equal.

        The salt consists of the user's name and, if KV cache is kept, of the weights that begin the sample.
        """
        if not self.keeps_cache:
            return user or None
        current = self._salts[self.version]
        return f"{user}\n{current if first_version is None else self._salts.get(first_version, current)}"

    async def load(self, folder: Path, version: int) -> LoadTimes:
        """Swap in the weights of `folder`, interrupting every sequence mid-way.

        `folder` holds safetensors files of the whole model or, for an engine with `lora`, an adapter of the model at
        the start. Tokens sampled so far stay. The KV cache is dropped, and each prefix is prefilled again under the new
        weights. With `kv_on_update: keep` running samples keep their KV cache, but later samples do not reuse it. With
        `interrupt: false` the engine is `drained` first. Raises WeightLoadError, before anything is interrupted, if the
        weights do not fit the model. Raises EngineError if the engine dies, or if loading fails so late that the
        weights are torn (the engine is then closed).
        """
        await asyncio.to_thread(check_offer, folder, self._model)
        async with self._loading, self.drained():
            self._process.raise_if_failed()
            await self._open(folder)
            swap = asyncio.ensure_future(self._swap(folder, version))
            try:
                return await asyncio.shield(swap)
            except asyncio.CancelledError:
                await asyncio.wait({swap})  # cancelling the swap would leave the engine paused for ever
                raise

    async def receive(
        self, version: int, calls: AsyncGenerator[tuple[str, dict[str, Any]], None], lost: asyncio.Event | None = None
    ) -> LoadTimes:
        """Swap in weights that a trainer sends straight into an engine with `transfer`, as in `load`.

        calls: the calls of vLLM's weight transfer with their arguments, up to `finish_weight_update`. Asking for the
        next call tells the trainer that a call is done. Sequences are interrupted at `start_weight_update`, whose
        argument has the shapes of all tensors. lost: is set once the sender is gone in the middle of a call. Raises
        WeightLoadError if the tensors do not fit the model, or if the transfer ends early or fails: then the engine
        stays paused until `load` or `receive` has brought a whole version. Raises EngineError if the engine dies, or
        does not finish a call in time, LOST_SECONDS after the loss of a sender (the engine is then closed).
        """
        async with self._loading, self.drained(), contextlib.aclosing(calls):
            self._process.raise_if_failed()
            await self._end_transfer()
            times, pause, elements = None, None, 0
            try:
                async for call, info in calls:
                    if call == "start_weight_update":
                        check_shapes({name: tuple(shape) for name, shape in info.items()}, self._model, "what is sent")
                        elements = sum(prod(shape) for shape in info.values())
                        pause = await self._pause()
                        self.torn_since = pause.start
                    await self._transfer(elements, None if call == FINISH else lost, "transfer", call, info)
                    if call == FINISH and pause:
                        times = await self._resume(pause, version)
                        self._elements_per_second = elements / times.load_seconds / TIMES_THE_LAST
            except WeightLoadError:
                await self._end_transfer()
                raise
            if times is None:
                await self._end_transfer()
                raise WeightLoadError("the trainer ended the transfer early")
            return times

    async def _transfer(self, elements: int, lost: asyncio.Event | None, method: str, *args: Any) -> None:
        """Call a method of all workers, for a transfer of `elements` elements. Raises WeightLoadError, EngineError."""
        patience = TRANSFER_SECONDS + elements / self._elements_per_second
        call = asyncio.create_task(self._process.call_workers(method, *args))
        loss = asyncio.create_task((lost or asyncio.Event()).wait())
        try:
            await asyncio.wait({call, loss}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if loss.done():
                await asyncio.wait({call}, timeout=LOST_SECONDS)
            if not call.done():
                why = "its sender is gone" if loss.done() else f"it has not ended within {patience:.0f} s"
                stuck = self._process.fail(EngineError(f"A transfer of weights holds the engine, but {why}."))
                await self._process.close(patience=0)
                raise stuck
            wrong = call.result()
        finally:
            call.cancel()
            loss.cancel()
            await asyncio.wait({call, loss})
        if wrong:
            raise WeightLoadError(wrong)

    async def _end_transfer(self) -> None:
        """After a failed transfer: release the sender, and make the model ready for a load."""
        if self.torn_since is not None:
            await self._transfer(0, None, "end_transfer")

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """With `interrupt: false`: finish the running sequences before the block (except sequences that vLLM had
        preempted), and start none in it. Do nothing with `interrupt: true`, inside another drained block, and after a
        failed transfer, which leaves nothing running."""
        if self._config.interrupt or self._drained_since is not None or self.torn_since is not None:
            yield
            return
        self._drained_since = time.perf_counter()
        try:
            # No sequence starts until `resume_scheduler_async`; the call returns once no sequence is running.
            await self._process.call(self._core.pause_scheduler_async(mode="wait", clear_cache=False))
            yield
        finally:
            self._drained_since = None
            if self._process.error is None and self.torn_since is None:
                await self._process.call(self._core.resume_scheduler_async())

    async def sleep(self) -> None:
        """Stop sampling and, on GPUs, free GPU memory: the KV cache is dropped, and the weights move to host memory.

        Sequences stay. After `wake` each prefix is prefilled again. A load waits for `wake`. Only an engine started
        with `sleeps` sleeps, and only once at a time."""
        await self._loading.acquire()
        if self._core.vllm_config.model_config.enable_sleep_mode:
            await self._process.call(self._core.sleep_async(level=1, mode="keep"))
        else:
            await self._process.call(self._core.pause_scheduler_async(mode="keep", clear_cache=True))

    async def wake(self) -> None:
        """Undo `sleep`: sequences continue."""
        if self._core.vllm_config.model_config.enable_sleep_mode:
            await self._process.call(self._core.wake_up_async())
        else:
            await self._process.call(self._core.resume_scheduler_async())
        self._loading.release()

    async def _open(self, folder: Path) -> None:
        """Open the files of the next load in all workers: the trainer may remove checked files."""
        adapter = ADAPTER if self._model.lora else None
        if wrong := await self._process.call_workers("open_policy", str(folder), adapter):
            raise WeightLoadError(f"{folder} cannot be read: {wrong}")

    async def _swap(self, folder: Path, version: int) -> LoadTimes:
        try:
            await self._end_transfer()
            pause = await self._pause()
            await self._process.call(self._core.collective_rpc_async("load_policy"))
            return await self._resume(pause, version)
        except EngineError:
            raise
        except Exception as error:  # vLLM turns any error of its worker into a plain Exception
            torn = EngineError(f"Loading {folder} failed half-way, so the weights may be torn: {error}")
            self._process.fail(torn)
            await self._process.close()
            raise torn from error

    async def _pause(self) -> _Pause:
        """Stop all sequences between two tokens. Stopped sequences stay stopped."""
        start = self.torn_since or self._drained_since or time.perf_counter()
        await self._process.call(self._core.pause_scheduler_async(mode="keep", clear_cache=not self.keeps_cache))
        stopped = self._sequences.interruptible()
        recomputed = 0 if self.keeps_cache else sum(sequence.prompt + sequence.sampled for sequence in stopped)
        return _Pause(start, time.perf_counter(), len(stopped), recomputed)

    async def _resume(self, pause: _Pause, version: int) -> LoadTimes:
        """Let all sequences continue under the new weights."""
        self.version = version
        self._salts[version] = f"load {next(self._loads)}"
        self.torn_since = None
        loaded = time.perf_counter()
        # Both calls are sent at once, in this order. A round trip between them would leave the engine idle.
        labelled, resumed = self._core.set_weight_version_async(str(version)), self._core.resume_scheduler_async()
        await asyncio.gather(self._process.call(labelled), self._process.call(resumed))
        return LoadTimes(
            pause.reached - pause.start,
            loaded - pause.reached,
            time.perf_counter() - loaded,
            pause.sequences,
            pause.recomputed,
        )
