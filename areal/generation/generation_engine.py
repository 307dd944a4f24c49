"""Generation with vLLM: tokens in, tokens out, with each token's log-prob and the version that sampled it.

The engine talks to vLLM's engine process directly, without the `AsyncLLM` front end, for two reasons:

* *Exact versions.* The engine process labels each step's message with the version of the weights that ran the step.
  The label changes only while the engine is paused and idle. So a token and its version arrive in one message, and the
  version stays correct however long the message waits in a queue here. `AsyncLLM` reports versions only with a
  sequence's last token.
* *Speed.* There is no tokenizer, no text and no object per token: only rows of a table remain.

The engine has three parts: `EngineProcess` (calls and errors), `EngineSequences` (new tokens for the readers),
`EngineWeights` (loads and pauses). `vllm_worker` and `gathering_scheduler` run inside vLLM's process. Importing this
module imports neither torch nor vLLM: `GenerationEngine.start` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.config.trainer_section import LoraConfig
from areal.devices import visible_devices
from areal.generation.engine_process import (
    CLOSE_SECONDS,
    EngineError,
    EngineProcess,
    EngineSequence,
    EngineSequences,
    EngineStats,
)
from areal.generation.engine_start import EngineUse, start_core
from areal.generation.engine_weights import ADAPTER, EngineWeights
from areal.generation.offered_weights import EngineModel, read_model_folder
from areal.samples.pictures import find
from areal.samples.table import Generation
from areal.samples.trajectory import TokenScores

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.engine.core_client import AsyncMPClient


class GenerationEngine:
    """A vLLM engine in a child process that is killed when this process ends.

    max_model_len: maximum length of a sequence, prompt and completion, in tokens. `EngineWeights` documents `load`,
    `receive`, `drained`, `sleep` and `wake`.
    """

    def __init__(self, core: AsyncMPClient, config: GeneratorConfig, model: EngineModel, version: int) -> None:
        """For `start` only. Call from the event loop that will use the engine."""
        self._model = model
        self.max_model_len = model.max_len
        self._sequences = EngineSequences(model.kept_logprobs)
        self._process = EngineProcess(core, self._sequences.deliver, self._sequences.fail)
        self.weights = weights = EngineWeights(self._process, self._sequences, config, model, version)
        self.load, self.receive, self.drained = weights.load, weights.receive, weights.drained
        self.sleep, self.wake = weights.sleep, weights.wake
        self._returns_routes = core.vllm_config.aux_output_config.enabled
        self._serial = itertools.count()

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
        """Start an engine on the Hugging Face folder `model`, whose weights are policy `version`.

        lora: if given, later versions are adapters of this model. sleeps: whether `sleep` will be called. transfer: the
        backend of vLLM's weight transfer for `receive`; an engine with a backend does not sleep. routes, kept_logprobs:
        whether tokens get the column of this name. kept_words: the width of the column of this name, 0 for no column; a
        full row may lack words.

        A process that starts an engine needs the guard `if __name__ == "__main__"`: the child imports the main module
        of its parent. Raises UserError if `model` or `config` is at fault, EngineError if the engine does not start.
        """
        config = config.for_device(cuda=bool(visible_devices()))
        shapes, tied = read_model_folder(model)
        # In a thread: importing vLLM and waiting for the process take seconds, and the actor has to send heartbeats.
        use = EngineUse(seed, lora, sleeps, transfer, routes, kept_words)
        core, stops = await asyncio.to_thread(start_core, model, config, use)
        limits = core.vllm_config.model_config
        vocabulary = limits.get_vocab_size()
        sizes = vocabulary, limits.max_model_len, min(kept_words, vocabulary), kept_logprobs
        engine = cls(core, config, EngineModel(model, shapes, tied, lora, stops, *sizes), version)
        call = engine._process.call
        if lora:
            await call(core.collective_rpc_async("start_adapter", args=(ADAPTER,)))
        if routes and not engine._returns_routes:
            await call(core.collective_rpc_async("capture_routes"))
        await call(core.set_weight_version_async(str(version)))
        return engine

    @property
    def version(self) -> int:
        """The policy version that samples the next tokens."""
        return self.weights.version

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
        last part has a `finish`. The first part of a user's call has one token, since the user waits for it.

        max_new_tokens: replaces `sampling.max_new_tokens` (a sequence continued from another engine has fewer tokens
        left). first_version: the version of the sample's first token. With `kv_on_update: keep` the call reuses
        prefixes since this version, otherwise only prefixes that the current weights have computed. pictures: the
        pictures of the first placeholders among the tokens. cache_salt: the name of the user who calls, or "": a call
        reuses only prefixes of calls with the same name. whole: the caller reads nothing before the last part, so later
        parts may be longer. Closing the async generator or cancelling its task aborts the sequence in the engine.
        Raises ValueError for tokens and pictures that the model cannot take, EngineError if the engine dies or hands
        over its sequences.
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
            routed_experts_prompt_start=len(tokens) - 1 if self._returns_routes else 0,
        )
        features = find("features")(self._model.folder, tokens, pictures) if pictures else None
        salt = self.weights.salt(cache_salt, first_version)
        async with contextlib.aclosing(self._stream(request_id, tokens, params, salt, features)) as sequences:
            async for sequence in sequences:
                yield sequence.take()

    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores:
        """Return the log-probs of the tokens, and the `top_k` likeliest tokens at each place, under the current weights
        and without KV cache of older weights.

        The engine holds the logits of up to a step's tokens at once, in fp32. Raises as `generate` does.
        """
        params = _sampling_params(max_tokens=1, prompt_logprobs=top_k)
        sequence = await _scored(self._stream(request_id, tokens, params, self.weights.salt()))
        assert isinstance(sequence.scores, TokenScores)
        return sequence.scores._replace(version=int(sequence.rows.versions[-1]))

    async def classify(self, request_id: str, tokens: Sequence[int], activation: bool) -> np.ndarray:
        """Return the outputs of a sequence classifier for the tokens, float32 [outputs]. activation: whether to apply
        the classifier's sigmoid or softmax. The engine has the option `runner: pooling`. Raises as `generate` does."""
        from vllm import PoolingParams

        params = PoolingParams(task="classify", use_activation=activation)
        outputs = (await _scored(self._stream(request_id, tokens, params, self.weights.salt()))).scores
        assert isinstance(outputs, np.ndarray)
        return outputs

    async def _stream(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams | PoolingParams,
        salt: str | None,
        features: list[MultiModalFeatureSpec] | None = None,
    ) -> AsyncGenerator[EngineSequence, None]:
        """Yield the sequence whenever it has new rows or scores. features: pictures in vLLM's form."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams  # `vllm` would search the module for each request
        from vllm.v1.engine import EngineCoreRequest

        if not 0 < len(tokens) < self._model.max_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens: the model takes 1 to {self._model.max_len - 1} "
                f"(max_model_len minus one token to sample)"
            )
        if min(tokens) < 0 or max(tokens) >= self._model.vocab_size:
            raise ValueError(f"the prompt has a token outside the model's vocabulary of {self._model.vocab_size}")
        self._process.raise_if_failed()
        # The serial number keeps late tokens of an aborted request out of a new request with the same id.
        key = f"{request_id}#{next(self._serial)}"
        sequence = self._sequences.open(key, len(tokens))
        try:
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
            await self._process.send(request)
            while not sequence.exhausted:
                await sequence.grow()
                yield sequence
        finally:
            self._sequences.remove(key)
            if not sequence.finished and self._process.error is None:
                await self._process.core.abort_requests_async([key])

    def hand_over(self, request_ids: Collection[str] | None = None) -> None:
        """End the sequences of the requests, or all sequences if None, for another engine to continue.

        Each running `generate` yields its last tokens, raises EngineError and is aborted in the engine. A sequence
        whose last token has already arrived ends normally. After a hand-over of all sequences, later calls of
        `generate` raise EngineError.
        """
        self._sequences.hand_over(request_ids)

    def stats(self) -> EngineStats:
        """The load at the engine's latest step."""
        return self._sequences.stats()

    async def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Stop the engine process, or kill it after `patience` seconds. Running sequences end with an EngineError."""
        await self._process.close(patience)


@lru_cache(maxsize=1024)  # making the parameters takes vLLM as long as sending a request
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


async def _scored(stream: AsyncGenerator[EngineSequence, None]) -> EngineSequence:
    """Return the sequence of a stream once it has `scores`. Raises EngineError if the stream ends without scores."""
    async with contextlib.aclosing(stream) as sequences:
        async for sequence in sequences:
            if sequence.scores is not None:
                return sequence
    raise EngineError("The engine gave no scores of a prompt.")
