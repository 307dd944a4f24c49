"""Rewards written for verl, recognised by the names of parameters and called in the same way as in verl:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...

`ground_truth` comes from the row's `reward_model`, or else is the row's answer; `data_source` and `extra_info` are
fields of the row. The result is a number, or a dict with `score`. Further numbers in the dict are scores of parts.
"""

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from areal.rewards.functions import RewardError
from areal.rewards.lookup import RewardForm

NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


class VerlForm(RewardForm):
    @staticmethod
    def keywords(parameters: Mapping[str, Any]) -> set[str] | None:
        return {*NAMES} & {*parameters} if {"solution_str", "ground_truth"} <= parameters.keys() else None

    @staticmethod
    def adapted(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
        return _adapted(function, parameters)


def _adapted(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    """Return a function of prompt, completion and row that calls a reward for verl with these `parameters`."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def arguments(completion: str, row: Mapping[str, Any]) -> dict[str, Any]:
        settings = row.get("reward_model")
        truth = settings.get("ground_truth") if isinstance(settings, Mapping) else row.get("answer")
        if truth is None:
            raise RewardError("the row has neither a reward_model with a ground_truth nor an answer")
        values = (row.get("data_source"), completion, truth, row.get("extra_info") or {})
        return {name: value for name, value in zip(NAMES, values, strict=True) if takes_all or name in parameters}

    def call(prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
        return _scores(function(**arguments(completion, row)))

    async def await_call(prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
        return _scores(await function(**arguments(completion, row)))

    return await_call if inspect.iscoroutinefunction(function) else call


def _scores(result: Any) -> Any:
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise RewardError(f"the reward returned a dict without a 'score', only {', '.join(map(str, result))}")
    parts = {name: value for name, value in result.items() if name != "score" and isinstance(value, numbers.Real)}
    return result["score"], parts
