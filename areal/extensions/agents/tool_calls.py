"""Turns in which the policy calls tools, until a turn without a call."""

from collections.abc import Sequence
from typing import Any, Protocol

from areal.base.text import cut_text
from areal.extensions.agents.openai_api import ChatRequest, ChatSession
from areal.workflows.chat_templates import Message, check_shown
from areal.workflows.session import Session


class OffersTools(Protocol):
    """Tools, as chat templates take them, and their calls: arguments are JSON, results are texts."""

    @property
    def shown(self) -> Sequence[dict[str, Any]]: ...

    async def call(self, name: str, arguments: str) -> str: ...


async def use_tools(
    session: Session, messages: list[Message], offered: OffersTools, max_turns: int, max_output: int | None = None
) -> str:
    """Let the policy call tools. Return its last turn: the first turn without a call, or the last of `max_turns`."""
    check_shown(session.tokenizer, messages, [*offered.shown])
    chat = ChatSession(session)
    answer = ""
    for remaining_turns in reversed(range(max_turns)):
        completion = await chat.complete(ChatRequest(messages=messages, tools=[*offered.shown]))
        if not len(completion.sampled.tokens):
            break
        answer = session.tokenizer.decode(completion.sampled.tokens, skip_special_tokens=True)
        calls = completion.message.get("tool_calls", [])
        if not calls or not remaining_turns or completion.sampled.finish == "length":
            break
        messages.append(completion.message)
        for call in calls:
            result = await offered.call(call["function"]["name"], call["function"]["arguments"])
            message = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
            messages.append(message | {"content": cut_text(result, max_output) if max_output else result})
    return answer
