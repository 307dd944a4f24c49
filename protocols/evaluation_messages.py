"""The messages of the evaluator.

| from | to | request | answer |
|---|---|---|---|
| evaluator | master | AskEvaluation | EvaluationAnswer |
| evaluator | master | RowsScored, EvaluationDone, EvaluationAbandoned | Done |
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from protocols.membership_messages import Member
from protocols.messages import Float64s, Int32s, Int64s, Message, Number, Part, Several, slices


class AskEvaluation(Message):
    pass


class RowScores(Part):
    """The scores of held-out rows. `counts[i]` samples of row `rows[i]` could be scored; they have `tokens[i]` sampled
    tokens in total. `scores` holds the scores of all rows, one row after the other."""

    rows: Int32s
    counts: Int32s
    tokens: Int64s
    scores: Float64s

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not len(self.rows) == len(self.counts) == len(self.tokens):
            raise ValueError(f"{len(self.rows)} rows, {len(self.counts)} counts and {len(self.tokens)} sums of tokens")
        if (self.counts < 1).any() or int(self.counts.sum(dtype=np.int64)) != len(self.scores):
            raise ValueError(f"the counts do not divide {len(self.scores)} scores among the rows")
        if not (np.abs(self.scores) <= 1e100).all() or (self.tokens < 0).any():
            raise ValueError("a score or a number of tokens is out of range")
        return self

    @classmethod
    def of(cls, rows: Mapping[int, tuple[Sequence[float], int]]) -> Self:
        """From the scores and the number of tokens by row."""
        return cls(
            rows=np.array(list(rows), np.int32),
            counts=np.array([len(scores) for scores, _ in rows.values()], np.int32),
            tokens=np.array([tokens for _, tokens in rows.values()], np.int64),
            scores=np.array([score for scores, _ in rows.values() for score in scores], np.float64),
        )

    def by_row(self) -> dict[int, tuple[list[float], int]]:
        """The scores and the number of tokens of each row."""
        scores = [self.scores[part].tolist() for part in slices(self.counts)]
        return dict(zip(self.rows.tolist(), zip(scores, self.tokens.tolist(), strict=True), strict=True))


class EvaluationAnswer(Message):
    """`version`: the version to evaluate now; None: ask again. `holder`: the only generator to use; None: use all of
    them, since there is no newer version. `scored`: the rows that an earlier attempt has scored at this version."""

    version: int | None
    holder: Member | None = None
    scored: RowScores | None = None


class RowsScored(Message):
    """Some rows are scored at the version under evaluation. A restarted evaluator skips these rows."""

    version: int
    scored: RowScores


class Sample(Part):
    prompt: str
    completion: str
    answer: str | None
    score: Number


class Scores(Part):
    """Values as in actors.evaluator.pass_at_k.Scorecard. `accuracy`: None if no sample was scored.
    `completion_tokens_mean`: mean over the scored samples. `unfinished`: number of samples that
    `evaluator.timeout_seconds` cut off; no other value counts them."""

    accuracy: Number | None
    standard_error: Number | None = None
    pass_at: dict[str, Number]
    rows: int
    failed: int
    unfinished: int = 0
    completion_tokens_mean: Number | None


class BenchmarkScores(Scores):
    """`samples`: number per row. `scored`: number of scored samples. `cut_share`: share of these at the token limit."""

    samples: int
    scored: int
    cut_share: Number | None


class EvaluationDone(Message, Scores):
    """The scores of the held-out rows, and of every benchmark that was due. The accuracy may be None."""

    version: int
    samples: Several[Sample]
    benchmarks: dict[str, BenchmarkScores] = {}


class EvaluationAbandoned(Message):
    """The evaluation of a version is given up; there will be no result."""

    version: int
    reason: Annotated[str, Field(max_length=4096)]
