"""The tools of rows, in the forms of published sets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.extensions.agents.offered_tools import read_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Of today."}}}
FUNCTION = {"name": "weather", "description": "Today's.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "written",
    [
        [TOOL],
        TOOL,
        json.dumps([TOOL]),
        str([TOOL]),
        [json.dumps(FUNCTION)],
        [FUNCTION],
        [{"type": "function", **FUNCTION}],
        [{"name": "weather", "description": "Today's.", "input_schema": SCHEMA}],
        [{"type": "custom", "name": "weather", "description": "Today's.", "input_schema": SCHEMA}],
    ],
    ids=[
        "OpenAI, TRL",
        "one",
        "JSON",
        "Python",
        "JSON of each",
        "glaive",
        "Responses, NeMo-Gym",
        "Anthropic",
        "custom",
    ],
)
def test_tools_are_read_in_the_forms_of_published_sets(written):
    assert read_tools(written) == [TOOL]


@pytest.mark.parametrize("written", [None, [], "", " ", "[]", {}])
def test_a_row_may_have_no_tools(written):
    assert read_tools(written) is None


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("calculator", "it is a text, but no JSON of tools"),
        (["calculator"], "neither an object nor its JSON"),
        ([{"type": "web_search"}], "the type 'web_search', but only functions can be shown"),
        ([{"function": {"description": "x"}}], "a tool has no name"),
        ([{"description": "x"}], "a tool has no name"),
        ([{"name": "f", "parameters": ["a"]}], "the parameters of the tool f are not one object"),
        ([{"name": "f", "parameters": {}, "input_schema": {}}], "the parameters of the tool f are not one object"),
        ([{**TOOL, "note": "x"}], "a tool has note beside its function"),
    ],
)
def test_what_is_no_tool_is_refused(written, why):
    with pytest.raises(ValueError, match=why):
        read_tools(written)


def test_a_table_gives_no_tool_the_parameters_of_another_tool():
    read = read_tools(
        [TOOL | {"function": FUNCTION | {"parameters": SCHEMA | {"x": None}, "strict": None}}], of_table=True
    )
    assert read == [TOOL]


texts = st.text(min_size=1, max_size=6)
schemas = st.dictionaries(texts, texts | st.dictionaries(texts, texts, max_size=2), max_size=2)
functions = st.fixed_dictionaries(
    {}, optional={"name": texts, "description": texts, "parameters": schemas, "input_schema": schemas, "note": texts}
)
tools = (
    functions
    | functions.map(lambda function: {"type": "function", "function": function})
    | st.builds(lambda one, two: one | {"function": two}, functions, functions)
    | functions.map(json.dumps)
    | st.builds(
        lambda kind, one: {"type": kind, **one}, st.sampled_from(["function", "custom", "web_search"]), functions
    )
)


def leaves(value) -> list[str]:
    if isinstance(value, str) and value.startswith("{"):
        return leaves(json.loads(value)) if value.endswith("}") else [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [key, *leaves(item)]]
    return [text for item in value for text in leaves(item)] if isinstance(value, list) else [value]


@given(st.lists(tools, max_size=2))
def test_what_is_read_of_tools_has_every_text_of_them_or_they_are_refused(written):
    try:
        read = read_tools(written)
    except ValueError:
        return
    shown = leaves(read or [])
    assert not [text for text in leaves(written) if text not in shown and text not in ("input_schema", "custom")]
