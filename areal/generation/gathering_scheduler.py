"""The scheduler in vLLM's engine process. It gathers tokens into messages, and separates old from new KV cache.

vLLM imports this module by name (`scheduler_cls`). Nothing else should import the module: vLLM would be imported too.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from areal.samples.table import NO_WORD

NOTHING = np.zeros(0, np.float32)
GATHER_SECONDS = 0.02
"""Least time between two messages with tokens while sequences run: a message costs more than the tokens in it."""
WHOLE = 8
"""Factor on the length of chunks for a sequence whose reader waits for its end. A generator that dies loses a chunk;
the tokens of the chunk are generated again."""


def _set_routes(outputs: Sequence[EngineCoreOutput], scheduled: SchedulerOutput, step: ModelRunnerOutput) -> None:
    """Set the experts of each new token, [new tokens, layers, chosen]. The experts are those of the pass at the
    previous token, which sampled the new token. No cached prefix contains that pass: preemption repeats it."""
    rows: Any = step.aux_output_connector_output
    captured, ends = isinstance(rows, np.ndarray), {}
    if captured:
        counts = [scheduled.num_scheduled_tokens[request] for request in step.req_ids]
        ends = dict(zip(step.req_ids, np.cumsum(counts).tolist(), strict=True))
    for output in outputs:
        if not (count := len(output.new_token_ids)):
            output.routed_experts = None
        elif captured:
            guessed = len(scheduled.scheduled_spec_decode_tokens.get(output.request_id, ()))
            first = ends[output.request_id] - 1 - guessed
            output.routed_experts = rows[first : first + count]
        elif output.routed_experts is not None:  # vLLM's own option gives all tokens so far but the last
            output.routed_experts = output.routed_experts[len(output.routed_experts) - count :]


def _joined(parts: Sequence[LogprobsLists]) -> LogprobsLists:
    """Join the log-probs of the parts, [tokens, 1 + words], and the numbers of the likeliest words, [tokens, words].
    The first column is the token itself. A word that the sampler has left out is `NO_WORD`, without a log-prob. The
    sequence that asks for most words sets the number of words of a step."""
    width = max(part.logprobs.shape[1] for part in parts)
    logprobs = np.concatenate([_widened(part.logprobs, width) for part in parts])
    words = NOTHING
    if width > 1:
        numbers = np.concatenate([_widened(part.logprob_token_ids, width) for part in parts])
        words = np.where(np.isneginf(logprobs), NO_WORD, numbers)[:, 1:].astype(np.int32)
    return LogprobsLists(words, logprobs, NOTHING)


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    """Return the rows, [tokens, width], filled up with log-probs or numbers of left-out words."""
    missing = width - rows.shape[1]
    fill = -np.inf if rows.dtype.kind == "f" else NO_WORD
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=fill) if missing else rows


class _Gathers:
    """A scheduler that sends the tokens of a sequence in chunks of `stream_interval`, or at the end of the sequence.
    The first token of a user's sequence is sent at once, since the user waits. If nobody reads a sequence before its
    end, the later chunks are WHOLE times as long. Steps within GATHER_SECONDS share a message, except the first step
    after a pause. All log-probs and routes (uint8 [tokens, width]) of a message are in its first output, since many
    arrays cost more.

    vLLM labels a message with the version of the last step. Weights change only in a pause, so tokens from before the
    last pause go in separate outputs, whose request id ends in `@VERSION`. A pause preempts every sequence. The events
    of a pause are left out, so every event that is sent means a full KV cache.

    Sequences that see the same picture at the same time hold the picture's patches once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[_Held]] = {}
        self._seen: dict[str, int] = {}  # pauses before the last output, by request
        self._pauses = 0
        self._waiting: list[_Part] = []
        self._sent = 0.0  # the time of the last message; 0: no message since the last pause
        self._labelled = EngineCoreOutputs()  # the first step since the last pause
        self._unsent = [0, 0]  # prefix cache queries and hits since the last message
        self._patches: WeakValueDictionary[str, Any] = WeakValueDictionary()  # by the names of pictures

    def add_request(self, request: Request) -> None:
        for feature in request.mm_features:
            feature.data = self._patches.setdefault(feature.identifier, feature.data)
        super().add_request(request)  # type: ignore[misc]

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if pause_state == PauseState.UNPAUSED:  # not at the start of a pause, which finishes the steps in flight
            self._pauses += 1
            self._sent = 0.0

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        steps: dict[int, EngineCoreOutputs] = super().update_from_output(scheduled, result)  # type: ignore[misc]
        for step in steps.values():  # a single step: an engine has one generator
            _set_routes(step.outputs, scheduled, result)
            self._labelled = self._labelled if self._sent else step
            self._waiting += [part for output in step.outputs for part in self._ready(output)]
            if self._holds(step):
                return {}
            ready, self._waiting = self._waiting, []
            step.outputs = [part.labelled(self._pauses) for part in ready]
            if logprobs := [lists for part in ready for lists in part.logprobs]:
                step.outputs[0].new_logprobs = _joined(logprobs)
            if routes := [array for part in ready for array in part.routes]:
                rows = np.concatenate(routes)
                step.outputs[0].routed_experts = rows.reshape(len(rows), -1).view(np.uint8)
        return steps

    def has_requests(self) -> bool:
        """Return whether the scheduler has another step. After a pause or abort, a step sends the waiting outputs."""
        return bool(self._waiting) or super().has_requests()  # type: ignore[misc]

    def _holds(self, step: EngineCoreOutputs) -> bool:
        """Return whether the outputs of a step wait for the next step."""
        now, counts = time.monotonic(), step.scheduler_stats and step.scheduler_stats.prefix_cache_stats
        runs = self.running and self.pause_state == PauseState.UNPAUSED  # type: ignore[attr-defined]
        urgent = step.finished_requests or any(part.urgent for part in self._waiting)
        if counts:
            self._unsent = [self._unsent[0] + counts.queries, self._unsent[1] + counts.hits]
        if runs and not urgent and now < self._sent + GATHER_SECONDS:
            return True
        if counts:
            (counts.queries, counts.hits), self._unsent = self._unsent, [0, 0]
        self._sent = now
        return False

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        ended: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._held.pop(request.request_id, None)
            self._seen.pop(request.request_id, None)
        return ended

    def _interval(self, request: str, begins: bool) -> int:
        """Return how many tokens of a sequence make a chunk. begins: whether the chunk has the first token."""
        asked, interval = self.requests[request], self.scheduler_config.stream_interval  # type: ignore[attr-defined]
        if begins:
            return 1 if user_of(asked.cache_salt) else int(interval)
        whole = asked.sampling_params and (asked.sampling_params.extra_args or {}).get("whole")
        return int(interval) * (WHOLE if whole else 1)

    def _ready(self, output: EngineCoreOutput) -> "Iterator[_Part]":
        """Yield the parts of this output's sequence that are sent now."""
        begins = output.request_id not in self._seen
        if self._seen.get(output.request_id) != self._pauses:
            output.events = None
        self._seen[output.request_id] = self._pauses
        held = self._held.setdefault(output.request_id, [])
        held.append(_Held(output, self._labelled, self._pauses))
        tokens = sum(len(entry.output.new_token_ids) for entry in held)
        interval = self._interval(output.request_id, begins) if output.finish_reason is None else 0
        if tokens < interval:
            return
        del self._held[output.request_id]
        if output.finish_reason is not None:
            del self._seen[output.request_id]
        for pauses, group in groupby(held, key=lambda entry: entry.pauses):
            parts = list(group)
            outputs = [entry.output for entry in parts]
            combined = output if pauses == self._pauses else EngineCoreOutput(output.request_id, [])
            logprobs = [piece.new_logprobs for piece in outputs if piece.new_logprobs is not None]
            combined.new_token_ids = [token for piece in outputs for token in piece.new_token_ids]
            combined.events = [event for piece in outputs for event in piece.events or ()] or None
            routes = [piece.routed_experts for piece in outputs if piece.routed_experts is not None]
            combined.new_logprobs = combined.routed_experts = None
            yield _Part(combined, logprobs, routes, pauses, parts[0].step, interval == 1)


