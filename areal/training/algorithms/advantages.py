"""Advantages from rewards, without a critic or with one.

By default the reward is given at the last token. With gamma = lambda = 1 and no value function, every sampled token of
a sample then has the same advantage: the sample's normalised reward. A sample may also give each token a return of its
own. A penalty on a single token (`penalties`) lowers the return of that token and of the tokens before it, since later
tokens did not cause it. With a critic, `gae` takes the place of returns and penalties.
"""

import numpy as np

from areal.samples.trajectory import differ


def advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    samples: np.ndarray,
    returns: np.ndarray | None = None,
    penalties: np.ndarray | None = None,
    *,
    sampled: np.ndarray,
    mean: str,
    std: str,
) -> np.ndarray:
    """(return - mean) / std of every token, float64 [T]; 0 up to rounding (areal.samples.trajectory.differ).

    rewards: [M], of each sample. groups: int [M], the group of each sample. Groups may differ in size. samples: int
    [T], the sample of each token; the tokens of a sample are in the order in which they may have caused each other.
    returns: [T], by default the reward of the token's sample. penalties: [T], 0 by default; the return of a token is
    lowered by those of the token and of all later ones of its sample. sampled: bool [T].
    mean: of the samples' returns, each the mean over its sampled tokens or its reward, lowered by all its penalties:
    "batch" (over all), "group", "leave_one_out" (over the others of the group; a group of one uses its own return),
    "none" (0). std: "batch", "group", "none" (1): the root mean square of the sampled tokens' returns less that mean
    over the batch or group, in which all tokens of a sample have the weight of one. So abs(A) is at most about
    sqrt(MT), if std is not of another level than mean (TrainerConfig refuses such pairs). Raises ValueError if a return
    is not finite.
    """
    totals = np.asarray(rewards, np.float64)
    gains = totals[samples]
    if returns is not None:
        gains = np.asarray(returns, np.float64)
        totals = _mean_of(gains, samples, sampled)
    if penalties is not None:
        gains = gains - _to_go(np.asarray(penalties, np.float64), samples)
        totals = totals - np.bincount(samples, penalties)
    if not np.isfinite(totals).all() or not np.isfinite(gains).all():
        raise ValueError(f"rewards, returns and penalties must be finite, not {totals.tolist()}")
    differences = _differences(gains, totals, samples, groups, mean)
    if std == "none":
        return differences
    squares = _mean_of(_differences(gains, totals, samples, groups, std) ** 2, samples, sampled)
    scales = np.sqrt(_means(squares, groups, std))
    return differences / np.where(scales > 0, scales, 1.0)[samples]


def _differences(
    gains: np.ndarray, totals: np.ndarray, samples: np.ndarray, groups: np.ndarray, mean: str
) -> np.ndarray:
    means = _means(totals, groups, mean)[samples]
    return np.where(differ(gains, means), gains - means, 0.0)


def _mean_of(values: np.ndarray, samples: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """The mean over the sampled tokens of each sample, [M]."""
    return np.bincount(samples, values * sampled) / np.bincount(samples, sampled)


def gae(
    values: np.ndarray,
    returns: np.ndarray,
    penalties: np.ndarray | None,
    samples: np.ndarray,
    sampled: np.ndarray,
    *,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """Generalised advantage estimates (arXiv 1506.02438, eq. 16) of the sampled tokens, float64 [T]; 0 for others.

    values: [T], the critic's estimate before each token. returns, penalties, samples, sampled: as of `advantages`, with
    the samples in ascending order. The tokens that a sample did not sample are no steps: the next state is that before
    its next sampled token. The reward of a token is its return minus that of the next one, minus its penalty, so a
    reward of the whole sample is that of its last token.
    """
    own, gains = np.flatnonzero(sampled), np.zeros(len(values))
    V, G, sample = values[own].astype(np.float64), returns[own], samples[own]
    is_last = np.append(sample[1:] != sample[:-1], True)
    next_V, next_G = (np.where(is_last, 0.0, np.roll(array, -1)) for array in (V, G))
    rewards = G - next_G - (0.0 if penalties is None else penalties[own])
    gains[own] = _to_go(rewards + gamma * next_V - V, sample, gamma * lam)
    return gains


def _to_go(values: np.ndarray, samples: np.ndarray, discount: float = 1.0) -> np.ndarray:
    """The sum of each token's value and all later ones of its sample, times `discount` for every token between, [T]."""
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


def _means(rewards: np.ndarray, groups: np.ndarray, of: str) -> np.ndarray:
    _, member, size = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.bincount(member, rewards)[member]
    match of:
        case "batch":
            return np.full(len(rewards), rewards.mean())
        case "group":
            return sums / size[member]
        case "leave_one_out":
            peers = size[member] - 1
            return np.where(peers > 0, (sums - rewards) / np.maximum(peers, 1), rewards)
        case _:
            return np.zeros(len(rewards))
