"""One sample as a chat in the format of OpenAI's API: answers an agent's requests as turns of one conversation.

All calls of a sample are turns of one `Conversation`, and therefore one trajectory. A call that does not continue from
the last answer is refused, because its tokens could not be trained together with the others.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from areal.workflows.conversation import Conversation, Generation, Policy, keep_until_text
from areal.workflows.parsers import Parsed, Parsers

Json = dict[str, Any]

# Each of them is searched for in all new text. OpenAI allows four.
MAX_STOPS = 16
StopText = Annotated[str, Field(max_length=1024)]


class ApiError(Exception):
    """A request that is answered with an HTTP status of 4xx."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class ResponseFormat(BaseModel):
    type: Literal["text"]


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of a chat completion request. Other fields, such as `temperature`, are ignored: the run sets them."""

    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    model: str = "policy"
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    n: Literal[1] | None = 1
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def offered(self) -> list[Json] | None:
        """The tools that the policy may call."""
        return self.tools if self.tools and self.tool_choice != "none" else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn: the message for the agent, the finish reason, what was sampled, and the number of tokens before it."""

    message: Json
    finish: str
    sampled: Generation
    prompt_tokens: int


class ChatSession:
    """The turns of one sample. Once there is no room for another turn, every further answer is empty, with the finish
    "length".

    parsers: read what the policy says; default: those of the default configuration. reward: the reward that the agent
    has reported. failure: set to the error if a generation of this sample fails.
    """

    def __init__(self, session: Policy, parsers: Parsers | None = None) -> None:
        self._session = session
        self.tokenizer = session.tokenizer
        self._parsers = parsers or Parsers(session.tokenizer)
        self._turn = asyncio.Lock()
        self._tools: list[Json] | None = None
        self._full: Answer | None = None
        self.conversation = Conversation(self.tokenizer)
        self.reward: float | None = None
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def last_text(self) -> str:
        """The text of the last answer, without tool calls and thinking."""
        return self.conversation.messages[-1]["content"]

    async def complete(self, request: ChatRequest) -> Answer:
        """The policy's next turn. Concurrent calls are answered one after another. Raises ApiError."""
        async with self._turn:
            if self._full:
                return self._full
            await self._check(request.offered)
            prompt = self._prompt([_message(raw) for raw in request.messages], request.offered)
            stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
            sampled = await self._generate(prompt, request.max_completion_tokens or request.max_tokens, stops)
            if not len(sampled.tokens):
                self._full = Answer({"role": "assistant", "content": ""}, "length", sampled, len(prompt))
                return self._full
            read = await asyncio.to_thread(self._parsers.parse, sampled, request.offered, stops, self._call_ids())
            message = _shown(read)
            self.conversation.add(sampled, _message(message))
            finish = "stop" if read.stopped else "tool_calls" if "tool_calls" in message else sampled.finish
            return Answer(message, finish, sampled, len(prompt))

    def _prompt(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """The tokens of the prompt. Raises ApiError if the messages do not continue from the last answer, or cannot be
        rendered and encoded."""
        if not self.conversation.generations:
            self._tools, self.conversation = tools, Conversation(self.tokenizer, tools)
        elif tools != self._tools or not self.conversation.continues(messages):
            what = (
                "the tools are not those of the call before"
                if tools != self._tools
                else "the messages do not begin with all messages of the call before and its answer"
            )
            raise ApiError(
                f"{what}: all calls of a sample must be turns of one conversation, because they are trained as one "
                f"trajectory",
                "not_a_continuation",
            )
        try:
            return self.conversation.prompt(messages)
        except Exception as error:  # templates and tokenizers may raise anything
            raise ApiError(f"the model's tokenizer or chat template does not take these messages: {error}") from None

    async def _generate(self, prompt: list[int], limit: int | None, stops: list[str]) -> Generation:
        keep = keep_until_text(self.tokenizer, stops) if stops else None
        try:
            return await self._session.generate(prompt, limit, keep)
        except Exception as error:  # any error: a sample that has lost a turn cannot be trained
            if not self.failure.done():
                self.failure.set_result(error)
            raise ApiError(f"the sample has failed: {error}", "sample_failed") from error

    async def _check(self, tools: list[Json] | None) -> None:
        """Raises ApiError if vLLM's parsers do not take these tools. The first call imports vLLM."""
        try:
            await asyncio.to_thread(self._parsers.check, tools)
        except ValueError as error:
            raise ApiError(str(error)) from None

    def _call_ids(self) -> list[str]:
        return [call["id"] for message in self.conversation.messages for call in message.get("tool_calls", ())]


@dataclass(frozen=True, slots=True)
class Access:
    """What an agent needs to make the calls of one sample, and the chat that these calls make up."""

    base_url: str
    api_key: str
    chat: ChatSession


def completion(answer: Answer, request: ChatRequest, tokenizer: Any) -> Json:
    """The body of an answer that is not streamed."""
    choice = {"index": 0, "message": answer.message | {"refusal": None}, "finish_reason": answer.finish}
    choice["logprobs"] = _logprobs(answer.sampled, request, tokenizer)
    return _envelope("chat.completion", request) | {"choices": [choice], "usage": _usage(answer)}


def chunks(answer: Answer, request: ChatRequest, tokenizer: Any) -> list[Json]:
    """The events of a streamed answer, without the last one, [DONE]."""
    envelope = _envelope("chat.completion.chunk", request)
    calls = [call | {"index": i} for i, call in enumerate(answer.message.get("tool_calls", []))]
    delta = answer.message | ({"tool_calls": calls} if calls else {})
    logprobs = _logprobs(answer.sampled, request, tokenizer)
    made = [
        envelope | {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]},
        envelope | {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": answer.finish}]},
    ]
    if request.stream_options and request.stream_options.include_usage:
        made.append(envelope | {"choices": [], "usage": _usage(answer)})
    return made


def _envelope(kind: str, request: ChatRequest) -> Json:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": request.model,
    }  # fmt: skip


