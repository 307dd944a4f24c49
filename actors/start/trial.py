"""`areal agent try`: an episode of a workflow on a single row, with a real engine and without a run.

The workflow gets the same session as in a run. The services of the session are an engine and a reward worker.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.runtime.logs import configure_logging
from actors.sampling.flows import Job
from actors.sampling.jobs import Call, SampleFailed, ScoreJob, ScoringRules, score_with_retries
from actors.sampling.own_code import place_of
from actors.sampling.services import Rewards, Services, judges_of
from actors.sampling.sessions import SampleSession
from actors.watching.episode import CompletionScore, Episode, Turn, show
from areal.base.command_line import output
from areal.base.errors import UserError, explain
from areal.base.processes import ROOT
from areal.base.text import LIBRARIES, shown
from areal.config import Config, overridden, validated
from areal.config.reading import merged, read_values
from areal.data.rows import Row
from areal.data.sources import open_source, read_row
from areal.extensions.agents.agents import AgentFailed
from areal.extensions.agents.openai_endpoint import OpenAIEndpoint
from areal.extensions.agents.parsers import Json, Parsed, Parsers
from areal.generation.engine_process import EngineError
from areal.generation.generation_engine import GenerationEngine
from areal.models import resolve_model
from areal.rewards import lookup as rewards
from areal.rewards.functions import Result
from areal.rewards.pool import RewardPool
from areal.samples.pictures import find
from areal.samples.table import Generation
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import Trajectory
from areal.workflows.chat_templates import check_shown
from areal.workflows.conversation import user
from areal.workflows.named_workflows import resolve_workflow

# Without --config. A run has to set all of this but the workflow.
DEFAULTS: dict[str, Any] = {"steps": 1, "batch_size": 8, "group_size": 8, "sampling": {"max_new_tokens": 1024}}
DEFAULTS["reward"] = {"functions": "exact_match"}
_OVERRIDE = re.compile(r"(?:[\w.]+|reward\.[\w.:/-]+)=")
_FUNCTION = re.compile(r"(\S+\.py|[\w.]+):[A-Za-z_]\w*")
NOT_THE_USERS = (*LIBRARIES, str(ROOT / "areal"), str(ROOT / "actors"))


def try_agent(options: Namespace) -> int:
    """`areal agent try`: do an episode, and print it. Returns the exit status: 0, 1 if the sample has failed, 130 or
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
        with explain(EngineError, "{why}"), Console(stderr=True).status("starting the engine, then one episode"):
            return asyncio.run(_try(config, row, title))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def _configured(
    words: Sequence[str], model: str | None, file: Path | None, rows: Path | None
) -> tuple[str | None, Config]:
    """The agent, and the configuration with the agent."""
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


async def _try(config: Config, row: Row, title: str) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    workflow = resolve_workflow(config.rollout_manager.workflow, config.rollout_manager.workflow_options)
    async with contextlib.AsyncExitStack() as used:
        trial = await Trial.start(config, row, used)
        sample, failure = await trial.play(workflow)
        episode = trial.episode(title, sample)
    show(episode, trial.services.tokenizer.decode, trial.parser, output(120))
    if failure is not None:
        print(f"The sample has failed: {shown(failure)}", file=sys.stderr)
    return 0 if failure is None else 1


class _Recorded(Parsers):
    """Parsers that record the tokens, the parsed text, and the offered tools of every read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns: list[tuple[Generation, Parsed, list[Json] | None]] = []

    def parse(self, sampled: Generation, tools: list[Json] | None, *args: Any, **kwargs: Any) -> Parsed:
        read = super().parse(sampled, tools, *args, **kwargs)
        self.turns.append((sampled, read, tools))
        return read


class _Noted(Rewards):
    """Rewards that record their scores."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.scores: list[CompletionScore] = []

    async def score(self, name: str, prompt: str, completions: Sequence[str], *job: Any) -> list[Result]:
        results = await super().score(name, prompt, completions, *job)
        self.scores += [CompletionScore(name, *pair) for pair in zip(completions, results, strict=True)]
        return results


class _OneMachine:
    """Does the jobs of a trial, with an engine and a worker for the rewards."""

    def __init__(self, engine: GenerationEngine, pool: RewardPool, config: Config) -> None:
        self._engine, self._pool, self._config = engine, pool, config
        self._numbers = itertools.count()

    async def run(self, job: Job) -> Any:
        """Raises SampleFailed."""
        match job:
            case Call():
                return await self._sample(job)
            case ScoreJob():
                request = job.function, job.prompt, job.completions, job.row, job.tokens
                retries = self._config.reward.retries
                return await score_with_retries(job.function, retries, lambda: self._pool.score_all(*request))
        raise SampleFailed("scorer", f"a trial has no scorers, and the workflow asks {job.serves!r}")

    async def _sample(self, call: Call) -> Generation:
        try:
            pictures = [find("sight")(self._config.model).look(content) for content in call.files.values()]
            number = f"{next(self._numbers)}"
            parts = self._engine.generate(number, call.tokens.tolist(), call.sampling, pictures=pictures)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    if completion := call.add(part, part.finish):
                        return completion
        except ValueError as error:
            return call.refused(error)
        raise EngineError("the engine ended a sequence without its last token")


