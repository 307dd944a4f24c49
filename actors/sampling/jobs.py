"""The jobs of samples: calls to generators, and completions to rewards and scorers. `tokens_job.py` has rows of tokens.

A call is a sequence of tokens. Generator after generator may sample the sequence, always from its last token on. A
scoring job begins anew at another actor.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from actors.sampling.flows import Choose, Job
from areal.base.errors import explain
from areal.config.engine_sections import SamplingConfig
from areal.config.scoring import RewardConfig
from areal.rewards.functions import Result, RewardError
from areal.rewards.pool import digest
from areal.rewards.quarantine import Quarantine
from areal.rewards.worker import RewardFailed
from areal.samples.table import Finish, Generation, TokenTable, split
from areal.workflows.turn_ends import Keep
from protocols.attempt_messages import Cause
from protocols.bus_errors import BusError, BusyError, FencedError, HarmfulError, MalformedError, RefusedError
from protocols.membership_messages import Member, actor_name
from protocols.messages import (
    FINISHES,
    SAMPLING,
    Completion,
    CompletionsScored,
    Generate,
    JobFailed,
    Message,
    NewSequence,
    Score,
    TokenColumns,
)
from protocols.picture_messages import GeneratePictured

# Time to wait for a reward actor that serves a reward named only by rows. The wait for a reward of the run has no
# deadline: the master says which reward is missing.
NO_REWARD_SECONDS = 60.0
# A sample fails after more than this many lost scoring requests, for example because reward actors died. A lost request
# does not count as a failure of the reward function (`reward.retries`).
REWARDS_LOST = 10

ScoringRole = Literal["reward", "scorer"]


class SampleFailed(Exception):
    """A sample, or a group, cannot be finished or scored, because of `cause`. A failure never becomes a score of 0."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.cause = cause


async def score_with_retries(
    name: str,
    retries: int,
    score: Callable[[], Awaitable[list[Result]]],
    on_refusal: Callable[[Cause, str], None] = lambda cause, reason: None,
) -> list[Result]:
    """Return the results of `score`, called up to `retries` times more while the reward `name` fails. on_refusal:
    called with the first failure. Raises SampleFailed."""
    reason = ""
    for attempt in range(retries + 1):
        try:
            return await score()
        except RewardError as error:
            reason = f"reward {name!r}: {error}"
        if not attempt:
            on_refusal("reward", reason)
    raise SampleFailed("reward", reason)


class SampleState:
    """The common state of the calls of a sample.

    `home`: the generator on which the next call starts, because it has the prefix; None: any. `slot`: counts as a
    request there until the first call begins. `first_version`: the version of the first token, for `on_start`.
    `min_version`: rises to the group's start version, so that no older version samples a later token. `tokens_sampled`:
    the number of tokens in all calls, trained or not. `generators`: names of the asked generators, in order.
    `pictures`: the files of pictures, by name. `cache_salt`: calls share the KV cache only with calls of the same salt.
    """

    pictures: Mapping[str, bytes] = {}
    cache_salt = ""

    def __init__(
        self,
        sampling: SamplingConfig,
        min_version: int,
        home: Member | None,
        slot: ExitStack | None,
        on_start: Callable[[int], None],
    ) -> None:
        self.sampling = sampling
        self.min_version = min_version
        self.home = home
        self.slot = slot or ExitStack()
        self.first_version: int | None = None
        self.tokens_sampled = 0
        self.generators: dict[str, None] = {}
        self.closed = False
        self._on_start = on_start
        self._draws = itertools.count()

    @property
    def room(self) -> int:
        """The number of tokens that the sample may still sample."""
        return max(0, self.sampling.max_new_tokens - self.tokens_sampled)

    def next_seed(self) -> int | None:
        """Return the seed of the next call: calls of a sample differ."""
        seed = self.sampling.seed
        return None if seed is None else (seed + next(self._draws)) % 2**63

    async def place(self, choose: Choose) -> Member:
        """Return the generator of the next call. Raises SampleFailed if there is none."""
        return await choose("generator", None, self.min_version)

    def count(self, versions: np.ndarray) -> None:
        """Count new tokens with these versions."""
        self.tokens_sampled += len(versions)
        if self.first_version is None and len(versions):
            self.first_version = int(versions[0])
            self._on_start(self.first_version)


