"""Moves tensors between the devices and host memory without their owners' knowledge."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

DEPTH = 4


class OffloadedTensors:
    """The memory of tensors that may be away from their device: `leave` copies the memory to the host and frees it,
    `come_back` undoes this. All views of a memory stay valid, but must not be used while the memory is away."""

    def __init__(self) -> None:
        self._away: list[tuple[UntypedStorage, UntypedStorage]] = []
        self._copies: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}  # kept, since pinned memory is slow to get

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of `tensors`, except memory that torch may not resize, such as mapped files."""
        memories = {memory._cdata: memory for memory in (tensor.untyped_storage() for tensor in tensors)}
        for key, memory in memories.items():
            if not (memory.nbytes() and memory.resizable()):
                continue
            copy = self._copies.get(key, (memory, None))[1]
            if copy is None or copy.nbytes() != memory.nbytes():
                pinned = memory.device.type == "cuda"
                copy = torch.empty(memory.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            copy.copy_(memory)
            memory.resize_(0)
            self._copies[key] = memory, copy
            self._away.append((memory, copy))

    def come_back(self) -> None:
        for memory, copy in self._away:
            memory.resize_(copy.nbytes())
            memory.copy_(copy)
        self._away.clear()


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in nested collections, with their gradients."""
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif depth and isinstance(value, Mapping):
        for item in (*value.keys(), *value.values()):
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item, depth - 1)
