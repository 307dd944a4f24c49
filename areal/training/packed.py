"""A batch as arrays, and packed rows of its sequences.

A row is [1, T]: sequences one after another, without padding; positions restart with each sequence. If sequences of a
group begin with the same tokens (`FlatBatch.shared`), the row holds these tokens once. Each sequence then adds only the
tokens that the sequence before it does not have, and its *path* lists the places of all its tokens in the row. So a row
is a prefix tree, written branch by branch. A token's position is its depth in the tree, and it attends to its ancestors
and itself (areal.training.attention). Its log-probability and all gradients equal those of the sequence computed by
itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from areal.samples.pictures import find
from areal.samples.table import COLUMNS, KEPT, NOT_SAMPLED
from areal.samples.trajectory import Branch, Group, Trajectory, common, paths

NO_PICTURES: Mapping[str, Any] = {}
# The parts of a batch that are arrays by name.
PARTS = ("columns", "inputs", "pictures")


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as arrays, sequences one after another.

    A sequence is a branch of a sample, from its first token on; most samples have one branch.
    columns: by name, [T] or [T, k], the columns of the table of tokens (`COLUMNS`) that the samples have; and what a
    step finds for each token before it trains on the batch.
    inputs: by name, what the model's layers take with each token. `routes`: uint8 [T, width], the experts of the pass
    at a token, which sampled the token after it; 0: it has none. The extension `pictures` adds those of placeholders.
    Without routes or pictures in the batch, these are missing.
    lengths, samples, branches, minibatch: [N], the number of the sequence's sample, that of the branch in its sample,
    and that of the minibatch which the group belongs to. shared: [N], number of first tokens that a sequence has in
    common with the one before it; computed once.
    rewards, groups, cut: [M]: the number of the sample's group, and whether it was cut at the limit of tokens.
    pictures: by name, what the model's tower takes of the batch's pictures.
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

        prefix_tree: share prefixes within each group; its sequences are then sorted by their tokens, so that each
        has its longest common prefix with a neighbour. With fewer groups than `minibatches`, each group is a minibatch.
        keeps_cache: as of `_routes`. pictures: those that the samples name. Raises ValueError if there are no groups, a
        sequence's first token is a sampled one (no token predicts it), or only some samples have a column whose absence
        means nothing (`Column.missing`).
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
        """All arrays by name, such as `lengths` and `columns.tokens`. `of_arrays` is the inverse."""
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
        """int32 [T], the sample of each token."""
        return np.repeat(self.samples, self.lengths)

    def by_sample(self) -> np.ndarray:
        """The places of all tokens, int64 [T], sample by sample and in each sample branch by branch."""
        ends = self.lengths.cumsum()
        order = np.lexsort((self.branches, self.samples))
        return np.concatenate([np.arange(ends[n] - self.lengths[n], ends[n]) for n in order])

    def trained(self, mask_older_than: int | None, *, mask_cut: bool = False) -> np.ndarray:
        """bool [T], the tokens in the loss: sampled tokens, without those of versions before `mask_older_than`, and
        with `mask_cut` without those of samples that were cut at the limit."""
        masked = np.repeat(self.cut[self.samples] & mask_cut, self.lengths)
        return (self.columns["versions"] >= max(0, mask_older_than or 0)) & ~masked

    def weights(self, trained: np.ndarray, mean: str, constant: int) -> np.ndarray:
        """The weight of each token in the loss of its minibatch, float64 [T].

        mean: "token", the mean over the minibatch's tokens in the loss; "sequence", the mean over its samples of their
        means; "constant", the mean over its samples of their sums divided by `constant`. trained: bool [T], the tokens
        in the loss; samples without such a token do not count.
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
    """`FlatBatch.columns`: what a sequence lacks is what the declaration of the column says. Raises ValueError if only
    some sequences have a column of which it says nothing."""
    columns = {}
    for name, column in COLUMNS.items():
        having = sum(name in sequence.columns for sequence in sequences)
        if having not in (0, len(sequences)) and column.missing is None:
            raise ValueError(f"only {having} of {len(sequences)} sequences have {name}")
        if having and not column.of_pass:
            columns[name] = _stacked([sequence.filled(name) for sequence in sequences], name).astype(column.dtype)
    return columns


