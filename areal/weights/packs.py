"""Packs of tensors in a direct transfer, and the GPU memory that sending them takes. Formulas only: no torch."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# Tensors are sent together until they have more than this size.
PACKED_BYTES = 16 << 20
# Generators to which a trainer sends at once; the others sample on until it is their turn.
SENDS_AT_ONCE = 2


def packs(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Divide tensors as vLLM's receiver does: a pack ends with the tensor that makes it larger than `limit` bytes.

    A tensor larger than that is one of a pack as a whole: the receiver hands each one to the model's `load_weights` by
    its name, which takes whole tensors only (packed_nccl_broadcast_consumer in vLLM's packed_tensor.py)."""
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
    """Memory that the trainer's first GPU needs to send weights directly. largest: bytes of the largest tensor."""
    return SENDS_AT_ONCE * (PACKED_BYTES + largest)
