"""Passes over a block of logits as one Triton kernel each, which `head` uses with `trainer.fused_head`.

PyTorch's own operations read and write each logit about ten times in each direction, in fp32. A kernel reads it once,
in the type of the model, and the gradient overwrites it. All sums are in fp32, as in `head`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Words that a program takes at a time."""
WARPS = 8
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _reduce(logits, factor, words, top, normaliser, entropy, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    first = row.to(tl.int64) * words
    lanes = tl.arange(0, BLOCK)
    highest = LOWEST
    total = 0.0
    pull = 0.0  # the sum of power * (score - highest)
    for start in range(0, words, BLOCK):
        inside = start + lanes < words
        scores = tl.load(logits + first + start + lanes, mask=inside, other=LOWEST).to(tl.float32) * factor
        above = tl.maximum(highest, tl.max(tl.where(inside, scores, LOWEST), 0))
        lower = highest - above
        shrink = tl.exp(lower)
        scores -= above
        powers = tl.where(inside, tl.exp(scores), 0.0)
        pull = shrink * (pull + lower * total) + tl.sum(tl.where(inside, powers * scores, 0.0), 0)
        total = shrink * total + tl.sum(powers, 0)
        highest = above
    tl.store(top + row, highest)
    tl.store(normaliser + row, tl.log(total))
    tl.store(entropy + row, tl.log(total) - pull / total)


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    logits, factor, words, top, normaliser, entropy, sums, pulls, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    words_of = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words_of < words
    places = logits + row.to(tl.int64) * words + words_of
    scores = tl.load(places, mask=inside, other=LOWEST).to(tl.float32) * factor
    logps = scores - tl.load(top + row) - tl.load(normaliser + row)
    d = -tl.exp(logps) * (tl.load(sums + row) + tl.load(pulls + row) * (logps + tl.load(entropy + row)))
    tl.store(places, d.to(logits.dtype.element_ty), mask=inside)


def reduce(logits: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the scores, logits [U, W] times `factor`: the highest, log sum exp(score - highest), and the entropies, [U]
    each in fp32."""
    sums = logits.new_empty((3, len(logits)), dtype=torch.float32)
    _reduce[(len(logits),)](logits, factor, logits.shape[1], *sums, BLOCK=BLOCK, num_warps=WARPS)
    top, normaliser, entropy = sums
    return top, normaliser, entropy


def differentiate(
    logits: Tensor, factor: float, rows: tuple[Tensor, ...], places: tuple[Tensor, Tensor], gradients: Tensor
) -> Tensor:
    """The derivative of a loss by the scores, in place of the logits [U, W], which it overwrites.

    rows: [U] each: the highest score, the normaliser and the entropy of all words; the sums of the gradients of the
    row's log-probs and of its entropies. places: row and word of each log-prob, [S] each; gradients: [S], of these.
    """
    words, (row, word) = logits.shape[1], places
    top, normaliser, entropy, sums, pulls = rows
    # A target's derivative is the difference of two numbers that are nearly the same where p is near 1: it is complete
    # before it is rounded. Several tokens may have the same place: each of them gets the sum.
    logps = logits[row, word].float() * factor - top[row] - normaliser[row]
    ordered = (keys := row * words + word).sort().values
    same = torch.searchsorted(ordered, keys)
    together = torch.zeros_like(gradients).index_add_(0, same, gradients)[same]
    complete = together - logps.exp() * (sums[row] + pulls[row] * (logps + entropy[row]))
    grid: Any = (len(logits), triton.cdiv(words, BLOCK))
    if len(logits):
        _differentiate[grid](logits, factor, words, *rows, BLOCK=BLOCK, num_warps=WARPS)
    return logits.index_put_(places, complete.to(logits.dtype))
