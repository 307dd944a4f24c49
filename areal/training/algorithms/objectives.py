"""The objective of a configuration, and the rehearsal of a user's own objective.

The objectives of this project are in `areal.config.named_objectives`; their losses are in the table of extensions. A
user's own objective is given in `trainer.objective` as `package.module:function`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.named_objectives import OBJECTIVES
from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.token_loss import Objective, TokenLoss, Tokens


def objective_of(name: str) -> Objective:
    """The objective named `name` in `trainer.objective`.

    Raises UserError if the user's own objective does not load or is not a function.
    """
    loss = OBJECTIVES[name].loss if name in OBJECTIVES else name
    function: Objective = extensions.find("objective", loss, "The objective")
    if not callable(function):
        raise UserError(f"The objective {name!r} is of type {type(function).__name__}: name a function.")
    return function


def mask_of(name: str) -> Callable[..., np.ndarray] | None:
    """Return the function that chooses the tokens of a minibatch that an objective keeps, or None to keep all."""
    return extensions.part_of("mask", name)


def rehearse(config: TrainerConfig) -> Objective:
    """Return the objective of `config`, after test calls on three tokens, with different and equal policies, and on
    none.

    A rank without work has empty micro-batches. Raises UserError if the objective does not load, raises, or does not
    return a `TokenLoss` with finite values and gradients, in the shapes and types of the class.
    """
    objective = objective_of(config.objective)
    for size, gap in ((3, 0.1), (3, 0.0), (0, 0.0)):
        logp = torch.linspace(-1.0, -2.0, size, requires_grad=True)
        sequence, A, behaviour = torch.arange(size) // 2, torch.linspace(-1.0, 1.0, size), logp.detach() + gap
        of_words = {"kept_words": sequence[:, None], "kept_logprobs": behaviour[:, None], "kept_policy": logp[:, None]}
        tokens = Tokens(logp, logp.detach() - gap, behaviour, A, sequence, entropy=-logp, columns=of_words)
        same = " that all policies find equally likely" if size and not gap else ""
        called = f"The objective {config.objective!r}, called on {size} tokens{same},"
        # The user's own code may raise anything.
        with explain(Exception, f"{called} raised {{why}}. It takes (areal.training.Tokens, TrainerConfig)."):
            out = objective(tokens, config)
        if flaw := _flaw(out, size) or _flaw_of_values(out.loss, logp):
            raise UserError(f"{called} {flaw}.")
    return objective


def _flaw(out: object, size: int) -> str | None:
    if not isinstance(out, TokenLoss):
        return f"returned a value of type {type(out).__name__}: return an areal.training.TokenLoss"
    for name, value, kind in (("loss", out.loss, "floating-point"), ("clipped", out.clipped, "bool")):
        if not isinstance(value, Tensor):
            return f"returned a {name} of type {type(value).__name__}: return a {kind} tensor [{size}]"
        if value.shape != (size,):
            return f"returned a {name} of shape {list(value.shape)}: return one value for each token, [{size}]"
    if out.clipped.dtype != torch.bool:
        return f"returned a clipped of {out.clipped.dtype}: return a bool tensor"
    if not out.loss.requires_grad:
        return "returned a loss without gradient: it must depend on tokens.logp, not detached"
    return None


def _flaw_of_values(loss: Tensor, logp: Tensor) -> str | None:
    try:
        (gradient,) = torch.autograd.grad(loss.sum(), logp, allow_unused=True)
    except RuntimeError as error:
        return f"returned a loss without a gradient for tokens.logp ({' '.join(str(error).split())})"
    for name, values in (("loss", loss), ("gradient", gradient)):
        if values is not None and not values.isfinite().all():
            shown = ", ".join(f"{value:g}" for value in values.tolist())
            return f"has a {name} that is not finite, [{shown}]: look for a division by 0 or a logarithm of 0 in it"
    return None
