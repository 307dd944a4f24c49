"""The jobs that samples give to other actors on flows: sequences for generators, completions for reward actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from actors.parts.flows import Job
from areal.config import SamplingConfig
from areal.generation.engine import Chunk
from areal.rewards.result import Result
from areal.workflows.conversation import Generation
from protocols.errors import BusError
from protocols.messages import (
    FINISHES,
    Completion,
    CompletionsScored,
    Generate,
    JobFailed,
    Message,
    NewSequence,
    Score,
    TokenColumns,
    slices,
)


class SequenceJob(Job):
    """A sequence to sample. `taken` gets each chunk, and returns the completion if that ends with it."""

    def __init__(
        self, number: int, prompt: np.ndarray, sampling: SamplingConfig, max_new_tokens: int, min_new_tokens: int,
        min_version: int, first_version: int | None, taken: Callable[[Chunk], Generation | None],
    ) -> None:  # fmt: skip
        super().__init__(number)
        self.prompt = prompt
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens
        self.min_version = min_version
        self.first_version = first_version
        self._taken = taken

    def take(self, part: Chunk) -> None:
        if self.done.done():
            return
        try:
            if (completion := self._taken(part)) is not None:
                self.succeed(completion)
        except Exception as error:  # of the workflow's `keep`, to which it belongs
            self.fail(error)


class Sequences:
    """Jobs of generators. Those with the same prompt send it once."""

    @staticmethod
    def request(flow: int, jobs: Sequence[SequenceJob]) -> Generate:
        prompts = {job.prompt.tobytes(): job.prompt for job in jobs}
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        new = (
            NewSequence(
                job=job.number,
                prompt=numbers[job.prompt.tobytes()],
                temperature=job.sampling.temperature,
                top_p=job.sampling.top_p,
                max_new_tokens=job.max_new_tokens,
                min_new_tokens=job.min_new_tokens,
                min_version=job.min_version,
                first_version=job.first_version,
            )
            for job in jobs
        )
        return Generate(flow=flow, prompts=tuple(prompts.values()), sequences=tuple(new))

    @staticmethod
    def take(part: Message, jobs: dict[int, SequenceJob]) -> Sequence[JobFailed]:
        if not isinstance(part, TokenColumns):
            raise BusError(f"a generator sent {part.kind!r} instead of tokens")
        for number, own, finish in zip(part.jobs.tolist(), slices(part.counts), part.finishes.tolist(), strict=True):
            if job := jobs.get(number):
                job.take(Chunk(part.tokens[own], part.logprobs[own], part.versions[own], FINISHES[finish]))
                if finish:
                    del jobs[number]
        return part.failed


class ScoreJob(Job):
    """A completion to score; the result is a Result."""

    def __init__(
        self, number: int, function: str, prompt: str, completion: str, row: Mapping[str, Any],
        tokens: np.ndarray | None,
    ) -> None:  # fmt: skip
        super().__init__(number)
        self.function = function
        self.prompt = prompt
        self.completion = completion
        self.row = row
        self.tokens = tokens


class Completions:
    """Jobs of reward actors. Those of the same row send it once."""

    @staticmethod
    def request(flow: int, jobs: Sequence[ScoreJob]) -> Score:
        rows = {id(job.row): job.row for job in jobs}
        numbers = {row: number for number, row in enumerate(rows)}
        completions = (
            Completion(
                job=job.number,
                function=job.function,
                prompt=job.prompt,
                completion=job.completion,
                row=numbers[id(job.row)],
                tokens=job.tokens,
            )
            for job in jobs
        )
        return Score(flow=flow, rows=tuple(dict(row) for row in rows.values()), completions=tuple(completions))

    @staticmethod
    def take(part: Message, jobs: dict[int, ScoreJob]) -> Sequence[JobFailed]:
        if not isinstance(part, CompletionsScored):
            raise BusError(f"a reward actor sent {part.kind!r} instead of scores")
        for scored in part.scored:
            if job := jobs.pop(scored.job, None):
                job.succeed(Result(scored.score, scored.parts))
        return part.failed
