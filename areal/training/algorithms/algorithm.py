"""An algorithm: advantages and loss of a training step. The engine knows passes, rows and the optimizer only.

policy_gradient: an objective with an estimator of advantages
  └ with_critic (critic) └ with_reference (reference) └ with_teacher (distillation), each around the previous algorithm
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.samples.table import NOT_SAMPLED
from areal.training.algorithms.advantages import Credits, estimate
from areal.training.algorithms.estimators import rehearse_estimator
from areal.training.algorithms.objectives import mask_of, rehearse
from areal.training.algorithms.token_loss import TokenLoss, Tokens, mask_sequences
from areal.training.packed import FlatBatch, PackedRow


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """The outputs of a minibatch's pass for the S tokens of a row in the loss, with gradients.

    logp, entropy: fp32 [S], nats. values: fp32 [S], of a critic, or None. further: fp32 [S, k], log-probs of the tokens
    in the column `Algorithm.further`, or None.
    """

    logp: Tensor
    entropy: Tensor
    values: Tensor | None = None
    further: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Algorithm:
    """needs: by column, the configuration key that needs the column. Passes before the step compute `reference`,
    log-probs of the reference model, `proximal`, log-probs of the policy, and `values`, of a critic; float32 [T] each.
    The samples have all further columns. advantages: returns float64 [T], and may add columns to the credits. loss:
    returns the loss of the row's tokens, and may change the columns of the row. mask: returns the column `mask`, bool
    [T], the tokens to keep, once `proximal` is known for all minibatches. None: no mask, and the first minibatch has
    its own log-probs as `proximal`. further: a column of tokens, int [T, k], whose log-probs the loss also needs.
    """

    needs: Mapping[str, str]
    advantages: Callable[[Credits], np.ndarray]
    loss: Callable[[RowOutputs, PackedRow], TokenLoss]
    mask: Callable[[FlatBatch], np.ndarray] | None = None
    further: str | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether the passes before the first minibatch include the first minibatch."""
        return self.mask is not None or "values" in self.needs


def policy_gradient(config: TrainerConfig) -> Algorithm:
    """Return the objective `trainer.objective` with the estimator `trainer.advantage`. Raises UserError for a function
    of the user's own that fails its rehearsal."""
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
    """Return the input of an objective for a row."""
    of = row.columns
    policies = outputs.logp, of["proximal"], of["logprobs"]
    return Tokens(*policies, of["advantages"], row.sequence, of.get("mask"), outputs.entropy, of)


def set_columns(batch: FlatBatch, algorithm: Algorithm, config: TrainerConfig) -> None:
    """Add to a batch the mask, the advantages, the weights of the tokens in the loss (`weights`), and the columns that
    the algorithm adds to its credits."""
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
