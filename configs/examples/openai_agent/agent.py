"""An agent with OpenAI's client: the agent samples three drafts, and takes the most frequent answer."""

from collections import Counter

import httpx
from openai import AsyncOpenAI

DRAFTS = 3
shared = httpx.AsyncClient(timeout=300)  # starting a client for each sample would take tens of milliseconds


async def solve(base_url: str, api_key: str, row: dict) -> float:
    """Return the reward: half for the vote, half for the share of right drafts."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared)
    messages = [{"role": "user", "content": row["prompt"]}]
    drafts = await client.chat.completions.create(model="policy", messages=messages, n=DRAFTS, max_tokens=64)
    answers = [answer_of(choice.message.content or "") for choice in drafts.choices]
    vote, _ = Counter(answers).most_common(1)[0]
    return (vote == row["answer"]) / 2 + answers.count(row["answer"]) / len(answers) / 2


def answer_of(working: str) -> str:
    """Return the sum in the working: the last carry, then the last digit of each column of 5, from the end."""
    return (working[-2:-1] + working[4::5][::-1]).lstrip("0")
