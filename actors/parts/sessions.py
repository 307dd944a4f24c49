"""Sessions: each one runs a sample on generators and rewards, and survives their crashes.

A session keeps every token that it received. If a generator dies, the session continues the sequence on another
generator from the last token. The rollout manager and the evaluator use sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import structlog

from actors.parts.flows import Flow
from actors.parts.jobs import Completions, ScoreJob, SequenceJob, Sequences
from actors.runtime.actor import Actor, Signal
from areal.config import DataConfig, SamplingConfig, UserError
from areal.data.rows import Row, prompt_text
from areal.data.sources import open_source
from areal.generation import routing
from areal.generation.engine import Chunk
from areal.generation.routing import Load, fullness
from areal.rewards.pool import Quarantine, RewardFailed, digest
from areal.rewards.result import Result, combined, overlong_penalty
from areal.sandbox.outside import Sandbox, SandboxError, open_sandbox
from areal.tokens import load_tokenizer
from areal.trajectory import Finish, Tokens, Trajectory
from areal.workflows.builtin import resolve_workflow
from areal.workflows.conversation import Generation, Keep, begin, first_of, keep_until_text
from areal.workflows.forest import Forest
from areal.workflows.openai_api import Access
from areal.workflows.parsers import Parsers
from protocols.errors import BusError, FencedError, HarmfulError, MalformedError, RefusedError
from protocols.messages import (
    Cause,
    Done,
    Member,
    ScoringFailed,
    actor_name,
)

if TYPE_CHECKING:
    from actors.parts.openai_endpoint import OpenAIEndpoint

# Time to wait for a reward actor that serves a reward which only rows name. For the rewards of the configuration the
# run waits without a deadline: the master says what is missing.
NO_REWARD_SECONDS = 60.0
# After a failed request, other actors of the role are preferred to this one for this long.
AVOID_SECONDS = 5.0
RETRY_SECONDS = 0.1
# A sample fails after more than this many scoring requests were lost, for example because reward actors died. A lost
# request does not count as a failure of the reward function (`reward.retries`).
REWARDS_LOST = 10

log = structlog.get_logger()


class SampleFailed(Exception):
    """A sample cannot be finished or scored, because of `cause`. It never gets a score of 0 instead."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.cause = cause


class Router:
    """Chooses an actor of a role: the least loaded one that has not failed a request recently. A generator that holds a
    version older than `min_version` is chosen only if there is no other.

    `load`: number of this actor's requests at each server, by its identity, including places that sessions have taken
    before their first request. `room`: notified when one of them ends. `told`: the load that each generator has
    reported, as the master passes it on.
    """

    def __init__(self, actor: Sampler) -> None:
        self.actor = actor
        self.load: Counter[str] = Counter()
        self.room = Signal()
        self.told: dict[str, Load] = {}
        self._avoid: dict[str, float] = {}

    async def choose(self, role: str, serves: str | None = None, min_version: int = 0) -> Member:
        """The actor of `role` to ask next. Waits until one is healthy.

        serves: a name that the actor has to serve; None: any. min_version: the oldest version that may sample.
        """
        found: list[Member] = []

        def some() -> bool:
            found[:] = [m for m in self.actor.with_role(role) if serves is None or serves in m.serves]
            return bool(found)

        await self.actor.until(some)
        now, askers = asyncio.get_running_loop().time(), self.askers
        # Reported loads are out of date. Each asker begins its choice at another actor, so that not all of them fill
        # the same few.
        first = (self.actor.index or 0) * len(found) // askers % len(found)
        found = found[first:] + found[:first]

        def cost(m: Member) -> tuple[bool, bool, float]:
            held_back = m.held is not None and m.held.version < min_version
            return held_back, self._avoid.get(m.identity, 0.0) > now, self._load_of(m, askers, min_version)

        return min(found, key=cost)

    @property
    def askers(self) -> int:
        """Number of healthy actors of this actor's own role, at least 1."""
        return max(1, len(self.actor.with_role(self.actor.role)))

    def limit(self, generator: Member) -> int:
        """Number of sequences that the generator takes from all askers together."""
        told = self.told.get(generator.identity)
        return told.limit if told else self.actor.config.generator.max_concurrent_rollouts

    def _load_of(self, m: Member, askers: int, min_version: int) -> float:
        if m.role != "generator":
            return self.load[m.identity]
        told = self.told.get(m.identity) or Load(0, 0, self.limit(m), min_version)
        return fullness(told, self.load[m.identity], askers, min_version)

    def enter(self, member: Member) -> None:
        """Count one more request to this member."""
        self.load[member.identity] += 1

    def leave(self, member: Member) -> None:
        self.load[member.identity] -= 1
        if not self.load[member.identity]:
            del self.load[member.identity]
        self.room.notify()

    @contextlib.contextmanager
    def using(self, member: Member) -> Iterator[None]:
        """Count a request to this member until the end of the block."""
        self.enter(member)
        try:
            yield
        finally:
            self.leave(member)

    async def avoid(self, member: Member) -> None:
        """Prefer other actors for AVOID_SECONDS. Also pauses for RETRY_SECONDS, for the case that there is no other."""
        now = asyncio.get_running_loop().time()
        self._avoid = {identity: until for identity, until in self._avoid.items() if until > now}
        self._avoid[member.identity] = now + AVOID_SECONDS
        await asyncio.sleep(RETRY_SECONDS)


