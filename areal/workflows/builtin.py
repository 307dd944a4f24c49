"""Workflows: how one sample of a prompt is produced. A workflow is one async function of a session and a row.

    async def my_workflow(session: Session, row: Row, *, depth: int = 3) -> Trajectory: ...

`rollout_manager.workflow: package.module:my_workflow` selects it; `rollout_manager.workflow_options: {depth: 5}` sets
its keyword arguments. A workflow handles tokens exactly as the engine saw them (areal.workflows.conversation). Text is
decoded only for rewards, tools and environments. See docs/workflows.md.
"""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from areal.base.errors import UserError, explain
from areal.base.plugins import load
from areal.base.text import python_call
from areal.data.rows import Row, prompt_text
from areal.extensions.agents import mcp_tools
from areal.extensions.agents.agents import agent
from areal.extensions.agents.agents import check as check_agent
from areal.extensions.agents.openai_api import ChatRequest, ChatSession
from areal.extensions.environments import environments, verifiers_agent
from areal.extensions.sandboxes.sandbox_environments import SandboxEnvironment
from areal.samples.trajectory import LARGEST_REWARD, Trajectory
from areal.workflows.chat_templates import Message, parts_of
from areal.workflows.conversation import Conversation, Keep, begin, check_shown, keep_until, messages_of, user
from areal.workflows.session import Session

Workflow = Callable[..., Awaitable[Trajectory]]

Turns = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


async def single_turn(session: Session, row: Row) -> Trajectory:
    """Samples one completion of the prompt and scores it."""
    talk, messages = begin(session.tokenizer, row.prompt)
    sampled = await session.generate(talk.prompt(messages))
    completion = talk.add(sampled)["content"]
    return session.trajectory(await session.score(completion, sampled.tokens))


async def multi_turn(
    session: Session,
    row: Row,
    *,
    max_turns: Turns = 2,
    discount: Share = 1.0,
    feedback: str = "That is not correct. Try again.",
    pass_score: float = 1.0,
) -> Trajectory:
    """Attempts until one scores at least `pass_score`, at most `max_turns`. After each attempt that does not, the
    policy gets `feedback`, in which `{prompt}` stands for the prompt. The reward is the score of the last attempt,
    times `discount` for each attempt before it."""
    talk, messages = begin(session.tokenizer, row.prompt)
    score = 0.0
    async for attempt in turns(session, talk, messages, max_turns):
        score = await session.score(attempt, session.calls[-1].tokens)
        if score >= pass_score:
            break
        messages.append(user(feedback.replace("{prompt}", prompt_text(row.prompt))))
    return session.trajectory(score * discount ** (len(session.calls) - 1))


async def python_tool(session: Session, row: Row, *, max_calls: Turns = 4, max_output: Turns = 2000) -> Trajectory:
    """The policy may write Python, in a ```python block or between <tool> and </tool>. The code is run, and the policy
    continues with its output (at most `max_output` characters). After `max_calls` calls, one more turn follows. The
    first turn without code is scored, or else the last turn."""
    talk, messages = begin(session.tokenizer, row.prompt)
    answer = ""
    async for answer in turns(session, talk, messages, max_calls + 1, _until_call(session.tokenizer)):
        code = python_call(answer)
        if code is None:
            break
        messages.append(user(_output_block(_cut(await session.run_python(code), max_output))))
    return session.trajectory(await session.score(answer, session.calls[-1].tokens))


async def environment(
    session: Session,
    row: Row,
    *,
    environment: str,
    environment_options: dict[str, Any] | None = None,
    max_turns: Turns = 8,
) -> Trajectory:
    """The policy acts in an environment (environments.py) until it is done, or for `max_turns` turns. The
    reward is the sum of the rewards of all steps, each of which is that of its turn (`reward.credit`)."""
    async with environments.opened(environment, environment_options or {}, session.sandboxes) as world:
        talk, messages = begin(session.tokenizer, await world.reset(row))
        async for action in turns(session, talk, messages, max_turns):
            observation, reward, is_last = await world.step(action)
            session.reward(session.calls[-1], reward)
            if is_last:
                break
            messages.append(user(observation))
    return session.trajectory(0.0)


async def tools(
    session: Session,
    row: Row,
    *,
    servers: dict[str, mcp_tools.Server],
    max_turns: Turns = 8,
    max_output: Turns = 4000,
    timeout_seconds: Seconds = mcp_tools.TIMEOUT_SECONDS,
) -> Trajectory:
    """The policy may call the tools of MCP servers (mcp_tools.py), and continues with their results (each
    at most `max_output` characters). The first turn without a call is scored, or else the last of `max_turns`."""
    async with mcp_tools.opened(servers, timeout_seconds) as offered:
        answer = await _use_tools(session, messages_of(row.prompt), offered, max_turns, max_output)
    return session.trajectory(await session.score(answer, session.calls[-1].tokens))


async def sandbox_tools(
    session: Session,
    row: Row,
    *,
    environment: str,
    environment_options: dict[str, Any] | None = None,
    max_turns: Turns = 30,
) -> Trajectory:
    """The policy has a shell and an editor in a sandbox (sandbox_tools.py), until a turn without a call,
    or for `max_turns` turns. Then the row's tests give the reward. environment: one that is a sandbox."""
    async with environments.opened(environment, environment_options or {}, session.sandboxes) as world:
        if not isinstance(world, SandboxEnvironment):
            raise UserError(f"The environment {environment!r} of the workflow sandbox_tools is no sandbox.")
        prompt = await world.reset(row)
        await _use_tools(session, messages_of(prompt), world.tools, max_turns)
        reward = await world.judge()
    return session.trajectory(reward)


