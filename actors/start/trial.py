"""`python -m areal agent try`: one episode of a workflow on one row, with a real engine and without a run.

The workflow gets the session that it has in a run. Its services are one engine and one reward worker.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console

from actors.runtime.logs import configure_logging
from actors.sampling.flows import Job
from actors.sampling.jobs import Call, SampleFailed, ScoreJob, ScoringRules, score_with_retries
from actors.sampling.policy_judges import PolicyJudges
from actors.sampling.scores import Rewards
from actors.sampling.services import Services
from actors.sampling.sessions import SampleSession, place_of
from actors.watching.episode import CompletionScore, Episode, Turn, show
from areal.base.command_line import output
from areal.base.errors import UserError
from areal.base.processes import ROOT
from areal.base.text import LIBRARIES, shown
from areal.config import Config, overridden, validated
from areal.config.reading import merged, read_values
from areal.data.rows import Row
from areal.data.sources import open_source, read_row
from areal.extensions.agents.agents import AgentFailed
from areal.extensions.agents.openai_endpoint import OpenAIEndpoint
from areal.extensions.agents.parsers import Json, Parsed, Parsers
from areal.generation.generation_engine import EngineError, GenerationEngine
from areal.models import resolve_model
from areal.rewards import functions as rewards
from areal.rewards.pool import RewardPool
from areal.rewards.result import Result
from areal.samples.pictures import find
from areal.samples.table import Generation
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import resolve_workflow
from areal.workflows.conversation import check_shown, user

# Without --config. A run has to set all but the workflow by itself.
DEFAULTS = {
    "steps": 1,
    "batch_size": 8,
    "group_size": 8,
    "sampling": {"max_new_tokens": 1024},
    "reward": {"functions": "exact_match"},
}
_OVERRIDE = re.compile(r"(?:[\w.]+|reward\.[\w.:/-]+)=")
NOT_THE_USERS = (*LIBRARIES, str(ROOT / "areal"), str(ROOT / "actors"))
_FUNCTION = re.compile(r"(\S+\.py|[\w.]+):[A-Za-z_]\w*")


def try_agent(options: Namespace) -> int:
    """`areal agent try`: do one episode, and print it. Returns the exit status: 0, 1 if the sample has failed, 130 or
    143 after a signal."""
    configure_logging("trial")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rows, index = options.row, options.index
    agent, config = _configured(options.overrides, options.model, options.config, rows)
    if index < 0:
        raise UserError(f"--index is {index}, but rows are counted from 0.")
    row = read_row(rows, config.data, index) if rows else open_source(config.data, config.seed).row(index)
    row = dataclasses.replace(row, index=index)
    title = f"{agent or config.rollout_manager.workflow} on row {index} of {rows or config.data.named}"
    try:
        with Console(stderr=True).status("starting the engine, then one episode"):
            return asyncio.run(_try(config, row, title, output(120)))
    except EngineError as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def _configured(
    words: Sequence[str], model: str | None, file: Path | None, rows: Path | None
) -> tuple[str | None, Config]:
    """The agent, and the configuration with it."""
    agents = [word for word in words if not _OVERRIDE.match(word)]
    if len(agents) > 1:
        raise UserError(f"{agents[0]!r} and {agents[1]!r} are two agents: quote a command with arguments.")
    values = overridden(DEFAULTS if file is None else read_values(file), [w for w in words if _OVERRIDE.match(w)])
    overrides: dict[str, Any] = {} if model is None else {"model": model}
    if agents:
        kind, unused = ("agent", "command") if _FUNCTION.fullmatch(agents[0]) else ("command", "agent")
        overrides["rollout_manager"] = {"workflow": "agent", "workflow_options": {kind: agents[0], unused: None}}
    if rows is not None and not {"source", "sources"} & (values.get("data") or {}).keys():
        overrides["data"] = {"source": str(rows)}
    elif rows is None and file is None and "data" not in values:
        raise UserError("There is no row to try: give --row FILE, or --config FILE.yaml with data.")
    config: Config = validated(merged(values, overrides), file)
    config = rewards.with_groups(config).model_copy(update={"model": str(resolve_model(config))})
    return (agents[0] if agents else None), config


async def _try(config: Config, row: Row, title: str, console: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Trial(config, row) as trial:
        episode, failure = await trial.play(title)
    show(episode, trial.decode, config.rollout_manager.tool_call_parser, console)
    if failure is not None:
        print(f"The sample has failed: {shown(failure)}", file=sys.stderr)
    return 0 if failure is None else 1


class _Recorded(Parsers):
    """Parsers that keep what they have read: the tokens, what they say, and the tools that were offered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns: list[tuple[Generation, Parsed, list[Json] | None]] = []

    def parse(self, sampled: Generation, tools: list[Json] | None, *args: Any, **kwargs: Any) -> Parsed:
        read = super().parse(sampled, tools, *args, **kwargs)
        self.turns.append((sampled, read, tools))
        return read


