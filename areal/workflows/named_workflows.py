"""The workflow of a configuration: by name, with its options and hooks. A workflow is an async function."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.samples.trajectory import Trajectory

Workflow = Callable[..., Awaitable[Trajectory]]
W = TypeVar("W", bound=Workflow)


def with_hooks(**hooks: Callable[..., Any]) -> Callable[[W], W]:
    """Give a workflow hooks. `check(options)` raises UserError for options that do not fit. `rehearse(options,
    sandbox)` tries the work of the samples once before the run, and raises UserError if the work fails.
    `examine(options, rows)` looks at some rows before the run, prints notes and raises UserError. `texts(options)`
    returns the texts that the workflow itself gives to the policy, for any row."""

    def hooked(workflow: W) -> W:
        vars(workflow).update(hooks)
        return workflow

    return hooked


def resolve_workflow(name: str, options: Mapping[str, Any]) -> Workflow:
    """Return the workflow named `name` or `package.module:function`, with the options set. Raises UserError."""
    workflow = extensions.find("workflow", name, "The workflow")
    bound = bound_workflow(name, workflow, options)
    if check := getattr(workflow, "check", None):
        check(bound.keywords)
    return bound


def texts_of(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return the texts that a workflow in the table of extensions gives to the policy itself, for any row."""
    texts = _hook(name, "texts")
    return texts(options) if texts else []


def rehearse(name: str, options: Mapping[str, Any], sandbox: SandboxConfig) -> None:
    """Try the work of a workflow in the table once, for example make an environment or start MCP servers. May take a
    while. Raises UserError."""
    if rehearsal := _hook(name, "rehearse"):
        rehearsal(options, sandbox)


def examine(name: str, options: Mapping[str, Any], rows: Iterator[Row]) -> None:
    """Have a workflow in the table look at some rows and print notes. Raises UserError."""
    if examination := _hook(name, "examine"):
        examination(options, rows)


def _hook(name: str, kind: str) -> Callable[..., Any] | None:
    entry = None if ":" in name else extensions.entry("workflow", name)
    return getattr(entry.load(), kind, None) if entry else None


def bound_workflow(name: str, workflow: Any, options: Mapping[str, Any]) -> functools.partial[Any]:
    """Return the workflow with the options set. name: for messages. Raises UserError."""
    if not _is_async(workflow):
        raise UserError(f"The workflow {name!r} is no async function: write `async def` (areal docs workflows).")
    return functools.partial(workflow, **_checked(name, workflow, options))


def _is_async(workflow: Any) -> bool:
    """Whether the workflow is an async function, or a partial, a decorator or an object with `__call__` around one."""
    while workflow is not None and not inspect.iscoroutinefunction(workflow):
        if callable(workflow) and inspect.iscoroutinefunction(type(workflow).__call__):
            return True
        workflow = getattr(workflow, "func", None) or getattr(workflow, "__wrapped__", None)
    return workflow is not None


def _checked(name: str, workflow: Workflow, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options. The options of a workflow in the table have the types of the parameters. Raises UserError."""
    where = f"rollout_manager.workflow_options: workflow {name!r}"
    signature = inspect.signature(workflow)
    option_names = ", ".join([*signature.parameters][2:]) or "no options"
    with explain(TypeError, f"{where}: {{why}}: besides a session and a row it takes {option_names}."):
        signature.bind(None, None, **options)
    if ":" in name or not (entry := extensions.entry("workflow", name)) or entry.load() is not workflow:
        return options
    hints = get_type_hints(workflow, include_extras=True)
    checked = {}
    for option, value in options.items():
        try:
            checked[option] = TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(f"{where}: {option} is {value!r:.80}: {error.errors()[0]['msg']}.") from None
    return checked
