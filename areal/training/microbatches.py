"""Dynamic micro-batches: Algorithm 1 of the AReaL paper (arXiv 2505.24298), and their distribution over ranks.

Sequences are packed by length under a token cap, with no padding. `fixed_number` is the paper's baseline in figure 6a.
All functions depend only on lengths and on numbers of shared tokens, so every rank computes the same plan alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


def microbatches(lengths: Sequence[int], cap: int, k_min: int = 1) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `cap` tokens.

    Sequences are placed longest first. A sequence opens a new micro-batch while there are fewer than `k_min`, or if no
    micro-batch has room. Otherwise the sequence goes into the micro-batch with room that has the fewest sequences.

    lengths: tokens of each sequence. Returns the indices of each micro-batch's sequences; every index occurs once. A
    sequence longer than `cap` gets its own micro-batch: a sequence cannot be cut, and dropping it would train on short
    answers only. Raises ValueError if `cap`, `k_min` or a length is below 1.

        >>> microbatches([5, 3, 2, 2], cap=8)
        [[0, 1], [2, 3]]
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


def split_over_ranks(
    lengths: Sequence[int], ranks: int, cap: int, shared: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Distribute sequences over `ranks`, balanced in tokens, and pack each rank's share with `microbatches`.

    shared: the number of first tokens that a sequence has in common with its predecessor. In the same micro-batch,
    shared tokens are computed once and count once. So sequences with shared tokens are distributed in runs. Several
    limits on the length of a run, up to the cap, are tried: the best limit leaves the fewest tokens on the fullest
    rank.

    Returns a list of micro-batches per rank, largest first. Without shared tokens, ranks differ by at most the longest
    sequence in tokens. All ranks have the same number of micro-batches, since under ZeRO-3 every forward and backward
    pass is a collective; a rank with too few sequences gets empty micro-batches. Raises ValueError as `microbatches`
    does.
    """
    shared = [0] * len(lengths) if shared is None else shared
    limits = [cap >> halvings for halvings in range(cap.bit_length())] if ranks > 1 and any(shared) else [cap]
    plans = [_dealt(_runs(lengths, shared, limit), ranks, cap) for limit in limits]
    return min(plans, key=lambda plan: plan[0])[1]


def fixed_number(sequences: int, ranks: int, count: int) -> list[list[list[int]]]:
    """Distribute sequences 0 to `sequences` - 1 over `ranks`, in `count` micro-batches each, without regard to lengths:
    neighbours stay together, and two micro-batches differ by at most one sequence.

    Returns `count` micro-batches per rank. With too few sequences a rank gets fewer micro-batches, each of a single
    sequence; some ranks may have an empty micro-batch. Raises ValueError if `ranks` or `count` is below 1.
    """
    if ranks < 1 or count < 1:
        raise ValueError(f"ranks ({ranks}) and count ({count}) must be at least 1")
    count = max(1, min(count, -(-sequences // ranks)))
    ends = [sequences * k // (ranks * count) for k in range(ranks * count + 1)]
    rows = [list(range(*pair)) for pair in pairwise(ends)]
    return [sorted(rows[rank::ranks], key=len, reverse=True) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Sequences `start` to `stop - 1`. tokens: of the sequences, with shared prefixes counted once."""

    start: int
    stop: int
    tokens: int


def _runs(lengths: Sequence[int], shared: Sequence[int], limit: int) -> list[SequenceRange]:
    """Cut the sequences into runs: wherever nothing is shared, then where the fewest tokens are shared until every run
    has at most `limit` tokens or is a single sequence."""
    starts = [i for i, common in enumerate(shared) if i == 0 or common == 0]
    todo = list(pairwise([*starts, len(lengths)]))
    runs = []
    while todo:
        start, stop = todo.pop()
        tokens = lengths[start] + sum(lengths[i] - shared[i] for i in range(start + 1, stop))
        if tokens <= limit or stop - start == 1:
            runs.append(SequenceRange(start, stop, tokens))
            continue
        middle = (start + stop) / 2
        cut = min(range(start + 1, stop), key=lambda i: (shared[i], abs(i - middle)))
        todo += [(start, cut), (cut, stop)]
    return sorted(runs, key=lambda run: run.start)


def _dealt(runs: Sequence[SequenceRange], ranks: int, cap: int) -> tuple[int, list[list[list[int]]]]:
    """The tokens of the fullest rank, and the micro-batches of every rank."""
    shares: list[list[SequenceRange]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for run in sorted(runs, key=lambda run: -run.tokens):
        least = tokens.index(min(tokens))
        shares[least].append(run)
        tokens[least] += run.tokens

    rounds, packed = 0, [microbatches([run.tokens for run in share], cap) for share in shares]
    while (count := max(map(len, packed))) > rounds:  # with a larger k_min, a rank may need another micro-batch
        rounds = count
        packed = [microbatches([run.tokens for run in share], cap, k_min=rounds) for share in shares]

    dealt = []
    for share, rows in zip(shares, packed, strict=True):
        batches = [[share[i] for i in row] for row in rows]
        batches.sort(key=lambda row: -sum(run.tokens for run in row))
        members = [[i for run in row for i in range(run.start, run.stop)] for row in batches]
        dealt.append(members + [[] for _ in range(rounds - len(batches))])
    return max(tokens), dealt
