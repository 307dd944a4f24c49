"""Runs the policy as the model of an environment of the verifiers library (0.1).

The environment runs in the process that samples. Its own rubric gives the reward.
"""

from __future__ import annotations

from typing import Any

from areal.data import verifiers_tasks
from areal.data.rows import Row
from areal.trajectory import Trajectory
from areal.workflows.conversation import check_shown
from areal.workflows.openai_api import ChatRequest, ChatSession
from areal.workflows.session import Session


async def play(session: Session, row: Row) -> Trajectory:
    """Runs the policy in the row's environment. Raises RuntimeError if the environment fails or gives no reward."""
    world = verifiers_tasks.load(row.fields["environment"], row.fields["environment_options"])
    fields = {key: value for key, value in row.fields.items() if value is not None}
    played = await world.run_rollout(fields | {"prompt": row.prompt}, _policy(session), "policy", {})
    if played.get("error") or played.get("reward") is None:
        raise RuntimeError(f"environment {row.fields['environment']!r}: {played.get('error') or 'it gave no reward'}")
    return session.trajectory(float(played["reward"]))


def _policy(session: Session) -> Any:
    """The session as a client of the verifiers library."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage

    chat = ChatSession(session)

    async def get_response(self: Any, prompt: Any, model: str, *, tools: Any = None, **_: Any) -> Any:
        messages = [_openai(message.model_dump(exclude_none=True)) for message in prompt]
        shown = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools or []]
        if shown and not session.calls:
            check_shown(session.tokenizer, messages, shown)
        answer = await chat.complete(ChatRequest(messages=messages, tools=shown))
        if not len(answer.sampled.tokens):
            raise OverlongPromptError
        calls = [{"id": call["id"], **call["function"]} for call in answer.message.get("tool_calls", ())]
        cut = answer.sampled.finish == "length"
        response_message = ResponseMessage(
            role="assistant",
            content=answer.message["content"] or "",
            finish_reason=answer.sampled.finish,
            is_truncated=cut,
            tool_calls=calls or None,
        )
        return Response(id=str(len(session.calls)), created=0, model=model, message=response_message)

    # `get_response` replaces all steps of the base class, so its abstract methods are never called.
    unused = dict.fromkeys(Client.__abstractmethods__)
    return type("Policy", (Client,), unused | {"get_response": get_response})(None)


def _openai(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the library in the form of OpenAI's API."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {"id": call["id"], "type": "function", "function": {key: call[key] for key in ("name", "arguments")}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}
