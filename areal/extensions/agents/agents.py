"""Agents: programs that sample from the policy as from OpenAI's or Anthropic's API. A run of an agent is a sample.

An agent is an async function or a command, given by the user. docs/agents.md describes its inputs and its results.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Annotated, Any

from pydantic import Field

from areal.base.children import kill_group
from areal.base.errors import UserError, explain
from areal.base.plugins import load
from areal.base.processes import find_program, plain_environment, tied
from areal.data.rows import Row
from areal.extensions.agents.openai_api import Access, ChatSession
from areal.samples.trajectory import Trajectory
from areal.workflows.named_workflows import with_hooks
from areal.workflows.session import Session

# The time in which a cancelled or killed agent has to end.
END_SECONDS = 5.0
# The end of a program's stderr that an error message quotes.
ERROR_BYTES = 1000
Seconds = Annotated[float, Field(gt=0)]
Range = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=2, max_length=2)]
REWARD_RANGE = [0.0, 1.0]
# Further arguments of an agent's function, passed if it has a parameter of the name.
EXTRAS = ("reward_key", "sandboxes")
_WHERE = "rollout_manager.workflow_options"


class AgentFailed(Exception):
    """An agent did not complete its work. The sample has failed; it does not get a low score."""


def _check_rewards(rewards: Sequence[float], low: float, high: float) -> None:
    with contextlib.suppress(TypeError, ValueError):  # an agent may return a list, an array or a text
        if all(low <= value <= high for value in rewards) and low <= math.fsum(rewards) <= high:
            return
    raise AgentFailed(
        f"the agent gave the rewards {str(rewards):.200}, but each of them and their sum have to be numbers from "
        f"{low:g} to {high:g} ({_WHERE}.reward_range)"
    )


def check(options: Mapping[str, Any]) -> None:
    """Check the workflow's options before anything is started. Raises UserError."""
    function, command = options.get("agent"), options.get("command")
    if bool(function) == bool(command):
        raise UserError(
            f"The workflow agent needs one of {_WHERE}.agent=package.module:function and "
            f"{_WHERE}.command='python my_agent.py'."
        )
    if function:
        _check_function(function, load(function, "The agent"))
    if command and not find_program(_program(command)):
        raise UserError(f"There is no program {_program(command)!r} to start: correct {_WHERE}.command.")
    _check_range(options.get("reward_range"), options.get("agent_reward", False))


def _check_function(name: str, agent: Any) -> None:
    if not inspect.iscoroutinefunction(agent):
        raise UserError(
            f"The agent {name!r} is not an `async def` and would block the rollout manager while it waits: "
            f"make it an `async def`, or start it as a program with {_WHERE}.command."
        )
    signature = inspect.signature(agent)
    with explain(
        TypeError,
        f"The agent {name!r}: {{why}}: it is called with base_url, api_key and row, and with {' and '.join(EXTRAS)} "
        f"if it has parameters of these names.",
    ):
        signature.bind("", "", {}, **{name: "" for name in EXTRAS if name in signature.parameters})


def _check_range(reward_range: Range | None, agent_reward: bool) -> None:
    if reward_range and not agent_reward:
        raise UserError(
            f"{_WHERE}.reward_range is the range of an agent's rewards, but the agent gives none: leave it out, or set "
            f"{_WHERE}.agent_reward=true."
        )
    if reward_range and reward_range[0] >= reward_range[1]:
        raise UserError(f"{_WHERE}.reward_range is {reward_range}, but has to be the lowest reward, then the highest.")


def _program(command: str) -> str:
    with explain(ValueError, f"{_WHERE}.command is {command!r}, which is no command line: {{why}}."):
        return (shlex.split(command) or [""])[0]


async def _call(function: str, session: Session, api: Access, row: Row, reward_key: str) -> float | None:
    call = load(function, "The agent")
    extras = {"reward_key": reward_key, "sandboxes": session.sandboxes}
    options = {name: value for name, value in extras.items() if name in inspect.signature(call).parameters}
    return await call(api.base_url, api.api_key, row.fields, **options)


