"""Groups of ranks that compute a row together. In the core each rank is alone; extensions have other groups."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.training.packed import PackedRow

if TYPE_CHECKING:
    from areal.training.head import Head

Attention = Callable[..., tuple[Tensor, None]]
"""An attention function as transformers registers them."""
Compute = Callable[..., tuple[Tensor, ...]]
"""Computes the model's outputs: takes a rank's part of a row, the row, and inputs by name in place of the row's."""


class RowGroup:
    """The ranks that compute the same rows as this rank: this rank alone.

    size: how many parts a row has. number: of this group among the `count` groups. first: whether this rank is the
    first rank of the group.
    """

    size = 1

    def __init__(self) -> None:
        self.count, self.number, self.first = dist.get_world_size(), dist.get_rank(), True

    def check(self, head: "Head", vocabulary: int, device: torch.device, compute: Compute) -> None:
        """Raise UserError if the ranks cannot compute rows of a model with this head together (all ranks)."""

    def forward(self, row: PackedRow, compute: Compute) -> tuple[Tensor, ...]:
        """Return the outputs of the forward pass for a row, [S] each (all ranks of the group)."""
        return compute(row, row)

    def attention(
        self, attention: Attention, query: Tensor, key: Tensor, options: dict[str, Any]
    ) -> tuple[Attention, dict[str, Any]]:
        """Return the attention function over all ranks of the group, and its options, for these queries and keys."""
        return attention, options
