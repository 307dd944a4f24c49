"""The calls of a sample to the policy: each is a sequence of tokens, which one generator after another may sample."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from actors.sampling.flows import Job
from areal.base.errors import explain
from areal.config.engine_sections import SamplingConfig
from areal.rewards.result import Result, RewardError
from areal.samples.table import Finish, Generation, TokenTable, split
from areal.workflows.conversation import Keep
from protocols.bus_errors import BusError
from protocols.messages import (
    FINISHES,
    SAMPLING,
    Cause,
    Generate,
    GeneratePictured,
    JobFailed,
    Member,
    Message,
    NewSequence,
    TokenColumns,
)


class SampleFailed(Exception):
    """A sample, or a group, cannot be finished or scored, because of `cause`. It never gets a score of 0 instead."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.cause = cause


async def score_with_retries(
    name: str,
    retries: int,
    score: Callable[[], Awaitable[list[Result]]],
    on_refusal: Callable[[Cause, str], None] = lambda cause, reason: None,
) -> list[Result]:
    """What `score` returns, which is called up to `retries` times more while the reward `name` fails. on_refusal: is
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
    """What the calls of a sample have in common.

    `home`: the generator on which the next call starts, because it has the prefix; None: any. `slot`: counts as a
    request there until the first call begins. `first_version`: of the first token; `on_start` is called with it.
    `min_version` rises to the group's start version once that is known, so that no older version samples a later token.
    `tokens_sampled`: all tokens received, in all calls, trained or not. `generators`: the names of those that were
    asked, in order. `pictures`: the files of all that it shows, by their names. `cache_salt`: of whose text the KV
    cache may be used.
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

    @property
    def room(self) -> int:
        """The number of tokens that the sample may still sample."""
        return max(0, self.sampling.max_new_tokens - self.tokens_sampled)

    def count(self, versions: np.ndarray) -> None:
        """New tokens have arrived, of these versions."""
        self.tokens_sampled += len(versions)
        if self.first_version is None and len(versions):
            self.first_version = int(versions[0])
            self._on_start(self.first_version)


class Call(Job):
    """A call of a sample to the policy (areal.generation.routing.Sequence). All tokens that arrive are kept: where a
    generator is lost, another one continues from the last token. Calls with the same prompt send it once.

    limit: the most tokens to sample. pictures: the names of those of the prompt, in order. keep: gets all tokens of the
    completion so far, and returns how many of them to keep and end with, or None to continue. `generator`: identity of
    the one that has the sequence, since the time `since`; None: none has. `target`: the one on which it should
    continue. `finish`: what the last tokens came with.
    """

    def __init__(
        self, sample: SampleState, prompt: np.ndarray, limit: int, keep: Keep | None, pictures: Sequence[str] = ()
    ) -> None:
        self.sample = sample
        self.pictures = tuple(pictures)
        self.files = {name: sample.pictures[name] for name in pictures}
        self.target: Member | None = None
        self.generator: str | None = None
        self.since = 0.0
        self.finish: Finish | None = None
        self._prompt = prompt
        self._limit = limit
        self._keep = keep
        self._table = TokenTable()

    @staticmethod
    def request(flow: int, jobs: "Sequence[Call]") -> Generate:
        prompts: dict[tuple[bytes, tuple[str, ...]], tuple[int, np.ndarray]] = {}  # the number and the tokens of each
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
        """int32 [prefix]: the prompt and what is sampled."""
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
        """The settings for the tokens that remain. A call may be limited to fewer than its sample must have."""
        settings, limit = self.sample.sampling, self.remaining
        least = min(limit, max(0, settings.min_new_tokens - self.sample.tokens_sampled))
        return settings.model_copy(update={"max_new_tokens": limit, "min_new_tokens": least})

    def run_at(self, generator: str) -> None:
        """Note that this generator has the sequence from now on."""
        self.generator, self.since = generator, asyncio.get_running_loop().time()

    def move(self, target: Member) -> None:
        """Have the current generator hand the running sequence over, and continue it on `target`."""
        self.target = target
        self.stop()

    def abort(self) -> None:
        self.fail(ended())

    def receive(self, new: TokenTable, finish: Finish | None) -> None:
        """Add tokens that a flow has brought (see `add`), unless the call has ended meanwhile."""
        if not self.runs:
            return
        try:
            if (completion := self.add(new, finish)) is not None:
                self.succeed(completion)
        except Exception as error:  # of the workflow's `keep`, to which it belongs
            self.fail(error)

    def add(self, new: TokenTable, finish: Finish | None) -> Generation | None:
        """Add the next tokens. Returns the completion if it is finished with them, if `keep` ends it, or if the sample
        has no room for more, since its other calls sample too. Raises SampleFailed if the sample is closed."""
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
        """The first `length` of the tokens that have arrived."""
        return Generation.of(self._table.view(0, length), finish)

    def refused(self, error: Exception) -> Generation:
        """The completion after a generator has refused the tokens. Raises SampleFailed if the sample has none yet."""
        if self.sample.tokens_sampled:  # the prompt has become too long
            return self.completion("length")
        raise SampleFailed("prompt", f"the generator refused the prompt: {error}") from None

    def _kept_length(self) -> int | None:
        if self._keep is None:
            return None
        tokens = self._table.tokens
        tokens.flags.writeable = False  # they are the sample's
        return self._keep(tokens)


def ended() -> SampleFailed:
    return SampleFailed("workflow", "its workflow ended before this call")
