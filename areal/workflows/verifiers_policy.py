"""Runs the policy as the model of an environment of the verifiers library (0.1).

The environment runs in the process that samples. Its own rubric gives the reward.
"""

from __future__ import annotations

import json
from typing import Any

from areal.data import verifiers_tasks
from areal.data.rows import Row
from areal.trajectory import Trajectory
from areal.workflows.conversation import Conversation, Message, Policy, begin_with_tools
from areal.workflows.openai_api import _tool_calls


async def play(session: Policy, row: Row) -> Trajectory:
    """Runs the policy in the row's environment. Raises RuntimeError if the environment fails or gives no reward."""
    world = verifiers_tasks.load(row.fields["environment"], json.loads(row.fields["environment_options"]))
    talks: list[Conversation] = []
    kept = {key: value for key, value in row.fields.items() if value is not None}
    played = await world.run_rollout(kept | {"prompt": row.prompt}, _policy(session, talks), "policy", {})
    if played.get("error") or played.get("reward") is None:
        raise RuntimeError(f"environment {row.fields['environment']!r}: {played.get('error') or 'it gave no reward'}")
    return talks[0].trajectory(float(played["reward"]))


def _policy(session: Policy, talks: list[Conversation]) -> Any:
    """The session as a client of the verifiers library. Its conversation is added to `talks` at the first turn."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage

    async def get_response(self: Any, prompt: Any, model: str, *, tools: Any = None, **_: Any) -> Any:
        messages = [message.model_dump(exclude_none=True) for message in prompt]
        if not talks:
            shown = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools or []]
            talks.append(begin_with_tools(session.tokenizer, messages, shown))
        talk = talks[0]
        sampled = await session.generate(talk.prompt(messages))
        if not len(sampled.tokens):
            raise OverlongPromptError
        text = talk.text(sampled)
        text, calls = _tool_calls(text, len(talk.generations)) if tools else (text, [])
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [{"id": call["id"], **call["function"]} for call in calls]
        cut = sampled.finish == "length"
        said = ResponseMessage(**talk.add(sampled, message), finish_reason=sampled.finish, is_truncated=cut)
        return Response(id=str(len(talk.generations)), created=0, model=model, message=said)

    # `get_response` replaces all steps of the base class, so its abstract methods are never called.
    unused = dict.fromkeys(Client.__abstractmethods__)
    return type("Policy", (Client,), unused | {"get_response": get_response})(None)
