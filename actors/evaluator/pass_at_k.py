"""Computes avg@n and pass@k from the scores of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import stdev


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The results of an evaluation.

    accuracy: avg@n, the mean over rows of the mean score of a row's samples.
    standard_error: of the accuracy, over rows: samples of a row are not independent, so a row counts once
    (Miller 2024, arXiv 2411.00640, section 2.2). None for a single row.
    pass_at: for k = 1, 2, 4, ... up to the number of samples per row, the probability that at least one of k samples is
    solved. A k is left out if no row has k scored samples.
    failed: the number of rows without a scored sample. These rows count in nothing else.
    """

    accuracy: float
    standard_error: float | None
    pass_at: dict[str, float]
    failed: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n >= k samples of which c are solved: 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def scorecard(rows: Sequence[Sequence[float]], samples: int, pass_score: float) -> Scorecard:
    """Return the scorecard of `rows`. A row has the scores of its samples: at most `samples` numbers, fewer if a sample
    has no score. A sample is solved if its score is at least `pass_score`. Raises ValueError if there is no score."""
    scored = [row for row in rows if row]
    if not scored:
        raise ValueError(f"not one sample of {len(rows)} rows could be scored")
    counts = [(len(row), sum(score >= pass_score for score in row)) for row in scored]
    pass_at = {}
    for k in (2**i for i in range(samples.bit_length())):
        if estimates := [pass_at_k(n, c, k) for n, c in counts if n >= k]:
            pass_at[f"{k}"] = sum(estimates) / len(estimates)
    means = [sum(row) / len(row) for row in scored]
    error = stdev(means) / sqrt(len(means)) if len(means) > 1 else None
    return Scorecard(sum(means) / len(means), error, pass_at, failed=len(rows) - len(scored))