class Call(Job):
    """A call of a sample to the policy (areal.generation.moves.Sequence). All tokens that arrive are kept: if a
    generator is lost, another generator continues from the last token. Calls with the same prompt send the prompt once.

    limit: the most tokens to sample. pictures: the names of the prompt's pictures, in order. keep: gets all tokens of
    the completion so far, and returns the number of tokens to keep and to end with, or None to continue. `generator`:
    identity of the generator that has the sequence, since the time `since`; None: no generator. `target`: the generator
    to continue on. `finish`: how the last tokens ended.
    """

    role = "generator"

    def __init__(
        self, sample: SampleState, prompt: np.ndarray, limit: int, keep: Keep | None, pictures: Sequence[str] = ()
    ) -> None:
        self.sample = sample
        self.pictures = tuple(pictures)
        self.files = {name: sample.pictures[name] for name in pictures}
        self.generator: str | None = None
        self.since = 0.0
        self.finish: Finish | None = None
        self._prompt = prompt
        self._limit = limit
        self._keep = keep
        self._seed = sample.next_seed()
        self._table = TokenTable()

    @staticmethod
    def request(flow: int, jobs: "Sequence[Call]") -> Generate:
        prompts: dict[tuple[bytes, tuple[str, ...]], tuple[int, np.ndarray]] = {}  # number and tokens of a prompt
        new = []
        for call in jobs:
            tokens, sampling = call.tokens, call.sampling
            key = tokens.tobytes(), call.pictures
            prompt, _ = prompts.setdefault(key, (len(prompts), tokens))
            new.append(
                NewSequence(
                    job=call.number,
                    prompt=prompt,
                    **{name: getattr(sampling, name) for name in SAMPLING},
                    min_version=call.min_version,
                    first_version=call.sample.first_version,
                    cache_salt=call.sample.cache_salt,
                    whole=call._keep is None,
                    seed=call._seed,
                )
            )
        tokens_of_all = tuple(tokens for _, tokens in prompts.values())
        everything: dict[str, Any] = {"flow": flow, "prompts": tokens_of_all, "sequences": tuple(new)}
        if not any(call.files for call in jobs):
            return Generate(**everything)
        return GeneratePictured(**everything, pictures=tuple(pictures for _, pictures in prompts))

    @staticmethod
    def deliver(part: Message, jobs: "dict[int, Call]") -> Sequence[JobFailed]:
        if not isinstance(part, TokenColumns):
            raise BusError(f"a generator sent {part.kind!r} instead of tokens")
        with explain(ValueError, "a generator sent wrong columns: {why}", BusError):
            tables = split(part.columns, part.counts.tolist())
        for number, table, finish in zip(part.jobs.tolist(), tables, part.finishes.tolist(), strict=True):
            if call := jobs.get(number):
                call.receive(table, FINISHES[finish])
                if finish:
                    del jobs[number]
        return part.failed

    @property
    def sampled(self) -> int:
        """The number of tokens that have arrived."""
        return len(self._table)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [prefix]: the prompt and the sampled tokens."""
        return np.concatenate([self._prompt, self._table.tokens])

    @property
    def prefix(self) -> int:
        return len(self._prompt) + self.sampled

    @property
    def remaining(self) -> int:
        return self._limit - self.sampled

    @property
    def min_version(self) -> int:
        return self.sample.min_version

    @property
    def sampling(self) -> SamplingConfig:
        """The settings for the remaining tokens. A call's limit may be below the sample's least number of tokens."""
        settings, limit = self.sample.sampling, self.remaining
        least = min(limit, max(0, settings.min_new_tokens - self.sample.tokens_sampled))
        return settings.model_copy(update={"max_new_tokens": limit, "min_new_tokens": least})

    def begin_dispatch(self) -> Member | None:
        self.sample.slot.close()
        return self.sample.home

    def check(self) -> None:
        if self.sample.closed:
            raise ended()

    async def place(self, choose: Choose) -> Member:
        return await self.sample.place(choose)

    def run_at(self, member: Member) -> None:
        self.sample.home = member
        self.sample.generators[actor_name(member.identity)] = None
        self.generator, self.since = member.identity, asyncio.get_running_loop().time()

    def settle(self, error: BusError) -> Generation | None:
        if not isinstance(error, RefusedError | FencedError | MalformedError):
            self.generator = None
            return None
        if isinstance(error, FencedError | MalformedError):
            raise SampleFailed("prompt", f"the generator refused the prompt: {error}") from None
        return self.refused(error)

    def leave(self, member: Member, target: Member | None) -> Member | None:
        self.target = None
        if self.sample.home is member:
            self.sample.home = target
        return target

    def end_dispatch(self) -> None:
        self.generator = None

    def move(self, target: Member) -> None:
        """Have the current generator hand the running sequence over, and continue the sequence on `target`."""
        self.target = target
        self.stop()

    def abort(self) -> None:
        self.fail(ended())

    def receive(self, new: TokenTable, finish: Finish | None) -> None:
        """Add tokens from a flow (see `add`), unless the call has ended."""
        if not self.runs:
            return
        try:
            if (completion := self.add(new, finish)) is not None:
                self.succeed(completion)
        except Exception as error:  # an error of the workflow's `keep`, for the workflow
            self.fail(error)

    def add(self, new: TokenTable, finish: Finish | None) -> Generation | None:
        """Add the next tokens. Returns the completion if the tokens have a finish, if `keep` ends the call, or if the
        sample's other calls have left no room. Raises SampleFailed if the sample is closed."""
        if self.sample.closed:
            raise ended()
        room = self.sample.room
        self._table.append(new)
        self.finish = finish
        self.sample.count(new.versions)
        end = self._kept_length()
        length = self.sampled - max(0, len(new) - room)
        if length < self.sampled and (end is None or end > length):
            return self.completion("length", length)
        if end is not None:
            return self.completion("stop", end)
        if finish:
            return self.completion(finish)
        return None if room > len(new) else self.completion("length")

    def completion(self, finish: Finish | None, length: int | None = None) -> Generation:
        """Return the first `length` tokens as a completion; None: all."""
        return Generation.of(self._table.view(0, length), finish)

    def refused(self, error: Exception) -> Generation:
        """Return the completion after a generator's refusal. Raises SampleFailed if the sample has no token yet."""
        if self.sample.tokens_sampled:  # the prompt has become too long
            return self.completion("length")
        raise SampleFailed("prompt", f"the generator refused the prompt: {error}") from None

    def _kept_length(self) -> int | None:
        if self._keep is None:
            return None
        tokens = self._table.tokens
        tokens.flags.writeable = False  # the tokens belong to the sample
        return self._keep(tokens)


