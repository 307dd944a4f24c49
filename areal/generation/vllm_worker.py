"""Inside vLLM's own processes: loading weights in place, separating old from new KV cache, exit with the generator.

vLLM imports this module by name (`worker_extension_cls`, `scheduler_cls`, `distributed_executor_backend`). Nothing else
should import it, since that imports vLLM.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from safetensors import SafetensorError
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from areal.base import extensions
from areal.base.errors import UserError
from areal.devices import ENGINE_CORES, settle
from areal.samples.table import NO_WORD
from areal.weights.folders import stored_tensors

NOTHING = np.zeros(0, np.float32)
GATHER_SECONDS = 0.02
"""Least time between two messages with tokens while sequences run: a message costs more than the tokens in it."""
WHOLE = 8
"""How many times longer the chunks are of a sequence of which nothing is read before its end. A generator that dies
loses a chunk, which is generated again."""
ON_CPU = current_platform.is_cpu()

if gloo := extensions.own_entries().get(("direct", "engine")):
    WeightTransferEngineFactory.register_engine("gloo", *gloo.target.split(":"))

if ON_CPU:
    from areal.cpu import kernels


class PolicyWorker:
    """Mixin of vLLM's worker, called through `collective_rpc`: `open_policy`, then, while generation is paused,
    `load_policy`. With adapters, `start_adapter` comes first. `transfer` has the weights sent by a trainer instead."""

    model_runner: Any  # set by the worker
    weight_transfer_engine: Any
    vllm_config: Any
    _opened: Iterator[tuple[str, torch.Tensor]] | LoRAModel

    def start_adapter(self, number: int) -> None:
        """Have an adapter with this number that changes nothing."""
        manager = self.model_runner.lora_manager
        self._put_adapter(manager._adapter_manager.create_dummy_lora(number, 1, manager.embedding_modules))
        for module in self.model_runner.get_model().modules():
            if isinstance(module, LogitsProcessorWithLoRA):
                module._get_logits = partial(_logits_of_model, module)

    def capture_routes(self) -> None:
        """Have what each step gives say to which experts its tokens went, as `_set_routes` takes it."""
        runner = self.model_runner
        capturer = RoutedExpertsCapturer(self.vllm_config.scheduler_config.max_num_batched_tokens, self.vllm_config)
        bind_routed_experts_capturer(runner.get_model(), capturer)
        runner.sample_tokens = partial(_sample_with_routes, runner.sample_tokens, runner, capturer)

    def open_policy(self, folder: str, adapter: int | None) -> str | None:
        """Open the files that `load_policy` loads: those of a whole model, or of the adapter with this number. Returns
        why they cannot be opened, or None if all are open.

        If the trainer removes the folder while weights are being overwritten, they are still read to the end. If it
        has removed the folder before, no weight has been touched, on any rank.
        """
        try:
            if adapter is None:
                self._opened = stored_tensors(Path(folder))
            else:
                self._opened = self.model_runner.lora_manager._load_adapter(LoRARequest("policy", adapter, folder))
        except (LoRAAdapterNotFoundError, OSError, SafetensorError, UserError, ValueError) as error:
            return str(error)
        return None

    def load_policy(self) -> None:
        """Overwrite the weights (or the adapter) in place with those in the opened folder, in Hugging Face's form."""
        tensors = self._opened
        if isinstance(tensors, LoRAModel):
            self._put_adapter(tensors)
            return
        model = self.model_runner.get_model()
        if self._unpacked is not None:
            kernels.load_and_pack(model, self._unpacked, tensors)
            return
        _prepare_reload(model)
        with set_current_vllm_config(self.vllm_config):  # some layers ask for it when their weights are processed
            self.model_runner.reload_weights(weights_iterator=tensors)
        _finish_reload(model)

    @cached_property
    def _unpacked(self) -> dict[torch.nn.Module, torch.nn.Parameter] | None:
        # A transfer takes layers apart, after which these parameters would no longer be theirs.
        reloads = not ON_CPU or self.weight_transfer_engine
        return None if reloads else kernels.unpacked_weights(self.model_runner.get_model())

    def transfer(self, call: str, info: dict[str, Any]) -> str | None:
        """Do a call of vLLM's weight transfer: one of its methods of the worker, and the argument. Returns why it
        failed, or None. After a failure, and before any other load, `end_transfer` has to be called."""
        try:
            if call == "init_weight_transfer_engine":
                self.weight_transfer_engine.shutdown()  # the group with an earlier trainer
                self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]  # the worker's, as those below
            elif call == "start_weight_update":
                _prepare_reload(self.model_runner.get_model())
                self.start_weight_update()  # type: ignore[attr-defined]
            elif call == "update_weights":
                self.update_weights(info)  # type: ignore[attr-defined]
            else:
                self.finish_weight_update()  # type: ignore[attr-defined]
                _finish_reload(self.model_runner.get_model())
        except Exception as error:  # vLLM would lose the answers of the engine's other processes
            return f"{type(error).__name__}: {error}"
        return None

    def end_transfer(self) -> None:
        """Leave the group with the trainer, and put the layers together that a transfer has taken apart. Their weights
        are no policy's until a whole version is loaded."""
        engine = self.weight_transfer_engine
        engine.shutdown()
        with set_current_vllm_config(self.vllm_config):
            engine.finish_weight_update()
        self._weight_update_active = False

    def _put_adapter(self, adapter: LoRAModel) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)


