"""The policy calls plain functions: the workflow `tools` with its option `tools`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fakes.scripted_policy import Session, byte_tokenizer

from areal.base.errors import ToolError, UserError
from areal.data.rows import Row
from areal.extensions.agents.function_tools import FunctionTools
from areal.workflows.named_workflows import resolve_workflow

ROW = Row(index=0, prompt="Say.", answer=None, reward=None, fields={})
DOCSTRING = '''"""Look up the weather of a city.

    Args:
        city: the name of the city.
        days: how many days ahead.
    """
'''
TOOLS = f"""
import asyncio, threading

def weather(city: str, days: int = 0) -> str:
    {DOCSTRING}
    assert threading.current_thread() is not threading.main_thread()
    return f"Rain in {{city}} in {{days + 1}} days."

async def forecast(city: str, days: int) -> dict:
    {DOCSTRING}
    if city == "slow":
        await asyncio.sleep(60)
    if city == "lost":
        raise TimeoutError("The station does not answer.")
    return {{"sky": "grey"}} if city != "odd" else {{1j}}

def untyped(city, days):
    {DOCSTRING}

def undescribed(city: str) -> str:
    "The weather."

number = 7
"""


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    return tmp_path / "my_tools.py"


def call(tool: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


async def test_the_policy_sees_a_function_calls_it_and_its_turn_without_a_call_is_scored(file):
    session = Session(call("weather", city="Rome", days=1), "Rain.", scores={"Rain.": 0.5}, tokenizer=byte_tokenizer())
    outcome = await resolve_workflow("tools", {"tools": [f"{file}:weather"]})(session, ROW)
    assert session.prompts[0] == "tools weatheruser Say.assistant "
    assert session.prompts[1].endswith("</tool_call>tool Rain in Rome in 2 days.assistant ")
    assert outcome.reward == 0.5


async def test_a_function_has_the_types_of_its_arguments_and_the_policy_is_told_what_is_wrong(file):
    tools = FunctionTools([f"{file}:weather", f"{file}:forecast"], 0.2)
    (weather, _) = tools.shown
    assert weather["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "the name of the city."},
            "days": {"type": "integer", "description": "how many days ahead."},
        },
        "required": ["city"],
    }
    assert await tools.call("weather", '{"city": "Rome", "days": "2"}') == "Rain in Rome in 3 days."
    assert await tools.call("forecast", '{"city": "Rome", "days": 1}') == '{"sky": "grey"}'
    assert "days: Input should be a valid integer" in await tools.call("weather", '{"city": "Rome", "days": "soon"}')
    assert "city: Missing" in await tools.call("weather", "{}")
    assert "no JSON object" in await tools.call("weather", "[1]")
    assert "longer than 0.2 s" in await tools.call("forecast", '{"city": "slow", "days": 1}')
    assert await tools.call("forecast", '{"city": "lost", "days": 1}') == "Error: The station does not answer."
    with pytest.raises(ToolError, match="the tool forecast returned a value of type set, which is no JSON"):
        await tools.call("forecast", '{"city": "odd", "days": 1}')


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "set rollout_manager.workflow_options.tools=[FILE.py:FUNCTION]"),
        (["untyped"], "Argument city is missing a type hint"),
        (
            ["undescribed"],
            "no description for the argument 'city': give each argument a type, and a line below `Args:`",
        ),
        (["number"], "is of type int: name a function"),
        (["weather", "weather"], "Two tools are called weather"),
    ],
)
def test_what_cannot_be_shown_to_the_policy_is_refused_before_the_run(file, names, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        resolve_workflow("tools", {"tools": [f"{file}:{name}" for name in names]})
