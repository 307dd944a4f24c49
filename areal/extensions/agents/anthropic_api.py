"""Anthropic's Messages API, translated to and from chat completions."""

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from areal.extensions.agents.openai_api import (
    MAX_STOPS,
    Answer,
    ApiError,
    ChatRequest,
    Event,
    Json,
    SamplingFields,
    StopText,
    only_text,
    other_tool,
)

Blocks = Annotated[list[Json], Field(fail_fast=True)]

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    507: "api_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Claude Code begins its system prompt with a block with a hash of the call, so that no call would continue the call
# before. vLLM leaves the block out, too.
_BILLING = "x-anthropic-billing-header"


class InputMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class OfferedTool(BaseModel):
    name: str
    input_schema: Json
    description: str | None = None
    type: Literal["custom"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            raise PydanticCustomError("tool", "{why}", {"why": other_tool(tool["type"], tool.get("name"))})
        return tool

    def chat(self) -> Json:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]


class OutputConfig(BaseModel):
    format: Annotated[Json | None, AfterValidator(only_text)] = None


Threads = dict[str, ChatRequest]
"""A sample's messages by id: the request of a message, with the answer added."""


class Thread(BaseModel):
    """A kept conversation: "continue" adds the request's messages to the messages up to an earlier message."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountRequest(BaseModel):
    """The body of a request that counts tokens. Unknown fields are ignored."""

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    model: str = "policy"
    system: str | Blocks | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> ChatRequest:
        """Translate the request to a chat completion. Raises ApiError."""
        messages = [message for turn in self.messages for message in _chat_messages(turn.role, turn.content)]
        if messages[-1]["role"] == "assistant":
            raise ApiError("the last message is the assistant's: the policy cannot be made to begin with a given text")
        system = self.system
        if isinstance(system, list):
            system = [block for block in system if not str(block.get("text")).startswith(_BILLING)]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return ChatRequest(
            messages=messages,
            model=self.model,
            tools=None if self.tools is None else [tool.chat() for tool in self.tools],
            tool_choice=self.tool_choice and self.tool_choice.type,
        )


class MessagesRequest(CountRequest, SamplingFields):
    """The body of a request for a message. Unknown fields are ignored."""

    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    thread: Thread | None = None

    def chat(self) -> ChatRequest:
        options = {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "stream": self.stream}
        options |= self.sampling_fields
        return super().chat().model_copy(update=options)


class MessageReply:
    """A `Reply` as a message, which is added to `threads`. Raises ApiError if the request cannot be translated."""

    def __init__(self, message_request: MessagesRequest, tokenizer: Any, threads: Threads) -> None:
        self.request = _continued(message_request, threads)
        self._threads = threads
        self._tokenizer = tokenizer
        self._streamed_length: int | None = None  # characters; None: no text block has begun
        self.names = [f"msg_{secrets.token_hex(12)}"]
        self._envelope = {
            "id": self.names[0],
            "type": "message",
            "role": "assistant",
            "model": message_request.model,
        }

    def body(self, *answers: Answer) -> Json:
        (answer,) = answers
        self._keep(answer)
        return self._envelope | {"content": _blocks(answer.message)} | self._ending(answer) | {"usage": _usage(answer)}

    def start(self) -> list[Event]:
        # The prompt's length follows at the end.
        unknown = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
        return [{"type": "message_start", "message": self._envelope | {"content": []} | unknown}]

    def text(self, piece: str) -> list[Event]:
        begin = [_begin(0, {"type": "text", "text": ""})] if self._streamed_length is None else []
        self._streamed_length = (self._streamed_length or 0) + len(piece)
        return [*begin, _delta(0, {"type": "text_delta", "text": piece})]

    def finish(self, answer: Answer) -> list[Event]:
        self._keep(answer)
        events: list[Event] = []
        for index, block in enumerate(_blocks(answer.message)):
            empty, delta = _streamed(block)
            if block["type"] == "text" and self._streamed_length is not None:
                delta["text"] = delta["text"][self._streamed_length :]
            else:
                events.append(_begin(index, empty))
            events += [_delta(index, delta), {"type": "content_block_stop", "index": index}]
        events.append({"type": "message_delta", "delta": self._ending(answer), "usage": _usage(answer)})
        return [*events, {"type": "message_stop"}]

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(error.status, str(error), error.code)]

    def _keep(self, answer: Answer) -> None:
        messages = [*self.request.messages, answer.message]
        self._threads[self.names[0]] = self.request.model_copy(update={"messages": messages})

    def _ending(self, answer: Answer) -> Json:
        if answer.finish == "stop" and self.request.stop:
            text = self._tokenizer.decode(answer.sampled.tokens, skip_special_tokens=True)
            stops = [stop for stop in self.request.stop if stop in text]
            if stops:
                return {"stop_reason": "stop_sequence", "stop_sequence": min(stops, key=text.find)}
        return {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None}


def error_body(status: int, message: str, code: str | None = None) -> Json:
    """Return the body of an error. Clients of threads look for the code."""
    error: Json = {"type": _ERRORS.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error | ({"details": {"error_code": code}} if code else {})}


def _continued(message_request: MessagesRequest, threads: Threads) -> ChatRequest:
    """Return the request with system prompt, tools and messages of the continued thread. Raises ApiError."""
    request = message_request.chat()
    if message_request.thread is None or message_request.thread.type == "create":
        return request
    earlier = threads.get(message_request.thread.previous_message_id or "")
    if earlier is None:
        raise ApiError("thread: previous_message_id is not the id of a message of this sample", "thread_not_found", 404)
    return request.model_copy(update={"messages": [*earlier.messages, *request.messages], "tools": earlier.tools})


def _chat_messages(role: str, content: str | list[Json]) -> list[Json]:
    """Translate a message to chat messages: tool results have messages of their own. Raises ApiError."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Json] = []
    texts: list[Json] = []
    calls: list[Json] = []
    for block in content:
        match block:
            case {"type": "text"} | {"type": "image"}:
                texts.append(_picture(block))
            case {"type": "tool_use", "id": number, "name": name, "input": arguments} if role == "assistant":
                calls.append(
                    {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                )
            case {"type": "tool_result", "tool_use_id": number} if role == "user":
                result = block.get("content")
                result = [_picture(part) for part in result] if isinstance(result, list) else result
                results.append({"role": "tool", "tool_call_id": number, "content": result})
            case {"type": "thinking" | "redacted_thinking"} if role == "assistant":
                pass
            case _:
                raise ApiError(
                    f"a message of the role {role} has a block of the type {block.get('type')!r}, or one that lacks a "
                    f"field: blocks are text and image, and tool_use and thinking of the assistant, and tool_result of "
                    f"the user"
                )
    if calls:
        return [{"role": role, "content": texts, "tool_calls": calls}]
    return [*results, {"role": role, "content": texts}] if texts or not results else results


def _picture(block: Any) -> Any:
    """Translate a block with a picture to a part of a chat message. Any other block is returned unchanged."""
    match block:
        case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
            return {"type": "image_url", "image_url": f"data:{kind};base64,{data}"}
    return block


def _blocks(message: Json) -> list[Json]:
    blocks: list[Json] = []
    if message.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def _streamed(block: Json) -> tuple[Json, Json]:
    """Return the block at its beginning, and the delta with the whole content."""
    if block["type"] == "text":
        return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        return block | {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _begin(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _usage(answer: Answer) -> Json:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.sampled.tokens)}