class Place:
    """A place in the load of a generator."""

    def __init__(self, router: Router, generator: Member | None = None) -> None:
        self._router = router
        self._taken: Member | None = None
        self.stand(generator)

    def stand(self, generator: Member | None) -> None:
        """Leave the place, and take one at `generator`."""
        if self._taken is not None:
            self._router.leave(self._taken)
        if generator is not None:
            self._router.enter(generator)
        self._taken = generator


class Call:
    """A call of a sample to the policy: a sequence that runs on one generator after another, until it is complete."""

    def __init__(
        self, session: SampleSession, place: Place, prompt: np.ndarray, most: int, keep: Keep | None
    ) -> None:  # fmt: skip
        self._session = session
        self._router = session.router
        self._place = place
        self._prompt = prompt
        self._most = most
        self._keep = keep
        self._parts: list[Chunk] = []
        self._home = session.home
        self._target: Member | None = None
        self._asked: routing.Sequence | None = None
        self._taken = 0  # tokens of the sequence since it was asked for
        self._job: SequenceJob | None = None

    async def sampled(self) -> Generation:
        """Raises SampleFailed."""
        session = self._session
        while not session.closed:
            generator = self._home or await self._router.choose("generator", min_version=session.min_version)
            self._place.stand(generator)
            session.home = generator
            session.generators[actor_name(generator.identity)] = None
            try:
                return await self._continue_on(generator)
            except RefusedError as error:
                if session.tokens_sampled and not isinstance(error, FencedError):  # the prompt has become too long
                    return _joined(self._parts, "length")
                raise SampleFailed("prompt", f"the generator refused the prompt: {error}") from None
            except BusError as error:
                await self._leave(generator, error)
        raise _ended()

    def abort(self) -> None:
        """Have `sampled` raise SampleFailed."""
        if self._job is not None:
            self._job.fail(_ended())

    @property
    def sequence(self) -> routing.Sequence | None:
        """The sequence that a generator has now."""
        return self._asked and self._asked.grown(self._taken, self._session.min_version)

    def move(self, target: Member) -> None:
        """Have the current generator hand the running sequence over, and continue it on `target`."""
        self._target = target
        if self._job is not None:
            self._job.stop()

    def close(self) -> None:
        """Stop counting towards any generator's load."""
        self._asked = self._job = self._target = None
        self._place.stand(None)

    async def _leave(self, generator: Member, error: BusError) -> None:
        """Leave a generator whose stream broke, or which handed the sequence over. Chooses where to continue."""
        self._home, self._target = self._target, None
        if self._home is None:
            log.warning(
                "the sequence continues on another generator", generator=generator.identity,
                sampled=_count(self._parts), error=str(error),
            )  # fmt: skip
            await self._router.avoid(generator)
        elif self._home.identity not in self._router.actor.directory:
            self._home = None
        if self._session.home is generator:
            self._session.home = self._home

    async def _continue_on(self, generator: Member) -> Generation:
        session, sampled = self._session, _count(self._parts)
        self._job = job = SequenceJob(
            next(self._router.actor.jobs),
            np.concatenate([self._prompt, *(part.tokens for part in self._parts)]),
            session.sampling,
            self._most - sampled,
            max(0, session.sampling.min_new_tokens - session.tokens_sampled),
            session.min_version,
            session.first_version,
            self.take,
        )
        self._taken = 0
        self._asked = routing.Sequence(
            number=job.number,
            generator=generator.identity,
            since=asyncio.get_running_loop().time(),
            prefix=len(job.prompt),
            sampled=sampled,
            remaining=self._most - sampled,
            min_version=session.min_version,
        )
        done: Generation = await self._router.actor.do(generator, job)
        return done

    def take(self, part: Chunk) -> Generation | None:
        """Add a chunk that has arrived. Returns the completion if the chunk finishes it, if `keep` ends it, or if the
        sample has no room for more, since its other calls sample too. `keep` gets all tokens of the completion so far,
        and returns how many of them to keep, or None to continue."""
        room = self._session.room
        self._parts.append(part)
        self._session.took(part.versions)
        self._taken += len(part.tokens)
        end = self._keep(np.concatenate([part.tokens for part in self._parts])) if self._keep else None
        over = len(part.tokens) - room
        if over > 0:
            length = _count(self._parts) - over
            return _joined(self._parts, "length", length) if end is None or end > length else self._kept(end)
        if end is not None:
            return self._kept(end)
        if part.finish:
            return _joined(self._parts, part.finish)
        return None if room > len(part.tokens) else _joined(self._parts, "length")

    def _kept(self, end: int) -> Generation:
        return _joined(self._parts, "stop", end)


