"""The inputs and the result of an objective, and the parts that objectives have in common.

An objective is a function `(Tokens, TrainerConfig) -> TokenLoss`. Symbols are the paper's (arXiv 2505.24298, section
5.2). Averaging over tokens (`trainer.loss_mean`), the KL penalty and the entropy bonus are not part of an objective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal.config.trainer_section import TrainerConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this bound (a factor of 5e8) before exp, as in verl, to keep products of ratios finite."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The S sampled tokens of a micro-batch in the loss.

    logp, logp_prox, logp_behav: [S], log-probabilities (nats) of the tokens under the current, the proximal and the
    behaviour policy; only `logp` carries a gradient. A: [S], advantages. sequence: int64 [S], the index of a token's
    sequence in the micro-batch, ascending from 0. A sequence is never split over micro-batches. mask: bool [S], true
    for the tokens that the mask over the whole minibatch (`m2po`) keeps; None: all. entropy: [S], nats, of the current
    policy's distribution at the token. The gradient of the entropy is computed only if the loss depends on it.
    `trainer.entropy_coef` adds an entropy bonus to any objective. columns: by name, [S] or [S, k], the columns of the
    table of tokens (areal.samples.table) that the samples have, and columns that the step computed before
    (areal.training.algorithms.algorithm).
    """

    logp: Tensor
    logp_prox: Tensor
    logp_behav: Tensor
    A: Tensor
    sequence: Tensor
    mask: Tensor | None = None
    entropy: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def log_u(self) -> Tensor:
        """log pi_theta / pi_prox, [S]."""
        return self.logp - self.logp_prox.detach()

    @property
    def log_w(self) -> Tensor:
        """log pi_prox / pi_behav, [S], without gradient."""
        return (self.logp_prox - self.logp_behav).detach()


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """loss: [S], -J of each token, to be minimised. clipped: bool [S], true for tokens that are masked or whose ratio
    is clipped. A clipped token has no gradient, except in `cispo` and, under a mask of its sequence's weight, `vespo`.
    value_loss: [S], of a critic; objectives leave it out.
    """

    loss: Tensor
    clipped: Tensor
    value_loss: Tensor | None = None

    @property
    def moving(self) -> Tensor:
        """bool [S], the tokens that require an optimizer step: unmasked tokens, or tokens with a value to learn."""
        return torch.ones_like(self.clipped) if self.value_loss is not None else ~self.clipped | (self.loss != 0)


Objective = Callable[[Tokens, TrainerConfig], TokenLoss]


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), [S], with `log_ratio` clamped to +-`LOG_RATIO_BOUND`; no gradient beyond the bound."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def behaviour_weight(tokens: Tokens, config: TrainerConfig) -> Tensor:
    """w = pi_prox / pi_behav, [S] without gradient: corrects for tokens that an older policy sampled.

    `behaviour_weight_level`: w of each token, or the product over the token's sequence (Liu et al. 2025, "When Speed
    Kills Stability"), or the geometric mean over the sequence. "truncated": min(w, upper bound), TIS (Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). "masked": 0 outside the bounds, IcePop
    (arXiv 2510.18855). "masked_kl": 0 where `binary_kl` in either direction is above the upper bound, KPop (Guo et al.
    2026, "Taming Training-Inference Mismatch ...").
    """
    log_w = tokens.log_w
    if config.behaviour_weight_level != "token":
        combined = sequence_sum if config.behaviour_weight_level == "sequence" else sequence_mean
        log_w = combined(log_w, tokens.sequence)
    w = ratio(log_w)
    low, high = config.behaviour_weight_bounds
    match config.behaviour_weight:
        case "full":
            return w
        case "truncated":
            return w.clamp(max=high)
        case "masked":
            return torch.where((low <= w) & (w <= high), w, 0.0)
        case "masked_kl":
            logps = tokens.logp_prox.detach(), tokens.logp_behav
            far = torch.maximum(binary_kl(*logps), binary_kl(*reversed(logps)))
            return torch.where(far <= high, w, 0.0)
        case "none":
            return torch.ones_like(w)


def binary_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(P || Q), nats [S], of distributions over two events: the token, with probability p or q, or another token."""
    rest_p, rest_q = (torch.log(-torch.expm1(x.clamp(max=-1e-7))) for x in (logp, logq))
    return logp.exp() * (logp - logq) - torch.expm1(logp) * (rest_p - rest_q)


def clip_bounds(config: TrainerConfig) -> tuple[float, float]:
    """eps_clip and eps_clip_higher."""
    return config.eps_clip, config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher


def clip(u: Tensor, config: TrainerConfig) -> Tensor:
    """u clamped to 1 - eps_clip and 1 + eps_clip_higher, [S]."""
    low, high = clip_bounds(config)
    return u.clamp(1 - low, 1 + high)


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """The sum of `values` over all tokens of a token's sequence, [S]. sequence: as in `Tokens`."""
    _, member = sequence.unique_consecutive(return_inverse=True)
    return torch.zeros_like(values).index_add(0, member, values)[member]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """The mean of `values` over all tokens of a token's sequence, [S]. sequence: as in `Tokens`."""
    return sequence_sum(values, sequence) / sequence_sum(torch.ones_like(values), sequence)


def mask_sequences(out: TokenLoss, tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """Return `out` without the sequences whose w is outside `sequence_mask_bounds`. w is the product over the tokens of
    a sequence, as in verl's rejection of sequences, or the geometric mean. "kl": without sequences whose mean
    `binary_kl` from pi_behav to pi_prox is above the upper bound, as in FlashREINFORCE."""
    if config.sequence_mask == "none":
        return out
    if config.sequence_mask == "kl":
        far = sequence_mean(binary_kl(tokens.logp_behav, tokens.logp_prox.detach()), tokens.sequence)
    else:
        combined = sequence_sum if config.sequence_mask == "product" else sequence_mean
        far = combined(tokens.log_w, tokens.sequence).exp()
    low, high = config.sequence_mask_bounds
    mask = (far >= low) & (far <= high)
    return TokenLoss(loss=torch.where(mask, out.loss, 0.0), clipped=out.clipped | ~mask)


def masked_surrogate(tokens: Tokens, beyond: Tensor, config: TrainerConfig) -> TokenLoss:
    """J = w M u A without a clip. M is 0 for the tokens `beyond`, bool [S]."""
    w = behaviour_weight(tokens, config)
    J = torch.where(beyond, 0.0, w * ratio(tokens.log_u) * tokens.A)
    return TokenLoss(loss=-J, clipped=beyond | (w == 0))
