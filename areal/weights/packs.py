"""Packs of tensors in a direct transfer, and the GPU memory for sending packs. Formulas only: no torch."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# A pack of tensors ends above this size.
PACKED_BYTES = 16 << 20
# Generators to which a trainer sends at once; other generators sample until their turn.
SENDS_AT_ONCE = 2


def packs(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Divide tensors as vLLM's receiver does: a pack ends with the tensor that makes the pack larger than `limit`
    bytes.

    A larger tensor stays whole in its pack: the receiver hands each tensor to the model's `load_weights` by name, which
    takes whole tensors only (packed_nccl_broadcast_consumer in vLLM's packed_tensor.py).

        >>> list(packs([1, 9, 2, 3], size=lambda n: n, limit=4))
        [[1, 9], [2, 3]]"""
    pack: list[T] = []
    total = 0
    for item in items:
        pack.append(item)
        total += size(item)
        if total > limit:
            yield pack
            pack, total = [], 0
    if pack:
        yield pack


def sending_bytes(largest: int) -> int:
    """Return the memory that the trainer's first GPU needs to send weights directly. largest: of a tensor, in bytes."""
    return SENDS_AT_ONCE * (PACKED_BYTES + largest)
