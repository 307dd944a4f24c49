"""Ulysses sequence parallelism (arXiv 2309.14509): several ranks compute each row together, by DeepSpeed's ALST.

The ranks of a *sequence group* have the same rows. Each rank computes an equal part of a row's tokens. In attention,
the ranks exchange tokens for heads: each rank then has all tokens of the row for some heads, so the attention functions
of `packed`, prefix trees included, work unchanged. All further layers of a model take each token by itself. At the end
the ranks exchange log-probs, so that each rank has the whole row's: objectives may look at sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from areal.base.errors import UserError
from areal.training.head import Head
from areal.training.model_checks import LENGTHS, PREFIX, influence_of, random_groups
from areal.training.packed import FlatBatch, PackedRow, empty_row, pack
from areal.training.row_groups import Attention, Compute, RowGroup


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of a row that a rank computes.

    row: the row, filled up by a last sequence so that all parts have the same size. tokens, positions: int64
    [1, T / size], the rank's tokens. predicts: int64, places among the rank's tokens whose hidden states are needed.
    distribution: the place in `predicts` for each log-probability of the rank. targets: the tokens of these
    log-probabilities. indices: int64, the places of these tokens among the row's S. inputs: as in `PackedRow`.
    """

    row: PackedRow
    tokens: Tensor
    positions: Tensor
    predicts: Tensor
    distribution: Tensor
    targets: Tensor
    indices: Tensor
    inputs: dict[str, Tensor]


class SequenceGroup(RowGroup):
    """`size` neighbours, each with a part of every row (all ranks). Raises UserError if the ranks cannot be divided
    into groups of `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if ranks % size:
            raise UserError(
                f"trainer.sequence_parallel is {size}, but the number of the trainer's ranks is {ranks}: make that a "
                f"multiple of it."
            )
        self.size, self.count = size, ranks // size
        self.number, self._rank = divmod(rank, size)
        self.first = self._rank == 0
        groups = [dist.new_group(range(start, start + size)) for start in range(0, ranks, size)]
        self._group: Any = groups[self.number]

    def check(self, head: Head, vocabulary: int, device: torch.device, compute: Compute) -> None:
        def forward(row: PackedRow) -> tuple[Tensor, ...]:
            return compute(row, row, together=Muted())

        if not only_attention_mixes(forward, head.embeddings, vocabulary, device):
            raise UserError(
                f"{head} cannot be trained with trainer.sequence_parallel={self.size}: not only attention mixes the "
                f"tokens of a sequence in it, so set trainer.sequence_parallel=1."
            )
        with torch.no_grad():
            self.forward(empty_row(device), compute)

    def forward(self, row: PackedRow, compute: Compute) -> tuple[Tensor, ...]:
        part = self.part(row)
        inputs = {"input_ids": part.tokens, "position_ids": part.positions, "together": self}
        return self.join(part, compute(part, part.row, **inputs))

    def part(self, row: PackedRow) -> RowPart:
        """Return this rank's part of `row`."""
        full = filled(row, -row.tokens.shape[1] % self.size)
        size = full.tokens.shape[1] // self.size
        start = self._rank * size
        needed = (row.predicts >= start) & (row.predicts < start + size)
        indices = needed[row.distribution].nonzero()[:, 0]
        return RowPart(
            row=full,
            tokens=full.tokens[:, start : start + size],
            positions=full.positions[:, start : start + size],
            predicts=row.predicts[needed] - start,
            distribution=row.distribution[indices] - (row.predicts < start).sum(),
            targets=row.targets[indices],
            indices=indices,
            inputs={name: values[start : start + size] for name, values in full.inputs.items()},
        )

    def join(self, part: RowPart, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the forward pass's outputs for the whole row, [S] each (all ranks of the group). own: for this part.

        The gradient of another rank's values is computed by that rank.
        """
        outputs = own[0].new_zeros(len(own), len(part.row.targets))
        outputs[:, part.indices] = torch.stack([values.detach() for values in own])
        dist.all_reduce(outputs, group=self._group)
        return tuple(whole.index_put((part.indices,), values) for whole, values in zip(outputs, own, strict=True))

    def part_of_heads(self, values: Tensor) -> Tensor:
        """Return the values of this rank's heads. values: [heads], values of all heads."""
        return values.chunk(self.size)[self._rank]

    def attention(
        self, attention: Attention, query: Tensor, key: Tensor, options: dict[str, Any]
    ) -> tuple[Attention, dict[str, Any]]:
        attention = _exchanging(attention, query.shape[1], key.shape[1], query.shape[3], self._group)
        # DeepSpeed collects positions for functions that tell sequences apart by positions. Ours have the row.
        options["position_ids"] = query.new_zeros(1, 1)
        if options.get("s_aux") is not None:
            options["s_aux"] = self.part_of_heads(options["s_aux"])
        return attention, options


class Muted(RowGroup):
    """This rank alone, with 0 in place of the attention's output."""

    def attention(
        self, attention: Attention, query: Tensor, key: Tensor, options: dict[str, Any]
    ) -> tuple[Attention, dict[str, Any]]:
        def silent(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
            output, none = attention(*inputs, **options)
            return torch.zeros_like(output), none

        return silent, options


@cache
def _exchanging(attention: Attention, heads: int, kv_heads: int, width: int, group: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF(
        attention,
        batch_size=1,
        attn_head_count=heads,
        attn_head_size=width,
        kv_head_count=kv_heads,
        num_hidden_layers=1,
        process_group=group,
        seq_length_is_variable=True,
    )


def only_attention_mixes(
    forward: Callable[[PackedRow], tuple[Tensor, ...]],
    embeddings: torch.nn.Module,
    vocabulary: int,
    device: torch.device,
) -> bool:
    """Return whether a model without attention takes each token by itself, so that ranks can divide a row (all ranks).

    The gradient of a log-prob must be exactly 0 with respect to the embeddings of all tokens but the predicting token.
    forward: returns log-probs of a row first, with 0 for the attention's output; embeddings: as in `keeps_apart`.
    """
    flat = FlatBatch.of(random_groups(vocabulary, [LENGTHS], shared=PREFIX), minibatches=1)
    row = pack(flat, flat.trained(None), [0], device)
    _, influence = influence_of(forward, embeddings, row, -1)
    influence[row.predicts[row.distribution[-1]]] = 0
    return not influence.any()


def filled(row: PackedRow, count: int) -> PackedRow:
    """Return the row with `count` more tokens: a last sequence outside the loss."""
    if not count:
        return row
    padding = torch.arange(count, device=row.tokens.device)
    return replace(
        row,
        tokens=pad(row.tokens, (0, count)),
        positions=torch.cat([row.positions, padding[None]], 1),
        lengths=[*row.lengths, count],
        added=[*row.added, count],
        paths=torch.cat([row.paths, padding + row.tokens.shape[1]]),
        inputs={name: pad(of_row.T, (0, count)).T for name, of_row in row.inputs.items()},
    )
