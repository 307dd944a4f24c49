"""An agent of the OpenAI Agents SDK, written as for any served model: only the client differs."""

import re

import httpx
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
shared = httpx.AsyncClient(timeout=300)
PRICES = {"apple": 3, "pear": 4, "plum": 2, "melon": 9, "lemon": 5, "cherry": 1}


@function_tool
def price(fruit: str) -> str:
    """The price of a fruit, for example "apple"."""
    cost = PRICES.get(fruit.lower().strip())
    return f"There is no {fruit}." if cost is None else f"One {fruit} costs {cost}."


async def solve(base_url: str, api_key: str, row: dict) -> float:
    """Return 1 if the last number of the final answer is right, else 0. A mistake of the policy is 0, not a failure."""
    model = OpenAIResponsesModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared))
    agent = Agent(
        "clerk",
        instructions="Look prices up with the tool; do not guess them.",
        tools=[price],
        model=model,
        model_settings=ModelSettings(max_tokens=128),
    )
    try:
        run = await Runner.run(agent, row["prompt"], max_turns=4)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return 0.0
    numbers = re.findall(r"\d+", str(run.final_output))
    return float(numbers[-1:] == [row["answer"]])
