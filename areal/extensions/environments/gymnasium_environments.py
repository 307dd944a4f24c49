"""Runs environments of the Gymnasium library in the workflow `environment`: `environment: gymnasium:ID`."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal.base import plugins
from areal.base.errors import UserError
from areal.config.scoring import SandboxConfig
from areal.data.rows import Prompt, Row
from areal.extensions.environments.environments import extended, seed_of

_INTEGER = re.compile(r"(?<!\d)-?\d+")


class GymnasiumEnvironment:
    """One episode, in a thread of its own: steps may block, and some environments are bound to one thread.

    action: `package.module:function`, which makes an action of the policy's text, or None for a text without an action.
    By default the action is the text if the environment takes texts, and the last number in the text if the environment
    takes numbers. unparsed_reward: the reward for a text without a valid action; the environment does not see the text.
    timeout_seconds: the most that a reset or a step may take. options: arguments of `gymnasium.make`.
    """

    def __init__(
        self,
        id: str,
        *,
        action: str | None = None,
        unparsed_reward: float = 0.0,
        timeout_seconds: float = 60.0,
        **options: Any,
    ) -> None:
        self._id = id
        self._action: Callable[[str], Any] | None = plugins.load(action, "The option action") if action else None
        self._unparsed_reward = unparsed_reward
        self._timeout = timeout_seconds
        self._options = options
        self._world: Any = None
        self._thread = ThreadPoolExecutor(1, f"gymnasium:{id}")

    def rehearse(self, sandbox: SandboxConfig) -> None:
        """Make the environment, once. Raises UserError if that fails, or if the environment needs an `action`."""
        named = f"The environment 'gymnasium:{self._id}'"
        try:
            world = _make(self._id, self._options)
        except ImportError as error:
            raise UserError(
                f"{named} is not installed ({error}): pip install 'gymnasium==1.4.0' or its package."
            ) from None
        except Exception as error:  # the environment's own code may raise anything
            raise UserError(f"{named} cannot be made with these environment_options: {error}.") from error
        space = world.action_space
        world.close()
        if not self._action and not _is_text(space) and not _is_number(space):
            raise UserError(
                f"{named} takes neither texts nor numbers but {space}: set "
                f"environment_options.action=package.module:function, which makes an action of the policy's text."
            )

    async def reset(self, row: Row) -> Prompt:
        """Return the row's prompt and the first observation. The row's field `seed`, or else its index, is the seed."""
        return extended(row.prompt, await self._run(self._begin, seed_of(row)))

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Act as the text says. Raises TimeoutError, and the environment's own errors."""
        return await self._run(self._act, action)

    async def close(self) -> None:
        """Close the environment, without waiting for a step that still runs."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"gymnasium:{self._id} took longer than timeout_seconds ({self._timeout:g} s)") from None

    def _begin(self, seed: int) -> str:
        self._world = _make(self._id, self._options)
        observation, _ = self._world.reset(seed=seed)
        return self._shown(observation)

    def _act(self, text: str) -> tuple[str, float, bool]:
        space = self._world.action_space
        action = self._action(text) if self._action else _parsed(text, space)
        if action is None or not space.contains(action):
            return f"That is no action. Actions are: {space}.", self._unparsed_reward, False
        observation, reward, terminated, truncated, _ = self._world.step(action)
        return self._shown(observation), float(reward), bool(terminated or truncated)

    def _end(self) -> None:
        if self._world is not None:
            with contextlib.suppress(Exception):  # the episode is over, whatever its environment raises now
                self._world.close()

    def _shown(self, observation: Any) -> str:
        return self._world.render() if self._world.render_mode == "ansi" else str(observation)


def _make(id: str, options: dict[str, Any]) -> Any:
    import gymnasium  # optional

    return gymnasium.make(id, **options)


def _parsed(text: str, space: Any) -> Any:
    if _is_text(space):
        return text
    numbers = _INTEGER.findall(text)
    return int(numbers[-1]) if numbers else None


def _is_text(space: Any) -> bool:
    from gymnasium.spaces import Text

    return isinstance(space, Text)


def _is_number(space: Any) -> bool:
    from gymnasium.spaces import Discrete

    return isinstance(space, Discrete)
