"""Log-probs among the words that sampling has kept, where top-p, top-k or min-p left words out.

A token is drawn from the model's distribution over the kept words, renormalised. So all policies of a loss, behaviour,
proximal, current and reference, are distributions over the words that were kept when the token was sampled.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from areal.training.packed import PackedRow


def with_kept_words(row: PackedRow, words: Tensor) -> PackedRow:
    """Return the row with the S tokens' kept words as further targets. words: int64 [S, k]; no word: below 0."""
    present = words >= 0
    return replace(
        row,
        distribution=torch.cat([row.distribution, row.distribution[present.nonzero()[:, 0]]]),
        targets=torch.cat([row.targets, words[present]]),
    )


def among_kept_words(words: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the log-probs and entropies of the S tokens among their kept words, a critic's values, the log of the kept
    words' total probability, [S] each, and the log-probs of all kept words, [S, k]. outputs: of a row of
    `with_kept_words`."""
    (logp, _, *values), count = outputs, len(words)
    of_words = torch.full(words.shape, -math.inf, device=logp.device).masked_scatter(words >= 0, logp[count:])
    mass = of_words.logsumexp(1)
    policy = of_words - mass[:, None]
    entropy = -(policy.exp() * policy.masked_fill(words < 0, 0.0)).sum(1)
    return logp[:count] - mass, entropy, *(of_tokens[:count] for of_tokens in values), mass, policy
