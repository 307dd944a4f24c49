"""The connection to vLLM's engine process: calls and their answers, and the end of the process (`EngineProcess`). New
tokens on the way to their readers, and counts (`EngineSequences`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from areal.samples.table import Finish, Generation, TokenTable
from areal.samples.trajectory import TokenScores

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core_client import AsyncMPClient

T = TypeVar("T")

# Time for the engine process to exit. An exit takes 3 s on a busy core. A process killed earlier leaks a semaphore.
CLOSE_SECONDS = 10
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}
# vllm.v1.engine.EngineCoreEventType
PREEMPTED = 3
NO_LOGPROBS = np.empty((0, 1), np.float32)


class EngineError(Exception):
    """The engine cannot go on: it did not start, died, was closed, handed over its sequences, or has torn weights."""


class EngineProcess:
    """One vLLM engine process, which is killed when this process ends.

    core: vLLM's client of the process. deliver: called with each message of the process. end: called with the first
    error whenever an error is reported.
    """

    def __init__(
        self, core: AsyncMPClient, deliver: Callable[[EngineCoreOutputs], None], end: Callable[[EngineError], None]
    ) -> None:
        """Call from the event loop that will use the engine."""
        self.core = core
        self.error: EngineError | None = None
        self._deliver, self._end = deliver, end
        self._pump = asyncio.create_task(self._deliver_outputs(), name="engine outputs")

    async def call(self, call: Awaitable[T]) -> T:
        """Await an answer of the process. Raises EngineError if the process dies: vLLM itself would never answer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait({answer, self._pump}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        self.raise_if_failed()
        try:
            return answer.result()
        except EngineDeadError as error:
            raise self.fail(_death(error)) from error

    async def call_workers(self, method: str, *args: Any) -> str | None:
        """Call a method of all workers that returns the reason of a failure, or None. Returns the first reason."""
        call = self.core.call_utility_all_async("collective_rpc", method, None, args, None)
        return next((answer for answers in await self.call(call) for answer in answers if answer), None)

    async def send(self, request: EngineCoreRequest) -> None:
        """Send a request, which the process does not answer. Raises EngineError if the process is dead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self.core.add_request_async(request)
        except EngineDeadError as error:
            raise self.fail(_death(error)) from error

    def fail(self, error: EngineError) -> EngineError:
        """End the engine with `error`, unless an earlier error has ended the engine. Returns the first error."""
        self.error = first = self.error or error
        self._end(first)
        return first

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    async def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Stop the process, or kill it after `patience` seconds."""
        self.fail(EngineError("The engine was closed."))
        self._pump.cancel()
        await asyncio.wait({self._pump})
        await asyncio.to_thread(self.core.shutdown, patience)

    async def _deliver_outputs(self) -> None:
        while True:
            try:
                outputs = await self.core.get_output_async()
            except Exception as error:  # any end of vLLM's receiving task ends the engine
                self.fail(_death(error))
                return
            try:
                self._deliver(outputs)
            except Exception as error:  # otherwise every sequence would wait for ever
                self.fail(EngineError(f"The vLLM engine sent a message that cannot be used: {error!r}"))
                return


def _death(error: Exception) -> EngineError:
    return EngineError(f"The vLLM engine process died; its own log, above, says why ({type(error).__name__}).")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of an engine, and counts since its start.

    running, waiting: number of sequences. kv_use: share of the KV cache in use, 0 to 1. tokens_generated: sampled
    tokens. preemptions: sequences that lost their KV cache to other sequences (a load of weights does not count).
    prefix_cache_queries: prompt tokens. prefix_cache_hits: prompt tokens whose KV cache existed already.
    steps: messages of the engine process.
    """

    running: int
    waiting: int
    kv_use: float
    tokens_generated: int
    preemptions: int
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    steps: int = 0


class EngineSequence:
    """A sequence between the engine and the reader of `generate`.

    prompt, sampled: number of tokens. rows: sampled tokens that the reader has not taken yet. scores: the scores of
    the prompt, if the request asked for scores: `TokenScores` of its tokens but the first, or the outputs of a
    classifier, float32 [outputs].
    """

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
        """Add the new tokens of an output. columns: log-probs and further columns. version: of the tokens' weights."""
        if count := len(output.new_token_ids):
            assert version is not None  # the engine sets a version before it samples
            self.sampled += count
            self.rows.extend(count, columns | {"tokens": output.new_token_ids, "versions": int(version)})
        if output.new_prompt_logprobs_tensors is not None:
            # The first column belongs to the token itself, the next columns to the likeliest tokens.
            tensors = output.new_prompt_logprobs_tensors
            tokens, scores = tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy()
            self.scores = TokenScores(scores[:, 0], tokens[:, 1:].astype(np.int32), scores[:, 1:])
        if output.pooling_output is not None:
            self.scores = output.pooling_output.float().numpy()
        if output.finish_reason is not None:
            self._end(str(output.finish_reason))
        elif self.rows:  # the scheduler in the engine process has gathered enough tokens
            self._ready.set()

    def fail(self, error: EngineError) -> None:
        if not self.ended:
            self._error = error
            self._ready.set()

    async def grow(self) -> None:
        """Wait for new rows or scores, or the end. Raises EngineError if the sequence failed."""
        await self._ready.wait()
        if self._error is not None and not self.rows:  # tokens sampled before the error are valid and come first
            # A new error for each sequence: a shared error would collect the frames of all readers.
            raise EngineError(*self._error.args)
        if not self.ended:
            self._ready.clear()

    def take(self) -> Generation:
        """Return the rows and forget them."""
        rows, self.rows = self.rows, TokenTable()
        return Generation.of(rows, self._finish)

    def _end(self, reason: str) -> None:
        if finish := FINISHES.get(reason):
            self._finish = finish
            self._ready.set()
        else:
            self.fail(EngineError(f"The engine ended a sequence early (finish reason {reason!r})."))


class EngineSequences:
    """All sequences of an engine, by key: `{request id}#{number}`. kept_logprobs: whether tokens have this column."""

    def __init__(self, kept_logprobs: bool) -> None:
        self._kept_logprobs = kept_logprobs
        self._sequences: dict[str, EngineSequence] = {}
        self._handed_over = False
        self._tokens_generated = self._preemptions = self._queries = self._hits = self._steps = 0
        self._loads: dict[int, tuple[int, float]] = {}  # running sequences and KV use, by data-parallel rank

    def open(self, key: str, prompt: int) -> EngineSequence:
        """Add a sequence of `prompt` tokens. Raises EngineError after a hand-over of all sequences."""
        if self._handed_over:
            raise _handed_over()
        sequence = self._sequences[key] = EngineSequence(prompt)
        return sequence

    def remove(self, key: str) -> None:
        self._sequences.pop(key, None)

    def interruptible(self) -> list[EngineSequence]:
        """Return the sequences that have sampled a token and have not ended."""
        return [sequence for sequence in self._sequences.values() if sequence.sampled and not sequence.ended]

    def hand_over(self, request_ids: Collection[str] | None) -> None:
        """End the sequences of the requests, or all sequences if None, for another engine to continue."""
        self._handed_over = self._handed_over or request_ids is None
        for key, sequence in self._sequences.items():
            if request_ids is None or key.rpartition("#")[0] in request_ids:
                sequence.fail(_handed_over())

    def fail(self, error: EngineError) -> None:
        """End all sequences with an error."""
        for sequence in self._sequences.values():
            sequence.fail(error)

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Hand the new tokens of a message to their sequences, and count."""
        self._steps += 1
        if outputs.scheduler_stats is not None:
            stats = outputs.scheduler_stats
            self._loads[outputs.engine_index] = stats.num_running_reqs, stats.kv_cache_usage
            self._queries += stats.prefix_cache_stats.queries
            self._hits += stats.prefix_cache_stats.hits
        first = outputs.outputs[0].new_logprobs if outputs.outputs else None
        logprobs = NO_LOGPROBS if first is None else first.logprobs  # the log-probs of all outputs, in order
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
                    if self._kept_logprobs:
                        columns["kept_logprobs"] = np.where(words[begin:end] < 0, 0, logprobs[begin:end, 1:])
                if routes is not None:
                    columns["routes"] = routes[begin:end]
                sequence.add(output, columns, version)

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


def _handed_over() -> EngineError:
    return EngineError("This engine's sequences were handed over; another engine continues them.")
