"""Workflows: how a sample of a prompt is produced. A workflow is an async function of a session and a row.

    async def my_workflow(session: Session, row: Row, *, depth: int = 3) -> Trajectory: ...

`rollout_manager.workflow: package.module:my_workflow` selects the workflow; `rollout_manager.workflow_options: {depth:
5}` sets keyword arguments. A workflow handles tokens exactly as the engine saw them (areal.workflows.conversation).
Text is decoded only for rewards, tools and environments. See docs/workflows.md.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from areal.data.rows import Row, prompt_text
from areal.samples.trajectory import Trajectory
from areal.workflows.chat_templates import Message, parts_of
from areal.workflows.conversation import Conversation, begin, user
from areal.workflows.named_workflows import with_hooks
from areal.workflows.session import Session
from areal.workflows.turn_ends import Keep

Turns = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
FEEDBACK = "That is not correct. Try again."


async def single_turn(session: Session, row: Row) -> Trajectory:
    """Sample a completion of the prompt, and score the completion."""
    talk, messages = begin(session.tokenizer, row.prompt, row.tools)
    sampled = await session.generate(talk.prompt(messages))
    completion = talk.add(sampled)["content"]
    return session.trajectory(await session.score(completion, sampled.tokens))


def _feedback(options: Mapping[str, Any]) -> list[str]:
    return [options.get("feedback", FEEDBACK).replace("{prompt}", "")]


@with_hooks(texts=_feedback)
async def multi_turn(
    session: Session,
    row: Row,
    *,
    max_turns: Turns = 2,
    discount: Share = 1.0,
    feedback: str = FEEDBACK,
    pass_score: float = 1.0,
) -> Trajectory:
    """Sample attempts until an attempt scores at least `pass_score`, but at most `max_turns`. After a worse attempt the
    policy gets `feedback`, with the prompt in place of `{prompt}`. The reward is the last attempt's score, times
    `discount` for every earlier attempt."""
    talk, messages = begin(session.tokenizer, row.prompt, row.tools)
    score = 0.0
    async for attempt in turns(session, talk, messages, max_turns):
        score = await session.score(attempt, session.calls[-1].tokens)
        if score >= pass_score:
            break
        messages.append(user(feedback.replace("{prompt}", prompt_text(row.prompt))))
    return session.trajectory(score * discount ** (len(session.calls) - 1))


async def turns(
    session: Session, talk: Conversation, messages: list[Message], max_turns: int, keep: Keep | None = None
) -> AsyncIterator[str]:
    """Yield the policy's turns, as text: `max_turns` turns, or fewer if there is no room for more. `keep` may end a
    turn. A turn is appended to `messages`; before the next turn, the caller appends the messages in between."""
    for _ in range(max_turns):
        sampled = await session.generate(talk.prompt(messages), keep=keep, pictures=parts_of(messages))
        if not len(sampled.tokens):
            return
        messages.append(talk.add(sampled))
        yield messages[-1]["content"]
        if sampled.finish == "length":
            return