class Trial:
    """The session of a sample with the services of a run: an engine, and a worker for the rewards."""

    def __init__(self, row: Row, services: Services, rewards: _Noted) -> None:
        config, tools = services.config, services.tools
        names = config.rollout_manager.tool_call_parser, config.rollout_manager.reasoning_parser
        self.services, self._row, self._rewards = services, row, rewards
        self._parsers = _Recorded(services.tokenizer, *names, config.data.chat_template_kwargs)
        self._refused: list[str] = []
        self._unread = ""  # the reason why no parser reads the calls of tools
        tools["parsers"] = self._parsers
        tools["endpoint"] = OpenAIEndpoint(config.model, config.rollout_manager.endpoint_host, self._refused.append)
        self._session = SampleSession(services, row, config.sampling)

    @classmethod
    async def start(cls, config: Config, row: Row, used: contextlib.AsyncExitStack) -> "Trial":
        """Start the engine and the worker; `used` closes both. Raises UserError or EngineError."""
        names = tuple(row.reward or config.reward.functions)
        one_worker = config.served_rewards.model_copy(update={"workers": 1})
        for name in names:
            rewards.check(name, one_worker.options.get(name, {}))
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.data)
        served = tuple(name for name in names if name not in config.policy_judges)
        pool = await used.enter_async_context(RewardPool(served, one_worker))
        engine = await GenerationEngine.start(Path(config.model), config.generator, version=0, seed=config.seed)
        used.push_async_callback(engine.close)
        machine = _OneMachine(engine, pool, config)
        rules = ScoringRules(config.reward, set(), lambda cause, reason: None)
        noted = _Noted(machine, rules, {}, judges_of(config, machine, tokenizer))
        services = Services(config, tokenizer, machine, noted)
        used.push_async_callback(services.close)
        trial = cls(row, services, noted)
        await services.load_parsers()
        if config.rollout_manager.may_need_parsers:
            await asyncio.to_thread(trial._look_at_parsers)
        return trial

    def _look_at_parsers(self) -> None:
        try:
            self._parsers.load()
        except UserError as error:
            self._unread = f"{error}"

    @property
    def parser(self) -> str:
        """The name of the parser of tool calls."""
        return f"{self._parsers.tool_call_parser}"

    async def play(self, workflow: Any) -> tuple[Trajectory | None, str | None]:
        """The sample, or the reason of its failure. Raises UserError."""
        try:
            sample: Trajectory = await workflow(self._session, self._row)
            return sample.lowered(self.services.overlong(sample)), None
        except UserError:
            raise
        except (SampleFailed, AgentFailed) as error:
            return None, str(error)
        except Exception as error:  # the user's code may raise anything
            return None, f"{type(error).__name__}: {error}{place_of(error, NOT_THE_USERS)}"
        finally:
            self._session.close()

    def episode(self, title: str, trained: Trajectory | None) -> Episode:
        """The sampled, read and scored turns. trained: the sample from the workflow; None: the sample has failed."""
        forest, turns = self._session.forest, []
        for number in forest.places():
            call = forest.calls[number]
            read, tools = next(((read, tools) for of, read, tools in self._parsers.turns if of is call), (None, None))
            turns.append(Turn(number + 1, call, read, bool(tools), forest.rewards.get(number)))
        sample = forest.trajectory(0.0, "sample", 1.0) if turns else None
        if trained is not None and sample is not None and len(trained) == len(sample):
            sample = trained
        reward = trained.reward if trained else None
        return Episode(title, sample, turns, reward, self._rewards.scores, [*self._warnings(trained)])

    def _warnings(self, trained: Trajectory | None) -> Iterator[str]:
        services = self.services
        if self._unread:
            yield f"A sample fails if its agent offers tools. {self._unread}"
        yield from (f"The endpoint refused a request: {request}" for request in self._refused)
        if trained is not None and (penalty := services.overlong(trained)):
            yield f"reward.overlong_tokens has lowered the reward by {penalty:g}."
        if long := services.too_long(self._row):
            yield f"A run would leave this row out: {long}."
        if self._parsers.turns and not services.tokenizer.chat_template:
            yield "The model has no chat template, so messages are joined as they are: set data.chat_template."
        if tools := next((tools for _, _, tools in self._parsers.turns if tools), None):
            try:
                check_shown(services.tokenizer, [user("Hello")], tools)
            except ValueError as error:
                yield f"Tools were offered, but {error}."
        if not self._session.room:
            yield "All of sampling.max_new_tokens is used: further calls get empty answers."
