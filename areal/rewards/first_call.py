"""The first call of a user's own rewards, before a run: a wrong column, or a value that is no score, shows at once."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from areal.base import extensions
from areal.base.errors import UserError
from areal.config import Config
from areal.data.rows import Row, prompt_text
from areal.rewards.pool import RewardPool
from areal.rewards.worker import RewardFailed

# Longer calls are not waited for: a reward may load a model, or ask a model.
SECONDS = 20.0
# Errors of a program, unlike errors of a service that is perhaps down.
OF_CODE = ("KeyError", "TypeError", "AttributeError", "NameError", "IndexError", "ValueError", "ZeroDivisionError")


def check_own_rewards(config: Config, row: Row) -> None:
    """Have the user's own rewards, started by the run, score a row. Raises UserError."""
    built_in = {name for kind, name in extensions.own_entries() if kind == "reward"}
    names = [name for name in config.own_rewards if name in config.reward.functions and name not in built_in]
    if names and not config.rollout_manager.gives_rewards:
        reward = config.served_rewards.model_copy(update={"workers": 1, "timeout_seconds": SECONDS})
        check_calls(RewardPool(names, reward), {name: name in reward.groups for name in names}, row)


def check_calls(pool: Any, names: Mapping[str, bool], row: Row) -> None:
    """Have the rewards of a pool score an empty and a plausible completion of a row. names: the rewards, and whether
    they score groups. Prints a note if one call fails. Raises UserError if both calls fail, by an error of the code or
    by a value that is no score."""
    texts = ["", row.answer or "42"]
    with ThreadPoolExecutor(1) as thread:  # a notebook's thread has an event loop already
        failures = thread.submit(asyncio.run, _failures(pool, names, texts, row)).result()
    for name, reasons in failures.items():
        if reason := reasons[0] or reasons[-1]:
            text = f"the completion {texts[not reasons[0]]!r:.40} of the prompt {prompt_text(row.prompt)!r:.60}"
            sentence = f"reward {name!r} fails for {text} ({reason})"
            if all(reasons) and reason.startswith(OF_CODE):
                raise UserError(f"{sentence}: correct it, or the row's columns.")
            print(f"Note: {sentence}.", file=sys.stderr)


async def _failures(pool: Any, names: Mapping[str, bool], texts: list[str], row: Row) -> dict[str, list[str]]:

    async def failure(name: str, completions: Sequence[str]) -> str:
        try:
            tokens = [0] * len(completions[-1].split())
            await pool.score_all(name, prompt_text(row.prompt), completions, row.fields, tokens)
        except RewardFailed as error:
            return {"not_finite": f"ValueError: {error}", "raised": str(error)}.get(error.kind, "")
        return ""

    failures: dict[str, list[str]] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(SECONDS), pool:
            for name, groups in names.items():
                failures[name] = [await failure(name, call) for call in ([texts] if groups else [texts[:1], texts[1:]])]
    return failures
