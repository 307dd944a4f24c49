"""A reward: the mark of a model behind an OpenAI endpoint."""

import os
import re

from openai import APIConnectionError, AsyncOpenAI

QUESTION = """Question: {question}

Answer: {answer}

Give the answer a mark from 0 (useless) to 10 (short, clear and right). Write only the mark."""


class Judge:
    deterministic = False  # a second call may return a different mark

    def __init__(self, address: str, model: str) -> None:
        self.model = model
        self.client = AsyncOpenAI(base_url=address, api_key=os.environ.get("JUDGE_API_KEY", "none"))

    async def score(self, prompt: str, completion: str, row: dict) -> tuple[float, dict[str, float]]:
        """Return the mark as 0 to 1, and the length as a part. Without a mark raises ValueError: the sample fails."""
        question = QUESTION.format(question=row["prompt"], answer=completion)
        messages = [{"role": "user", "content": question}]
        try:
            reply = await self.client.chat.completions.create(
                model=self.model, messages=messages, temperature=0, max_tokens=8
            )
        except APIConnectionError as error:
            raise ConnectionError(f"the judge at {self.client.base_url} does not answer") from error
        text = reply.choices[0].message.content or ""
        if (mark := re.search(r"\b(10|\d)\b", text)) is None:
            raise ValueError(f"the judge wrote no mark, but {text!r}")
        return int(mark[0]) / 10, {"characters": float(len(completion))}
