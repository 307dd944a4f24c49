"""Environments in which a policy acts turn by turn, in the style of Gym, for the workflow `environment`.

    class MyEnvironment:
        async def reset(self, row: Row) -> Prompt: ...
        async def step(self, action: str) -> tuple[str, float, bool]: ...

The name of this environment is `package.module:MyEnvironment`. A sample has its own object, made with
`environment_options`. An async `close` is called at the end, also after an error. Names of other environments:
`gymnasium:ID` (Gymnasium library), `openenv:URL` (OpenEnv server), and the sandboxes `docker:IMAGE`, `podman:IMAGE`,
`bubble`, `http://HOST` and `sandbox:package.module:function`.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.scoring import SandboxConfig
from areal.data.rows import Prompt, Row
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import Turns, turns
from areal.workflows.conversation import begin, user
from areal.workflows.named_workflows import with_hooks
from areal.workflows.session import Session


class Environment(Protocol):
    """The state of one sample."""

    async def reset(self, row: Row) -> Prompt:
        """Begin the sample. Return the policy's first prompt."""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Return the next observation (unused after the last step), the step's reward, and whether it was the last."""


class ColumnAddition:
    """The quickstart's addition (areal.data.addition), a column per turn: the policy has to remember the carry.

    In a turn the policy sees `label, digit, digit, =` and writes `label, digit, digit, carry, sum`. A correct answer
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


def resolve(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a factory of the environment `name`: a name of the table, or `package.module:Class`. Raises UserError."""
    prefix, _, outside_name = name.partition(":")
    if outside_name and (entry := extensions.entry("environment", f"{prefix}:")):
        make: Any = functools.partial(entry.load(), outside_name)
    else:
        make = _load_class(name)
    with explain(TypeError, f"The environment {name!r} does not take these environment_options: {{why}}."):
        inspect.signature(make).bind(**options)
    return functools.partial(make, **options)


def _load_class(name: str) -> Any:
    make = extensions.find("environment", name, "The environment")
    for method in "reset", "step":
        if not inspect.iscoroutinefunction(getattr(getattr(make, "func", make), method, None)):
            raise UserError(f"The environment {name!r} has no async {method} (areal docs environments).")
    return make


def check(options: Mapping[str, Any]) -> None:
    """Check the options of a workflow that has an environment. Raises UserError."""
    resolve(options["environment"], options.get("environment_options") or {})


def rehearse(options: Mapping[str, Any], sandbox: SandboxConfig) -> None:
    """Make the environment of these options, and have it rehearse. Raises UserError if that fails."""
    world = resolve(options["environment"], options.get("environment_options") or {})()
    if hasattr(world, "rehearse"):
        world.rehearse(sandbox)


def examine(options: Mapping[str, Any], rows: Iterator[Row]) -> None:
    """Have the environment of these options look at rows, if it has `examine`. The environment prints notes."""
    world = resolve(options["environment"], options.get("environment_options") or {})()
    if hasattr(world, "examine"):
        world.examine(rows)


@contextlib.asynccontextmanager
async def opened(name: str, options: Mapping[str, Any], session: Session) -> AsyncIterator[Environment]:
    """Open a new environment, and close it at the end of the block. An environment with an attribute `sandboxes` gets
    the owner of sandboxes there."""
    world = resolve(name, options)()
    if hasattr(world, "sandboxes"):
        world.sandboxes = session.sandboxes
    try:
        yield world
    finally:
        if hasattr(world, "close"):
            await world.close()


@with_hooks(check=check, rehearse=rehearse, examine=examine)
async def environment(
    session: Session,
    row: Row,
    *,
    environment: str,
    environment_options: dict[str, Any] | None = None,
    max_turns: Turns = 8,
) -> Trajectory:
    """Let the policy act in an environment until the environment ends, or for `max_turns` turns. The reward is the sum
    of all steps' rewards; a turn has the reward of its step (`reward.credit`). If the turns end first, an async `judge`
    of the environment gives the last turn its reward."""
    async with opened(environment, environment_options or {}, session) as world:
        talk, messages = begin(session.tokenizer, await world.reset(row), row.tools)
        async for action in turns(session, talk, messages, max_turns):
            observation, reward, is_last = await world.step(action)
            session.reward(session.calls[-1], reward)
            if is_last:
                break
            messages.append(user(observation))
        else:
            if session.calls and hasattr(world, "judge"):
                session.reward(session.calls[-1], await world.judge())
    return session.trajectory(0.0)


def seed_of(row: Row) -> int:
    """Return the row's field `seed`, or the row's index without a field `seed`."""
    seed = row.fields.get("seed")
    return row.index if seed is None else seed


def extended(prompt: Prompt, text: str) -> Prompt:
    """Return the prompt with the text at the end, on a new line."""
    if isinstance(prompt, str):
        return f"{prompt}\n{text}" if prompt else text
    last = prompt[-1]["content"]
    content = f"{last}\n{text}" if isinstance(last, str) else [*last, {"type": "text", "text": f"\n{text}"}]
    return [*prompt[:-1], prompt[-1] | {"content": content}]
