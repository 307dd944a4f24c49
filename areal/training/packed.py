"""A batch as arrays, and packed rows of its sequences.

A row is [1, T]: sequences one after another, without padding; positions restart with each sequence. If sequences of a
group begin with the same tokens (`FlatBatch.shared`), the row holds the common tokens once. Each sequence then adds
only the tokens that its predecessor lacks, and the *path* of a sequence lists the places of all its tokens in the row.
So a row is a prefix tree, written branch by branch. The position of a token is its depth in the tree. A token attends
to its ancestors and itself (areal.training.attention). Log-probabilities and gradients equal the results for each
sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from areal.base import extensions
from areal.samples.pictures import find
from areal.samples.table import COLUMNS, KEPT, NOT_SAMPLED
from areal.samples.trajectory import Group, Trajectory, common, paths

NO_PICTURES: Mapping[str, Any] = {}
# The fields of a batch that hold arrays by name.
PARTS = ("columns", "inputs", "pictures")


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as arrays, sequences one after another.

    A sequence is a branch of a sample, from its first token on; most samples have one branch. columns: by name, [T] or
    [T, k], the columns of the table of tokens (`COLUMNS`) that the samples have, and the columns that a step adds
    before training. inputs: by name, further inputs of the model's layers for each token. `routes`: uint8 [T, width],
    the experts of the pass at a token, which sampled the next token; 0: unknown. The extension `pictures` adds inputs
    of placeholders. Empty for a batch without routes and pictures. lengths, samples, branches, minibatch: [N], the
    length of a sequence, and the numbers of its sample, of its branch in the sample, and of its minibatch. shared: [N],
    how many first tokens a sequence shares with its predecessor. rewards, groups, cut: [M], the reward of a sample, the
    number of its group, and whether the token limit cut the sample. pictures: by name, the inputs of the model's tower
    for the batch's pictures.
    """

    columns: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    lengths: np.ndarray
    shared: np.ndarray
    samples: np.ndarray
    branches: np.ndarray
    minibatch: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    cut: np.ndarray
    pictures: dict[str, np.ndarray]

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        *,
        minibatches: int,
        prefix_tree: bool = False,
        keeps_cache: bool = False,
        pictures: Mapping[str, Any] = NO_PICTURES,
    ) -> FlatBatch:
        """Flatten `groups`. Whole groups are assigned to the minibatches in turn.

        prefix_tree: share prefixes within each group. The group's sequences are then sorted by their tokens, so a
        sequence has its longest common prefix with a neighbour. With fewer groups than `minibatches`, each group is a
        minibatch. keeps_cache: as in `_routes`. pictures: by the names in the samples. Raises ValueError if there are
        no groups, a sequence begins with a sampled token (no token predicts it), or only some samples have a column
        without a default for missing values (`Column.missing`).
        """
        if not groups:
            raise ValueError("a batch without groups cannot be trained")
        trajectories = [t for group in groups for t in group.trajectories]
        numbers = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.trajectories) for group in groups])
        rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
        members = _members(trajectories, numbers, prefix_tree)
        sequences = [member.sequence for member in members]
        lengths = np.array([len(t) for t in sequences], dtype=np.int32)
        columns = _columns(sequences)
        for n in np.flatnonzero(columns["versions"][lengths.cumsum() - lengths] != NOT_SAMPLED):
            raise ValueError(f"group {groups[members[n].group].id}: a sample without a prompt cannot be trained")
        routes = _routes(trajectories, members, keeps_cache=keeps_cache)
        shared = _shared_prefixes(members, routes) if prefix_tree else np.zeros_like(lengths)
        placeholders, of_pictures = find("inputs")(sequences, pictures) if pictures else ({}, {})
        return cls(
            columns=columns,
            inputs=({"routes": np.concatenate(routes)} if routes else {}) | placeholders,
            lengths=lengths,
            shared=shared,
            samples=np.array([member.sample for member in members], dtype=np.int32),
            branches=np.array([member.branch for member in members], dtype=np.int32),
            minibatch=np.array([member.group for member in members], dtype=np.int32) % minibatches,
            rewards=rewards,
            groups=numbers,
            cut=np.array([t.finish == "length" for t in trajectories]),
            pictures=of_pictures,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by name, such as `lengths` and `columns.tokens`. `of_arrays` is the inverse."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        named = {f"{of}.{name}": array for of in PARTS for name, array in values.pop(of).items()}
        return values | named

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        values: dict[str, Any] = {part: {} for part in PARTS}
        for key, array in arrays.items():
            of, _, name = key.rpartition(".")
            (values[of] if of else values)[name] = array
        return cls(**values)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]."""
        return self.columns["tokens"]

    @property
    def of_sample(self) -> np.ndarray:
        """int32 [T], the sample of a token."""
        return np.repeat(self.samples, self.lengths)

    def by_sample(self) -> np.ndarray:
        """Return the places of all tokens, int64 [T], ordered by sample, and by branch within a sample."""
        ends = self.lengths.cumsum()
        order = np.lexsort((self.branches, self.samples))
        return np.concatenate([np.arange(ends[n] - self.lengths[n], ends[n]) for n in order])

    def trained(self, mask_older_than: int | None, *, mask_cut: bool = False) -> np.ndarray:
        """Return bool [T], the tokens in the loss: sampled tokens, without versions before `mask_older_than`, and with
        `mask_cut` without samples that the token limit cut."""
        masked = np.repeat(self.cut[self.samples] & mask_cut, self.lengths)
        return (self.columns["versions"] >= max(0, mask_older_than or 0)) & ~masked

    def weights(self, trained: np.ndarray, mean: str, constant: int) -> np.ndarray:
        """Return the weight of each token in the loss of its minibatch, float64 [T].

        mean: "token", the mean over the minibatch's tokens in the loss; "sequence", the mean over its samples of their
        means; "constant", the mean over its samples of their sums divided by `constant`. trained: bool [T], the tokens
        in the loss; samples without a trained token do not count.
        """
        starts = self.lengths.cumsum() - self.lengths
        tokens = np.bincount(self.samples, np.add.reduceat(trained, starts, dtype=np.int64))
        minibatch = np.empty(len(tokens), np.int64)
        minibatch[self.samples] = self.minibatch
        per_minibatch = tokens if mean == "token" else tokens > 0
        share = 1 / np.maximum(1, np.bincount(minibatch, per_minibatch))[minibatch]
        if mean != "token":
            share = share / (np.maximum(1, tokens) if mean == "sequence" else constant)
        return np.repeat(share[self.samples], self.lengths)


def _columns(sequences: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Return `FlatBatch.columns`. A sequence without a column gets the column's default, `Column.missing`. Raises
    ValueError if only some sequences have a column without a default."""
    columns = {}
    for name, column in COLUMNS.items():
        having = sum(name in sequence.columns for sequence in sequences)
        if having not in (0, len(sequences)) and column.missing is None:
            raise ValueError(f"only {having} of {len(sequences)} sequences have {name}")
        if having and not column.of_pass:
            columns[name] = _stacked([sequence.filled(name) for sequence in sequences], name).astype(column.dtype)
    return columns


