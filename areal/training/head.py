"""From hidden states to log-probabilities and entropies, without the logits of a whole row.

The logits of a row of 32,768 tokens and a vocabulary of 151,936 take 10 GB in bf16, and their gradient as much again.
So `linear_logprobs` includes the matrix product with the head's weight. The forward pass takes some tokens at a time.
The backward pass takes some words at a time, and computes their logits again. Each block of the gradient of the head's
weight is then one product over all tokens, summed in fp32 inside the product. A logit's gradient is complete in fp32
before rounding: where p is near 1, g - g p is far smaller than both terms.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from areal.base import extensions
from areal.base.errors import UserError
from areal.config.trainer_section import CriticConfig
from areal.training.logit_curve import IDENTITY, PROBE, LogitCurve, curve_through

AT_ONCE = 1 << 25
"""Most logits that exist at once (128 MiB in fp32)."""


class _LinearLogprobs(torch.autograd.Function):
    """Implements `linear_logprobs`."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        distribution: Tensor,
        targets: Tensor,
        temperature: float,
        curve: LogitCurve,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        top, normaliser, entropy = hidden.new_full((3, len(hidden)), math.nan, dtype=torch.float32)
        logps = hidden.new_empty(len(targets), dtype=torch.float32)
        for part, tokens in _parts(distribution, len(hidden), AT_ONCE // len(weight)):
            scores, places = linear(hidden[part], weight, bias), (distribution[tokens] - part.start, targets[tokens])
            scores = curve.scores(scores, temperature)
            top[part] = scores.amax(-1)
            scores -= top[part, None]
            logps[tokens] = scores[places]
            powers = scores.exp() if with_entropy else scores.exp_()
            sums = powers.sum(-1)
            normaliser[part] = sums.log()
            if with_entropy:
                entropy[part] = normaliser[part] - scores.mul_(powers).sum(-1) / sums
            del scores, powers  # before the next scores are made
        # `top` and `normaliser` stay apart: their sum would lose the small normaliser of a likely token.
        context.save_for_backward(hidden, weight, bias, distribution, targets, top, normaliser, entropy)
        context.temperature, context.curve = temperature, curve
        context.set_materialize_grads(False)  # most losses do not depend on the entropies
        return logps - normaliser[distribution], entropy[distribution]

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, distribution, targets, top, normaliser, entropy = context.saved_tensors
        factor = context.curve.scale / context.temperature
        gradient = torch.zeros_like(targets, dtype=torch.float32) if gradient is None else gradient * factor
        sums = torch.zeros_like(top).index_add_(0, distribution, gradient)
        pulls = torch.zeros_like(top)
        if of_entropy is not None:
            pulls.index_add_(0, distribution, of_entropy * factor)
        rows = top, normaliser, entropy, sums, pulls
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = torch.empty_like(weight) if context.needs_input_grad[1] else None
        d_bias = torch.empty_like(bias) if context.needs_input_grad[2] else None
        for words, tokens in _parts(targets, len(weight), AT_ONCE // max(1, len(hidden))):
            d = linear(hidden, weight[words], None if bias is None else bias[words])
            places = distribution[tokens], targets[tokens] - words.start
            scores = context.curve.scores(d, context.temperature)
            slope = context.curve.slope(scores, context.temperature)
            d = _differentiate(scores, rows, of_entropy is not None)
            d.index_put_(places, gradient[tokens], accumulate=True)
            if slope is not None:
                d *= slope
            del scores, slope
            if d_bias is not None:
                d_bias[words] = d.sum(0, dtype=torch.float32)
            d = d.to(hidden.dtype)
            if d_weight is not None:
                d_weight[words] = d.T @ hidden
            d_hidden += d @ weight[words]
            del d
        return d_hidden.to(hidden.dtype), d_weight, d_bias, *(None,) * 5


def _differentiate(scores: Tensor, rows: tuple[Tensor, ...], of_entropy: bool) -> Tensor:
    """Return the derivative by the scores [U, W], without the part of the targets' log-probs. Overwrites `scores`."""
    top, normaliser, entropy, sums, pulls = (values[:, None] for values in rows)
    scores -= top
    if not of_entropy:
        return scores.exp_().mul_(-sums * (-normaliser).exp())  # the normaliser takes no separate pass here
    scores -= normaliser  # the entropy's derivative by a score is -p (log p + entropy)
    return scores.exp().mul_(scores.add_(entropy).mul_(-pulls).sub_(sums))


def _parts(keys: Tensor, count: int, size: int) -> Iterator[tuple[slice, Tensor | slice]]:
    """Yield slices of range(count), `size` long, each with the indices of the `keys` inside the slice."""
    starts = range(0, count, max(1, size))
    indices: Sequence[Tensor | slice] = [slice(None)]
    if len(starts) > 1:
        ordered, order = keys.sort(stable=True)
        ends = torch.searchsorted(ordered, torch.tensor(starts[1:], device=keys.device))
        indices = order.tensor_split(ends.cpu())
    for start, inside in zip(starts, indices, strict=False):
        yield slice(start, start + starts.step), inside


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    distribution: Tensor,
    targets: Tensor,
    temperature: float,
    curve: LogitCurve = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """log softmax(curve(hidden @ weight.T + bias) / temperature) at `targets`, and entropies, in fp32.

    hidden: [U, H]; weight: [V, H]; bias: [V]; distribution: [S], the row of `hidden` for each target; targets: [S].
    Returns [S] and [S], in nats. Without gradients, entropies are NaN: no pass without gradients reads entropies, which
    take a third of the time beside the product (measured on a CPU with 152k words).
    """
    inputs = hidden, weight, bias, distribution, targets, temperature, curve
    return _LinearLogprobs.apply(*inputs, torch.is_grad_enabled())


class Head:
    """Makes `model`, a causal language model of transformers, return log-probabilities in place of logits.

    The model's own forward pass runs with a module in the head's place that keeps the hidden states. Then the head is
    called with the hidden states, from within the model's forward method and as a module, because ZeRO 3 gathers the
    weights of modules when they are called. Raises UserError if the model's head is not a linear layer.
    """

    def __init__(self, model: Any) -> None:
        self.curve = IDENTITY
        self.critic: Any = None
        self._model = model
        self._linear = model.get_output_embeddings()
        if type(self._linear) is not torch.nn.Linear:
            raise UserError(
                f"{self} cannot be trained: its output layer is of type "
                f"{type(self._linear).__name__}, and the trainer needs a linear layer."
            )
        self._parent, self._name = next(
            (parent, name)
            for parent in model.modules()
            for name, child in parent.named_children()
            if child is self._linear
        )
        self._forward = model.forward
        model.forward = self._forward_to_logprobs
        self._linear.forward = self._logprobs

    def __str__(self) -> str:
        return type(self._model).__name__

    @property
    def embeddings(self) -> torch.nn.Module:
        """The module that makes the embeddings of the input."""
        return self._model.get_input_embeddings()

    def add_critic(self, config: CriticConfig) -> Any:
        """Return a new critic. From now on the model also returns the critic's values."""
        value_head = extensions.need("critic", "head", "trainer.critic").load()
        self.critic = value_head(self._linear.in_features, self._linear.weight.dtype, config)
        return self.critic

    def refuse_adapters(self) -> None:
        """Raise UserError if adapters were put around the head: the head's weight is then incomplete."""
        if getattr(self._parent, self._name) is not self._linear:
            raise UserError(
                f"trainer.lora.target_modules includes the output layer {self._name}, which cannot have an adapter: "
                f"leave it out."
            )

    @torch.no_grad()
    def measure(self, module: torch.nn.Module, **inputs: Any) -> None:
        """Find the model's `curve` in a forward pass (all ranks). module: the model, or a wrapper.

        Raises UserError if the model changes its logits by more than scaling and softcapping.
        """
        probe = torch.tensor(PROBE, device=self._linear.weight.device)
        curve = curve_through(probe, module(probe=probe[None, None], **inputs)[0, 0].double())
        if curve is None:
            raise UserError(f"{self} cannot be trained: it changes its logits by more than a scale or softcapping.")
        self.curve = curve

    def _forward_to_logprobs(
        self,
        *,
        predicts: Tensor | None = None,
        distribution: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        probe: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The model's new forward method: log-probs, entropies, [S], of a `PackedRow`'s tokens; a critic's values.

        probe: logits to return as the model changes them, for `measure`.
        """
        tap = _Tap(probe, self._linear.weight)
        setattr(self._parent, self._name, tap)
        try:
            output = self._forward(**inputs)
        finally:
            setattr(self._parent, self._name, self._linear)
        if probe is not None:
            return output.logits
        hidden = tap.hidden[0].index_select(0, predicts)
        outputs = self._linear(hidden, distribution, targets, temperature)
        return outputs if self.critic is None else (*outputs, self.critic(hidden)[distribution])

    def _logprobs(
        self, hidden: Tensor, distribution: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The head's new forward method."""
        head = self._linear
        return linear_logprobs(hidden, head.weight, head.bias, distribution, targets, temperature, self.curve)


class _Tap(torch.nn.Module):
    """Takes the head's place for a forward pass, keeps the hidden states, and returns them or `probe`. weight: of the
    head; some models read its dtype."""

    def __init__(self, probe: Tensor | None, weight: Tensor) -> None:
        super().__init__()
        self.probe = probe
        self.__dict__["weight"] = weight  # not a parameter of this module
        self.hidden = torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        return hidden if self.probe is None else self.probe
