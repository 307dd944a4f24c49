"""The function of a model on the products of its head: identity, a scale (Granite, Cohere), or softcapping (Gemma)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PROBE = (0.01, 1e12, *(float(x) for x in range(-100, 101, 5)))
"""Logits that `Head.measure` passes through the model to find its `LogitCurve`."""


@dataclass(frozen=True, slots=True)
class LogitCurve:
    """The model's function on the products of its head: scale * x, or cap * tanh(scale * x / cap) (softcapping)."""

    scale: float = 1.0
    cap: float = math.inf

    def scores(self, logits: Tensor, temperature: float) -> Tensor:
        """Return the final logits divided by the temperature, in fp32. Overwrites `logits` in fp32."""
        scores = logits.float()
        if self.cap < math.inf:
            return scores.mul_(self.scale / self.cap).tanh_().mul_(self.cap / temperature)
        factor = self.scale / temperature
        return scores if factor == 1.0 else scores.mul_(factor)

    def slope(self, scores: Tensor, temperature: float) -> Tensor | None:
        """The derivative of `scores` with respect to the head's products, as a multiple of scale / temperature."""
        return None if self.cap == math.inf else 1 - (scores * (temperature / self.cap)).square()


IDENTITY = LogitCurve()
"""The curve of a model that does not change the products of its head."""


def curve_through(probe: Tensor, logits: Tensor) -> LogitCurve | None:
    """Return the curve that makes `logits` of `probe`, values of PROBE; None: no curve does. logits: float64 [n]."""
    cap = logits[1].item() if logits[1] < PROBE[1] / 1e6 else math.inf
    scale = logits[0].item() / PROBE[0]
    curve = LogitCurve(1.0 if abs(scale - 1) < 1e-5 else scale, cap)
    fits = logits.shape == probe.shape and torch.allclose(
        curve.scores(probe.clone(), 1.0).double(), logits, rtol=1e-4, atol=1e-4
    )
    return curve if fits else None