class _Clock:
    """What takes time, in seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: Counter[str] = Counter()
        self._since: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time of the block, once if there are several at the same time."""
        if not self._running[part]:
            self._since[part] = time.perf_counter()
        self._running[part] += 1
        try:
            yield
        finally:
            self._running[part] -= 1
            if not self._running[part]:
                took = time.perf_counter() - self._since[part]
                self.seconds[part] = self.seconds.get(part, 0.0) + took


class OneMachine:
    """Does the jobs of a trial, with one engine and one worker for the rewards."""

    def __init__(self, engine: GenerationEngine, pool: RewardPool, config: Config, clock: _Clock) -> None:
        self._engine = engine
        self._pool = pool
        self._retries = config.reward.retries
        self._look = functools.cache(lambda content: find("sight")(config.model).look(content))
        self._clock = clock
        self._numbers = itertools.count()

    async def run(self, job: Job) -> Any:
        """Raises SampleFailed."""
        match job:
            case Call():
                return await self._sample(job)
            case ScoreJob():
                return await self._score(job)
        raise SampleFailed("scorer", f"a trial has no scorers, and the workflow asks {job.serves!r}")

    async def _sample(self, call: Call) -> Generation:
        number = f"{next(self._numbers)}"
        try:
            pictures = [self._look(content) for content in call.files.values()]
            parts = self._engine.generate(number, call.tokens.tolist(), call.sampling, pictures=pictures)
            with self._clock.timed("sampling"):
                async with contextlib.aclosing(parts):
                    async for part in parts:
                        completion = call.add(part, part.finish)
                        if completion is not None:
                            return completion
        except ValueError as error:
            return call.refused(error)
        raise EngineError("the engine ended a sequence without its last token")

    async def _score(self, job: ScoreJob) -> list[Result]:
        request = job.function, job.prompt, job.completions, job.row, job.tokens
        return await score_with_retries(job.function, self._retries, lambda: self._pool.score_all(*request))


class NotedRewards(Rewards):
    """The rewards of a trial. `scores`: all that they have said."""

    def __init__(self, clock: _Clock, *parts: Any) -> None:
        super().__init__(*parts)
        self.scores: list[CompletionScore] = []
        self._clock = clock

    async def score(self, name: str, prompt: str, completions: Sequence[str], *job: Any) -> list[Result]:
        with self._clock.timed("scoring"):
            results = await super().score(name, prompt, completions, *job)
        self.scores += [CompletionScore(name, *pair) for pair in zip(completions, results, strict=True)]
        return results