def _logits_of_model(module: LogitsProcessorWithLoRA, hidden: torch.Tensor, head: Any, *options: Any) -> Any:
    """The logits without an adapter of the head, which the policy's adapters do not have. vLLM would add one of zeros,
    and dies where a prompt is scored while other sequences are sampled: its rows are counted by what is sampled."""
    return module.base_layer._get_logits(hidden, getattr(head, "base_layer", head), *options)


def _sample_with_routes(
    sample: Callable[..., Any], runner: Any, capturer: RoutedExpertsCapturer, *arguments: Any
) -> ModelRunnerOutput | AsyncModelRunnerOutput:
    """The model runner's own `sample`, with the experts of each token of the step's forward pass: [tokens, layers,
    chosen], those of one request after another."""
    state = runner.execute_model_state
    result = sample(*arguments)
    if state is not None:
        scheduled: SchedulerOutput = state.scheduler_output
        routes = capturer.snapshot_routing_data(scheduled.total_num_scheduled_tokens).numpy()
        of_step = getattr(result, "_model_runner_output", result)  # that of a step which is not waited for
        of_step.aux_output_connector_output = routes
    return result


def _set_routes(outputs: Sequence[EngineCoreOutput], scheduled: SchedulerOutput, step: ModelRunnerOutput) -> None:
    """Set for each new token the experts of the pass that sampled it, [new tokens, layers, chosen], which is the pass
    at the token before it. No cached prefix has this one, and after a pause or a preemption it is computed again."""
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
        elif output.routed_experts is not None:  # by vLLM's own option: of all tokens so far but the last
            output.routed_experts = output.routed_experts[len(output.routed_experts) - count :]


def _prepare_reload(model: torch.nn.Module) -> None:
    """To call before vLLM's own reload, as `_finish_reload` after it."""
    # It warns of every layer without weights, such as tied heads. The files were compared with the model before.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    if ON_CPU:
        kernels.forget_packed_experts(model)


def _finish_reload(model: torch.nn.Module) -> None:
    if ON_CPU:
        kernels.pack_heads(model)


def _joined(parts: Sequence[LogprobsLists]) -> LogprobsLists:
    """The log-probs of each token and of the likeliest words, as many as were asked for, [tokens, 1 + words], and these
    words, [tokens, words]: `NO_WORD` for a word that the sampler has left out, which has no log-prob. A step has as
    many words as the sequence in it that asks for most."""
    width = max(part.logprobs.shape[1] for part in parts)
    logprobs = np.concatenate([_widened(part.logprobs, width) for part in parts])
    words = NOTHING
    if width > 1:
        numbers = np.concatenate([_widened(part.logprob_token_ids, width) for part in parts])
        words = np.where(np.isneginf(logprobs), NO_WORD, numbers)[:, 1:].astype(np.int32)
    return LogprobsLists(words, logprobs, NOTHING)


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    """[tokens, width]: the rows, and after them log-probs of words that were left out, or the numbers of such words."""
    missing = width - rows.shape[1]
    fill = -np.inf if rows.dtype.kind == "f" else NO_WORD
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=fill) if missing else rows


