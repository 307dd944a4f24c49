"""The tools of a row, which the chat template shows to the policy.

Data sets write tools as OpenAI's API does, with the function's fields beside the type (Responses, NeMo-Gym), with
`input_schema` (Anthropic), or as JSON of these forms (glaive).
"""

from typing import Any

from areal.data.prompt_forms import literal, without_nulls

_NONE = ("", "[]", "null")
_PARAMETERS = ("parameters", "input_schema")


def read_tools(value: Any, *, of_table: bool = False) -> list[dict[str, Any]] | None:
    """Return tools in any of these forms as chat templates take them; None without tools. Everything in `value` is in
    the result. of_table: as in `read_prompt`. Raises ValueError with the reason if tools cannot be read."""
    if isinstance(value, str):
        text, value = value.strip(), literal(value)
        if value is None and text not in _NONE:
            raise ValueError("it is a text, but no JSON of tools")
    if not value:
        return None
    return [_read_tool(tool, of_table) for tool in (value if isinstance(value, list) else [value])]


def _read_tool(tool: Any, of_table: bool) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = literal(tool)
    if not isinstance(tool, dict):
        raise ValueError("a tool is neither an object nor its JSON")
    if of_table:
        tool = without_nulls(tool)
    if tool.get("type", "function") not in ("function", "custom"):
        raise ValueError(f"a tool has the type {tool['type']!r}, but only functions can be shown")
    function = tool.get("function")
    if function is None:
        function = {key: field for key, field in tool.items() if key != "type"}
    elif tool.keys() - {"type", "function"}:
        raise ValueError(f"a tool has {', '.join(sorted(tool.keys() - {'type', 'function'}))} beside its function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool has no name")
    if schemas := [key for key in _PARAMETERS if function.get(key) is not None]:
        if len(schemas) > 1 or not isinstance(function[schemas[0]], dict):
            raise ValueError(f"the parameters of the tool {function['name']} are not one object")
        named = {key: field for key, field in function.items() if key not in _PARAMETERS}
        function = named | {"parameters": function[schemas[0]]}
    return {"type": "function", "function": function}