class Trial:
    """An episode of the workflow on one row. It has the services that a sample of a run has, with one engine and one
    worker for the rewards. Use it as an async context."""

    def __init__(self, config: Config, row: Row) -> None:
        """Raises UserError."""
        self._config = config
        self._row = row
        self._notes: list[str] = []
        self._clock = _Clock()
        self._workflow = resolve_workflow(config.rollout_manager.workflow, config.rollout_manager.workflow_options)

    async def __aenter__(self) -> Self:
        """Raises UserError or EngineError."""
        config, names = self._config, tuple(self._row.reward or self._config.reward.functions)
        one_worker = config.served_rewards.model_copy(update={"workers": 1})
        for name in names:
            rewards.check(name, one_worker.options.get(name, {}))
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.data)
        async with contextlib.AsyncExitStack() as used:
            with self._clock.timed("start"):
                served = tuple(name for name in names if name not in config.policy_judges)
                pool = await used.enter_async_context(RewardPool(served, one_worker))
                engine = await GenerationEngine.start(Path(config.model), config.generator, version=0, seed=config.seed)
            used.push_async_callback(engine.close)
            machine = OneMachine(engine, pool, config, self._clock)
            rules = ScoringRules(config.reward, set(), lambda cause, reason: None)
            judges = PolicyJudges(config, machine, tokenizer)
            self._rewards = NotedRewards(self._clock, machine, rules, {}, judges)
            self._services = Services(config, tokenizer, machine, self._rewards)
            used.push_async_callback(self._services.close)
            settings, kwargs, tools = config.rollout_manager, config.data.chat_template_kwargs, self._services.tools
            parsers = (settings.tool_call_parser, settings.reasoning_parser)
            tools["parsers"] = self._parsers = _Recorded(tokenizer, *parsers, kwargs)
            tools["endpoint"] = OpenAIEndpoint(config.model, settings.endpoint_host, self._note_refusal)
            await self._services.load_parsers()
            self._used = used.pop_all()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._used.aclose()

    async def play(self, title: str) -> tuple[Episode, str | None]:
        """The episode, and why its sample has failed, if it has. Raises UserError."""
        session = SampleSession(self._services, self._row, self._config.sampling)
        sample, failure = None, None
        with self._clock.timed("episode"):
            try:
                sample = await self._workflow(session, self._row)
                if penalty := self._services.overlong(sample):
                    self._notes.append(f"reward.overlong_tokens has lowered the reward by {penalty:g}.")
                sample = sample.lowered(penalty)
            except UserError:
                raise
            except (SampleFailed, AgentFailed) as error:
                failure = str(error)
            except Exception as error:  # the user's code may raise anything
                failure = f"{type(error).__name__}: {error}{place_of(error, NOT_THE_USERS)}"
            finally:
                session.close()
        return self._episode(title, session, sample), failure

    def _episode(self, title: str, session: SampleSession, trajectory: Trajectory | None) -> Episode:
        forest, turns = session.forest, []
        for number in forest.places():
            sampled = forest.calls[number]
            read, tools = next(
                ((read, tools) for call, read, tools in self._parsers.turns if call is sampled), (None, None)
            )
            turns.append(Turn(number + 1, sampled, read, bool(tools), forest.rewards.get(number)))
        sample = forest.trajectory(0.0, "sample", 1.0) if turns else None
        if trajectory is not None and sample is not None and len(trajectory) == len(sample):
            sample = trajectory
        reward, warnings = trajectory.reward if trajectory else None, self._warnings(session, trajectory)
        return Episode(title, sample, turns, reward, self._rewards.scores, self._clock.seconds, warnings)

    def _warnings(self, session: SampleSession, trajectory: Trajectory | None) -> list[str]:
        trained = sum(len(call.tokens) for call in session.calls)
        notes = list(self._notes)
        if long := self._services.too_long(self._row):
            notes.append(f"A run would leave this row out: {long}.")
        if self._parsers.turns and not self._services.tokenizer.chat_template:
            notes.append("The model has no chat template, so messages are joined as they are: set data.chat_template.")
        if tools := next((tools for _, _, tools in self._parsers.turns if tools), None):
            try:
                check_shown(self._services.tokenizer, [user("Hello")], tools)
            except ValueError as error:
                notes.append(f"Tools were offered, but {error}.")
        if not session.room:
            notes.append("All of sampling.max_new_tokens is used: further calls get empty answers.")
        if session.tokens_sampled > trained:
            surplus = session.tokens_sampled - trained
            notes.append(f"{surplus} more tokens were sampled: after a stop text, or for calls that the agent gave up.")
        if trajectory is not None and (missing := trained - int(trajectory.sampled.sum())):
            notes.append(f"The workflow's own trajectory leaves out {missing} tokens that were sampled.")
        return notes

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, special ones included."""
        text: str = self._services.tokenizer.decode(tokens)
        return text

    def _note_refusal(self, request: str) -> None:
        self._notes.append(f"The endpoint refused a request: {request}")