class OffersTools(Protocol):
    """Tools, as chat templates take them, and their calls: their arguments are JSON, their results texts."""

    @property
    def shown(self) -> Sequence[dict[str, Any]]: ...

    async def call(self, name: str, arguments: str) -> str: ...


async def _use_tools(
    session: Session, messages: list[Message], offered: OffersTools, max_turns: int, max_output: int | None = None
) -> str:
    """The policy's last turn, after it has called tools: one without a call, or the last of `max_turns`."""
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
            messages.append(message | {"content": _cut(result, max_output) if max_output else result})
    return answer


async def verifiers(session: Session, row: Row, *, timeout_seconds: Seconds = 600.0) -> Trajectory:
    """Does a task of the verifiers library, which also gives the rows (data.source verifiers:NAME)."""
    return await agent(
        session,
        row,
        agent=f"{verifiers_agent.__name__}:solve",
        timeout_seconds=timeout_seconds,
        agent_reward=True,
        reward_range=[-LARGEST_REWARD, LARGEST_REWARD],
    )


async def turns(
    session: Session, talk: Conversation, messages: list[Message], max_turns: int, keep: Keep | None = None
) -> AsyncIterator[str]:
    """The policy's turns, as text: `max_turns` of them, or fewer if there is no room for more. `keep` may end a turn.
    Each turn is appended to `messages`; before the next turn, the caller appends the messages that come between
    them."""
    for _ in range(max_turns):
        sampled = await session.generate(talk.prompt(messages), keep=keep, pictures=parts_of(messages))
        if not len(sampled.tokens):
            return
        messages.append(talk.add(sampled))
        yield messages[-1]["content"]
        if sampled.finish == "length":
            return


def _until_call(tokenizer: Any) -> Keep:
    """Ends a turn after the first call in it. The policy would otherwise go on with an invented output of that call."""
    return keep_until(tokenizer, ("```", "</tool>"), lambda text: python_call(text) is not None)


def _output_block(output: str) -> str:
    return f"```output\n{output}\n```\n"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters]"


BUILT_IN: dict[str, Workflow] = {
    "single_turn": single_turn,
    "multi_turn": multi_turn,
    "python_tool": python_tool,
    "environment": environment,
    "tools": tools,
    "sandbox_tools": sandbox_tools,
    "agent": agent,
    "verifiers": verifiers,
}


def resolve_workflow(name: str, options: Mapping[str, Any]) -> Workflow:
    """A workflow by built-in name or `package.module:function`, with its options set. Raises UserError."""
    if name not in BUILT_IN and ":" not in name:
        raise UserError(
            f"Unknown workflow {name!r} in rollout_manager.workflow: "
            f"known are {', '.join(BUILT_IN)}, or write package.module:function."
        )
    workflow = BUILT_IN.get(name) or load(name, "The workflow")
    bound = bound_workflow(name, workflow, options)
    if workflow in (environment, sandbox_tools):
        environments.resolve(bound.keywords["environment"], bound.keywords.get("environment_options") or {})
    if workflow is tools:
        mcp_tools.check(bound.keywords["servers"])
    if workflow is agent:
        check_agent(bound.keywords)
    return bound


def bound_workflow(name: str, workflow: Any, options: Mapping[str, Any]) -> functools.partial[Any]:
    """The workflow with its options set. name: for messages. Raises UserError."""
    if not _is_async(workflow):
        raise UserError(f"The workflow {name!r} is no async function: write `async def` (docs/workflows.md).")
    return functools.partial(workflow, **_checked(name, workflow, options))


def _is_async(workflow: Any) -> bool:
    """Whether it is an async function, or a partial, a decorator or an object with `__call__` around one."""
    while workflow is not None and not inspect.iscoroutinefunction(workflow):
        if callable(workflow) and inspect.iscoroutinefunction(type(workflow).__call__):
            return True
        workflow = getattr(workflow, "func", None) or getattr(workflow, "__wrapped__", None)
    return workflow is not None


def texts_of(name: str, options: Mapping[str, Any]) -> list[str]:
    """The texts that a built-in workflow itself gives to the policy, for whatever row."""
    if name == "multi_turn":
        default = inspect.signature(multi_turn).parameters["feedback"].default
        return [options.get("feedback", default).replace("{prompt}", "")]
    return [_output_block("")] if name == "python_tool" else []


def rehearse(name: str, options: Mapping[str, Any]) -> None:
    """Tries, once, what the workflow's samples will do, which may take a while: makes an environment from
    outside, starts MCP servers. Raises UserError."""
    if name in ("environment", "sandbox_tools"):
        environments.rehearse(options["environment"], options.get("environment_options") or {})
    if name == "tools":
        mcp_tools.rehearse(options)


def _checked(name: str, workflow: Workflow, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options; those of a built-in workflow as the types that it wants. Raises UserError."""
    where = f"rollout_manager.workflow_options: workflow {name!r}"
    signature = inspect.signature(workflow)
    known = ", ".join([*signature.parameters][2:]) or "no options"
    with explain(TypeError, f"{where}: {{why}}: besides a session and a row it takes {known}."):
        signature.bind(None, None, **options)
    if BUILT_IN.get(name) is not workflow:
        return options
    hints = get_type_hints(workflow, include_extras=True)
    checked = {}
    for option, value in options.items():
        try:
            checked[option] = TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(f"{where}: {option} is {value!r:.80}: {error.errors()[0]['msg']}.") from None
    return checked
