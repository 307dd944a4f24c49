"""`python -m areal agent try`: one episode of a workflow on one row, with a real engine and without a run.

The workflow gets the session that it has in a run. Instead of the run's actors there are one engine and one reward
worker, which the session reaches as members of a directory that never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from actors.parts.jobs import ScoreJob, SequenceJob
from actors.parts.sessions import SampleFailed, Sampler, SampleSession
from actors.runtime.actor import incarnation
from actors.runtime.addresses import Door
from actors.runtime.logs import configure_logging
from actors.watching.episode import CompletionScore, Episode, Turn, show
from areal.command_line import output
from areal.config import Config, UserError, checked, merged, overridden, read_values
from areal.data.rows import Row
from areal.data.sources import PromptSource, open_source, read_row
from areal.generation.engine import EngineError, GenerationEngine
from areal.models import resolve_model
from areal.processes import ROOT
from areal.rewards import functions as rewards
from areal.rewards.pool import RewardFailed, RewardPool
from areal.text import shown
from areal.trajectory import Trajectory
from areal.workflows.agents import AgentFailed
from areal.workflows.conversation import Generation, check_shown, user
from areal.workflows.parsers import Json, Parsed, Parsers
from protocols.errors import RefusedError
from protocols.messages import Member
from protocols.network import ZmqNetwork
from protocols.security import Keys, make_keys
from protocols.transport import Bus

HOST = "127.0.0.1"
# Without --config. A run has to set all but the workflow by itself.
DEFAULTS = {
    "steps": 1, "batch_size": 8, "group_size": 8, "sampling": {"max_new_tokens": 1024},
    "reward": {"functions": "exact_match"},
}  # fmt: skip
_OVERRIDE = re.compile(r"[\w.]+=")
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
    given: dict[str, Any] = {} if model is None else {"model": model}
    if agents:
        kind, other = ("agent", "command") if _FUNCTION.fullmatch(agents[0]) else ("command", "agent")
        given["rollout_manager"] = {"workflow": "agent", "workflow_options": {kind: agents[0], other: None}}
    if rows is not None and not {"source", "sources"} & (values.get("data") or {}).keys():
        given["data"] = {"source": str(rows)}
    elif rows is None and file is None and "data" not in values:
        raise UserError("There is no row to try: give --row FILE, or --config FILE.yaml with data.")
    config: Config = checked(merged(values, given), file)
    config = config.model_copy(update={"model": str(resolve_model(config))})
    return (agents[0] if agents else None), config


async def _try(config: Config, row: Row, title: str, console: Console) -> int:
    trial, this = Trial(config, row), asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        await trial.setup()
        episode, failure = await trial.play(title)
    finally:
        await trial.teardown()
        await trial.bus.close()
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


class Trial(Sampler):
    """A rollout manager without a run, for one sample. It does the jobs of the sample by itself."""

    role = "rollout_manager"

    def __init__(self, config: Config, row: Row) -> None:
        self._used = contextlib.AsyncExitStack()
        keys = make_keys(Path(self._used.enter_context(tempfile.TemporaryDirectory()))).parent
        super().__init__(
            Bus(f"trial/0#{incarnation()}", ZmqNetwork(Keys(keys))), "", door=Door(HOST, HOST), make_parsers=_Recorded,
            open_source=lambda data, seed: PromptSource([]),
        )  # fmt: skip
        self.config = config
        self._row = row
        self._names = tuple(row.reward or config.reward.functions)
        self._scores: list[CompletionScore] = []
        self._notes: list[str] = []
        self._seconds: dict[str, float] = {}
        self._running: Counter[str] = Counter()
        self._since: dict[str, float] = {}

    async def setup(self) -> None:
        """Raises UserError or EngineError."""
        config = self.config.served_rewards.model_copy(update={"workers": 1})
        for name in self._names:
            rewards.check(name, config.options.get(name, {}))
        await super().setup()
        with self._timed("start"):
            self._pool = await self._used.enter_async_context(RewardPool(self._names, config))
            self._engine = await GenerationEngine.start(
                Path(self.config.model), self.config.generator, version=0, seed=self.config.seed
            )
        self._used.push_async_callback(self._engine.close)
        for role, serves in ("generator", ()), ("reward", self._names):
            self.directory[role] = Member(
                identity=f"{role}/0", role=role, index=0, address="", state="healthy", serves=serves
            )

    async def teardown(self) -> None:
        await super().teardown()
        await self._used.aclose()

    async def play(self, title: str) -> tuple[Episode, str | None]:
        """The episode, and why its sample has failed, if it has. Raises UserError."""
        session = SampleSession(
            self._router, self._tokenizer, self._row, self.config.sampling, 0, self.directory["generator"]
        )
        done, failure = None, None
        with self._timed("episode"):
            try:
                done = self._lowered((await self._workflow(session, self._row)).checked())
            except UserError:
                raise
            except (SampleFailed, AgentFailed) as error:
                failure = str(error)
            except Exception as error:  # the user's code may raise anything
                failure = f"{type(error).__name__}: {error}{_place(error)}"
            finally:
                session.close()
        return self._episode(title, session, done), failure

    def _lowered(self, done: Trajectory) -> Trajectory:
        """As a rollout manager does it."""
        if penalty := self.overlong(done):
            self._notes.append(f"reward.overlong_tokens has lowered the reward by {penalty:g}.")
        return done.lowered(penalty)

    def _episode(self, title: str, session: SampleSession, done: Trajectory | None) -> Episode:
        forest, turns = session.forest, []
        for number in forest.places():
            sampled = forest.calls[number]
            read, tools = next(((read, tools) for one, read, tools in self._read if one is sampled), (None, None))
            turns.append(Turn(number + 1, sampled, read, bool(tools), forest.rewards.get(number)))
        sample = forest.trajectory(0.0, "sample", 1.0) if turns else None
        if done is not None and sample is not None and len(done) == len(sample):
            sample = done
        return Episode(
            title,
            sample,
            turns,
            done.reward if done else None,
            self._scores,
            self._seconds,
            self._warnings(session, done),
        )

    @property
    def _read(self) -> list[tuple[Generation, Parsed, list[Json] | None]]:
        assert isinstance(self.parsers, _Recorded)
        return self.parsers.turns

    def _warnings(self, session: SampleSession, done: Trajectory | None) -> list[str]:
        trained = sum(len(call.tokens) for call in session.calls)
        found = list(self._notes)
        if long := self.too_long(self._row):
            found.append(f"A run would leave this row out: {long}.")
        if self._read and not self._tokenizer.chat_template:
            found.append("The model has no chat template, so messages are joined as they are: set data.chat_template.")
        if tools := next((tools for _, _, tools in self._read if tools), None):
            try:
                check_shown(self._tokenizer, [user("Hello")], tools)
            except ValueError as error:
                found.append(f"Tools were offered, but {error}.")
        if not session.room:
            found.append("All of sampling.max_new_tokens is used: further calls get empty answers.")
        if session.tokens_sampled > trained:
            more = session.tokens_sampled - trained
            found.append(f"{more} more tokens were sampled: after a stop text, or for calls that the agent gave up.")
        if done is not None and (left := trained - int(done.sampled.sum())):
            found.append(f"The workflow's own trajectory leaves out {left} tokens that were sampled.")
        return found

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens, special ones included."""
        text: str = self._tokenizer.decode(tokens)
        return text

    def request_refused(self, told: str) -> None:
        self._notes.append(f"The endpoint refused a request: {told}")

    def scoring_failed(self, reason: str) -> None:
        """There is no master to tell."""

    async def do(self, member: Member, job: SequenceJob | ScoreJob) -> Any:
        work = asyncio.create_task(self._score(job) if isinstance(job, ScoreJob) else self._sample(job))
        work.add_done_callback(lambda done: None if done.cancelled() else _end(job, done.exception()))
        try:
            return await job.done
        finally:
            work.cancel()
            await asyncio.wait({work})

    async def _sample(self, job: SequenceJob) -> None:
        limits = {"max_new_tokens": job.max_new_tokens, "min_new_tokens": job.min_new_tokens}
        sampling = job.sampling.model_copy(update=limits)
        chunks = self._engine.generate(str(job.number), job.prompt.tolist(), sampling)
        try:
            with self._timed("sampling"):
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        job.take(chunk)
        except ValueError as error:  # as a generator answers it
            raise RefusedError(str(error)) from None

    async def _score(self, job: ScoreJob) -> None:
        try:
            with self._timed("scoring"):
                result = await self._pool.score(job.function, job.prompt, job.completion, job.row, job.tokens)
        except RewardFailed as error:
            raise RefusedError(str(error)) from None
        self._scores.append(CompletionScore(job.function, job.completion, result))
        job.succeed(result)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
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
                self._seconds[part] = self._seconds.get(part, 0.0) + took


def _end(job: SequenceJob | ScoreJob, error: BaseException | None) -> None:
    if isinstance(error, Exception):
        job.fail(error)


def _place(error: Exception) -> str:
    """Where in the user's code an exception was raised."""
    others = (sys.prefix, sys.base_prefix, str(ROOT / "areal"), str(ROOT / "actors"))
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
