"""Plays environments that an OpenEnv server (0.10) serves: `environment: openenv:URL`.

This module speaks the server's protocol, JSON over a WebSocket, itself: the `openenv` package and vLLM need different
versions of the MCP library and cannot be installed together.
"""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

from areal.base import plugins
from areal.base.errors import UserError, explain
from areal.config.scoring import SandboxConfig
from areal.data.rows import Prompt, Row
from areal.extensions.environments.environments import extended, seed_of

MESSAGE_BYTES = 64 << 20
"""A server that sends a longer message ends its session."""


class ActionRefused(Exception):
    """The server refuses an action. The episode goes on."""


class OpenEnvEnvironment:
    """One episode, in a session of its own with the server.

    action: the field of an action that takes the policy's text, or `package.module:function`, which makes an action, a
    dict, of the text, or None for a text without an action. observation: the field of an observation that the policy
    sees; by default the whole observation as JSON. unparsed_reward: the reward for a text without an action that the
    server takes. timeout_seconds: the most that a reset or a step may take.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str,
        observation: str | None = None,
        unparsed_reward: float = 0.0,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._action = action
        self._own_action = plugins.load(action, "The option action") if ":" in action else None
        self._observation = observation
        self._unparsed_reward = unparsed_reward
        self._timeout = timeout_seconds
        self._http: Any = None

    def rehearse(self, sandbox: SandboxConfig) -> None:
        """Ask the server for the fields of actions. Raises UserError without an answer, or if `action` is no field."""
        try:
            with urllib.request.urlopen(f"{self._url}/schema", timeout=self._timeout) as answer:
                fields = json.load(answer)["action"]["properties"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"No OpenEnv server answers at {self._url} ({error!r}): start it, or correct it.") from None
        if self._own_action is None and self._action not in fields:
            raise UserError(
                f"Actions of the OpenEnv server at {self._url} have no field {self._action!r} but {', '.join(fields)}: "
                f"correct environment_options.action."
            )

    async def reset(self, row: Row) -> Prompt:
        """Return the row's prompt and the first observation. The server gets the seed (the row's field `seed`, or else
        its index) and the content of the row's field `reset`."""
        import aiohttp  # a web library, which few runs need

        self._http = aiohttp.ClientSession()
        async with self._deadline():
            self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=MESSAGE_BYTES)
        begun = await self._ask("reset", {"seed": seed_of(row), **(row.fields.get("reset") or {})})
        return extended(row.prompt, self._shown(begun))

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Act as the text says. Raises RuntimeError for an error there, OSError if the server is lost, TimeoutError."""
        data = self._own_action(action) if self._own_action else {self._action: action}
        try:
            response = await self._ask("step", data)
        except ActionRefused as error:
            return f"That is no action{error}.", self._unparsed_reward, False
        return self._shown(response), float(response["reward"] or 0.0), response["done"]

    async def close(self) -> None:
        """End the session."""
        if self._http is not None:
            await self._http.close()

    async def _ask(self, kind: str, data: dict[str, Any] | None) -> dict[str, Any]:
        if data is None:
            raise ActionRefused
        async with self._deadline():
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive()
        if not isinstance(answer.data, str):
            raise ConnectionError(f"{self._url} has ended the session")
        reply = json.loads(answer.data)
        if reply["type"] != "error":
            return reply["data"]
        if kind == "step" and reply["data"]["code"] == "VALIDATION_ERROR":
            reasons = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in reply["data"]["errors"]]
            raise ActionRefused(f": {'; '.join(reasons)}")
        raise RuntimeError(f"{self._url}: {reply['data']['message']} ({reply['data']['code']})")

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        slow = f"{self._url} took longer than timeout_seconds ({self._timeout:g} s)"
        with explain(TimeoutError, slow, TimeoutError):
            async with asyncio.timeout(self._timeout):
                yield

    def _shown(self, result: dict[str, Any]) -> str:
        observation = result["observation"]
        return str(observation[self._observation]) if self._observation else json.dumps(observation)