def _stacked(parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Concatenate a column of the sequences."""
    if name in KEPT:
        width, fill = max(part.shape[1] for part in parts), COLUMNS[name].unsampled or 0
        parts = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in parts]
    return np.concatenate(parts)


class _Member(NamedTuple):
    """A sequence of a batch, and the numbers of its group, sample and branch."""

    group: int
    sample: int
    branch: int
    sequence: Trajectory


def _members(trajectories: Sequence[Trajectory], numbers: np.ndarray, prefix_tree: bool) -> list[_Member]:
    """Return the sequences of the samples. numbers: of the samples' groups."""
    members = [
        _Member(int(numbers[sample]), sample, branch, sequence)
        for sample, trajectory in enumerate(trajectories)
        for branch, sequence in enumerate(trajectory.sequences())
    ]
    if prefix_tree:
        members.sort(key=lambda m: (m.group, m.sequence.tokens.astype(np.int32).tobytes()))
    return members


def _routes(trajectories: Sequence[Trajectory], members: Sequence[_Member], *, keeps_cache: bool) -> list[np.ndarray]:
    """Return the input `routes` of each member; empty if the samples have no routes.

    keeps_cache: whether engines keep the KV cache after a load. Otherwise an engine computes a sequence's tokens again
    with the new weights, so only passes of the last version have routes.
    """
    if trajectories[0].routes is None:
        return []
    of_branches = extensions.need("routing", "of_branches", "a sample with routes").load()
    by_sample = [list(of_branches(trajectory, keeps_cache=keeps_cache)) for trajectory in trajectories]
    return [by_sample[member.sample][member.branch] for member in members]


def _shared_prefixes(members: Sequence[_Member], routes: Sequence[np.ndarray]) -> np.ndarray:
    """`FlatBatch.shared`. Not where experts differ."""
    counts = [0]
    for number, (previous, member) in enumerate(pairwise(members)):
        count = common(previous.sequence, member.sequence) if previous.group == member.group else 0
        if routes:
            differ = (routes[number][:count] != routes[number + 1][:count]).any(1)
            count = int(np.append(differ, True).argmax())
        counts.append(count)
    return np.array(counts, dtype=np.int32)


@dataclass(slots=True)
class PackedRow:
    """A packed micro-batch of T tokens, S of them in the loss.

    tokens, positions: int64 [1, T]. lengths: the length of each sequence. added: how many tokens each sequence adds to
    the row. paths: int64 [sum(lengths)], the places in the row of each sequence's tokens, one sequence after another.
    batch_index: int64 [S], the places of the S tokens in the batch. sequence: int64 [S], the index of a token's
    sequence in the row. predicts: int64 [U], the places in the row whose hidden states are needed. distribution: int64
    [S], the index among the U places that predicts a token. targets: int64 [S], the tokens. inputs: the batch's inputs
    for the row's tokens, [T, ...]. columns: the batch's columns for the S tokens, once `set_columns` was called;
    floating-point numbers are float32. kept_words: int64 [S, k], the column of the batch, or None.
    """

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    added: list[int]
    paths: Tensor
    batch_index: np.ndarray
    sequence: Tensor
    predicts: Tensor
    distribution: Tensor
    targets: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    kept_words: Tensor | None = None

    def set_columns(self, columns: Mapping[str, np.ndarray]) -> None:
        """Take the row's part of columns of the batch, [T, ...]."""
        for name, values in columns.items():
            part = torch.from_numpy(values[self.batch_index]).to(self.tokens.device)
            self.columns[name] = part.float() if part.is_floating_point() else part

    def with_targets(self, tokens: Tensor) -> PackedRow:
        """Return the row with k further targets for each of the S tokens, after the targets. tokens: int64 [S, k]."""
        places = self.distribution.repeat_interleave(tokens.shape[1])
        return replace(
            self,
            distribution=torch.cat([self.distribution, places]),
            targets=torch.cat([self.targets, tokens.flatten()]),
        )


def pack(batch: FlatBatch, trained: np.ndarray, members: Sequence[int], device: torch.device) -> PackedRow:
    """Pack the sequences `members` into a row. trained: bool [T], the batch's tokens in the loss.

    A sequence shares a prefix only with its predecessor in the batch, if the predecessor directly precedes it in
    `members`. Without members the result is an `empty_row`: a rank without work still takes part in the collectives.
    """
    if not members:
        return empty_row(device)
    lengths = batch.lengths[members].tolist()
    adjacent = np.array([-2, *members[:-1]]) + 1 == members
    shared = (batch.shared[members] * adjacent).tolist()
    added = (batch.lengths[members] - shared).tolist()
    places = np.concatenate(list(paths(zip(shared, added, strict=True))))
    starts = np.cumsum(batch.lengths) - batch.lengths
    source = np.concatenate([np.arange(starts[i], starts[i] + batch.lengths[i]) for i in members])
    tokens, positions = np.empty((2, sum(added)), dtype=np.int64)
    tokens[places] = batch.tokens[source]
    positions[places] = np.concatenate([np.arange(length) for length in lengths])
    in_loss = np.flatnonzero(trained[source])
    chosen = source[in_loss]
    predicts, distribution = np.unique(places[in_loss - 1], return_inverse=True)
    words = batch.columns.get("kept_words")

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    def in_row(values: np.ndarray) -> Tensor:
        of_row = np.empty((sum(added), *values.shape[1:]), values.dtype)
        of_row[places] = values[source]
        return on_device(of_row)

    return PackedRow(
        tokens=on_device(tokens)[None],
        positions=on_device(positions)[None],
        lengths=lengths,
        added=added,
        paths=on_device(places),
        batch_index=chosen,
        sequence=on_device(np.repeat(np.arange(len(lengths)), lengths)[in_loss]),
        predicts=on_device(predicts),
        distribution=on_device(distribution),
        targets=on_device(batch.tokens[chosen]).long(),
        inputs={name: in_row(values) for name, values in batch.inputs.items()},
        kept_words=None if words is None else on_device(words[chosen]).long(),
    )


def empty_row(device: torch.device, tokens: int = 1) -> PackedRow:
    """Return a row of one sequence of zeros outside the loss."""
    zeros = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device)
    no, batch_index = zeros[0, :0], np.zeros(0, np.int64)
    return PackedRow(zeros, positions[None], [tokens], [tokens], positions, batch_index, no, no, no, no)
