"""References for kernels: the same numbers without packing, parts or kernels.

References have the precision of their arguments; float64 has far smaller errors than any training dtype.
"""

import math
from typing import Any

import torch
from torch import Tensor

from areal.training.packed import PackedRow


def attention(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, window: int | None = None) -> Tensor:
    """Return the attention of each token of `row` to itself and its ancestors, by a dense mask.

    query: [1, heads, T, D], key and value: [1, kv heads, T, D]. window: the number of nearest ancestors seen, the token
    included; None: all. Returns [1, T, heads, D].
    """
    seen = torch.zeros(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device)
    for path in row.paths.split(row.lengths):
        here = torch.ones(len(path), len(path), dtype=torch.bool, device=seen.device).tril()
        seen[path[:, None], path] |= here if window is None else here.triu(1 - window)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[3])).masked_fill(~seen, -math.inf)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


def logprobs_alone(model: Any, tokens: Tensor, temperature: float) -> Tensor:
    """Return log pi of every token but the first, [T - 1], from the sequence alone. tokens: int64 [T]."""
    logps = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / temperature, -1)
    return logps.gather(1, tokens[1:, None])[:, 0]