class SampleSession:
    """The session that a workflow gets for one sample (areal.workflows.Session).

    `home`: the generator that all samples of the group start on, because they share the prompt prefix. The session
    counts towards its load at once, until the first call ends or `close` is called. `first_version`: of the first
    token; `on_start` is called with it. `min_version` rises to the group's start version once that is known, so that no
    older version samples a later token. `running`: its calls in progress. `tokens_sampled`: all tokens received, in all
    calls, trained or not. `forest`: those calls that are trained. `reward_parts`: of the last score. `generators`:
    those that were asked, in order.
    """

    def __init__(
        self, router: Router, tokenizer: Any, row: Row, sampling: SamplingConfig, min_version: int, home: Member,
        on_start: Callable[[int], None] = lambda version: None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.router = router
        self._row = row
        self.sampling = sampling
        self.min_version = min_version
        self.home: Member | None = home
        self._on_start = on_start
        self.first_version: int | None = None
        self.tokens_sampled = 0
        self.reward_parts: dict[str, float] = {}
        self.generators: dict[str, None] = {}
        self.running: dict[Call, None] = {}  # not a set, whose order is not that of the calls
        self.closed = False
        self.forest = Forest()
        self._unused: Place | None = Place(router, home)  # until the first call
        self._waits = 0
        self._in_workflow = False

    async def generate(self, tokens: Tokens, max_new_tokens: int | None = None, keep: Keep | None = None) -> Generation:
        """Sample a completion of the prompt `tokens`, on several generators one after the other if necessary. It ends
        where `keep` or one of `sampling.stop` ends it. Calls at the same time run at the same time.

        max_new_tokens: a limit for this call; the sample's own limit, over all calls, holds as well. keep: see
        `Call.take`. Raises SampleFailed if a generator refuses the first prompt of the sample.
        """
        prompt = np.asarray(tokens, np.int32)
        most = self.room if max_new_tokens is None else min(self.room, max_new_tokens)
        if most <= 0:
            return _joined([], "length")
        if self.sampling.stop:
            keep = first_of(keep, keep_until_text(self.tokenizer, self.sampling.stop))
        place, self._unused = self._unused or Place(self.router), None
        call = Call(self, place, prompt, most, keep)
        self.running[call] = None
        try:
            with self._waiting():
                sampled = await call.sampled()
        finally:
            del self.running[call]
            call.close()
        self.forest.add(prompt, sampled)
        return sampled

    def reward(self, call: Generation, value: float) -> None:
        self.forest.reward(call, value)

    def trajectory(self, reward: float | None = None) -> Trajectory:
        own = self.router.actor.config.reward
        return self.forest.trajectory(reward, own.credit, own.turn_discount)

    @property
    def calls(self) -> Sequence[Generation]:
        return self.forest.calls

    @property
    def parsers(self) -> Parsers:
        return self.router.actor.parsers

    @property
    def room(self) -> int:
        """The number of tokens that the sample may still sample."""
        return max(0, self.sampling.max_new_tokens - self.tokens_sampled)

    def took(self, versions: np.ndarray) -> None:
        """New tokens have arrived, of these versions."""
        self.tokens_sampled += len(versions)
        if self.first_version is None and len(versions):
            self.first_version = int(versions[0])
            self._on_start(self.first_version)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark the block as waiting for other actors. While a sample does not wait, its workflow's own code runs, which
        counts as work of this actor."""
        self._waits += 1
        self.router.actor.own_code.pop(self, None)
        try:
            yield
        finally:
            self._waits -= 1
            self._runs_own_code()

    def _runs_own_code(self) -> None:
        if self._in_workflow and not self._waits:
            self.router.actor.own_code[self] = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def in_workflow(self) -> Iterator[None]:
        """Mark the block as the run of this sample's workflow."""
        self._in_workflow = True
        self._runs_own_code()
        try:
            yield
        finally:
            self._in_workflow = False
            self.router.actor.own_code.pop(self, None)

    def close(self) -> None:
        """End the calls in progress, and stop counting towards any generator's load."""
        self.closed = True
        for call in self.running:
            call.abort()
        if self._unused is not None:
            self._unused.stand(None)
            self._unused = None

    async def run_python(self, code: str) -> str:
        """The output of the code, errors included. Raises SampleFailed if the sandbox fails, not if the code does."""
        actor = self.router.actor
        try:
            with self._waiting():
                async with actor.program_slots:
                    outcome = await (await actor.sandbox()).run(code)
        except (SandboxError, UserError) as error:
            raise SampleFailed("sandbox", f"the sandbox cannot run Python: {error}") from None
        return outcome.transcript

    def endpoint(self) -> AbstractAsyncContextManager[Access]:
        return self.router.actor.endpoint.serve(self)

    async def score(self, completion: str, tokens: Tokens | None = None) -> float:
        """The weighted sum of the row's rewards on this completion. Raises SampleFailed if a reward failed on every
        attempt."""
        rewards = self._row.reward or self.router.actor.config.reward.functions
        with self._waiting():
            results = {name: await self._score_by(name, completion, tokens) for name in rewards}
        self.router.actor.scored += 1
        score, self.reward_parts = combined(rewards, results)
        return score

    async def _score_by(self, name: str, completion: str, tokens: Tokens | None) -> Result:
        actor = self.router.actor
        prompt, row = prompt_text(self._row.prompt), self._row.fields
        own_tokens = None if tokens is None else np.asarray(tokens, np.int32)

        def key() -> bytes:
            return digest(name, prompt, completion, row)

        refused = lost = 0
        while True:
            try:
                if actor.quarantine:
                    actor.quarantine.check(key())
                async with asyncio.timeout(None if name in actor.config.rewards else NO_REWARD_SECONDS):
                    member = await self.router.choose("reward", name)
            except RewardFailed as error:
                raise SampleFailed("reward", f"reward {name!r}: {error}") from None
            except TimeoutError:
                raise SampleFailed(
                    "reward", f"no reward actor serves {name!r} (waited {NO_REWARD_SECONDS:g} s)"
                ) from None
            try:
                with self.router.using(member):
                    job = ScoreJob(next(actor.jobs), name, prompt, completion, row, own_tokens)
                    result: Result = await actor.do(member, job)
                    return result
            except MalformedError as error:  # this row cannot travel, to no actor and at no time
                raise SampleFailed("row", f"reward {name!r}: {error}") from None
            except BusError as error:
                if isinstance(error, RefusedError):
                    refused += 1
                    if refused == 1:
                        actor.scoring_failed(f"reward {name!r}: {error}")
                else:
                    lost += 1
                if isinstance(error, HarmfulError):
                    actor.quarantine.lost(key())
                if refused > actor.config.reward.retries or lost > REWARDS_LOST:
                    raise SampleFailed("reward", f"reward {name!r}: {error}") from None
                await self.router.avoid(member)


def _ended() -> SampleFailed:
    return SampleFailed("workflow", "its workflow ended before this call")


def _count(parts: Sequence[Chunk]) -> int:
    return sum(len(part.tokens) for part in parts)


def _joined(parts: Sequence[Chunk], finish: Finish, end: int | None = None) -> Generation:
    return Generation(
        tokens=np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)])[:end],
        logprobs=np.concatenate([np.zeros(0, np.float32), *(part.logprobs for part in parts)])[:end],
        versions=np.concatenate([np.zeros(0, np.int32), *(part.versions for part in parts)])[:end],
        finish=finish,
    )


