"""Passes of packed rows through a model: the possible rows, the packing of sequences, and the pass."""

from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from areal.base.errors import UserError, explain
from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.algorithm import RowOutputs
from areal.training.attention import FLASH, compile_layers, row_inputs
from areal.training.flops import experts_of
from areal.training.head import Head
from areal.training.kept_words import among_kept_words, with_kept_words
from areal.training.microbatches import fixed_number, split_over_ranks
from areal.training.model_checks import keeps_apart, what_is_missing
from areal.training.packed import FlatBatch, PackedRow, empty_row, pack
from areal.training.row_groups import Compute, RowGroup

log = structlog.get_logger()


class Passes:
    """The passes of one rank.

    attention: the name in transformers of the attention function. together: the ranks that compute each row together.
    replay: replays the experts of sampling; None: routers choose experts. prefix_tree, one_a_row: whether a row is a
    prefix tree, and whether a row holds a single sequence, as `fit` finds out.
    """

    def __init__(
        self, config: TrainerConfig, attention: str, together: RowGroup, device: torch.device, replay: Any = None
    ) -> None:
        self._config, self._attention, self._together, self._device = config, attention, together, device
        self._replay = replay
        self.tower: Any = None  # until a batch has pictures
        self.prefix_tree = config.prefix_tree and attention != FLASH  # flash attention takes no mask
        self.one_a_row = False

    def fit(self, module: Any, head: Head, longest: int | None) -> None:
        """Find out, on a few random tokens, how `module` changes its logits and what a row may hold (all ranks).

        A row holds a prefix tree, or several sequences, or, if the model mixes sequences, a single sequence. longest:
        tokens of a sequence; None: the model's limit. Raises UserError.
        """
        vocabulary: int = module.config.get_text_config().vocab_size
        kinds = (True, False) if self.prefix_tree else (False,)
        windows: list[int | None] = []
        causes = AssertionError, NotImplementedError, TypeError, ValueError
        with explain(causes, f"{head} cannot be trained: its forward pass failed on a packed row: {{why}}."):
            inputs = row_inputs(empty_row(self._device), self._attention)
            head.measure(module, **inputs, note_window=windows.append)
            if missing := what_is_missing(module, windows, longest):
                raise UserError(f"{head} cannot be trained: {missing}.")

            def forward(row: PackedRow) -> tuple[Tensor, ...]:
                return self._compute(module, 1.0, row, row)

            arguments = forward, head.embeddings, vocabulary, self._device
            prefix_tree = next((kind for kind in kinds if keeps_apart(*arguments, prefix_tree=kind)), None)
            self._together.check(head, vocabulary, self._device, self._compute_by(module, 1.0))
        self.prefix_tree, self.one_a_row = bool(prefix_tree), self.one_a_row or prefix_tree is None
        if self.one_a_row and self._config.microbatches:
            raise UserError(f"{head} mixes the sequences of a micro-batch: leave out trainer.microbatches.")
        if dist.get_rank() == 0:
            rows = {True: "a prefix tree", False: "several sequences", None: "one sequence, since layers mix sequences"}
            settings = {key: getattr(self._config, key) for key in ("dtype", "gradient_checkpointing")}
            log.info("attention", model=str(head), kind=self._attention, a_row_holds=rows[prefix_tree], **settings)

    def compile(self, module: Any, head: Head) -> None:
        """Have torch compile the layers of `module`. Raises UserError if layers mix tokens or have experts."""
        if self.one_a_row or any(experts_of(module.config.get_text_config())):
            raise UserError(f"{head} has layers that mix tokens, or experts: leave out trainer.compile.")
        compile_layers(module, self._attention)

    def rows(self, batch: FlatBatch, trained: np.ndarray, members: np.ndarray) -> list[PackedRow]:
        """Return the packed rows of the sequences `members` for this rank and its sequence group."""
        if self._config.microbatches:
            minibatches = len(np.unique(batch.minibatch[members]))
            groups = fixed_number(len(members), self._together.count, self._config.microbatches * minibatches)
        else:
            groups = split_over_ranks(
                batch.lengths[members].tolist(),
                self._together.count,
                1 if self.one_a_row else self._config.max_tokens_per_microbatch,
                batch.shared[members].tolist(),
            )
        return [pack(batch, trained, members[row].tolist(), self._device) for row in groups[self._together.number]]

    def forward(self, module: Any, row: PackedRow, temperature: float) -> tuple[Tensor, ...]:
        """Return log-probabilities (after temperature) and entropies of the row's tokens in the loss, and a critic's
        values, [S] each (all ranks). In a row with kept words, probabilities are among the kept words, and the row
        gains the column `kept_mass`: the log of the kept words' probability in the whole distribution. With the column
        `kept_logprobs` the row also gains `kept_policy`, log pi_theta of the kept words."""
        if row.kept_words is not None:
            extended = with_kept_words(row, row.kept_words)
            every = self._compute(module, temperature, extended, extended)
            *outputs, mass, policy = among_kept_words(row.kept_words, every)
            row.columns["kept_mass"] = mass.detach()
            if "kept_logprobs" in row.columns:
                row.columns["kept_policy"] = policy
            return tuple(outputs)
        return self._together.forward(row, self._compute_by(module, temperature))

    def outputs(self, module: Any, row: PackedRow, temperature: float, further: str | None) -> RowOutputs:
        """Return the outputs of `forward` for the loss (all ranks). further: the column of `Algorithm.further`."""
        if further is None:
            return RowOutputs(*self.forward(module, row, temperature))
        tokens = row.columns[further].long()
        everything = self.forward(module, row.with_targets(tokens), temperature)
        logp, entropy, *values = (output[: len(row.targets)] for output in everything)
        further_logp = everything[0][len(row.targets) :].view_as(tokens)
        return RowOutputs(logp, entropy, values[0] if values else None, further_logp)

    def _compute_by(self, module: Any, temperature: float) -> Compute:
        return partial(self._compute, module, temperature)

    def _compute(self, module: Any, temperature: float, what: Any, row: PackedRow, **inputs: Any) -> tuple[Tensor, ...]:
        """Return the model's outputs for `what`: `row` or this rank's part. inputs: replace or add to the row's."""
        if self._replay:
            self._replay.follow(what.inputs.get("routes"))
        if self.tower:
            self.tower.follow(row)
        outputs: tuple[Tensor, ...] = module(
            **row_inputs(row, self._attention) | inputs,
            predicts=what.predicts,
            distribution=what.distribution,
            targets=what.targets,
            temperature=temperature,
        )
        return outputs
