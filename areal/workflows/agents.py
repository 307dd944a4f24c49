"""Agents: programs that sample from the policy as from OpenAI's or Anthropic's API. One run of an agent is a sample.

An agent is an async function or a command, given by the user. docs/agents.md describes its inputs and its results.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from areal.config import UserError
from areal.data.rows import Row
from areal.plugins import load
from areal.processes import tied
from areal.trajectory import Trajectory
from areal.workflows.openai_api import Access
from areal.workflows.session import Session

# How long an agent that is cancelled or killed may take to end.
END_SECONDS = 5.0
# The end of a program's output that is searched for a reward, and the end of its stderr that an error message quotes.
OUTPUT_BYTES, ERROR_BYTES = 65536, 1000


class AgentFailed(Exception):
    """An agent did not complete its work. Its sample has failed; it does not get a low score."""


async def agent(
    session: Session, row: Row, *, agent: str | None = None, command: str | None = None, timeout_seconds: float = 600.0
) -> Trajectory:
    """Everything that an agent sampled, with the rewards that the agent reported. If it reported none, the row's reward
    functions score its last answer.

    agent: `package.module:function`. command: a program and its arguments. timeout_seconds: time limit of one sample.
    Raises AgentFailed, the exception that the agent raised, or the exception that was raised while it sampled.
    """
    async with session.endpoint() as api:
        work = asyncio.create_task(_call(agent, api, row) if agent else _execute(command or "", api, row))
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
        chat = api.chat
    if not session.calls:
        raise AgentFailed("the agent ended without a single call to the policy")
    reward = chat.reward if reward is None else reward
    if reward is None and not chat.rewarded:
        reward = await session.score(chat.last_text)
    if reward is not None and not math.isfinite(reward):
        raise AgentFailed(f"the agent reported the reward {reward}, which is not a finite number")
    return session.trajectory(reward)


def check(options: Mapping[str, Any]) -> None:
    """Checks the workflow's options before anything is started. Raises UserError."""
    where = "rollout_manager.workflow_options"
    function, command = options.get("agent"), options.get("command")
    if bool(function) == bool(command):
        raise UserError(
            f"The workflow agent needs one of {where}.agent=package.module:function and "
            f"{where}.command='python my_agent.py'."
        )
    if function and not inspect.iscoroutinefunction(load(function, "The agent")):
        raise UserError(
            f"The agent {function!r} is not an `async def` and would block the rollout manager while it waits: "
            f"make it an `async def`, or start it as a program with {where}.command."
        )
    if command and not shutil.which(_program(command, where)):
        raise UserError(f"There is no program {_program(command, where)!r} to start: correct {where}.command.")


def _program(command: str, where: str) -> str:
    try:
        return (shlex.split(command) or [""])[0]
    except ValueError as error:
        raise UserError(f"{where}.command is {command!r}, which is no command line: {error}.") from None


async def _call(function: str, api: Access, row: Row) -> float | None:
    return await load(function, "The agent")(api.base_url, api.api_key, row.fields)


async def _execute(command: str, api: Access, row: Row) -> float | None:
    """Run a program to its end. Returns the reward in its last line of output, if any. The program is killed with its
    process group when this task ends; it is also killed when this process ends. Raises AgentFailed."""
    access = {"OPENAI_BASE_URL": api.base_url, "OPENAI_API_KEY": api.api_key}
    access |= {"ANTHROPIC_BASE_URL": api.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api.api_key}
    # Files, not pipes: nothing has to read them meanwhile, and processes that a program leaves cannot keep them open.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(row.fields).encode() + b"\n")
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *tied(*shlex.split(command)),
            stdin=given, stdout=output, stderr=errors, env=os.environ | access, start_new_session=True,
        )  # fmt: skip
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code:
            raise AgentFailed(f"the agent ended with exit code {code}: {_end_of(errors, ERROR_BYTES)}")
        return _told_reward(_end_of(output, OUTPUT_BYTES))


def _end_of(file: IO[bytes], size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode(errors="replace").strip()


def _told_reward(output: str) -> float | None:
    """The reward in a last line such as {"reward": 0.5}, if there is one. Raises AgentFailed if it is not a number."""
    try:
        told = json.loads(output.rpartition("\n")[2])
    except ValueError:
        return None
    if not isinstance(told, dict) or "reward" not in told:
        return None
    if not isinstance(told["reward"], int | float):
        raise AgentFailed(f"the agent reported the reward {told['reward']!r}, which is not a number")
    return told["reward"]