def _stacked(parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """The column of the sequences, one after another."""
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
    """The sequences of the samples, of which `numbers` has the groups."""
    members = [
        _Member(int(numbers[sample]), sample, branch, sequence)
        for sample, trajectory in enumerate(trajectories)
        for branch, sequence in enumerate(trajectory.sequences())
    ]
    if prefix_tree:
        members.sort(key=lambda m: (m.group, m.sequence.tokens.astype(np.int32).tobytes()))
    return members


def _routes(trajectories: Sequence[Trajectory], members: Sequence[_Member], *, keeps_cache: bool) -> list[np.ndarray]:
    """The input `routes` of each member; empty if they have none.

    keeps_cache: whether engines go on from the passes of older weights after a load. Else they compute a sequence's
    tokens again with the weights that sample the next one, so only passes of the last version have their routes there.
    """
    if trajectories[0].routes is None:
        return []
    by_sample = [list(_routes_of(trajectory, keeps_cache=keeps_cache)) for trajectory in trajectories]
    return [by_sample[member.sample][member.branch] for member in members]


def _routes_of(trajectory: Trajectory, *, keeps_cache: bool) -> Iterator[np.ndarray]:
    """The routes of each branch. A pass that sampled no token of the branch has the routes which it has in another."""
    assert trajectory.routes is not None
    every = [*paths(trajectory.branches or [Branch(0, len(trajectory))])]
    after = np.full(len(trajectory), -1)  # of the pass at each token, the token that it sampled
    for path in reversed(every):
        after[path[:-1]] = np.where(trajectory.sampled[path[1:]], path[1:], after[path[:-1]])
    for path in every:
        made = after[path]
        made[:-1] = np.where(trajectory.sampled[path[1:]], path[1:], made[:-1])
        versions = np.where(made >= 0, trajectory.versions[made], NOT_SAMPLED)
        last = trajectory.versions[path][trajectory.sampled[path]][-1:]
        routed = (versions != NOT_SAMPLED) & (keeps_cache | (versions == last))
        yield np.where(routed[:, None], trajectory.routes[made], 0).astype(np.uint8)


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
    batch_index: int64 [S], where the S tokens are in the batch. sequence: int64 [S], the index of the row's sequence
    that each belongs to. predicts: int64 [U], the places in the row whose hidden states are needed. distribution: int64
    [S], which of these U gives each token's log-probability. targets: int64 [S], the tokens.
    inputs: as those of the batch, of the row's tokens, [T, ...].
    columns: as those of the batch, of the S tokens, once `set_columns` was called; floating-point numbers are float32.
    kept_words: int64 [S, k], the column of the batch; None: it has none.
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
        """The row with further targets for log-probs after its own: tokens, int64 [S, k], in place of each of the S."""
        places = self.distribution.repeat_interleave(tokens.shape[1])
        return replace(
            self,
            distribution=torch.cat([self.distribution, places]),
            targets=torch.cat([self.targets, tokens.flatten()]),
        )

    def filled(self, count: int) -> PackedRow:
        """The row with `count` more tokens, a last sequence that is in no loss."""
        if not count:
            return self
        padding = torch.arange(count, device=self.tokens.device)
        return replace(
            self,
            tokens=pad(self.tokens, (0, count)),
            positions=torch.cat([self.positions, padding[None]], 1),
            lengths=[*self.lengths, count],
            added=[*self.added, count],
            paths=torch.cat([self.paths, padding + self.tokens.shape[1]]),
            inputs={name: pad(of_row.T, (0, count)).T for name, of_row in self.inputs.items()},
        )


def pack(batch: FlatBatch, trained: np.ndarray, members: Sequence[int], device: torch.device) -> PackedRow:
    """Pack the sequences `members` into a row. trained: bool [T], the batch's tokens that are in the loss.

    A sequence shares a prefix only with its predecessor in the batch, if that one directly precedes it in `members`.
    Without members it is an `empty_row`: a rank without work still takes part in the collectives.
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
    """A row of one sequence of zeros that is in no loss."""
    zeros = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device)
    no, batch_index = zeros[0, :0], np.zeros(0, np.int64)
    return PackedRow(zeros, positions[None], [tokens], [tokens], positions, batch_index, no, no, no, no)
