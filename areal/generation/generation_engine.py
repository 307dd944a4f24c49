"""Generation with vLLM: tokens in, tokens out, with each token's log-prob and the version that sampled it.

`vllm_worker` runs inside vLLM's process; contracts on imports name all who use vLLM's API. This talks to vLLM's engine
process directly, without the `AsyncLLM` front end, for two reasons:

* *Exact versions.* The engine labels each step's message with the version of the weights that ran the step. The label
  changes only while the engine is paused and idle. So a token and its version arrive in one message, and the version
  stays correct however long the message waits in a queue here. `AsyncLLM` reports versions only with a sequence's last
  token.
* *Speed.* There is no tokenizer, no text and no object per token: only rows of a table remain.

Importing this module imports neither torch nor vLLM: `GenerationEngine.start` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from areal.base.errors import explain
from areal.base.processes import importing
from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.config.trainer_section import LoraConfig
from areal.cpu import vllm_on_cpu as cpu
from areal.cpu.fork_server import forked_engines
from areal.devices import visible_devices
from areal.generation.engine_start import EngineUse, checked_config, engine_arguments, prepare, stop_tokens
from areal.generation.offered_weights import EngineModel, WeightLoadError, check_offer, check_shapes, read_model_folder
from areal.models import check_mixture
from areal.samples.pictures import find
from areal.samples.table import Finish, Generation, TokenTable
from areal.samples.trajectory import TokenScores
from areal.weights.model_files import only_model

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core_client import AsyncMPClient

T = TypeVar("T")

# Time for the engine process to exit. It takes 3 s on a busy core; if killed earlier, it leaks a semaphore and warns.
CLOSE_SECONDS = 10

FINISH = "finish_weight_update"  # the last call of a direct transfer
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}

# vllm.v1.engine.EngineCoreEventType
PREEMPTED = 3

_NOTHING = np.empty((0, 1), np.float32)

# The number of the only adapter.
ADAPTER = 1

# Timeout of one call of a transfer: so much, and a second for so many elements, or else so many times as long as the
# last transfer took. An engine that takes longer is stuck.
TRANSFER_SECONDS, ELEMENTS_PER_SECOND, TIMES_THE_LAST = 90.0, 25e6, 10.0
# An engine in a call of a sender that is gone is ended after so much: gloo notices it in this time, NCCL never does.
LOST_SECONDS = 5.0


class EngineError(Exception):
    """The engine cannot go on: it did not start, died, was closed, handed over its sequences, or has torn weights."""


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """What one load of new weights cost.

    pause_seconds: until the engine was paused; if `generator.interrupt` is false, this includes finishing what ran.
    load_seconds: until the weights were in place. resume_seconds: until sequences continued.
    sequences_interrupted: sequences stopped mid-way.
    tokens_recomputed: tokens of their prefixes, prompt and sampled; 0 if the KV cache is kept. A prefix that sequences
    have in common counts for each of them, though vLLM computes it once.
    """

    pause_seconds: float
    load_seconds: float
    resume_seconds: float
    sequences_interrupted: int
    tokens_recomputed: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """running, waiting: number of sequences. kv_use: share of the KV cache in use, 0 to 1. tokens_generated: since the
    start. preemptions: since the start, of sequences for which no KV cache was left (not those stopped by `load`).
    steps: messages of the engine's process since the start.
    prefix_cache_queries, prefix_cache_hits: prompt tokens since the start, and those whose KV cache was there already.
    """

    running: int
    waiting: int
    kv_use: float
    tokens_generated: int
    preemptions: int
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Pause:
    """When it was begun and reached, and what it stopped, as in LoadTimes."""

    start: float
    reached: float
    sequences: int
    recomputed: int


class GenerationEngine:
    """One vLLM engine, in a child process that is killed when this process ends."""

    def __init__(self, core: AsyncMPClient, config: GeneratorConfig, model: EngineModel, version: int) -> None:
        """For `start` only. Call from the event loop that will use the engine."""
        self._core = core
        self._config = config
        self.keeps_cache = config.kv_on_update == "keep"
        """Whether sequences keep their KV cache on new weights. One of `kv_on_update: keep` can recompute it."""
        self._model = model
        self._version = version
        # By version, that of its last load. After a rollback other weights may come under the same number.
        self._salts = {version: "start"}
        self._sequences: dict[str, _Sequence] = {}
        self._serial = itertools.count()
        self._loading = asyncio.Lock()
        self._drained_since: float | None = None
        self._error: EngineError | None = None
        self._torn_since: float | None = None
        self._elements_per_second = ELEMENTS_PER_SECOND  # of a transfer, at the least
        self._handed_over = False
        self._tokens_generated = self._preemptions = self._queries = self._hits = self._steps = 0
        self._loads: dict[int, tuple[int, float]] = {}  # running sequences and KV use, by data-parallel rank
        self._pump = asyncio.create_task(self._deliver_outputs(), name="engine outputs")

    @classmethod
    async def start(
        cls,
        model: Path,
        config: GeneratorConfig,
        *,
        version: int,
        seed: int = 0,
        lora: LoraConfig | None = None,
        sleeps: bool = False,
        transfer: str | None = None,
        routes: bool = False,
        kept_words: int = 0,
        kept_logprobs: bool = False,
    ) -> GenerationEngine:
        """Start an engine on the Hugging Face folder `model`, whose weights are policy `version`. lora: if given, later
        versions are adapters of this model. sleeps: `sleep` will be called. transfer: the backend of vLLM's weight
        transfer for `receive`; an engine with it does not sleep. routes: whether tokens have the column of this name.
        kept_words: the width of the column of this name; 0: they do not have it. If it is full, words may be missing.
        kept_logprobs: whether they also have the column of this name.

        Every process that starts an engine needs the guard `if __name__ == "__main__"`: the child imports its main
        module. Raises UserError if `model` or `config` is at fault, EngineError if the engine does not start.
        """
        config = config.for_device(cuda=bool(visible_devices()))
        shapes, tied = read_model_folder(model)
        # In a thread: importing vLLM and waiting for its process take seconds; the actor has to send heartbeats then.
        use = EngineUse(seed, lora, sleeps, transfer, routes, kept_words)
        core, stops = await asyncio.to_thread(_start_core, model, config, use)
        limits = core.vllm_config.model_config
        vocabulary = limits.get_vocab_size()
        sizes = vocabulary, limits.max_model_len, min(kept_words, vocabulary), kept_logprobs
        facts = EngineModel(model, shapes, tied, lora, stops, *sizes)
        engine = cls(core, config, facts, version)
        if lora:
            await engine._call(core.collective_rpc_async("start_adapter", args=(ADAPTER,)))
        if routes and not core.vllm_config.aux_output_config.enabled:
            await engine._call(core.collective_rpc_async("capture_routes"))
        await engine._call(core.set_weight_version_async(str(version)))
        return engine

    @property
    def version(self) -> int:
        """The policy version that samples the next tokens."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence, prompt and completion, in tokens."""
        return self._model.max_len

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
        """Sample one continuation of `tokens`, streamed in parts of about `stream_interval` tokens, at least one. The
        last one has a `finish`. The first one of a user, who waits for it, has one token.

        `max_new_tokens` replaces that of `sampling` (a sequence continued from another engine has fewer tokens left).
        first_version: of the first token of the sample that this call belongs to. With `kv_on_update: keep` the call
        reuses prefixes since this version, otherwise only those that the current weights have computed.
        pictures: those that the first placeholders among the tokens stand for. cache_salt: a name of the user, if the
        call is one's: it reuses prefixes of calls with the same name alone. whole: no part is read before the last, so
        that all but the first may be longer.
        Closing the async generator or cancelling its task aborts the sequence in the engine. Raises ValueError for
        tokens and pictures that the model cannot take, EngineError if the engine dies or hands over its sequences.
        """
        max_tokens = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        params = _sampling_params(
            tuple(self._model.stop_tokens),
            whole,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_new_tokens, max_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            logprobs=self._model.kept_words,
            routed_experts_prompt_start=len(tokens) - 1 if self._core.vllm_config.aux_output_config.enabled else 0,
        )
        features = find("features")(self._model.folder, tokens, pictures) if pictures else None
        salt = self._salt(cache_salt, first_version)
        async with contextlib.aclosing(self._stream(request_id, tokens, params, salt, features)) as sequences:
            async for sequence in sequences:
                yield sequence.take()

    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores:
        """The log-probs of these tokens, and the `top_k` likeliest ones, under these weights, without others' KV cache.

        The engine holds the logits of up to a step's tokens at once, in fp32. Raises as `generate` does.
        """
        params = _sampling_params(max_tokens=1, prompt_logprobs=top_k)
        sequence = await _scored(self._stream(request_id, tokens, params, self._salt()))
        assert isinstance(sequence.scores, TokenScores)
        return sequence.scores._replace(version=int(sequence.rows.versions[-1]))

    async def classify(self, request_id: str, tokens: Sequence[int], activation: bool) -> np.ndarray:
        """The outputs of a sequence classifier for these tokens, float32 [outputs]; `activation`: after its sigmoid or
        softmax. The engine has the option `runner: pooling`. Raises as `generate` does."""
        from vllm import PoolingParams

        params = PoolingParams(task="classify", use_activation=activation)
        outputs = (await _scored(self._stream(request_id, tokens, params, self._salt()))).scores
        assert isinstance(outputs, np.ndarray)
        return outputs

    async def _stream(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams | PoolingParams,
        salt: str | None,
        features: list[MultiModalFeatureSpec] | None = None,
    ) -> AsyncGenerator[_Sequence, None]:
        """The sequence, each time that it has something new. salt, features: of `_salt` and `_features`."""
        if not 0 < len(tokens) < self._model.max_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens: the model takes 1 to {self._model.max_len - 1} "
                f"(max_model_len minus one token to sample)"
            )
        if min(tokens) < 0 or max(tokens) >= self._model.vocab_size:
            raise ValueError(f"the prompt has a token outside the model's vocabulary of {self._model.vocab_size}")
        self._raise_if_failed()
        if self._handed_over:
            raise _handed_over()
        # The serial number keeps late tokens of an aborted request out of a new one with the same id.
        key = f"{request_id}#{next(self._serial)}"
        sequence = self._sequences[key] = _Sequence(len(tokens))
        try:
            await self._send(key, tokens, params, salt, features)
            while not sequence.exhausted:
                await sequence.grow()
                yield sequence
        finally:
            self._sequences.pop(key, None)
            if not sequence.finished and self._error is None:
                await self._core.abort_requests_async([key])

    async def load(self, folder: Path, version: int) -> LoadTimes:
        """Swap in the weights of `folder`, interrupting every sequence mid-way.

        `folder` holds safetensors files of the whole model or, if the engine was started with `lora`, an adapter of the
        model that it was started on. Tokens sampled so far stay. The KV cache is dropped, and each prefix is prefilled
        again under the new weights. With `kv_on_update: keep` samples that have begun keep their KV cache, but later
        ones do not reuse it. With `interrupt: false` the engine is `drained` first.
        Raises WeightLoadError, before anything is interrupted, if the weights do not fit the model. Raises EngineError
        if the engine dies, or if loading fails so late that the weights are torn (the engine is then closed).
        """
        await asyncio.to_thread(check_offer, folder, self._model)
        async with self._loading, self.drained():
            self._raise_if_failed()
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

        calls: those of vLLM's weight transfer, each with its argument, from the first to `finish_weight_update`; asking
        for the next one says that a call is done. Sequences are interrupted at `start_weight_update`, whose argument is
        the shape of each tensor that will come. lost: is set once the sender is gone in the middle of a call. Raises
        WeightLoadError if they do not fit the model, or if the transfer ends early or fails: then the engine stays
        paused until `load` or `receive` has brought a whole version. Raises EngineError if the engine dies, or does not
        finish a call in time, which is LOST_SECONDS for a sender that is gone (the engine is then closed).
        """
        async with self._loading, self.drained(), contextlib.aclosing(calls):
            self._raise_if_failed()
            await self._end_transfer()
            times, pause, elements = None, None, 0
            try:
                async for call, info in calls:
                    if call == "start_weight_update":
                        check_shapes({name: tuple(shape) for name, shape in info.items()}, self._model, "what is sent")
                        elements = sum(prod(shape) for shape in info.values())
                        pause = await self._pause()
                        self._torn_since = pause.start
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
        """Call a method of all workers, for a transfer of so many elements. Raises WeightLoadError, EngineError."""
        patience = TRANSFER_SECONDS + elements / self._elements_per_second
        call = asyncio.create_task(self._call_workers(method, *args))
        loss = asyncio.create_task((lost or asyncio.Event()).wait())
        try:
            await asyncio.wait({call, loss}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if loss.done():
                await asyncio.wait({call}, timeout=LOST_SECONDS)
            if not call.done():
                why = "its sender is gone" if loss.done() else f"it has not ended within {patience:.0f} s"
                stuck = self._fail(EngineError(f"A transfer of weights holds the engine, but {why}."))
                await self.close(patience=0)
                raise stuck
            wrong = call.result()
        finally:
            call.cancel()
            loss.cancel()
            await asyncio.wait({call, loss})
        if wrong:
            raise WeightLoadError(wrong)

    async def _end_transfer(self) -> None:
        """After a transfer that failed: release the sender, and make the model ready for a load."""
        if self._torn_since is not None:
            await self._transfer(0, None, "end_transfer")

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """With `interrupt: false`: running sequences are finished before the block (except those that vLLM itself had
        preempted), and no sequence starts in it. Otherwise, inside another such block, and after a transfer that
        failed, which leaves nothing running, it does nothing."""
        if self._config.interrupt or self._drained_since is not None or self._torn_since is not None:
            yield
            return
        self._drained_since = time.perf_counter()
        try:
            # No sequence starts until `resume_scheduler_async`; this returns once none is running.
            await self._call(self._core.pause_scheduler_async(mode="wait", clear_cache=False))
            yield
        finally:
            self._drained_since = None
            if self._error is None and self._torn_since is None:
                await self._call(self._core.resume_scheduler_async())

    async def sleep(self) -> None:
        """Stop sampling and, on GPUs, leave their memory: the KV cache is dropped, and the weights move to host memory.

        Sequences stay. After `wake` each prefix is prefilled again. A load waits for `wake`. Call it only if the engine
        was started with `sleeps`, and not while it is asleep."""
        await self._loading.acquire()
        if self._core.vllm_config.model_config.enable_sleep_mode:
            await self._call(self._core.sleep_async(level=1, mode="keep"))
        else:
            await self._call(self._core.pause_scheduler_async(mode="keep", clear_cache=True))

    async def wake(self) -> None:
        """Undo `sleep`: sequences go on where they stopped."""
        if self._core.vllm_config.model_config.enable_sleep_mode:
            await self._call(self._core.wake_up_async())
        else:
            await self._call(self._core.resume_scheduler_async())
        self._loading.release()

    def hand_over(self, request_ids: Collection[str] | None = None) -> None:
        """End these sequences where they are, so that another engine can continue them. None: all sequences.

        Each running `generate` yields the tokens it has, raises EngineError and is aborted in the engine. A sequence
        whose last token has already arrived ends normally. After a hand-over of all sequences, later calls of
        `generate` raise EngineError.
        """
        self._handed_over = self._handed_over or request_ids is None
        for key, sequence in self._sequences.items():
            if request_ids is None or key.rpartition("#")[0] in request_ids:
                sequence.fail(_handed_over())

    def stats(self) -> EngineStats:
        """The load at the engine's latest step."""
        unfinished = len(self._sequences)
        running = min(sum(running for running, _ in self._loads.values()), unfinished)
        kv_use = max((used for _, used in self._loads.values()), default=0.0) if unfinished else 0.0
        return EngineStats(
            running,
            unfinished - running,
            kv_use,
            self._tokens_generated,
            self._preemptions,
            self._queries,
            self._hits,
            self._steps,
        )

    async def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Stop the engine process, kill it after `patience` seconds. Sequences in it end with an EngineError."""
        self._fail(EngineError("The engine was closed."))
        self._pump.cancel()
        await asyncio.wait({self._pump})
        await asyncio.to_thread(self._core.shutdown, patience)

    async def _send(
        self,
        key: str,
        tokens: Sequence[int],
        params: SamplingParams | PoolingParams,
        salt: str | None,
        features: list[MultiModalFeatureSpec] | None,
    ) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams  # vllm itself would import the module anew for each request
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.exceptions import EngineDeadError

        request = EngineCoreRequest(
            request_id=key,
            prompt_token_ids=[int(token) for token in tokens],
            mm_features=features,
            sampling_params=params if isinstance(params, SamplingParams) else None,
            pooling_params=None if isinstance(params, SamplingParams) else params,
            arrival_time=time.time(),
            lora_request=LoRARequest("policy", ADAPTER, "loaded by open_policy") if self._model.lora else None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        try:
            await self._core.add_request_async(request)  # the engine gives no answer
        except EngineDeadError as error:
            raise self._fail(_death(error)) from error

    def _salt(self, of_user: str = "", first_version: int | None = None) -> str | None:
        """Requests share the KV cache of a prefix only if their salts are equal: that of a user, and of weights."""
        if not self.keeps_cache:
            return of_user or None
        current = self._salts[self._version]
        return f"{of_user}\n{current if first_version is None else self._salts.get(first_version, current)}"

    async def _open(self, folder: Path) -> None:
        """Have the files opened that are loaded next. The trainer may have removed them since they were checked."""
        adapter = ADAPTER if self._model.lora else None
        if wrong := await self._call_workers("open_policy", str(folder), adapter):
            raise WeightLoadError(f"{folder} cannot be read: {wrong}")

    async def _call_workers(self, method: str, *args: Any) -> str | None:
        """Call a method of all workers that returns why it failed, or None. Returns why the first one failed."""
        call = self._core.call_utility_all_async("collective_rpc", method, None, args, None)
        return next((answer for answers in await self._call(call) for answer in answers if answer), None)

    async def _swap(self, folder: Path, version: int) -> LoadTimes:
        try:
            await self._end_transfer()
            pause = await self._pause()
            await self._call(self._core.collective_rpc_async("load_policy"))
            return await self._resume(pause, version)
        except EngineError:
            raise
        except Exception as error:  # vLLM reports whatever its worker raised as a plain Exception
            torn = EngineError(f"Loading {folder} failed half-way, so the weights may be torn: {error}")
            self._fail(torn)
            await self.close()
            raise torn from error

    async def _pause(self) -> _Pause:
        """Stop all sequences where they are. They stay stopped if they are already."""
        start = self._torn_since or self._drained_since or time.perf_counter()
        await self._call(self._core.pause_scheduler_async(mode="keep", clear_cache=not self.keeps_cache))
        stopped = [sequence for sequence in self._sequences.values() if sequence.sampled and not sequence.ended]
        recomputed = 0 if self.keeps_cache else sum(sequence.prompt + sequence.sampled for sequence in stopped)
        return _Pause(start, time.perf_counter(), len(stopped), recomputed)

    async def _resume(self, pause: _Pause, version: int) -> LoadTimes:
        """Let all sequences continue under the weights that are in place now."""
        self._version = version
        self._salts[version] = f"load {next(self._serial)}"
        self._torn_since = None
        loaded = time.perf_counter()
        # Both are sent at once, in this order, which saves a round trip during which nothing would run.
        labelled, resumed = self._core.set_weight_version_async(str(version)), self._core.resume_scheduler_async()
        await asyncio.gather(self._call(labelled), self._call(resumed))
        return LoadTimes(
            pause.reached - pause.start,
            loaded - pause.reached,
            time.perf_counter() - loaded,
            pause.sequences,
            pause.recomputed,
        )

    async def _call(self, call: Awaitable[T]) -> T:
        """Await an answer of the engine process. Raises EngineError if it dies, since vLLM then never answers."""
        from vllm.v1.engine.exceptions import EngineDeadError

        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait({answer, self._pump}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        self._raise_if_failed()
        try:
            return answer.result()
        except EngineDeadError as error:
            raise self._fail(_death(error)) from error

    async def _deliver_outputs(self) -> None:
        while True:
            try:
                outputs = await self._core.get_output_async()
            except Exception as error:  # whatever ended vLLM's receiving task ends this engine
                self._fail(_death(error))
                return
            try:
                self._deliver(outputs)
            except Exception as error:  # otherwise every sequence would wait for ever
                self._fail(EngineError(f"What the vLLM engine sent cannot be used: {error!r}"))
                return

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        self._steps += 1
        if outputs.scheduler_stats is not None:
            stats = outputs.scheduler_stats
            self._loads[outputs.engine_index] = stats.num_running_reqs, stats.kv_cache_usage
            self._queries += stats.prefix_cache_stats.queries
            self._hits += stats.prefix_cache_stats.hits
        first = outputs.outputs[0].new_logprobs if outputs.outputs else None
        logprobs = _NOTHING if first is None else first.logprobs  # of all outputs, one after another
        words = None if first is None or logprobs.shape[1] < 2 else first.logprob_token_ids
        routes = outputs.outputs[0].routed_experts if outputs.outputs else None
        end = 0
        for output in outputs.outputs:
            begin, end = end, end + len(output.new_token_ids)
            self._tokens_generated += end - begin
            key, _, version = output.request_id.partition("@")  # tokens of earlier steps name their version
            version = version or outputs.weight_version
            if (sequence := self._sequences.get(key)) is not None:
                self._preemptions += sum(event.type == PREEMPTED for event in output.events or ())
                columns = {"logprobs": logprobs[begin:end, 0]}
                if words is not None:
                    columns["kept_words"] = words[begin:end]
                    if self._model.kept_logprobs:
                        columns["kept_logprobs"] = np.where(words[begin:end] < 0, 0, logprobs[begin:end, 1:])
                if routes is not None:
                    columns["routes"] = routes[begin:end]
                sequence.add(output, columns, version)

    def _fail(self, error: EngineError) -> EngineError:
        """End all sequences with the first error that occurred, and return that error."""
        self._error = first = self._error or error
        for sequence in self._sequences.values():
            sequence.fail(first)
        return first

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


class _Sequence:
    """A sequence between the engine and the reader of `generate`. `rows`: the tokens that are not taken yet. `scores`:
    of the prompt, if they were asked for: those of its tokens but the first, or float32 [outputs] of a classifier."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.sampled = 0
        self.rows = TokenTable()
        self.scores: TokenScores | np.ndarray | None = None
        self._ready = asyncio.Event()
        self._finish: Finish | None = None
        self._error: EngineError | None = None

    @property
    def ended(self) -> bool:
        """True if the engine sends nothing more for this sequence."""
        return self.finished or self._error is not None

    @property
    def finished(self) -> bool:
        """True if the sequence has its last token."""
        return self._finish is not None

    @property
    def exhausted(self) -> bool:
        """True if the sequence is finished and the reader has received all of its tokens."""
        return self.finished and not self.rows and self.scores is None

    def add(self, output: EngineCoreOutput, columns: dict[str, np.ndarray], version: str | None) -> None:
        if count := len(output.new_token_ids):
            assert version is not None  # it is set before anything is sampled
            self.sampled += count
            self.rows.extend(count, columns | {"tokens": output.new_token_ids, "versions": int(version)})
        if output.new_prompt_logprobs_tensors is not None:
            # The token itself comes first, then the likeliest ones.
            tensors = output.new_prompt_logprobs_tensors
            tokens, scores = tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy()
            self.scores = TokenScores(scores[:, 0], tokens[:, 1:].astype(np.int32), scores[:, 1:])
        if output.pooling_output is not None:
            self.scores = output.pooling_output.float().numpy()
        if output.finish_reason is not None:
            self._end(str(output.finish_reason))
        elif self.rows:  # as many as the scheduler sends at a time
            self._ready.set()

    def fail(self, error: EngineError) -> None:
        if not self.ended:
            self._error = error
            self._ready.set()

    async def grow(self) -> None:
        """Wait for new rows or scores, or the end."""
        await self._ready.wait()
        if self._error is not None and not self.rows:  # tokens sampled before the error are valid and come first
            # One of its own: the error that all sequences share would collect the frames of each of them.
            raise EngineError(*self._error.args)
        if not self.ended:
            self._ready.clear()

    def take(self) -> Generation:
        """The rows, which are the reader's from now on."""
        rows, self.rows = self.rows, TokenTable()
        return Generation.of(rows, self._finish)

    def _end(self, reason: str) -> None:
        if finish := FINISHES.get(reason):
            self._finish = finish
            self._ready.set()
        else:
            self.fail(EngineError(f"The engine ended a sequence early (finish reason {reason!r})."))