@dataclass(eq=False)
class ScoringRules:
    """The rules for all scoring jobs of an actor. awaited: rewards with actors that are awaited without a deadline, as
    scorers are. on_refusal: called with the cause and the reason when a job is refused for the first time."""

    config: RewardConfig
    awaited: Set[str]
    on_refusal: Callable[[Cause, str], None]
    quarantine: Quarantine = field(init=False)

    def __post_init__(self) -> None:
        self.quarantine = Quarantine(self.config.quarantine_after)


class ScoringJob(Job):
    """The common part of jobs for reward actors and scorers: an actor that serves a name does the job. After an error
    another actor is asked, a limited number of times."""

    def __init__(self, rules: ScoringRules, role: ScoringRole, serves: str) -> None:
        self.role: ScoringRole = role
        self.serves: str = serves
        self.rules = rules
        self._refused = self._lost = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.serves!r}"

    def settle(self, error: BusError) -> None:
        if isinstance(error, MalformedError):  # this row can travel to no actor at any time
            raise SampleFailed("row", f"{self.name}: {error}") from None
        if isinstance(error, RefusedError):
            self._refused += 1
            if self._refused == 1:
                self.rules.on_refusal(self.role, f"{self.name}: {error}")
        elif not isinstance(error, BusyError):  # an actor that drains or starts has lost nothing
            self._lost += 1
        self.note_harm(error)
        if self._refused > self.rules.config.retries or self._lost > REWARDS_LOST:
            raise SampleFailed(self.role, f"{self.name}: {error}") from None

    def note_harm(self, error: BusError) -> None:
        """Called with each error."""


class ScoreJob(ScoringJob):
    """A job to score a completion, or the completions of a group; the result is a list of Results. Jobs of a row send
    the row once. scorer: the name of the scorer that gives the reward `function`; None: a reward actor gives it."""

    def __init__(
        self,
        rules: ScoringRules,
        function: str,
        prompt: str,
        completions: Sequence[str],
        row: Mapping[str, Any],
        tokens: np.ndarray | None,
        scorer: str | None = None,
    ) -> None:
        super().__init__(rules, "scorer" if scorer else "reward", scorer or function)
        self.function = function
        self.prompt = prompt
        self.completions = tuple(completions)
        self.row = row
        self.tokens = tokens

    async def place(self, choose: Choose) -> Member:
        if self.role == "scorer":
            return await super().place(choose)
        if self.rules.quarantine:
            with explain(RewardFailed, f"{self.name}: {{why}}", _reward_failed):
                self.rules.quarantine.check(self._digest())
        if self.serves in self.rules.awaited:
            return await super().place(choose)
        absent = f"no reward actor serves {self.serves!r} (waited {NO_REWARD_SECONDS:g} s)"
        with explain(TimeoutError, absent, _reward_failed):
            async with asyncio.timeout(NO_REWARD_SECONDS):
                return await super().place(choose)

    def note_harm(self, error: BusError) -> None:
        if isinstance(error, HarmfulError):
            self.rules.quarantine.lost(self._digest())

    def _digest(self) -> bytes:
        return digest(self.function, self.prompt, self.completions, self.row)

    @staticmethod
    def request(flow: int, jobs: Sequence["ScoreJob"]) -> Score:
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
    def deliver(part: Message, jobs: "dict[int, ScoreJob]") -> Sequence[JobFailed]:
        if not isinstance(part, CompletionsScored):
            raise BusError(f"a reward actor sent {part.kind!r} instead of scores")
        for scored in part.scored:
            if (job := jobs.get(scored.job)) and len(scored.scores) != len(job.completions):
                raise BusError("a reward actor sent scores of another number of completions")
            if job := jobs.pop(scored.job, None):
                job.succeed([*map(Result, scored.scores, scored.parts)])
        return part.failed


def ended() -> SampleFailed:
    return SampleFailed("workflow", "its workflow ended before this call")


def _reward_failed(why: str) -> SampleFailed:
    return SampleFailed("reward", why)
