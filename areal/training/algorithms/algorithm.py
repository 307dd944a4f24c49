"""An algorithm: what a training step learns from a batch. The engine knows passes, rows and the optimizer only.

policy_gradient: an objective with an estimator of advantages
  └ with_critic (critic) └ with_reference (reference) └ with_teacher (distillation), each around the one before it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.samples.table import NOT_SAMPLED
from areal.training.algorithms.advantages import Credits, estimate, rehearse_estimator
from areal.training.algorithms.objectives import mask_of, rehearse
from areal.training.algorithms.token_loss import TokenLoss, Tokens, mask_sequences
from areal.training.packed import FlatBatch, PackedRow


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """What the pass of a minibatch gives for the S tokens of a row that are in the loss, with gradients.

    logp, entropy: fp32 [S], nats. values: fp32 [S], a critic's; None: there is none. further: fp32 [S, k], log-probs of
    the tokens in the column `Algorithm.further`; None: it names none.
    """

    logp: Tensor
    entropy: Tensor
    values: Tensor | None = None
    further: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Algorithm:
    """needs: by the names of columns, the configuration key that needs each. Passes before the step find `reference`,
    log-probs of the reference model, `proximal`, those of the policy, and `values`, a critic's; float32 [T] each. All
    others are of the samples.
    advantages: gives float64 [T], and may add columns to those of the credits.
    loss: gives the loss of the row's tokens; it may change the columns of the row.
    mask: gives the tokens that the column `mask` keeps, bool [T], once `proximal` is known for all minibatches; None:
    there is no mask, and the first minibatch has its own log-probs as `proximal`.
    further: a column of tokens, int [T, k], whose log-probs the loss needs, too.
    """

    needs: Mapping[str, str]
    advantages: Callable[[Credits], np.ndarray]
    loss: Callable[[RowOutputs, PackedRow], TokenLoss]
    mask: Callable[[FlatBatch], np.ndarray] | None = None
    further: str | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether the passes before the first minibatch are also for that minibatch."""
        return self.mask is not None or "values" in self.needs


def policy_gradient(config: TrainerConfig) -> Algorithm:
    """The objective `trainer.objective` with the estimator `trainer.advantage`. Raises UserError for a function of the
    user's own that does not do what it should."""
    objective, estimator = rehearse(config), rehearse_estimator(config)

    def advantages(credits: Credits) -> np.ndarray:
        return estimate(estimator, credits, config.advantage)

    def loss(outputs: RowOutputs, row: PackedRow) -> TokenLoss:
        tokens = tokens_in(outputs, row)
        return mask_sequences(objective(tokens, config), tokens, config)

    mask = mask_of(config.objective)
    needs = {"kept_logprobs": f"trainer.objective={config.objective}"} if config.centres_scores else {}
    return Algorithm(needs, advantages, loss, mask=mask and partial(mask, config=config))


def tokens_in(outputs: RowOutputs, row: PackedRow) -> Tokens:
    """What an objective gets of a row."""
    of = row.columns
    policies = outputs.logp, of["proximal"], of["logprobs"]
    return Tokens(*policies, of["advantages"], row.sequence, of.get("mask"), outputs.entropy, of)


def set_columns(batch: FlatBatch, algorithm: Algorithm, config: TrainerConfig) -> None:
    """Add to a batch the mask, the advantages and the weights of the tokens in the loss, `weights`, and what the
    algorithm adds to its credits."""
    columns, order = batch.columns, batch.by_sample()
    if algorithm.mask:
        columns["mask"] = algorithm.mask(batch)
    in_order = {name: values[order] for name, values in columns.items()}
    sampled = in_order["versions"] != NOT_SAMPLED
    of_samples = batch.rewards, batch.groups, batch.of_sample[order], sampled
    credits = Credits(*of_samples, in_order.get("returns"), penalties=None, columns=in_order)
    in_order["advantages"] = algorithm.advantages(credits)
    for name in in_order.keys() - columns.keys():
        columns[name] = np.empty_like(in_order[name])
        columns[name][order] = in_order[name]
    columns["weights"] = batch.weights(columns["trained"], config.loss_mean, config.loss_tokens)
