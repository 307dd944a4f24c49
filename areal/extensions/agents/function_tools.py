"""Tools that are functions of Python. The chat template shows the policy the annotations and docstrings.

An async function is awaited. Other functions are called in threads, so that they may block.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from areal.base.errors import ToolError, UserError, explain
from areal.base.plugins import load


class FunctionTools:
    """Functions as tools. `shown`: as chat templates take tools. `timeout_seconds` ends a call, but not its thread."""

    def __init__(self, names: Sequence[str], timeout_seconds: float) -> None:
        """names: `package.module:function` or `path/to/file.py:function`. Raises UserError."""
        self._timeout_seconds = timeout_seconds
        self._functions: dict[str, Callable[..., Any]] = {}
        self.shown: list[dict[str, Any]] = []
        for name in names:
            function = load(name, "The tool")
            shown = schema_of(name, function)
            if shown["function"]["name"] in self._functions:
                raise UserError(f"Two tools are called {shown['function']['name']}: rename the function {name!r}.")
            self._functions[shown["function"]["name"]] = function
            self.shown.append(shown)

    async def call(self, name: str, arguments: str) -> str:
        """Return a tool's result, as text or the JSON of another value, or its error. `arguments`: JSON. Raises
        ToolError for a result that is no JSON."""
        function = self._functions[name]
        try:
            fields = json.loads(arguments)
            if not isinstance(fields, dict):
                return f"Error: the arguments of {name} are no JSON object"
            async with asyncio.timeout(self._timeout_seconds) as limit:
                result = await _result(function, fields)
        except ValidationError as error:
            return f"Error: {'; '.join(map(_sentence, error.errors()))}"
        except Exception as error:  # the user's own function may raise anything, TimeoutError too
            is_late = isinstance(error, TimeoutError) and limit.expired()
            return f"Error: {name} has taken longer than {self._timeout_seconds:g} s" if is_late else f"Error: {error}"
        if isinstance(result, str):
            return result
        what = f"the tool {name} returned a value of type {type(result).__name__}, which is no JSON ({{why}})"
        with explain((TypeError, ValueError), what, ToolError):
            return json.dumps(result, ensure_ascii=False)


def schema_of(name: str, function: Any) -> dict[str, Any]:
    """Return a function as chat templates take a tool: name, docstring and JSON schema of the arguments.
    Raises UserError if an argument has no type or no description."""
    from transformers.utils import get_json_schema

    if not inspect.isroutine(function):
        raise UserError(f"The tool {name!r} is of type {type(function).__name__}: name a function.")
    advice = "give each argument a type, and a line below `Args:` in the docstring"
    with explain(Exception, f"The tool {name!r}: {{why}}: {advice}."):
        shown: dict[str, Any] = get_json_schema(function)
    offered = {key: shown["function"][key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": offered}


async def _result(function: Any, fields: Mapping[str, Any]) -> Any:
    """Call the function with these arguments, converted to the types of its annotations."""
    adapter = TypeAdapter[Any](function)
    call = ArgsKwargs((), dict(fields))
    if inspect.iscoroutinefunction(function):
        return await adapter.validate_python(call)
    return await asyncio.to_thread(adapter.validate_python, call)


def _sentence(mistake: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"
