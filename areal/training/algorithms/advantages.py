"""Advantages from credits: `normalised`, and an estimator's call on a batch. `estimators` finds estimators by name.

By default a sample is credited with its reward at its last token. With gamma = lambda = 1 and no value function, every
sampled token of a sample has the same advantage: the sample's normalised reward. A sample may also give every token its
own return. A penalty on a single token (`Credits.penalties`) lowers the return of the penalised token and of earlier
tokens, since later tokens did not cause the penalty. With a critic, estimates replace returns and penalties.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from areal.base.errors import UserError, explain
from areal.samples.trajectory import differ

Estimator = Callable[["Credits"], np.ndarray]
"""Returns the advantages of a batch, per sample, [M], or per token, [T]. A true attribute `compares_group` says that
the estimator compares the samples of a group, so groups of one sample teach nothing."""


@dataclass(frozen=True)
class Credits:
    """The credits of the M samples of a batch and of their T tokens.

    rewards: float64 [M]. groups: int [M], the group of each sample; groups may differ in size. samples: int [T], the
    sample of each token, ascending; a sample's tokens are in causal order. sampled: bool [T], the tokens that the
    policy sampled. returns: float64 [T], in place of the reward of the token's sample; None: the reward. penalties:
    float64 [T], or None. columns: by name, [T] or [T, k], the columns of the table of tokens (areal.samples.table) that
    the samples have, and results of passes before the step.
    """

    rewards: np.ndarray
    groups: np.ndarray
    samples: np.ndarray
    sampled: np.ndarray
    returns: np.ndarray | None
    penalties: np.ndarray | None
    columns: dict[str, np.ndarray]

    @cached_property
    def of_tokens(self) -> np.ndarray:
        """float64 [T], the return of each token, less the penalties of the token and of later tokens of the sample."""
        gains = self.rewards[self.samples] if self.returns is None else self.returns
        return gains if self.penalties is None else gains - to_go(self.penalties, self.samples)

    @cached_property
    def of_samples(self) -> np.ndarray:
        """float64 [M], the reward of each sample, or the mean return of its sampled tokens; less all penalties."""
        totals = self.rewards if self.returns is None else self.mean(self.returns)
        return totals if self.penalties is None else totals - np.bincount(self.samples, self.penalties)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """float64 [M], the mean of values [T] over the sampled tokens of a sample."""
        return np.bincount(self.samples, values * self.sampled) / np.bincount(self.samples, self.sampled)

    def part(self, tokens: np.ndarray) -> "Credits":
        """Return the credits of these tokens alone, bool [T], with the samples that have such tokens."""
        numbers, samples = np.unique(self.samples[tokens], return_inverse=True)
        returns, penalties = (None if column is None else column[tokens] for column in (self.returns, self.penalties))
        columns = {name: column[tokens] for name, column in self.columns.items()}
        of_samples = self.rewards[numbers], self.groups[numbers]
        return Credits(*of_samples, samples, self.sampled[tokens], returns, penalties, columns)

    def in_groups(self, function: Callable[[np.ndarray], Any]) -> np.ndarray:
        """float64 [M], the result of `function` for the credits of the samples in each sample's group."""
        values, (_, member) = self.of_samples, np.unique(self.groups, return_inverse=True)
        return np.array([function(values[member == number]) for number in range(member.max() + 1)], np.float64)[member]


def normalised(credits: Credits, mean: str = "batch", std: str = "batch") -> np.ndarray:
    """Return (return - mean) / std of every token, float64 [T]; 0 up to rounding (areal.samples.trajectory.differ).

    mean: one of MEANS, over `Credits.of_samples`. std: "batch", "group" or "none" (1), the root mean square of the
    sampled tokens' returns less the mean, over the batch or group; all tokens of a sample together weigh as much as one
    sample. So abs(A) is at most about sqrt(MT), if std and mean have the same level (TrainerConfig refuses other
    pairs).
    """
    gains, totals = credits.of_tokens, credits.of_samples

    def differences(level: str) -> np.ndarray:
        means = MEANS[level](totals, credits.groups)[credits.samples]
        return np.where(differ(gains, means), gains - means, 0.0)

    if std == "none":
        return differences(mean)
    scales = np.sqrt(MEANS[std](credits.mean(differences(std) ** 2), credits.groups))
    return differences(mean) / np.where(scales > 0, scales, 1.0)[credits.samples]


