"""The jobs of scorers that give log-probs."""

from collections.abc import Sequence

import numpy as np

from actors.sampling.jobs import ScoringJob, ScoringRules
from areal.samples.trajectory import TokenScores
from protocols.bus_errors import BusError
from protocols.messages import JobFailed, Message, slices
from protocols.scorer_messages import ScoreTokens, TokensScored


class TokensJob(ScoringJob):
    """A row of tokens, int32 [T], for the scorer of this name; the result is its TokenScores. All jobs of a flow have
    the same scorer."""

    def __init__(self, rules: ScoringRules, scorer: str, tokens: np.ndarray) -> None:
        super().__init__(rules, "scorer", scorer)
        self.tokens = tokens

    @staticmethod
    def request(flow: int, jobs: Sequence["TokensJob"]) -> ScoreTokens:
        return ScoreTokens(
            flow=flow,
            scorer=jobs[0].serves,
            jobs=np.array([job.number for job in jobs], np.int64),
            counts=np.array([len(job.tokens) for job in jobs], np.int32),
            tokens=np.concatenate([job.tokens for job in jobs]),
        )

    @staticmethod
    def deliver(part: Message, jobs: "dict[int, TokensJob]") -> Sequence[JobFailed]:
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