def user_of(salt: str | None) -> str:
    """Return the user's part of a request's salt, before the part of the weights. Empty: the request has no user."""
    return (salt or "").partition("\n")[0]


class _Part(NamedTuple):
    """An output to send, with the log-probs and routes of its tokens. pauses, step: the number of pauses before the
    tokens, and their first step. urgent: a user waits for the tokens."""

    output: EngineCoreOutput
    logprobs: list[LogprobsLists]
    routes: list[np.ndarray]
    pauses: int
    step: EngineCoreOutputs
    urgent: bool

    def labelled(self, pauses: int) -> EngineCoreOutput:
        """Return the output for sending after so many pauses. By then vLLM has labelled the step with its version."""
        if self.pauses != pauses:
            self.output.request_id += f"@{self.step.weight_version}"
        return self.output


class _Held(NamedTuple):
    """An output that waits, the step that its chunk is labelled by, and the number of pauses before the output."""

    output: EngineCoreOutput
    step: EngineCoreOutputs
    pauses: int


class GatheringScheduler(_Gathers, Scheduler):
    """Without asynchronous scheduling."""


class AsyncGatheringScheduler(_Gathers, AsyncScheduler):
    """With asynchronous scheduling."""


class KeepingScheduler(AsyncGatheringScheduler):
    """The scheduler for `kv_on_update: keep`. The salt of a request names the weights that began its sample, and keeps
    the request away from KV cache of older weights. A request that waits in the engine's queue after a pause may have a
    salt from before the pause: the scheduler changes the salt."""

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            for request in self.waiting:
                request.cache_salt = f"{user_of(request.cache_salt)}\nafter pause {self._pauses}"
                request.block_hashes.clear()
                request.update_block_hashes()