@lru_cache(maxsize=1024)  # making them takes vLLM as long as sending a request takes
def _sampling_params(stop_tokens: tuple[int, ...] = (), whole: bool = False, **settings: float) -> SamplingParams:
    from vllm import SamplingParams

    options: dict[str, Any] = {"logprobs": 0, "detokenize": False} | settings
    params = SamplingParams(**options, stop_token_ids=list(stop_tokens))
    params.extra_args = {"whole": True} if whole else None
    of_draws = () if settings.get("temperature", 1) else ("top_p", "top_k", "min_p")  # without an effect if greedy
    for name, value in settings.items():
        if name not in of_draws and (used := getattr(params, name)) != value:
            raise ValueError(f"vLLM samples with {name}={used}, not with {value} as asked")
    return params


def _start_core(model: Path, config: GeneratorConfig, use: EngineUse) -> tuple[AsyncMPClient, list[int]]:
    prepare(config)
    with importing():
        from vllm.platforms import current_platform
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        cpu.set_environment(config)
        cpu.check_settings(config)
    check_mixture(model, use.lora, cuda=not on_cpu)
    failure = f"vLLM did not start on {model}; its own log, above, says why: {{why}}"
    with only_model(model) as folder:
        vllm_config = checked_config(model, config, lambda: engine_arguments(folder, config, use, on_cpu), on_cpu)
        with explain(RuntimeError, failure, EngineError), forked_engines() if on_cpu else contextlib.nullcontext():
            core = EngineCoreClient.make_async_mp_client(vllm_config, Executor.get_class(vllm_config), log_stats=True)
        listed = vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    return core, stop_tokens(model, listed)


def _handed_over() -> EngineError:
    return EngineError("This engine's sequences were handed over; another engine continues them.")


def _death(error: Exception) -> EngineError:
    return EngineError(f"The vLLM engine process died; its own log, above, says why ({type(error).__name__}).")


async def _scored(stream: AsyncGenerator[_Sequence, None]) -> _Sequence:
    """The sequence of a stream once it has `scores`."""
    async with contextlib.aclosing(stream) as sequences:
        async for sequence in sequences:
            if sequence.scores is not None:
                return sequence
    raise EngineError("The engine gave no scores of a prompt.")
