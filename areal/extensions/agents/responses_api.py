"""OpenAI's Responses API, translated to and from chat completions."""

import itertools
import secrets
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from areal.extensions.agents.openai_api import (
    UNSHOWN,
    Answer,
    ApiError,
    ChatRequest,
    Event,
    Json,
    ResponseFormat,
    SamplingFields,
    other_tool,
)

# Further fields of a message beside its content.
FURTHER = {*UNSHOWN, "tool_calls"}
Responses = dict[str, list[Json]]
"""A sample's responses: by id, all messages up to the response, without the instructions. A later call may name a
response as its `previous_response_id`."""


ITEMS = {"custom_tool": "custom", "web_search": "web_search", "local_shell": "local_shell"}
"""The types of tools by their items, without _call and _output."""


class FunctionTool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise PydanticCustomError("tool", "{why}", {"why": other_tool(tool["type"], tool.get("name"))})
        return tool

    def chat(self) -> Json:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextOptions(BaseModel):
    format: ResponseFormat | None = None


class ResponsesRequest(SamplingFields):
    """The body of a request for a response. Unknown fields are ignored."""

    input: str | Annotated[list[Json], Field(fail_fast=True)]
    model: str = "policy"
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    stream: bool | None = False
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None


class ResponseReply:
    """A `Reply` as a response, which is added to `responses`. Raises ApiError if the request cannot be translated."""

    def __init__(self, response_request: ResponsesRequest, responses: Responses) -> None:
        self._response_request = response_request
        self._responses = responses
        self._messages = _earlier(response_request, responses) + _chat_messages(response_request.input)
        if not self._messages:
            raise ApiError("input: there is no message in it")
        system = response_request.instructions
        self.request = ChatRequest(
            messages=[*([{"role": "system", "content": system}] if system else []), *self._messages],
            model=response_request.model,
            tools=None if response_request.tools is None else [tool.chat() for tool in response_request.tools],
            tool_choice=response_request.tool_choice,
            max_tokens=response_request.max_output_tokens,
            stream=response_request.stream,
            **response_request.sampling_fields,
        )
        self.names, self._message_id, self._created = [_new_id("resp")], _new_id("msg"), int(time.time())
        self._streamed_length: int | None = None  # characters; None: no message has begun
        self._numbers = itertools.count()

    def body(self, *answers: Answer) -> Json:
        (answer,) = answers
        return self._final_response(answer, self._items(answer))

    def start(self) -> list[Event]:
        return [self._event("response.created", response=self._response("in_progress", []))]

    def text(self, piece: str) -> list[Event]:
        return self._more_text(0, piece)

    def finish(self, answer: Answer) -> list[Event]:
        items = self._items(answer)
        events: list[Event] = []
        for index, item in enumerate(items):
            events += self._streamed(index, item)
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        response = self._final_response(answer, items)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def error(self, error: ApiError) -> list[Event]:
        return [self._event("error", code=error.code, message=str(error), param=None)]

    def _items(self, answer: Answer) -> list[Json]:
        items: list[Json] = []
        if reasoning := answer.message.get("reasoning"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": content})
        calls = answer.message.get("tool_calls", [])
        if answer.message["content"] or not calls:
            items.append(self._message([_part(answer.message["content"] or "")], _status(answer)))
        for call in calls:
            called = {"call_id": call["id"], **call["function"], "status": "completed"}
            items.append({"id": _new_id("fc"), "type": "function_call", **called})
        return items

    def _message(self, content: list[Json], status: str) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _final_response(self, answer: Answer, items: list[Json]) -> Json:
        self._responses[self.names[0]] = [*self._messages, answer.message]
        return self._response(_status(answer), items) | {"usage": _usage(answer)}

    def _response(self, status: str, output: list[Json]) -> Json:
        request = self._response_request
        return {
            "id": self.names[0], "object": "response", "created_at": self._created, "status": status,
            "model": request.model, "output": output, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions, "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens, "metadata": {}, "parallel_tool_calls": True,
            "tool_choice": request.tool_choice or "auto", "tools": [tool.model_dump() for tool in request.tools or []],
            "temperature": None, "top_p": None, "usage": None,
        }  # fmt: skip

    # --- events

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _streamed(self, index: int, item: Json) -> list[Event]:
        """Return the events of an item without the last event, and without text that `text` has already sent."""
        where: Json = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            (part,) = item["content"]
            where |= {"content_index": 0}
            return [
                *self._more_text(index, part["text"][self._streamed_length or 0 :]),
                self._event("response.output_text.done", **where, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", **where, part=part),
            ]
        if item["type"] == "reasoning":
            added = self._event("response.output_item.added", output_index=index, item=item | {"content": []})
            where |= {"content_index": 0}
            text = item["content"][0]["text"]
            delta = self._event("response.reasoning_text.delta", **where, delta=text)
            return [added, delta, self._event("response.reasoning_text.done", **where, text=text)]
        begun = item | {"arguments": "", "status": "in_progress"}
        added = self._event("response.output_item.added", output_index=index, item=begun)
        arguments = item["arguments"]
        delta = self._event("response.function_call_arguments.delta", **where, delta=arguments)
        return [added, delta, self._event("response.function_call_arguments.done", **where, arguments=arguments)]

    def _more_text(self, index: int, piece: str) -> list[Event]:
        """Return the events of a new piece of the message; the first piece also begins the message."""
        where = {"item_id": self._message_id, "output_index": index, "content_index": 0}
        events: list[Event] = []
        if self._streamed_length is None:
            begun = self._message([], "in_progress")
            events.append(self._event("response.output_item.added", output_index=index, item=begun))
            events.append(self._event("response.content_part.added", **where, part=_part("")))
        self._streamed_length = (self._streamed_length or 0) + len(piece)
        return [*events, self._event("response.output_text.delta", **where, delta=piece, logprobs=[])]


def _earlier(request: ResponsesRequest, responses: Responses) -> list[Json]:
    if request.previous_response_id is None:
        return []
    if request.previous_response_id not in responses:
        raise ApiError("previous_response_id is not the id of a response of this sample", "previous_response_not_found")
    return responses[request.previous_response_id]


def _chat_messages(request_input: str | list[Json]) -> list[Json]:
    """Translate an input to chat messages: calls after a message are part of the message. Raises ApiError."""
    if isinstance(request_input, str):
        return [{"role": "user", "content": request_input}]
    messages: list[Json] = []
    for item in request_input:
        match item:
            case {"type": "function_call", "call_id": number, "name": name, "arguments": arguments}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": number, "output": output}:
                messages.append({"role": "tool", "tool_call_id": number, "content": output})
            case {"type": "reasoning"}:
                pass
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                messages.append({"role": role, "content": content} | {key: item[key] for key in FURTHER & item.keys()})
            case {"type": str(kind)} if (tool := kind.removesuffix("_output").removesuffix("_call")) in ITEMS:
                raise ApiError(f"an item of the input has the type {kind!r}: {other_tool(ITEMS[tool])}")
            case _:
                raise ApiError(
                    f"an item of the input has the type {item.get('type')!r}, or lacks a field: items are message, "
                    f"function_call, function_call_output and reasoning"
                )
    return messages


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _usage(answer: Answer) -> Json:
    sampled = len(answer.sampled.tokens)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + sampled,
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
