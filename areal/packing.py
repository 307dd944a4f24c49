"""Dynamic micro-batches: Algorithm 1 of the AReaL paper (arXiv 2505.24298), and its share-out over ranks.

Sequences are packed by length under a token cap, with no padding. Everything here is a pure function of the
lengths, so every rank computes the same plan by itself.
"""

from __future__ import annotations

from collections.abc import Sequence


def microbatches(lengths: Sequence[int], cap: int, k_min: int = 1) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `cap` tokens.

    Longest first: a new micro-batch is opened while there are fewer than `k_min` or where the sequence fits into
    none; otherwise it goes into the fitting one with the fewest sequences (the first of these).

    lengths: tokens of each sequence. Returns the indices of each micro-batch's sequences; every index is in exactly
    one of them. A sequence longer than `cap` has a micro-batch of its own: it cannot be cut, and dropping it would
    train on short answers only. Raises ValueError where `cap`, `k_min` or a length is below 1.
    """
    if cap < 1 or k_min < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"cap ({cap}), k_min ({k_min}) and all lengths must be at least 1")
    packed: list[list[int]] = []
    tokens: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [k for k, used in enumerate(tokens) if used + lengths[index] <= cap]
        if len(packed) < k_min or not fitting:
            packed.append([index])
            tokens.append(lengths[index])
            continue
        k = min(fitting, key=lambda k: len(packed[k]))
        packed[k].append(index)
        tokens[k] += lengths[index]
    return packed


def split_over_ranks(lengths: Sequence[int], ranks: int, cap: int) -> list[list[list[int]]]:
    """Deal sequences to `ranks`, balanced in tokens, and pack each rank's share with `microbatches`.

    Returns one list of micro-batches a rank, largest first. Ranks differ by at most the longest sequence in tokens. All
    have the same number of micro-batches, since under ZeRO-3 every forward and backward pass is a collective; a rank
    with too few sequences gets empty ones. Raises ValueError as `microbatches` does.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = tokens.index(min(tokens))
        shares[least].append(index)
        tokens[least] += lengths[index]

    rounds, packed = 0, [microbatches([lengths[i] for i in share], cap) for share in shares]
    while (most := max(map(len, packed))) > rounds:  # spread over more micro-batches, a rank may come to need one more
        rounds = most
        packed = [microbatches([lengths[i] for i in share], cap, k_min=rounds) for share in shares]

    dealt = []
    for share, rows in zip(shares, packed, strict=True):
        own = [[share[i] for i in row] for row in rows]
        own.sort(key=lambda row: -sum(lengths[i] for i in row))
        dealt.append(own + [[] for _ in range(rounds - len(own))])
    return dealt
