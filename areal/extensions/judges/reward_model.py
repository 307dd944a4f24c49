"""The reward `reward_model`: a sequence classifier behind an address of vLLM scores a prompt with its completion.

Start it with `vllm serve MODEL --runner pooling`. An address that does not answer is a failed sample, never a score.
"""

from collections.abc import Mapping
from typing import Any

from areal.base.errors import explain
from areal.data.rows import chat_of
from areal.extensions.judges.judge import client_of
from areal.rewards.functions import Result, RewardError


class RewardModel:
    """url, model: the address (such as http://host:8000), and the model's name there. chat: the prompt and the
    completion are a chat in the template of the reward model; else one text. output: the number of the scoring output,
    if the model has several. activation: score after the model's sigmoid or softmax, from 0 to 1; by default the raw
    output. retries: of a request, on top of `reward.retries`. api_key: by default OPENAI_API_KEY."""

    deterministic = False  # the rest of a batch changes the last digits

    def __init__(
        self,
        url: str,
        model: str,
        chat: bool = True,
        output: int = 0,
        activation: bool = False,
        retries: int = 3,
        api_key: str | None = None,
    ) -> None:
        self._address = f"{url.rstrip('/').removesuffix('/v1')}/classify"
        self._chat, self._output = chat, output
        self._request = {"model": model, "use_activation": activation}
        self._client = client_of(url, api_key, retries)

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Result:
        """Return the model's output. The part `tokens` is the number of tokens read. Raises RewardError."""
        from openai import OpenAIError

        read = {"messages": chat_of(prompt, completion, row)} if self._chat else {"input": prompt + completion}
        body = self._request | read
        with explain(OpenAIError, f"the reward model at {self._address} did not answer: {{why}}", RewardError):
            answer = await self._client.post(self._address, cast_to=dict[str, Any], body=body)
        with explain(
            (KeyError, IndexError, TypeError),
            f"{self._address} gives no output {self._output} of a classifier: {answer}",
            RewardError,
        ):
            score, tokens = answer["data"][0]["probs"][self._output], answer["usage"]["total_tokens"]
        return Result(float(score), {"tokens": float(tokens)})
