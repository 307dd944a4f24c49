"""What is read of a request has every text that the request says, or the request is refused, in each protocol."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from areal.extensions.agents.anthropic_api import CountRequest
from areal.extensions.agents.openai_api import ApiError, ChatRequest, messages_of
from areal.extensions.agents.responses_api import ResponseReply, ResponsesRequest

DATA_URL = {"url": "data:image/png;base64,AAAA"}


class Said:
    """Draws the pieces of a request, and keeps the texts that it says in `texts`."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.texts = draw, []

    def text(self) -> str:
        self.texts.append(self.draw(st.text(min_size=1, max_size=6)))
        return self.texts[-1]

    def any_of(self, *makers: Any) -> Any:
        return self.draw(st.sampled_from(makers))()

    def some(self, maker: Any, least: int = 0) -> list[Any]:
        return [maker() for _ in range(self.draw(st.integers(least, 2)))]

    def maybe(self, **makers: Any) -> dict[str, Any]:
        return {key: maker() for key, maker in makers.items() if self.draw(st.integers(0, 3)) == 0}

    def arguments(self) -> Any:
        fields = self.draw(st.sampled_from([{}, {self.text(): self.text()}, {"n": [self.text()]}]))
        self.texts = self.texts[:-3] + [text for text in self.texts[-3:] if text in [*leaves(fields)]]
        return (
            self.draw(st.sampled_from([fields, json.dumps(fields), None, ""]))
            if not fields
            else self.any_of(lambda: fields, lambda: json.dumps(fields), lambda: json.dumps(fields, ensure_ascii=False))
        )

    # --- chat completions

    def part(self) -> Any:
        return self.any_of(
            lambda: {"type": "text", "text": self.text()},
            lambda: {"type": "input_text", "text": self.text()},
            lambda: {"type": "text", "value": self.text()},
            lambda: {"type": "text", "text": [self.text()]},
            lambda: {"text": self.text()},
            lambda: {"type": "refusal", "refusal": self.text()},
            lambda: {"type": "thinking_of_others", "text": self.text()},
            lambda: {"type": "image_url", "image_url": DATA_URL, "text": self.text()},
            lambda: {"type": "file", "file": {"file_data": self.text()}},
            lambda: self.text(),
        )

    def content(self) -> Any:
        return self.any_of(self.text, self.text, lambda: self.some(self.part), lambda: None, lambda: {"a": self.text()})

    def call(self) -> Any:
        function = {"name": self.text(), "arguments": self.arguments()}
        return self.any_of(
            lambda: {"id": "c", "type": "function", "function": function},
            lambda: {"id": "c", **function},
            lambda: {"id": "c", "type": "custom", "custom": {"name": "f", "input": self.text()}},
        )

    def message(self) -> Any:
        role = self.draw(st.sampled_from(["user", "assistant", "assistant", "system", "developer", "tool", "critic"]))
        further = self.maybe(
            tool_calls=lambda: self.some(self.call),
            refusal=self.text,
            function_call=lambda: {"name": self.text(), "arguments": self.text()},
            audio=lambda: {"transcript": self.text()},
        )
        return {"role": role, "content": self.content(), **further}

    # --- responses

    def item(self) -> Any:
        return self.any_of(
            self.message,
            lambda: {"type": "message", **self.message()},
            lambda: {"type": "function_call", "call_id": "c", "name": self.text(), "arguments": self.arguments()},
            lambda: {"type": "function_call_output", "call_id": "c", "output": self.content()},
            lambda: {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": self.text()},
            lambda: {"type": "web_search_call", "action": {"query": self.text()}},
            lambda: {"content": self.text()},
        )

    # --- messages

    def block(self) -> Any:
        return self.any_of(
            lambda: {"type": "text", "text": self.text()},
            lambda: {"type": "text", "text": self.text()},
            lambda: {"type": "tool_use", "id": "c", "name": self.text(), "input": {self.text(): self.text()}},
            lambda: {"type": "tool_result", "tool_use_id": "c", "content": self.text()},
            lambda: {"type": "tool_result", "tool_use_id": "c", "content": self.some(self.part)},
            lambda: {"type": "document", "title": self.text(), "source": {"type": "text", "data": self.text()}},
            lambda: {"type": "search_result", "title": self.text(), "text": self.text()},
            lambda: {"type": "image", "source": {"type": "url", "url": self.text()}, "text": self.text()},
        )

    def turn(self) -> Any:
        role = self.draw(st.sampled_from(["user", "assistant", "system"]))
        return {"role": role, "content": self.any_of(self.text, lambda: self.some(self.block))}


def leaves(value: Any) -> Iterator[str]:
    """All texts in a value, keys among them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str):
        yield value


def check(texts: list[str], request: ChatRequest) -> None:
    shown = "\0".join(leaves(messages_of(request, None)))
    assert not [text for text in texts if text not in shown]


refusals = contextlib.suppress(ApiError, ValidationError)


@given(st.data())
def test_a_chat_completion_is_read_with_every_text_or_refused(data):
    speech = Said(data.draw)
    body = {"messages": speech.some(speech.message, 1)}
    with refusals:
        check(speech.texts, ChatRequest.model_validate(body))


@given(st.data())
def test_a_request_of_responses_is_read_with_every_text_or_refused(data):
    speech = Said(data.draw)
    body = {
        "input": speech.any_of(speech.text, lambda: speech.some(speech.item, 1)),
        **speech.maybe(instructions=speech.text),
    }
    with refusals:
        check(speech.texts, ResponseReply(ResponsesRequest.model_validate(body), {}).request)


@given(st.data())
def test_a_request_of_messages_is_read_with_every_text_or_refused(data):
    speech = Said(data.draw)
    system = speech.maybe(system=lambda: speech.any_of(speech.text, lambda: speech.some(speech.block)))
    body = {"messages": [*speech.some(speech.turn, 1), {"role": "user", "content": speech.text()}], **system}
    with refusals:
        check(speech.texts, CountRequest.model_validate(body).chat())
