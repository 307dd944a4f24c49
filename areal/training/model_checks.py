"""Checks on the model itself: `packed` computes its kinds of attention, and sequences of a row do not see each other.

Our attention keeps the sequences of a row apart. Other layers do so only if the installed version of transformers, and
the installed kernels for this device, take the boundaries of sequences: otherwise linear attention and convolutions run
over the whole row. Nothing fails in such a case, only the numbers are wrong.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.models import COMPUTED, SHORTER
from areal.samples.table import NOT_SAMPLED
from areal.samples.trajectory import Group, Trajectory
from areal.training.packed import FlatBatch, PackedRow, pack

LENGTHS, PREFIX = (13, 12, 9), 5
"""Tokens of the check's sequences, and the length of their common prefix."""
TOLERANCE = 0.2
"""Largest median difference between log-probs of a packed row and of sequences alone, as a share of the log-probs'
standard deviation. In bf16, rounding takes a few hundredths; wrong positions take most of the deviation."""


def what_is_missing(model: Any, windows: Sequence[int | None], longest: int | None) -> str | None:
    """Return why the attention of a model cannot be computed although config.json shows no reason, or None.

    windows: of the attention layers in a pass. longest: tokens of a sequence; None: the model's limit.
    """
    if not windows and any("Attention" in type(part).__name__ for part in model.modules()):
        return "its layers do not call the attention function: take another model"
    sizes = model.config.get_text_config()
    longest = longest or getattr(sizes, "max_position_embeddings", None) or sys.maxsize
    kinds = getattr(sizes, "layer_types", None) or ()
    window = getattr(sizes, "sliding_window", None) or longest
    if unknown := sorted({*kinds} - COMPUTED):
        return f"layers of the kind {unknown[0]} are not implemented: take another model"
    expected = sum("sliding" in kind for kind in kinds) if kinds else 1
    if window < longest and sum(size is not None for size in windows) < expected:
        return f"not all of its layers tell the attention function their window of {window} tokens, so {SHORTER}"
    return None


def keeps_apart(
    forward: Callable[[PackedRow], tuple[Tensor, ...]],
    embeddings: torch.nn.Module,
    vocabulary: int,
    device: torch.device,
    *,
    prefix_tree: bool,
) -> bool:
    """Return whether sequences have the same log-probs in a common row as alone (all ranks).

    No log-prob of a sequence may depend on another sequence's tokens. So the gradient with respect to the other tokens'
    embeddings must be exactly 0, in any dtype. Besides, log-probs must equal the log-probs of each sequence alone,
    except for rounding. forward: log-probs of a row, first in a tuple; embeddings: the module that makes the tokens'
    embeddings.
    """
    flat = FlatBatch.of(random_groups(vocabulary, [LENGTHS], shared=PREFIX), minibatches=1, prefix_tree=prefix_tree)
    trained, members = flat.trained(None), range(len(flat.lengths))
    row = pack(flat, trained, members, device)
    paths = row.paths.split(row.lengths)
    for sequence in (members[0], members[-1]):
        packed, influence = influence_of(forward, embeddings, row, row.sequence == sequence)
        influence[paths[sequence]] = 0
        if influence.any():
            return False
    with torch.no_grad():
        alone = torch.cat([forward(pack(flat, trained, [n], device))[0] for n in members])
    return bool((packed - alone).abs().median() <= TOLERANCE * alone.std())


def influence_of(
    forward: Callable[[PackedRow], tuple[Tensor, ...]],
    embeddings: torch.nn.Module,
    row: PackedRow,
    chosen: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of a row, [S], and the size of the chosen log-probs' gradient by embedding, [T]."""
    seen: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        seen.append(output if output.requires_grad else output.requires_grad_())

    with embeddings.register_forward_hook(keep), torch.enable_grad():
        logps, *_ = forward(row)
        (gradient,) = torch.autograd.grad(logps[chosen].sum(), seen)
    return logps, gradient[0].abs().sum(-1)


def random_groups(
    vocabulary: int, lengths: Sequence[Sequence[int]], *, shared: int = 0, version: int = 0
) -> list[Group]:
    """Make a group for every item of `lengths`, which has the lengths of the group's samples in tokens. `version` has
    sampled all tokens but a sample's first. shared: the number of first tokens that the samples of a group share."""
    random = np.random.default_rng(0)
    groups = []
    for number, of_group in enumerate(lengths):
        prefix = random.integers(0, vocabulary, shared)
        samples = []
        for index, length in enumerate(of_group):
            tokens = random.integers(0, vocabulary, length)
            tokens[: min(shared, length)] = prefix[:length]
            versions = np.repeat([NOT_SAMPLED, version], [1, length - 1]).astype(np.int32)
            logprobs = np.where(versions == NOT_SAMPLED, 0, -np.log(vocabulary)).astype(np.float32)
            samples.append(Trajectory(tokens.astype(np.int32), logprobs, versions, float(index % 2), "stop"))
        groups.append(Group(f"{number}", number, tuple(samples)))
    return groups
