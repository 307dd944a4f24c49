"""What Triton and vLLM's utilities ask of a backend's driver."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    @staticmethod
    def is_active() -> bool:
        """vLLM asks all backends but "cpu" when it is imported. So this one is also registered as "masks"."""
        accept_masks_of_integers()
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda call, *, quantiles, **_: [call() or 1.0] * len(quantiles)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@cache
def accept_masks_of_integers() -> None:
    """In Triton 3.9's interpreter `block & scalar` of int1 is int32, and its loads and stores take masks of bool only
    (vLLM's guesses by n-grams have such a mask)."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store = Builder.create_masked_load, Builder.create_masked_store

    def as_bools(mask: Any) -> Any:
        mask.data = mask.data.astype(np.bool_)
        return mask

    def masked_load(self: Any, ptrs: Any, mask: Any, *more: Any, **named: Any) -> Any:
        return load(self, ptrs, as_bools(mask), *more, **named)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        return store(self, ptrs, value, as_bools(mask), *more, **named)

    Builder.create_masked_load, Builder.create_masked_store = masked_load, masked_store
