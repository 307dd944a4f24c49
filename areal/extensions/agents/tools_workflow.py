"""The workflow `tools`: the policy calls functions of the user, and tools of MCP servers."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from areal.base.errors import UserError
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.extensions.agents import mcp_tools
from areal.extensions.agents.agents import Seconds
from areal.extensions.agents.function_tools import FunctionTools
from areal.extensions.agents.mcp_tools import TIMEOUT_SECONDS, Server
from areal.extensions.agents.tool_calls import OffersTools, use_tools
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import Turns
from areal.workflows.conversation import messages_of
from areal.workflows.named_workflows import with_hooks
from areal.workflows.session import Session

_WHERE = "rollout_manager.workflow_options"


class ToolSet:
    """The tools of several owners in a set. Raises UserError if two tools have the same name."""

    def __init__(self, *owners: OffersTools) -> None:
        self._owners: dict[str, OffersTools] = {}
        self.shown: list[dict[str, Any]] = []
        for owner in owners:
            for tool in owner.shown:
                name = tool["function"]["name"]
                if name in self._owners:
                    raise UserError(f"Both a function and an MCP server have the tool {name}: rename the function.")
                self._owners[name] = owner
                self.shown.append(tool)

    async def call(self, name: str, arguments: str) -> str:
        """Call the tool of its owner. The policy is told if no owner has the tool."""
        owner = self._owners.get(name)
        return await owner.call(name, arguments) if owner else f"Error: there is no tool {name}"


@functools.lru_cache(1)
def _functions(names: Sequence[str], timeout_seconds: float) -> FunctionTools:
    return FunctionTools(names, timeout_seconds)


def _check(options: Mapping[str, Any]) -> None:
    """Raise UserError if there are no tools, a tool is no function, or a server cannot be started."""
    if not (options.get("tools") or options.get("servers")):
        raise UserError(
            f"The workflow tools needs tools: set {_WHERE}.tools=[FILE.py:FUNCTION], or {_WHERE}.servers={{NAME: "
            f"{{command: ..., args: [...]}}}}."
        )
    FunctionTools(options.get("tools", ()), TIMEOUT_SECONDS)
    if servers := options.get("servers"):
        mcp_tools.check(servers)


def _rehearse(options: Mapping[str, Any], sandbox: SandboxConfig) -> None:
    if options.get("servers"):
        mcp_tools.rehearse(options)


@with_hooks(check=_check, rehearse=_rehearse)
async def tools(
    session: Session,
    row: Row,
    *,
    tools: list[str] = [],  # noqa: B006 - never changed
    servers: dict[str, Server] = {},  # noqa: B006
    max_turns: Turns = 8,
    max_output: Turns = 4000,
    timeout_seconds: Seconds = TIMEOUT_SECONDS,
) -> Trajectory:
    """Let the policy call functions, `package.module:function`, and tools of MCP servers, and continue with the results
    (at most `max_output` characters each). The first turn without a call is scored, or else the last of `max_turns`."""
    async with mcp_tools.opened(servers, timeout_seconds) as of_servers:
        offered = ToolSet(_functions(tuple(tools), timeout_seconds), of_servers)
        answer = await use_tools(session, messages_of(row.prompt), offered, max_turns, max_output)
    return session.trajectory(await session.score(answer, session.calls[-1].tokens))