class _Gathers:
    """A scheduler that sends the tokens of a sequence once there are `stream_interval` of them, or the last one; a
    user's first token, who waits for it, at once; later tokens of which none is read before the last, WHOLE times as
    many. Steps within GATHER_SECONDS share a message, except the first step after a pause. All log-probs and routes
    (uint8 [tokens, width]) of a message are in its first output, one after another: an array each would cost more.

    vLLM labels what it sends with the version of the last step. Weights change only in a pause, so tokens from before
    the last pause go in outputs of their own, whose request id ends in `@VERSION`. A pause preempts every sequence;
    the events that tell of it are left out, so that those which remain tell of a KV cache that was full.

    Sequences that see the same picture at the same time hold its patches once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[_Held]] = {}
        self._seen: dict[str, int] = {}  # pauses before the last output, by request
        self._pauses = 0
        self._waiting: list[_Part] = []
        self._sent = 0.0  # the time of the last message; 0: there is none since the last pause
        self._labelled = EngineCoreOutputs()  # the first step since the last pause
        self._unsent = [0, 0]  # prefix cache queries and hits since the last message
        self._patches: WeakValueDictionary[str, Any] = WeakValueDictionary()  # by the names of pictures

    def add_request(self, request: Request) -> None:
        for feature in request.mm_features:
            feature.data = self._patches.setdefault(feature.identifier, feature.data)
        super().add_request(request)  # type: ignore[misc]

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if pause_state == PauseState.UNPAUSED:  # and not when it begins: steps in flight are finished in it
            self._pauses += 1
            self._sent = 0.0

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        steps: dict[int, EngineCoreOutputs] = super().update_from_output(scheduled, result)  # type: ignore[misc]
        for step in steps.values():  # one: an engine has one generator
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
        """Whether there is another step, which also sends what waits: after a pause, or an abort of what ran."""
        return bool(self._waiting) or super().has_requests()  # type: ignore[misc]

    def _holds(self, step: EngineCoreOutputs) -> bool:
        """Whether the outputs of a step wait for those of the next one."""
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
        """How many tokens of a sequence are enough to send them. begins: it has its first one."""
        asked, interval = self.requests[request], self.scheduler_config.stream_interval  # type: ignore[attr-defined]
        if begins:
            return 1 if user_of(asked.cache_salt) else int(interval)
        whole = asked.sampling_params and (asked.sampling_params.extra_args or {}).get("whole")
        return int(interval) * (WHOLE if whole else 1)

    def _ready(self, output: EngineCoreOutput) -> "Iterator[_Part]":
        """What to send of this output's sequence now."""
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
    """The user's part of a request's salt, which is before that of the weights; empty: it is not of a user."""
    return (salt or "").partition("\n")[0]


class _Part(NamedTuple):
    """An output to send, the log-probs and routes of its tokens, and a step after so many pauses, as those that made
    them. urgent: a user waits for it."""

    output: EngineCoreOutput
    logprobs: list[LogprobsLists]
    routes: list[np.ndarray]
    pauses: int
    step: EngineCoreOutputs
    urgent: bool

    def labelled(self, pauses: int) -> EngineCoreOutput:
        """The output, to be sent after so many pauses. vLLM has labelled the step once it was sent."""
        if self.pauses != pauses:
            self.output.request_id += f"@{self.step.weight_version}"
        return self.output


class _Held(NamedTuple):
    """An output that is not sent yet, of a step after so many pauses."""

    output: EngineCoreOutput
    step: EngineCoreOutputs
    pauses: int


class GatheringScheduler(_Gathers, Scheduler):
    """Without asynchronous scheduling."""


class AsyncGatheringScheduler(_Gathers, AsyncScheduler):
    """With asynchronous scheduling."""


class KeepingScheduler(AsyncGatheringScheduler):
    """The scheduler for `kv_on_update: keep`. A request's salt, that of the weights which began its sample, keeps it
    from KV cache of older weights. A request that still waits in the engine's queue after a pause may have been sent
    too early for that: it gets another salt."""

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            for request in self.waiting:
                request.cache_salt = f"{user_of(request.cache_salt)}\nafter pause {self._pauses}"
                request.block_hashes.clear()
                request.update_block_hashes()


class _DiesWithGenerator:
    """Kills vLLM's engine process when the generator ends. Else it would keep its memory."""

    def _init_executor(self) -> None:
        generator = multiprocessing.parent_process()
        assert generator is not None  # this process is its child

        def die_with_generator() -> None:
            generator.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die_with_generator, daemon=True, name="die-with-generator").start()
        settle(ENGINE_CORES)
        super()._init_executor()  # type: ignore[misc]  # of the executor that this is mixed into


class OneProcessExecutor(_DiesWithGenerator, uniproc_executor.UniProcExecutor):
    """The worker runs in the engine process. On the CPU vLLM would start one more process and busy-wait for it."""


class ManyProcessExecutor(_DiesWithGenerator, multiproc_executor.MultiprocExecutor):
    """One worker process per tensor-parallel rank; vLLM's own death pipe ends them with the engine process."""
