"""The jobs of samples for other actors, on flows: calls to generators, completions to rewards, rows to scorers.

If an actor dies, the job goes on at another one: a call from its last token, the others from the beginning.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal

import numpy as np

from actors.sampling.calls import Call, SampleFailed, ended, score_with_retries
from actors.sampling.flows import Flow, Job, Spawn
from actors.sampling.policy_judges import PolicyJudges
from actors.sampling.router import Router
from areal.base.errors import explain
from areal.config.scoring import RewardConfig
from areal.rewards.pool import Quarantine, digest
from areal.rewards.result import Result
from areal.rewards.worker_processes import RewardFailed
from areal.samples.table import Generation
from areal.samples.trajectory import TokenScores
from protocols.bus_errors import BusError, BusyError, FencedError, HarmfulError, MalformedError, RefusedError
from protocols.messages import (
    Cause,
    Completion,
    CompletionsScored,
    JobFailed,
    Member,
    Message,
    Score,
    ScoreTokens,
    TokensScored,
    actor_name,
    slices,
)
from protocols.transport import Bus

# Time to wait for a reward actor that serves a reward which only rows name. For the rewards of the run it
# waits without a deadline: the master says what is missing.
NO_REWARD_SECONDS = 60.0
# A sample fails after more than this many scoring requests were lost, for example because reward actors died. A lost
# request does not count as a failure of the reward function (`reward.retries`).
REWARDS_LOST = 10

ScoringRole = Literal["reward", "scorer"]


class Servers:
    """The flows of an actor to generators, reward actors and scorers, one to each: it does jobs of one kind."""

    def __init__(self, bus: Bus, spawn: Spawn) -> None:
        self._bus = bus
        self._spawn = spawn
        self._numbers = itertools.count()
        self._flows: dict[str, Flow[Any]] = {}  # by identity of the server

    async def run_job(self, member: Member, job: Call | ScoreJob | TokensJob) -> Any:
        """The result of a job that an actor of its role runs. Raises BusError."""
        flow = self._flows.get(member.identity)
        if flow is None or flow.broken:
            self._flows = {name: open_flow for name, open_flow in self._flows.items() if not open_flow.broken}
            flow = Flow(self._bus.peer(member.address), self._numbers, type(job), self._spawn)
            self._flows[member.identity] = flow
        return await flow.run_job(job)


class RoutedGenerators:
    """The generators of the run: a call is sampled by one after another, until it is complete."""

    def __init__(self, router: Router, servers: Servers) -> None:
        self._router = router
        self._servers = servers

    async def sample(self, call: Call) -> Generation:
        """Raises SampleFailed."""
        sample = call.sample
        sample.slot.close()
        home = sample.home
        try:
            while not sample.closed:
                if home is None or self._router.avoids(home):
                    home = await self._router.choose("generator", min_version=sample.min_version)
                generator = home
                sample.home = generator
                sample.generators[actor_name(generator.identity)] = None
                call.run_at(generator.identity)
                try:
                    with self._router.asking(generator):
                        completion: Generation = await self._servers.run_job(generator, call)
                        return completion
                except (FencedError, MalformedError) as error:
                    raise SampleFailed("prompt", f"the generator refused the prompt: {error}") from None
                except RefusedError as error:
                    return call.refused(error)
                except BusError as error:
                    home = await self._leave(call, generator, error)
            raise ended()
        finally:
            call.generator = None

    async def _leave(self, call: Call, generator: Member, error: BusError) -> Member | None:
        """Leave a generator that broke, or handed the sequence over. Returns where to continue; None: anywhere."""
        call.generator = None
        target, call.target = call.target, None
        if target is None:
            await self._router.avoid(generator, error)
        elif target.identity not in self._router.directory.members:
            target = None
        if call.sample.home is generator:
            call.sample.home = target
        return target


class ScoreJob(Job):
    """A completion to score, or those of a group; the result is a list of Results. Jobs of one row send it once."""

    def __init__(
        self, function: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: np.ndarray | None
    ) -> None:
        self.function = function
        self.prompt = prompt
        self.completions = tuple(completions)
        self.row = row
        self.tokens = tokens

    @staticmethod
    def request(flow: int, jobs: Sequence[ScoreJob]) -> Score:
        rows = {id(job.row): job.row for job in jobs}
        numbers = {row: number for number, row in enumerate(rows)}
        completions = (
            Completion(
                job=job.number,
                function=job.function,
                prompt=job.prompt,
                completions=job.completions,
                row=numbers[id(job.row)],
                tokens=job.tokens,
            )
            for job in jobs
        )
        return Score(flow=flow, rows=tuple(dict(row) for row in rows.values()), completions=tuple(completions))

    @staticmethod
    def deliver(part: Message, jobs: dict[int, ScoreJob]) -> Sequence[JobFailed]:
        if not isinstance(part, CompletionsScored):
            raise BusError(f"a reward actor sent {part.kind!r} instead of scores")
        for scored in part.scored:
            if (job := jobs.get(scored.job)) and len(scored.scores) != len(job.completions):
                raise BusError("a reward actor sent scores of another number of completions")
            if job := jobs.pop(scored.job, None):
                job.succeed([*map(Result, scored.scores, scored.parts)])
        return part.failed


class TokensJob(Job):
    """A row of tokens, int32 [T], for the scorer of this name; the result is its TokenScores. All jobs of a flow are
    for one name: it leads to one scorer, which has one."""

    def __init__(self, scorer: str, tokens: np.ndarray) -> None:
        self.scorer = scorer
        self.tokens = tokens

    @staticmethod
    def request(flow: int, jobs: Sequence[TokensJob]) -> ScoreTokens:
        return ScoreTokens(
            flow=flow,
            scorer=jobs[0].scorer,
            jobs=np.array([job.number for job in jobs], np.int64),
            counts=np.array([len(job.tokens) for job in jobs], np.int32),
            tokens=np.concatenate([job.tokens for job in jobs]),
        )

    @staticmethod
    def deliver(part: Message, jobs: dict[int, TokensJob]) -> Sequence[JobFailed]:
        if not isinstance(part, TokensScored):
            raise BusError(f"a scorer sent {part.kind!r} instead of log-probs")
        shape = len(part.logprobs), len(part.top_tokens) // max(1, len(part.logprobs))
        top_tokens, top_logprobs = part.top_tokens.reshape(shape), part.top_logprobs.reshape(shape)
        for number, places in zip(part.jobs.tolist(), slices(part.counts), strict=True):
            if (job := jobs.get(number)) and len(part.logprobs[places]) != len(job.tokens) - 1:
                raise BusError("a scorer sent log-probs of another number of tokens")
            if job := jobs.pop(number, None):
                job.succeed(TokenScores(part.logprobs[places], top_tokens[places], top_logprobs[places]))
        return part.failed


class RoutedRewards:
    """The reward actors and the scorers of the run. awaited: the rewards for whose actors a sample waits without a
    deadline, as it does for any scorer. on_refusal: called with the cause and the reason if a job is refused for the
    first time. scorers: those that give rewards, by the reward's name. judges: the rewards that the policy gives."""

    def __init__(
        self,
        router: Router,
        servers: Servers,
        config: RewardConfig,
        awaited: Set[str],
        on_refusal: Callable[[Cause, str], None],
        scorers: Mapping[str, str] | None = None,
        judges: PolicyJudges | None = None,
    ) -> None:
        self._router = router
        self._servers = servers
        self._config = config
        self._awaited = awaited
        self._on_refusal = on_refusal
        self._scorers = scorers or {}
        self._judges = judges
        self._quarantine = Quarantine(config.quarantine_after)

    async def score(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: np.ndarray | None
    ) -> list[Result]:
        """Raises SampleFailed."""
        if self._judges and name in self._judges:
            judged = partial(self._judges.score, name, prompt, completions, row)
            return await score_with_retries(name, self._config.retries, judged, self._on_refusal)
        job, scorer = ScoreJob(name, prompt, completions, row, tokens), self._scorers.get(name)
        results: list[Result] = await (self._do(job, "scorer", scorer) if scorer else self._do(job, "reward", name))
        return results

    async def score_tokens(self, name: str, tokens: np.ndarray) -> TokenScores:
        """What a scorer gives int32 [T] tokens. Raises SampleFailed."""
        scores: TokenScores = await self._do(TokensJob(name, tokens), "scorer", name)
        return scores

    async def _do(self, job: ScoreJob | TokensJob, role: ScoringRole, name: str) -> Any:
        refused = lost = 0
        while True:
            member = await self._choose(job, role, name)
            try:
                with self._router.asking(member):
                    return await self._servers.run_job(member, job)
            except MalformedError as error:  # this row cannot travel, to no actor and at no time
                raise SampleFailed("row", f"{role} {name!r}: {error}") from None
            except BusError as error:
                if isinstance(error, RefusedError):
                    refused += 1
                    if refused == 1:
                        self._on_refusal(role, f"{role} {name!r}: {error}")
                elif not isinstance(error, BusyError):  # one that drains or starts has lost nothing
                    lost += 1
                if isinstance(error, HarmfulError) and isinstance(job, ScoreJob):
                    self._quarantine.lost(_digest(job))
                if refused > self._config.retries or lost > REWARDS_LOST:
                    raise SampleFailed(role, f"{role} {name!r}: {error}") from None
                await self._router.avoid(member, error)

    async def _choose(self, job: ScoreJob | TokensJob, role: ScoringRole, name: str) -> Member:
        """The actor to ask next. Raises SampleFailed if none is to be asked, or none comes."""
        if role == "scorer":
            return await self._router.choose(role, name)
        failed = partial(SampleFailed, "reward")
        if self._quarantine and isinstance(job, ScoreJob):
            with explain(RewardFailed, f"reward {name!r}: {{why}}", failed):
                self._quarantine.check(_digest(job))
        with explain(TimeoutError, f"no reward actor serves {name!r} (waited {NO_REWARD_SECONDS:g} s)", failed):
            async with asyncio.timeout(None if name in self._awaited else NO_REWARD_SECONDS):
                return await self._router.choose("reward", name)


def _digest(job: ScoreJob) -> bytes:
    return digest(job.function, job.prompt, job.completions, job.row)