class Prompts(Protocol):
    """The interface of the source of rows (areal.data.sources.PromptSource)."""

    def row(self, index: int) -> Row: ...
    def heldout(self, i: int) -> Row: ...


class Sampler(Actor):
    """Base class of the roles that run the workflow on rows of the run's data. `scored`: number of scores from rewards,
    plus number of trajectories from workflows. `jobs`: numbers all its jobs and flows. A number is never used again,
    because a server may still be busy with an abandoned one."""

    def __init__(
        self, *args: Any, open_source: Callable[[DataConfig, int], Prompts] = open_source,
        load_tokenizer: Callable[[str, DataConfig], Any] = load_tokenizer, make_parsers: type[Parsers] = Parsers,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self._open_source = open_source
        self._load_tokenizer = load_tokenizer
        self._make_parsers = make_parsers
        self.scored = 0
        self.jobs = itertools.count()
        self._flows: dict[str, Flow[Any]] = {}  # to generators and reward actors, by identity
        self.own_code: dict[SampleSession, float] = {}  # samples in their workflow's own code, and since when
        self._endpoint: OpenAIEndpoint | None = None
        self._sandbox: asyncio.Task[Sandbox] | None = None
        # Further programs wait: more at once would only delay each other, up to their time limit.
        self.program_slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def setup(self) -> None:
        self._router = Router(self)
        self.quarantine = Quarantine(self.config.reward.quarantine_after)
        self._source = await asyncio.to_thread(self._open_source, self.config.data, self.config.seed)
        self._tokenizer = await asyncio.to_thread(self._load_tokenizer, self.config.model, self.config.data)
        own = self.config.rollout_manager
        self._workflow = resolve_workflow(own.workflow, own.workflow_options)
        self.parsers = self._make_parsers(
            self._tokenizer, own.tool_call_parser, own.reasoning_parser, self.config.data.chat_template_kwargs
        )
        if own.names_parsers:
            await asyncio.to_thread(self.parsers.load)

    async def do(self, member: Member, job: SequenceJob | ScoreJob) -> Any:
        """The result of a job that a generator or a reward actor does. Raises BusError."""
        flow = self._flows.get(member.identity)
        if flow is None or flow.broken:
            self._flows = {identity: other for identity, other in self._flows.items() if not other.broken}
            kind: Any = Sequences if member.role == "generator" else Completions
            flow = Flow(self.bus.peer(member.address), next(self.jobs), kind, self.spawn)
            self._flows[member.identity] = flow
        return await flow.do(job)

    def too_long(self, row: Row) -> str | None:
        """A sentence if the row's prompt has more tokens than `data.max_prompt_tokens`; None if it has not."""
        most = self.config.data.max_prompt_tokens
        if most is None:
            return None
        talk, messages = begin(self._tokenizer, row.prompt)
        tokens = len(talk.prompt(messages))
        return f"the prompt has {tokens} tokens, and data.max_prompt_tokens is {most}" if tokens > most else None

    async def teardown(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._sandbox is not None:
            with contextlib.suppress(UserError):
                (await self._sandbox).close()

    async def sandbox(self) -> Sandbox:
        """The sandbox, opened at the first call. Raises UserError if none is available."""
        if self._sandbox is None:
            self._sandbox = asyncio.create_task(asyncio.to_thread(open_sandbox, self.config.sandbox))
        return await asyncio.shield(self._sandbox)

    @property
    def endpoint(self) -> OpenAIEndpoint:
        if self._endpoint is None:
            from actors.parts.openai_endpoint import OpenAIEndpoint  # imports a web server, which few runs need

            host = self.config.rollout_manager.endpoint_host
            self._endpoint = OpenAIEndpoint(self.config.model, host, self.request_refused)
        return self._endpoint

    def request_refused(self, told: str) -> None:
        """Called with each request that the endpoint has answered with an error."""

    def stats(self) -> dict[str, float]:
        return {"samples_scored": self.scored}

    def oldest_work(self) -> tuple[str, float] | None:
        since = next(iter(self.own_code.values()), None)
        if since is None:
            return super().oldest_work()
        return f"the workflow's own code, in {len(self.own_code)} samples", since

    def scoring_failed(self, reason: str) -> None:
        """Report to the master that a completion could not be scored, unless this actor has scored one before. If no
        completion of the run can be scored, the user's reward or workflow is probably wrong."""
        if not self.scored:
            self.spawn(self.ask_master(ScoringFailed(reason=reason[:4096]), Done), "scoring failed")

    def overlong(self, done: Trajectory) -> float:
        """The penalty for a completion that is too long (`reward.overlong_tokens`)."""
        limit, buffer = self.config.sampling.max_new_tokens, self.config.reward.overlong_tokens
        return overlong_penalty(int(done.sampled.sum()), limit, buffer) if buffer else 0.0

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """Run the workflow for one sample. Raises SampleFailed, also for any exception of the user's own code: it fails
        the sample, not this actor."""
        try:
            with session.in_workflow():
                done = (await self._workflow(session, row)).checked()
        except (SampleFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            log.error("workflow failed", workflow=self.config.rollout_manager.workflow, exc_info=error)
            self.scoring_failed(f"the workflow raised {type(error).__name__}: {error}")
            raise SampleFailed("workflow", f"the workflow raised {type(error).__name__}: {error}") from error
        finally:
            session.close()
        self.scored += 1  # for workflows that compute the reward without a reward actor
        return done