def _usage(answer: Answer) -> Json:
    sampled = len(answer.sampled.tokens)
    return {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
    }  # fmt: skip


def _logprobs(sampled: Generation, request: ChatRequest, tokenizer: Any) -> Json | None:
    """Log-probs of the sampled tokens. Those of alternatives are not known, whatever `top_logprobs` asks for."""
    if not request.logprobs:
        return None
    content = []
    for token, logprob in zip(sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True):
        text = tokenizer.decode([token])
        this = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append(this | {"top_logprobs": [this] if request.top_logprobs else []})
    return {"content": content, "refusal": None}


def _message(raw: Json) -> Json:
    """A chat message in the form that templates take, without fields that clients add to the messages they received.
    Raises ApiError."""
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise ApiError(f"a message has the role {role!r}: roles are system, developer, user, assistant and tool")
    message = {"role": role, "content": _text(raw.get("content"))}
    if role == "tool" and raw.get("tool_call_id"):
        message["tool_call_id"] = raw["tool_call_id"]
    if role == "assistant" and raw.get("tool_calls"):
        if not isinstance(raw["tool_calls"], list):
            raise ApiError("the tool_calls of a message are not a list")
        message["tool_calls"] = [_tool_call(call) for call in raw["tool_calls"]]
    return message


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise ApiError("the content of a message is neither text nor a list of text parts: nothing else can be trained yet")


def _tool_call(raw: Any) -> Json:
    try:
        function = raw["function"]
        called = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        return {"id": raw["id"], "type": "function", "function": called}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ApiError("a tool call in the messages lacks its id, function.name or function.arguments") from None


def _shown(read: Parsed) -> Json:
    message: Json = {"role": "assistant", "content": read.content}
    if read.calls:
        message |= {"content": read.content or None, "tool_calls": read.calls}
    if read.reasoning:  # vLLM's name of the field, and the one before
        message |= {"reasoning": read.reasoning, "reasoning_content": read.reasoning}
    return message
