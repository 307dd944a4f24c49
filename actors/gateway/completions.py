"""The text completions of a gateway, for programs that evaluate log-probs of given texts.

A completion belongs to no session, has no group, and is in no ledger, so that no step can train it.
"""

import itertools
import secrets
import time
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from actors.gateway.user_sessions import UserSample
from areal.base.errors import explain
from areal.extensions.agents.openai_api import (
    MAX_STOPS,
    ApiError,
    Json,
    SamplingFields,
    StopText,
    aside,
    check_length,
)
from areal.samples.table import Generation
from areal.samples.trajectory import TokenScores
from areal.workflows.turn_ends import keep_until_text

MOST_PROMPTS = 128
# vLLM's default limit of alternatives with log-probs.
MOST_ALTERNATIVES = 20


class CompletionRequest(SamplingFields):
    """The body of a request for completions. prompt: texts or tokens. echo: the answer includes the prompt, with
    log-probs. logprobs: the number of likeliest tokens with log-probs."""

    prompt: (
        str | list[int] | Annotated[list[str], Field(max_length=MOST_PROMPTS)]
        | Annotated[list[list[int]], Field(max_length=MOST_PROMPTS)]
    ) = Field(min_length=1)  # fmt: skip
    model: str = "policy"
    max_tokens: int | None = Field(16, ge=0)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: Literal[1] | None = 1
    best_of: Literal[1] | None = 1
    stream: Literal[False] | None = False
    suffix: None = None

    @property
    def given(self) -> list[Any]:
        """The prompts, as texts or tokens."""
        is_list = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if is_list else [self.prompt]

    async def prompts(self, tokenizer: Any, most_characters: int) -> list[list[int]]:
        """Return the tokens of the prompts. most_characters: per prompt. Raises ApiError."""
        length = sum(check_length(prompt, None, most_characters) for prompt in self.given)
        return await aside(length, self._encode, tokenizer)

    def _encode(self, tokenizer: Any) -> list[list[int]]:
        with explain(Exception, "prompt: the model's tokenizer does not take it ({why})", ApiError):  # raises anything
            prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in self.given]
        if not all(prompts):
            raise ApiError("prompt: a prompt has no token")
        for token in (token for prompt in prompts for token in prompt if not 0 <= token < len(tokenizer)):
            raise ApiError(f"prompt: {token} is no token of the model, which has {len(tokenizer)}")
        return prompts

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextCompletion:
    """The completion of a prompt. scores: log-probs of the prompt, if the answer includes it."""

    def __init__(self, request: CompletionRequest, tokenizer: Any, prompt: list[int], scores: TokenScores | None):
        self._request, self._tokenizer, self._prompt, self._scores = request, tokenizer, prompt, scores
        self.sampled: Generation | None = None

    async def sample(self, sample: UserSample) -> None:
        """Sample the completion. Raises SampleFailed and ApiError."""
        stops = self._request.stops
        keep = keep_until_text(self._tokenizer, stops) if stops else None
        self.sampled = await sample.generate(np.array(self._prompt, np.int32), self._request.max_tokens, keep)

    def choice(self, index: int) -> Json:
        """Return the completion as a choice of the answer."""
        sampled = np.zeros(0, np.int32) if self.sampled is None else self.sampled.tokens
        text = self._tokenizer.decode(sampled, skip_special_tokens=True)
        end = min((at for stop in self._request.stops if (at := text.find(stop)) >= 0), default=len(text))
        head = self._tokenizer.decode(self._prompt) if self._request.echo else ""
        finish = "length" if self.sampled is None else self.sampled.finish or "length"
        logprobs = None if self._request.logprobs is None else self._logprobs()
        return {"index": index, "text": head + text[:end], "finish_reason": finish, "logprobs": logprobs}

    def _logprobs(self) -> Json:
        entries: list[tuple[int, float | None, Json | None]] = []
        if self._request.echo:
            first, *tokens = self._prompt
            entries.append((first, None, None))
            if self._scores is not None:
                entries += zip(
                    tokens, self._scores.logprobs.tolist(), map(self._likeliest, range(len(tokens))), strict=True
                )
        if self.sampled is not None:
            pairs = zip(self.sampled.tokens.tolist(), self.sampled.logprobs.tolist(), strict=True)
            entries += [(token, logprob, {self._text(token): logprob}) for token, logprob in pairs]
        texts = [self._text(token) for token, _, _ in entries]
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob, _ in entries],
            "top_logprobs": [likeliest for _, _, likeliest in entries],
            "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
        }

    def _likeliest(self, place: int) -> Json:
        """Return the likeliest tokens at a place of the prompt, and the prompt's own token, by text."""
        assert self._scores is not None
        tokens, logprobs = self._scores.top_tokens[place].tolist(), self._scores.top_logprobs[place].tolist()
        likeliest: Json = {}
        for token, logprob in zip(
            [*tokens, self._prompt[place + 1]], [*logprobs, float(self._scores.logprobs[place])], strict=True
        ):
            # Tokens may have the same text: the first is the likeliest.
            likeliest.setdefault(self._text(token), logprob)
        return likeliest

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


def completions_body(request: CompletionRequest, completions: list[TextCompletion], prompts: list[list[int]]) -> Json:
    sampled = sum(len(completion.sampled) for completion in completions if completion.sampled is not None)
    prompt = sum(map(len, prompts))
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [completion.choice(index) for index, completion in enumerate(completions)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }
