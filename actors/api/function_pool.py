"""Scores with functions of this process, in place of the worker processes of a reward actor."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from areal.base.errors import explain
from areal.base.text import error_text, place_in
from areal.config.scoring import RewardConfig
from areal.rewards.functions import Result, RewardError, RewardFunction
from areal.rewards.worker import RewardFailed
from areal.samples.table import Tokens


class FunctionPool:
    """Plain functions are called in threads, `config.workers` at once; async functions in the loop of the actor,
    `config.concurrent_calls` at once. A call that misses its deadline fails; a plain function's thread continues.

    functions: by name of the reward; they may be replaced while the pool is used."""

    def __init__(self, functions: Mapping[str, RewardFunction], config: RewardConfig) -> None:
        self._functions = functions
        self._config = config
        self._threads = asyncio.Semaphore(config.workers)
        self._calls = asyncio.Semaphore(config.concurrent_calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    async def score_all(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: Tokens | None = None
    ) -> list[Result]:
        """As RewardPool. Raises RewardFailed."""
        reward = self._functions[name]
        ids = None if tokens is None else [*map(int, tokens)]
        async with self._calls if reward.concurrent else self._threads:
            call = functools.partial(reward.call, prompt, completions, dict(row), ids)
            try:
                async with asyncio.timeout(self._config.timeout_seconds) as deadline:
                    value = await (call() if reward.concurrent else _in_thread(call))
            except RewardError as error:
                raise RewardFailed(str(error), "raised") from None
            except (Exception, SystemExit) as error:  # the user's function may raise anything, a TimeoutError too
                if deadline.expired():
                    raise RewardFailed(f"no score within {self._config.timeout_seconds:g} s", "timeout") from None
                reason = error_text(error) + place_in(traceback.extract_tb(error.__traceback__))
                raise RewardFailed(reason[:500], "raised") from None
        with explain(RewardError, "{why}", functools.partial(RewardFailed, kind="not_finite")):
            return reward.results(value, completions)


def _value(call: Callable[[], Any]) -> Any:
    value = call()
    return asyncio.run(value) if inspect.iscoroutine(value) else value


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a function called in a new thread. The thread does not keep the process from exiting."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            outcome(value)

    def work() -> None:
        try:
            outcome, value = done.set_result, context.run(_value, call)
        except BaseException as error:  # the caller gets it
            outcome, value = done.set_exception, _raisable(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for a late call
            loop.call_soon_threadsafe(settle, outcome, value)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await done


def _raisable(error: BaseException) -> BaseException:
    """A future takes no StopIteration, and SystemExit would end the loop of the actor."""
    return error if isinstance(error, Exception) and not isinstance(error, StopIteration) else RewardError(repr(error))
