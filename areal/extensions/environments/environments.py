"""Environments in which a policy acts turn by turn, in the style of Gym. Used by the workflow `environment`.

    class MyEnvironment:
        async def reset(self, row: Row) -> Prompt: ...
        async def step(self, action: str) -> tuple[str, float, bool]: ...

The name of this environment is `package.module:MyEnvironment`. Each object of the class is made with
`environment_options` and serves one sample. If it has an async `close`, that is called at the end, also after an error.
`gymnasium:ID` names an environment of the Gymnasium library, `openenv:URL` one that an OpenEnv server serves,
`docker:IMAGE`, `podman:IMAGE`, `bubble`, `http://HOST` and `sandbox:package.module:function` a sandbox.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from areal.base import plugins
from areal.base.errors import UserError, explain
from areal.data.rows import Prompt, Row
from areal.extensions.environments.gymnasium_environments import GymnasiumEnvironment
from areal.extensions.environments.openenv_environments import OpenEnvEnvironment
from areal.extensions.sandboxes.sandbox_environments import SandboxEnvironment
from areal.extensions.sandboxes.sandbox_owner import CONTAINERS, Sandboxes


class Environment(Protocol):
    """The state of one sample."""

    async def reset(self, row: Row) -> Prompt:
        """Begin the sample. Returns what the policy sees first."""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """What the policy sees next (unused after the last step), the step's reward, and whether it was the last."""


class ColumnAddition:
    """The quickstart's addition (areal.data.addition), one column per turn: the policy has to remember the carry.

    For each column it sees `label, digit, digit, =` and writes `label, digit, digit, carry, sum`. A correct answer
    gives the reward 1 / columns and the next column; a wrong answer ends the sample.
    """

    async def reset(self, row: Row) -> str:
        prompt = row.fields["prompt"]
        self._columns = [prompt[start : start + 3] for start in range(0, len(prompt) - 1, 3)]
        self._right = 0
        self._carry = 0
        return f"{self._columns[0]}="

    async def step(self, action: str) -> tuple[str, float, bool]:
        column = self._columns[self._right]
        total = int(column[1]) + int(column[2]) + self._carry
        if action != f"{column}{total:02d}":
            return "", 0.0, True
        self._right += 1
        self._carry = total // 10
        is_last = self._right == len(self._columns)
        return "" if is_last else f"{self._columns[self._right]}=", 1 / len(self._columns), is_last


BUILT_IN: dict[str, Callable[..., Environment]] = {"column_addition": ColumnAddition}


# PREFIX:NAME makes an environment of another program or library, which it calls NAME. Those of NAMELESS need no name.
NAMELESS = (*CONTAINERS, "bubble")
OUTSIDE: dict[str, Callable[..., SandboxEnvironment | GymnasiumEnvironment | OpenEnvEnvironment]] = {
    "gymnasium": GymnasiumEnvironment,
    "openenv": OpenEnvEnvironment,
    **{kind: functools.partial(SandboxEnvironment, kind) for kind in (*NAMELESS, "http", "https", "sandbox")},
}


def resolve(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """A factory of the environment `name`: built in, from outside, or `package.module:Class`. Raises UserError."""
    prefix, _, outside_name = name.partition(":")
    if name not in (*BUILT_IN, *NAMELESS) and not outside_name:
        raise UserError(
            f"Unknown environment {name!r} in rollout_manager.workflow_options: known are {', '.join(BUILT_IN)} and "
            f"{', '.join(f'{prefix}:NAME' for prefix in OUTSIDE)}, or write package.module:Class."
        )
    make: Any = functools.partial(OUTSIDE[prefix], outside_name) if prefix in OUTSIDE else _load_class(name)
    with explain(TypeError, f"The environment {name!r} does not take these environment_options: {{why}}."):
        inspect.signature(make).bind(**options)
    return functools.partial(make, **options)


def _load_class(name: str) -> Any:
    make = BUILT_IN.get(name) or plugins.load(name, "The environment")
    for method in "reset", "step":
        if not inspect.iscoroutinefunction(getattr(make, method, None)):
            raise UserError(f"The environment {name!r} has no async {method}: docs/workflows.md has what it needs.")
    return make


def rehearse(name: str, options: Mapping[str, Any]) -> None:
    """Tries whether an environment from outside can be made. Raises UserError."""
    world = resolve(name, options)()
    if isinstance(world, SandboxEnvironment | GymnasiumEnvironment | OpenEnvEnvironment):
        world.rehearse()


@contextlib.asynccontextmanager
async def opened(name: str, options: Mapping[str, Any], sandboxes: Sandboxes) -> AsyncIterator[Environment]:
    """A new environment, closed at the end of the block. sandboxes: the owner of its sandbox, if it has one."""
    world = resolve(name, options)()
    if isinstance(world, SandboxEnvironment):
        world.sandboxes = sandboxes
    try:
        yield world
    finally:
        if hasattr(world, "close"):
            await world.close()
