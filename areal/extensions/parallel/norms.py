"""The norm of gradients divided over ranks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def clip_divided(
    parameters: Iterable[torch.nn.Parameter],
    is_divided: Callable[[torch.nn.Parameter], bool],
    largest: float,
    group: Any,
) -> Tensor:
    """Scale gradients down to the norm `largest`, as torch's `clip_grad_norm_`. Returns the norm before (all ranks of
    the group). group: ranks with different parts of the divided parameters, and the same undivided parameters."""
    squares = torch.zeros(2, dtype=torch.float64)
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            squares = squares.to(parameter.grad.device)
            squares[int(is_divided(parameter))] += parameter.grad.double().square().sum()
            gradients.append(parameter.grad)
    undivided, parts = squares
    dist.all_reduce(parts, group=group)
    norm = (undivided + parts).sqrt().float()
    for gradient in gradients:
        gradient.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
    return norm