async def _execute(command: str, pass_env: Sequence[str], api: Access, row: Row, reward_key: str) -> None:
    """Run a program to its end. Kill it, with its group, when this task or process ends. Raises AgentFailed."""
    access = {"OPENAI_BASE_URL": api.base_url, "OPENAI_API_KEY": api.api_key}
    access |= {"ANTHROPIC_BASE_URL": api.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api.api_key}
    # A file, not a pipe: no reader is needed meanwhile, and a program's remaining processes cannot keep it open.
    with tempfile.TemporaryFile() as errors, _readable_once(reward_key) as key:
        process = await asyncio.create_subprocess_exec(
            *tied(*shlex.split(command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[key.fileno()],
            env=plain_environment(pass_env) | access | {"AREAL_REWARD_FD": str(key.fileno())},
            start_new_session=True,
        )
        assert process.stdin is not None  # a pipe, which the program's children inherit empty
        if not process.stdin.is_closing():  # the program may have ended
            process.stdin.write(json.dumps(row.fields).encode() + b"\n")
            process.stdin.close()
        try:
            code = await process.wait()
        finally:
            kill_group(process)
            await process.wait()
        if code:
            raise AgentFailed(f"the agent ended with exit code {code}: {_end_of(errors, ERROR_BYTES)}")


def _readable_once(text: str) -> socket.socket:
    """Return a socket from which only the first reader can read the text. The program's children inherit an empty
    socket. Unlike a pipe or a file, a socket cannot be opened through /proc/PID/fd."""
    sender, receiver = socket.socketpair()
    with sender:
        sender.sendall(text.encode())
    return receiver


def _rewards_of(chat: ChatSession, returned: float | None) -> dict[str | None, float]:
    """Return the rewards of the sample (None) and of its calls. The sample's reward is the reward that the agent has
    `returned` or posted, or else the mean of several agents' rewards."""
    of_agents = [*chat.agent_rewards.values()]
    if returned is None and of_agents and None not in chat.rewards:
        returned = sum(of_agents) / len(of_agents)
    return dict(chat.rewards) if returned is None else chat.rewards | {None: returned}


def _end_of(file: IO[bytes], size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode(errors="replace").strip()


@with_hooks(check=check)
async def agent(
    session: Session,
    row: Row,
    *,
    agent: str | None = None,
    command: str | None = None,
    timeout_seconds: float = 600.0,
    agent_reward: bool = False,
    reward_range: Range | None = None,
    pass_env: Sequence[str] = (),
) -> Trajectory:
    """Return everything that an agent sampled, with the agent's rewards. Without rewards, the row's reward functions
    score the agent's last answer.

    agent: `package.module:function`. command: a program and its arguments. pass_env: environment variables of this
    process for the program, besides the plain ones. timeout_seconds: time limit of one sample. agent_reward: whether
    the agent may give rewards. reward_range: the lowest and the highest value of a reward and of the sum; default: 0
    and 1. Raises AgentFailed, the agent's exception, or the exception of a failed generation.
    """
    async with session.endpoint() as api:
        arguments = api, row, api.reward_key if agent_reward else ""
        called = _call(agent, session, *arguments) if agent else _execute(command or "", pass_env, *arguments)
        work = asyncio.create_task(called)
        try:
            ends: set[asyncio.Future[Any]] = {work, api.chat.failure}
            await asyncio.wait(ends, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if api.chat.failure.done():
                raise api.chat.failure.result()
            if not work.done():
                raise AgentFailed(f"the agent did not end within timeout_seconds ({timeout_seconds:g} s)")
            if work.cancelled():
                raise AgentFailed("the agent cancelled itself")
            reward = work.result()
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=END_SECONDS)
    if not session.calls:
        raise AgentFailed("the agent ended without a single call to the policy")
    rewards = _rewards_of(api.chat, reward)
    if not rewards:
        return session.trajectory(await session.score(api.chat.last_text))
    if not agent_reward:
        raise AgentFailed(
            f"the agent returned the reward {reward}, but the run's reward functions score its sample: have it return "
            f"None, or set {_WHERE}.agent_reward=true"
        )
    for together in ([*rewards.values()], *([value] for value in api.chat.agent_rewards.values())):
        _check_rewards(together, *reward_range or REWARD_RANGE)
    return session.trajectory(rewards.get(None))