def _group_mean(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    sums, sizes = _sums_in_groups(values, groups)
    return sums / sizes


def _mean_of_others(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The mean over the rest of the group; in a group of one sample, the sample's own value."""
    sums, sizes = _sums_in_groups(values, groups)
    return np.where(sizes > 1, (sums - values) / np.maximum(sizes - 1, 1), values)


def _sums_in_groups(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    return np.bincount(member, values)[member], sizes[member]


MEANS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "batch": lambda values, groups: np.full(len(values), values.mean()),
    "group": _group_mean,
    "leave_one_out": _mean_of_others,
    "none": lambda values, groups: np.zeros(len(values)),
}
"""`trainer.advantage_mean`: from values and groups of the samples, [M] each, the baseline of each sample."""


def estimate(estimator: Estimator, credits: Credits, name: str) -> np.ndarray:
    """Return the advantages of all tokens, float64 [T]. In a batch of several agents, each agent is compared with
    itself alone, since rewards of agents may have different levels. name: of the estimator. Raises ValueError if
    credits are not finite, and UserError if the estimator fails or gives no advantages."""
    agents = credits.columns.get("agents", np.zeros(0))
    if not agents.any():
        return _estimate(estimator, credits, name)
    values = np.zeros(len(agents))
    for agent in np.unique(agents[credits.sampled]):
        tokens = credits.sampled & (agents == agent)
        values[tokens] = _estimate(estimator, credits.part(tokens), name)
    return values


def _estimate(estimator: Estimator, credits: Credits, name: str) -> np.ndarray:
    totals, samples = credits.of_samples, credits.samples
    if not np.isfinite(totals).all() or not np.isfinite(credits.of_tokens).all():
        raise ValueError(f"rewards, returns and penalties must be finite, not {totals.tolist()}")
    called = f"trainer.advantage {name!r}, called on {len(totals)} samples with {len(samples)} tokens,"
    # The user's own code may raise anything.
    with explain(Exception, f"{called} raised {{why}}. It takes areal.training.Credits and trainer.advantage_options."):
        values = estimator(credits)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise UserError(f"{called} returned a value of type {type(values).__name__}: return a NumPy array of numbers.")
    if values.shape not in (totals.shape, samples.shape):
        raise UserError(
            f"{called} returned an array of shape {list(values.shape)}: return one advantage for each sample, "
            f"[{len(totals)}], or for each token, [{len(samples)}]."
        )
    if not np.isfinite(values).all():
        raise UserError(f"{called} returned advantages that are not finite: look for a division by 0 in it.")
    return (values[samples] if values.shape == totals.shape else values).astype(np.float64)


def to_go(values: np.ndarray, samples: np.ndarray, discount: float = 1.0) -> np.ndarray:
    """Return the sum of each token's value and the later values of its sample, times `discount` per step, [T]."""
    order = samples.argsort(kind="stable")
    lengths = np.bincount(samples)
    longest_first = (-lengths).argsort(kind="stable")
    lasts, lengths = lengths.cumsum()[longest_first] - 1, lengths[longest_first]
    to_go, sums = np.empty(len(values)), np.zeros(len(lengths))
    for back in range(int(lengths.max(initial=0))):
        at = order[lasts[: np.count_nonzero(lengths > back)] - back]
        sums = values[at] + discount * sums[: len(at)]
        to_go[at] = sums
    return to_go
