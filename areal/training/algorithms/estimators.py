"""The estimator of advantages of a configuration, by name, and the rehearsal of a user's own estimator."""

import inspect
from functools import partial
from typing import Any

import numpy as np

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.advantages import Credits, Estimator, estimate


def estimator_of(config: TrainerConfig) -> Estimator:
    """Return the estimator `trainer.advantage` with its options: a function of `Credits` and options, or an instance of
    a class with options. Raises UserError."""
    name, options = config.advantage, config.advantage_options
    if name == "normalised":
        options = {"mean": config.advantage_mean, "std": config.advantage_std}
    target: Any = extensions.find("advantage", name, "The estimator of advantages")
    if not callable(target):
        raise UserError(f"trainer.advantage {name!r} is of type {type(target).__name__}: name a function or a class.")
    if not inspect.isclass(target):
        return partial(target, **options)
    with explain((TypeError, ValueError), f"trainer.advantage {name!r}: {{why}}: correct trainer.advantage_options"):
        estimator: Any = target(**options)
    return estimator


def compares_group(estimator: Estimator) -> bool:
    """Return whether an estimator declares that it compares the samples of a group."""
    return bool(getattr(getattr(estimator, "func", estimator), "compares_group", False))


def rehearse_estimator(config: TrainerConfig) -> Estimator:
    """Return the estimator of `config`, after test calls on different, equal and single samples. Raises UserError."""
    estimator = estimator_of(config)
    for rewards, groups in (([1.0, 0.0, 0.5, 1.0], [0, 0, 0, 1]), ([1.0, 1.0], [0, 0]), ([0.5], [0])):
        samples, sampled = np.repeat(np.arange(len(rewards)), 3), np.array([False, True, True] * len(rewards))
        columns = {"tokens": np.arange(len(samples)), "logprobs": np.where(sampled, -1.0, 0.0)}
        columns["versions"] = np.where(sampled, 0, -1)
        credits = Credits(np.array(rewards), np.array(groups), samples, sampled, None, None, columns)
        estimate(estimator, credits, config.advantage)
    return estimator
