"""The floating-point operations of a training step, and the peak of a device: together `mfu`.

The operations are the model's minimum (PaLM, arXiv 2204.02311, appendix B). A weight takes two operations for each
token forward, two more for the gradient of its layer's input, and two more for its own gradient if the weight is
trained. A pair of tokens that attend takes four times the size of all heads forward, and eight times backward.
Operations that are repeated to save memory do not count.
"""

import time
from collections import Counter
from functools import cache
from typing import Any

import torch

from areal.models import EXPERTS
from areal.training.packed import PackedRow

# Dense TFLOP/s in bf16 with sums in fp32, by a part of the device's name; the first match counts (data sheets).
KNOWN = {
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "H800": 989, "H20": 148, "B200": 2250,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "RTX 4090": 165, "RTX 3090": 71, "MI300X": 1307,
}  # fmt: skip
SMALLEST, LARGEST, LEAST_SECONDS, REPEATS = 64, 1024, 0.01, 5
"""A product of matrices measures a CPU: side lengths, least time (unless largest), and tries; the fastest try counts.
"""


class Operations:
    """Counts the operations of rows of one model.

    module: the model, before or after DeepSpeed has partitioned its parameters. Weights of experts count by the share
    of experts that a token takes.
    """

    def __init__(self, module: Any) -> None:
        sizes = module.config.get_text_config()
        sizes.allow_global_per_layer_attribute_access = True  # Gemma 4 has a head_dim of most layers
        experts, taken = experts_of(sizes)
        head, embeddings = module.get_output_embeddings().weight, module.get_input_embeddings().weight
        self._weights = self._trained = 0.0
        for parameter in module.parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if parameter is head or parameter is embeddings or len(shape) < 2:
                continue
            active = shape.numel() * (taken / experts if len(shape) == 3 and shape[0] == experts else 1)
            self._weights += active
            self._trained += active * parameter.requires_grad
        self._head = float(getattr(head, "ds_shape", head.shape).numel())
        self._head_trained = self._head * head.requires_grad
        width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        self._pair = 4.0 * sizes.num_attention_heads * width
        self._layers = layers_by_window(sizes)

    def of(self, row: PackedRow, *, backward: bool) -> float:
        """Return the operations of a row's forward pass, and, if `backward`, of its backward pass too."""
        if not len(row.batch_index):
            return 0.0
        tokens, predicted = sum(row.added), len(row.predicts)
        pairs = sum(
            layers * (_pairs(length, window) - _pairs(length - added, window))
            for window, layers in self._layers.items()
            for added, length in zip(row.added, row.lengths, strict=True)
        )
        forward = 2 * tokens * self._weights + 2 * predicted * self._head + pairs * self._pair
        gradients = forward + 2 * tokens * self._trained + 2 * predicted * self._head_trained + pairs * self._pair
        return forward + backward * gradients


def experts_of(sizes: Any) -> tuple[int, int]:
    """Return how many routed experts a layer has, and how many a token takes, or 0. sizes: of transformers."""

    def first(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(sizes, name, None), int) and value), 0)

    return first(*EXPERTS), first("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


def layers_by_window(sizes: Any) -> Counter[int | None]:
    """Count the layers of a model by the window of their attention; None: no window. sizes: the model's text config."""
    window = getattr(sizes, "sliding_window", None) or None
    kinds = getattr(sizes, "layer_types", None)
    if not kinds:
        return Counter({window: sizes.num_hidden_layers})
    return Counter(window if "sliding" in kind else None for kind in kinds if "attention" in kind or "sliding" in kind)


def _pairs(length: int, window: int | None) -> float:
    """Return the number of pairs of a token and a token that it attends to, in a sequence alone."""
    outside = max(0, length - (window or length))
    return (length * (length + 1) - outside * (outside + 1)) / 2


def peak_tflops(device: torch.device, dtype: str) -> float | None:
    """Return the dense TFLOP/s of a device: a table for common GPUs in bf16, a measurement for a CPU with this
    process's threads. None for other GPUs."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((float(peak) for part, peak in KNOWN.items() if part in name and dtype == "bfloat16"), None)
    return _measured_tflops(dtype, torch.get_num_threads())


@cache
def _measured_tflops(dtype: str, threads: int) -> float:
    """Measure the CPU with torch's `threads`, once in a process, since the measurement takes half a second."""
    size = SMALLEST  # a CPU without bf16 instructions takes a hundred times as long
    while size < LARGEST and _seconds_of_product(size, dtype) < LEAST_SECONDS:
        size *= 2
    return 2 * size**3 / min(_seconds_of_product(size, dtype) for _ in range(REPEATS)) / 1e12


def _seconds_of_product(size: int, dtype: str) -> float:
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype))
    started = time.perf_counter()
    torch.mm(matrix, matrix)
    return time.perf_counter() - started
