"""Packs sequences into one row, and makes attention keep them apart.

A row is [1, T]: sequences one after another, without padding; positions restart with each sequence. If sequences of a
group begin with the same tokens (`FlatBatch.shared`), the row holds these tokens once. Each sequence then adds only the
tokens that the sequence before it does not have, and its *path* lists the places of all its tokens in the row. So a row
is a prefix tree, written branch by branch. A token's position is its depth in the tree, and it attends to its ancestors
and itself. Its log-probability and all gradients equal those of the sequence computed by itself.

In layers with a *window* of W tokens, as in transformers and vLLM, it attends only to the last W of these.

`packed_sdpa` makes one kernel call per sequence: queries are the tokens it adds, keys are its path. On trees of the
quickstart, on one core, a training step is 1.2 times as fast with it as with each of these alternatives: a dense mask
for each group; whole paths for queries too; paths of similar length gathered into padded blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from areal.samples.table import COLUMNS, NOT_SAMPLED, SCORED, TOP
from areal.samples.trajectory import Group, Trajectory, common, paths
from areal.samples.vision import Picture, pictures_in, positions_of

NO_PICTURES: Mapping[str, Picture] = {}
log = structlog.get_logger()

FLASH, PACKED_FLEX, PACKED_SDPA = "flash_attention_2", "packed_flex", "packed_paths"
"""Names in transformers. In one with "sdpa" it would look for a support that only its own function needs."""
MASK_BLOCK = 128
"""Tokens a block of flex attention's mask, PyTorch's default."""
FLEX_KERNEL = {"BACKEND": "TRITON"}
"""For rows below 128 tokens, torch would take its kernel for decoding, which does not compile if a head of keys has
more than MASK_BLOCK queries: from 33 tokens on where four heads share a key."""
FLEX_GRAPHS = 64
"""Most graphs of flex attention. A run has 6 to 12; PyTorch's own limit is 8."""
QUERIES_AT_ONCE = 512
"""Tokens for which `packed_sdpa` makes one kernel call, if their layer has a window: with the keys that they see."""
Attend = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as arrays, sequences one after another.

    A sequence is a branch of a sample, from its first token on; most samples have one branch.
    tokens, logprobs, versions: [T], as in `Trajectory.sequences`. returns: float64 [T], as in `Trajectory`; empty if
    all tokens are credited with the reward of their sample. teacher_logprobs, reference_logprobs: float32 [T], and
    teacher_top_tokens, teacher_top_logprobs: [T, k], as in `Trajectory`; empty if scorers gave none.
    routes: uint8 [T, width], the experts of the pass at each token, which sampled the token after it; 0: it has none.
    Empty if generation gave none.
    lengths, samples, branches, minibatch: [N], the number of the sequence's sample, that of the branch in its sample,
    and that of the minibatch which the group belongs to. shared: [N], number of first tokens that a sequence has in
    common with the one before it; computed once.
    rewards, groups, cut: [M]: the number of the sample's group, and whether it was cut at the limit of tokens.
    patches, grids: float32 [patches of all, D] and int32 [K, 3], of the batch's K distinct pictures, as in
    `Picture`. pictures, parts: int32 [T], the picture that a token is a placeholder of, -1: of none, and
    of which of its parts. places: int32 [T, 3], as of `positions_of`. All are empty without pictures.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    returns: np.ndarray
    teacher_logprobs: np.ndarray
    reference_logprobs: np.ndarray
    teacher_top_tokens: np.ndarray
    teacher_top_logprobs: np.ndarray
    routes: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    samples: np.ndarray
    branches: np.ndarray
    minibatch: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    cut: np.ndarray
    patches: np.ndarray
    grids: np.ndarray
    pictures: np.ndarray
    parts: np.ndarray
    places: np.ndarray

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        *,
        minibatches: int,
        prefix_tree: bool = False,
        pictures: Mapping[str, Picture] = NO_PICTURES,
    ) -> FlatBatch:
        """Flatten `groups`. Whole groups are assigned to the minibatches in turn.

        prefix_tree: share prefixes within each group; its sequences are then sorted by their tokens, so that each
        has its longest common prefix with a neighbour. With fewer groups than `minibatches`, each group is a minibatch.
        pictures: those that the samples name. Raises
        ValueError if there are no groups, a sequence's first token is a sampled one (no token predicts it), or only
        some samples have what a scorer gives, or routes.
        """
        if not groups:
            raise ValueError("a batch without groups cannot be trained")
        trajectories = [t for group in groups for t in group.trajectories]
        numbers = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.trajectories) for group in groups])
        rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
        members = _members(trajectories, numbers, prefix_tree)
        sequences = [member.sequence for member in members]
        lengths = np.array([len(t) for t in sequences], dtype=np.int32)
        versions = np.concatenate([t.versions for t in sequences]).astype(np.int32)
        for n in np.flatnonzero(versions[lengths.cumsum() - lengths] != NOT_SAMPLED):
            raise ValueError(f"group {groups[members[n].group].id}: a sample without a prompt cannot be trained")
        differ = any(t.returns is not None for t in sequences)
        routes = _routes(sequences)
        shared = _shared_prefixes(members, routes) if prefix_tree else np.zeros_like(lengths)
        return cls(
            tokens=np.concatenate([t.tokens for t in sequences]).astype(np.int32),
            logprobs=np.concatenate([t.logprobs for t in sequences]).astype(np.float32),
            versions=versions,
            returns=np.concatenate([t.filled("returns") for t in sequences]) if differ else np.zeros(0),
            **{name: _scorer_column(name, sequences) for name in (*SCORED, *TOP)},
            routes=np.concatenate(routes or [np.zeros(0, np.uint8)]),
            lengths=lengths,
            shared=shared,
            samples=np.array([member.sample for member in members], dtype=np.int32),
            branches=np.array([member.branch for member in members], dtype=np.int32),
            minibatch=np.array([member.group for member in members], dtype=np.int32) % minibatches,
            rewards=rewards,
            groups=numbers,
            cut=np.array([t.finish == "length" for t in trajectories]),
            **_pictures(sequences, pictures),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name: `FlatBatch(**batch.arrays())` is the same batch."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def by_sample(self) -> np.ndarray:
        """The places of all tokens, int64 [T], sample by sample and in each sample branch by branch."""
        ends = self.lengths.cumsum()
        order = np.lexsort((self.branches, self.samples))
        return np.concatenate([np.arange(ends[n] - self.lengths[n], ends[n]) for n in order])

    def trained(self, mask_older_than: int | None, *, mask_cut: bool = False) -> np.ndarray:
        """bool [T], the tokens in the loss: sampled tokens, without those of versions before `mask_older_than`, and
        with `mask_cut` without those of samples that were cut at the limit."""
        masked = np.repeat(self.cut[self.samples] & mask_cut, self.lengths)
        return (self.versions >= max(0, mask_older_than or 0)) & ~masked

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


def _scorer_column(name: str, sequences: Sequence[Trajectory]) -> np.ndarray:
    """A column of SCORED or TOP of all sequences; empty if none has it. Raises ValueError if only some do."""
    arrays = [array for sequence in sequences if (array := getattr(sequence, name)) is not None]
    if len(arrays) not in (0, len(sequences)):
        raise ValueError(f"only {len(arrays)} of {len(sequences)} sequences have {name}")
    return np.concatenate(arrays or [np.zeros(0)]).astype(COLUMNS[name].dtype)


def _pictures(sequences: Sequence[Trajectory], pictures: Mapping[str, Picture]) -> dict[str, np.ndarray]:
    """`FlatBatch.patches` and what follows it. Raises ValueError for tokens that do not stand for their pictures."""
    distinct = list(pictures.values())
    numbers = {name: number for number, name in enumerate(pictures)}
    columns = [np.zeros((0, 5), np.int32)]
    for sequence in sequences if distinct else ():
        column = np.full((len(sequence), 5), -1, np.int32)
        starts, of_sequence = pictures_in(sequence.pictures, pictures)
        for start, picture in zip(starts, of_sequence, strict=True):
            column[start : start + picture.tokens, 0] = numbers[picture.name]
            column[start : start + picture.tokens, 1] = np.arange(picture.tokens)
        column[:, 2:] = positions_of(len(sequence), starts, of_sequence).T
        columns.append(column)
    table = np.concatenate(columns)
    return {
        "patches": np.concatenate([picture.patches for picture in distinct] or [np.zeros((0, 0), np.float32)]),
        "grids": np.array([picture.grid for picture in distinct], np.int32).reshape(-1, 3),
        "pictures": table[:, 0].copy(),
        "parts": table[:, 1].copy(),
        "places": table[:, 2:].copy(),
    }


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


def _routes(sequences: Sequence[Trajectory]) -> list[np.ndarray]:
    """`FlatBatch.routes` of each sequence; empty if none has routes."""
    column = _scorer_column("routes", sequences)
    parts = np.split(column, np.cumsum([len(t) for t in sequences])[:-1]) if len(column) else []
    return [np.concatenate([part[1:], np.zeros_like(part[:1])]) for part in parts]


def _shared_prefixes(members: Sequence[_Member], routes: Sequence[np.ndarray]) -> np.ndarray:
    """`FlatBatch.shared`. Not where experts differ. A token without routes takes its neighbour's."""
    counts = [0]
    for number, (previous, member) in enumerate(pairwise(members)):
        count = common(previous.sequence, member.sequence) if previous.group == member.group else 0
        if routes:
            of_previous, of_member = routes[number][:count], routes[number + 1][:count]
            differ = of_member.any(1) & (of_member != of_previous).any(1)
            count = int(np.append(differ, True).argmax())
            of_member[:count] = of_previous[:count]
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
    behaviour: float32 [S], log pi_behav. versions: int32 [S].
    routes: uint8 [T, width], as in `FlatBatch`; None: it has none. pictures, parts: int64 [1, T], and places [3, T], as
    there; None: the batch has no pictures.
    advantages, weights (of each token in the loss), proximal, reference and teacher (log-probabilities), values (the
    critic's before the step) and value_targets: float32 [S] once computed. top_tokens, top_logprobs: [S, k], those that
    are likeliest for the teacher, and their log-probabilities. mask: bool [S], as in `Tokens`.
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
    behaviour: Tensor
    versions: Tensor
    routes: Tensor | None = None
    advantages: Tensor | None = None
    weights: Tensor | None = None
    proximal: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None
    values: Tensor | None = None
    value_targets: Tensor | None = None
    mask: Tensor | None = None
    pictures: Tensor | None = None
    parts: Tensor | None = None
    places: Tensor | None = None

    def pick(self, values: np.ndarray) -> Tensor:
        """The values of the row's S tokens, float32 [S] or [S, k]. values: of the batch, [T] or [T, k]."""
        return torch.from_numpy(values[self.batch_index]).float().to(self.tokens.device)

    def with_top_tokens(self) -> PackedRow:
        """The row with further targets for log-probs: S + S k, the teacher's likeliest tokens after the others."""
        if self.top_tokens is None:
            return self
        places = self.distribution.repeat_interleave(self.top_tokens.shape[1])
        return replace(
            self,
            distribution=torch.cat([self.distribution, places]),
            targets=torch.cat([self.targets, self.top_tokens.flatten()]),
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
            routes=None if self.routes is None else pad(self.routes, (0, 0, 0, count)),
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
    routes = np.empty((sum(added), *batch.routes.shape[1:]), np.uint8)
    if has_routes := len(batch.routes) > 0:
        routes[places] = batch.routes[source]

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

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
        behaviour=on_device(batch.logprobs[chosen]),
        versions=on_device(batch.versions[chosen]),
        routes=on_device(routes) if has_routes else None,
        **_pictures_in(batch, places, source, device),
    )


def _pictures_in(batch: FlatBatch, places: np.ndarray, source: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """`PackedRow.pictures`, `parts` and `places` of a row; or nothing. places, source: of tokens in row and batch."""
    if not len(batch.pictures):
        return {}
    columns = np.empty((5, places.max() + 1), np.int64)
    columns[:, places] = np.stack([batch.pictures, batch.parts, *batch.places.T])[:, source]
    parts = torch.from_numpy(columns).to(device).split((1, 1, 3))
    return dict(zip(("pictures", "parts", "places"), parts, strict=True))


def empty_row(device: torch.device, tokens: int = 1) -> PackedRow:
    """A row of one sequence of zeros that is in no loss."""
    zeros = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device)
    none = torch.zeros(0, device=device)
    no, batch_index = none.long(), np.zeros(0, np.int64)
    return PackedRow(
        zeros, positions[None], [tokens], [tokens], positions, batch_index, no, no, no, no, none, none.int()
    )


def choose_attention(dtype: str, *, flash: bool = True) -> str:
    """The name in transformers of the fastest attention that is installed. Registers the packed ones there. flash:
    whether flash attention 2 can compute the model's."""
    from transformers import AttentionInterface
    from transformers.utils import is_flash_attn_2_available

    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionInterface.register(PACKED_FLEX, packed_flex)
    if dtype != "bfloat16" or not torch.cuda.is_available():
        return PACKED_SDPA
    if is_flash_attn_2_available() and flash:
        return FLASH
    if flash:
        log.info("flash-attention 2 is not installed (the extra `flash`): flex attention takes its place")
    return PACKED_FLEX


def compile_layers(module: Any, attention: str) -> None:
    """Have torch compile each layer of a model on its first pass. In place: its parameters keep their names.

    attention: the name of the attention, which is not compiled: what it does differs from row to row.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AttentionInterface.register(attention, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[attention]))
    for layer in module.get_decoder().modules():
        if type(layer).__name__ in module._no_split_modules:
            layer.compile(dynamic=True)


def row_inputs(row: PackedRow, attention: str) -> dict[str, Any]:
    """The arguments of the model's own forward method for a row."""
    inputs = {"input_ids": row.tokens, "position_ids": row.positions, "use_cache": False}
    return inputs | attention_kwargs(row, attention)


def attention_kwargs(row: PackedRow, attention: str) -> dict[str, Any]:
    """The keyword arguments that tell the attention function `attention`, and other layers, about a row's sequences."""
    boundaries = {} if row.added != row.lengths else _boundaries(row)  # a tree has none
    if attention == FLASH:
        return boundaries
    if attention == PACKED_FLEX:
        return {"row": row, "mask_of": cache(partial(block_mask, row)), **boundaries}
    longest = max((length for length, added in zip(row.lengths, row.added, strict=True) if added < length), default=0)
    mask = torch.ones(longest, longest, dtype=torch.bool, device=row.tokens.device).tril()
    return {"row": row, "mask": mask, **boundaries}


def _boundaries(row: PackedRow) -> dict[str, Any]:
    """Where the sequences of a row begin and end, by the names that transformers has for it.

    Flash attention and linear attention take the first four, convolutions take `seq_idx`.
    """
    device = row.tokens.device
    ends = torch.tensor([0, *np.cumsum(row.lengths)], dtype=torch.int32, device=device)
    numbers = np.repeat(np.arange(len(row.lengths), dtype=np.int32), row.lengths)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(row.lengths),
        "max_length_k": max(row.lengths),
        "seq_idx": torch.from_numpy(numbers).to(device)[None],
    }


def packed_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    row: PackedRow, mask: Tensor, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **options: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention along each path of a packed row; an attention function as transformers registers them.

    query: [1, heads, T, D], key and value: [1, kv heads, T, D]; returns [1, T, heads, D]. mask: bool, lower triangle as
    large as the longest sequence with a shared prefix. sliding_window: the most tokens that a token attends to, itself
    included; None: there is no limit. softcap: scores become cap * tanh(score / cap). s_aux: [heads], attention sinks,
    scores of a token that has no value. With one of these two, the
    scores of all pairs of tokens exist until the backward pass, and no kernel computes them.
    Raises NotImplementedError for kinds of attention it does not support, so that none is silently ignored.
    """
    _refuse(options)
    if row.added != row.lengths:
        key, value = key.index_select(2, row.paths), value.index_select(2, row.paths)
    repeats = query.shape[1] // key.shape[1]  # each head of queries gets keys and values of its own
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    attend: Attend = partial(scaled_dot_product_attention, scale=scaling)
    if by_scores := softcap is not None or s_aux is not None:
        query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        attend = partial(_attend_by_scores, softcap=softcap, sinks=s_aux)
    parts = (query.split(row.added, 2), key.split(row.lengths, 2), value.split(row.lengths, 2))
    chunk = chunk_of(module)
    outputs: list[Tensor] = []
    for q, k, v in (piece for part in zip(*parts, strict=True) for piece in _chunks(chunk, *part)):
        added, length = q.shape[2], k.shape[2]
        if not added:
            continue
        if by_scores or (sliding_window is not None and length > sliding_window):
            outputs += _within(min(sliding_window or length, length), q, k, v, attend)
        elif added == length:
            outputs.append(attend(q, k, v, is_causal=True))
        else:
            outputs.append(attend(q, k, v, attn_mask=mask[length - added : length, :length]))
    return torch.cat([output.transpose(1, 2) for output in outputs], 1), None


def _attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by its scores, as the models' functions in transformers. query: scaled. attn_mask: bool [n, m]."""
    scores = query @ key.transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~attn_mask, -torch.inf)
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, extra], 3)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def chunk_of(module: torch.nn.Module) -> int | None:
    """The tokens of the chunks within which an attention layer of a model attends (Llama 4); None: it has none. Such a
    layer gets its chunks by a mask, and does not tell the attention function of them."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    index = getattr(module, "layer_idx", len(kinds))
    chunked = index < len(kinds) and kinds[index] == "chunked_attention"
    return int(module.config.attention_chunk_size) if chunked else None


def _chunks(chunk: int | None, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The queries of a path that are in each of its chunks, with the keys and values of these.

    query: [1, heads, n, D], of the path's last tokens; key and value: [1, heads, length, D].
    """
    length = key.shape[2]
    first, size = length - query.shape[2], chunk or max(1, length)
    for start in range(first - first % size, length, size):
        keys = slice(start, min(start + size, length))
        yield query[:, :, max(0, start - first) : keys.stop - first], key[:, :, keys], value[:, :, keys]


def _within(window: int, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Iterator[Tensor]:
    """Attention of the last tokens of a path, each to the `window` tokens that end with it, in parts.

    query: [1, heads, n, D], key and value: [1, heads, length, D].
    """
    length, size = key.shape[2], min(QUERIES_AT_ONCE, query.shape[2])
    band = torch.ones(size, size + window - 1, dtype=torch.bool, device=key.device).triu().tril(window - 1)
    for start, q in zip(range(length - query.shape[2], length, size), query.split(size, 2), strict=True):
        count, first = q.shape[2], start - window + 1  # what the first of these queries sees begins there
        keys = slice(max(0, first), start + count)
        seen = band[:count, max(0, -first) : count + window - 1]
        yield attend(q, key[:, :, keys], value[:, :, keys], attn_mask=seen)


def block_mask(row: PackedRow, window: int | None = None, chunk: int | None = None) -> BlockMask:
    """The mask of a row for flex attention: which tokens attend to which. window: as `packed_sdpa` has it. chunk: as
    `chunk_of` says; a layer has at most one of them.

    A token and its descendants are an interval of the row that begins with the token. Only these attend to the token.
    So a block of keys concerns a later block of queries if its longest interval reaches that block, and wholly if its
    shortest one covers it. PyTorch's `create_block_mask` would compute the mask of every pair of tokens to find that
    out: 3 T^2 bytes. A window or a chunk takes away the blocks of keys that are outside that of each token of a block
    of queries.
    """
    ends = torch.tensor(row.added, device=row.tokens.device).cumsum(0)
    below = torch.zeros_like(row.tokens[0])
    lengths = torch.tensor(row.lengths, device=row.tokens.device)
    below.scatter_reduce_(0, row.paths, ends.repeat_interleave(lengths), "amax")

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < below[key])

    def sees_within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < below[key]) & (depth[key] >= first[query])

    T = len(below)
    intervals = pad(below, (0, -T % MASK_BLOCK)).view(-1, MASK_BLOCK)
    starts = torch.arange(0, T, MASK_BLOCK, device=below.device)[:, None]  # first query of each block
    earlier = starts > starts.T
    full = earlier & (intervals.amin(1) >= starts + MASK_BLOCK)
    some = earlier & (intervals.amax(1) > starts)
    limited = window is not None or chunk is not None
    if limited:
        depth = row.positions[0]
        # The depth of the first token on a token's path that it sees. It rises with the token's own depth.
        first = depth - depth % chunk if chunk else depth - (window or T) + 1

        def of_blocks(values: Tensor, filler: int) -> Tensor:
            return pad(values, (0, -T % MASK_BLOCK), value=filler).view(-1, MASK_BLOCK)

        full &= of_blocks(depth, T).amin(1) >= of_blocks(first, -T).amax(1)[:, None]
        some &= of_blocks(depth, -1).amax(1) >= of_blocks(first, T).amin(1)[:, None]
    partly = (some | (starts == starts.T)) & ~full
    return BlockMask.from_kv_blocks(
        *_as_lists(partly),
        *_as_lists(full),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=sees_within if limited else sees,
        seq_lengths=(T, T),
    )


def _as_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and their numbers first, as `BlockMask` stores them."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def packed_flex(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    row: PackedRow, mask_of: Callable[[int | None, int | None], BlockMask], scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **options: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Like `packed_sdpa`, but one kernel call for the whole row. mask_of: its `block_mask`, by window and chunk."""
    _refuse(options)
    longest, chunk = max(row.lengths), chunk_of(module)
    mask = mask_of(
        sliding_window if sliding_window is not None and longest > sliding_window else None,
        chunk if chunk is not None and longest > chunk else None,
    )
    attend = _compiled_flex() if query.is_cuda else flex_attention
    settings: dict[str, Any] = {} if softcap is None else {"score_mod": _softcapped(softcap)}
    if s_aux is not None:
        settings["return_aux"] = AuxRequest(lse=True)
    grouped = query.shape[1] != key.shape[1]
    output = attend(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=grouped, kernel_options=FLEX_KERNEL, **settings
    )
    if s_aux is not None:
        output, normaliser = output
        # With one more score s, each share becomes exp(score) / (exp(lse) + exp(s)).
        share = torch.sigmoid(normaliser.lse - s_aux.to(normaliser.lse.dtype)[None, :, None])
        output = output * share[..., None].to(output.dtype)
    return output.transpose(1, 2).contiguous(), None


@cache
def _softcapped(cap: float) -> Callable[..., Tensor]:
    """A modification of scores of flex attention. One function for each cap: another one would be compiled again."""

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return modify


@cache
def _compiled_flex() -> Any:
    """Rows differ in length. What else differs (heads, gradients, rows of one block) has a graph each. Beyond the
    limit, fullgraph makes an error of what would go on uncompiled, with the scores of all pairs of tokens."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, recompile_limit=FLEX_GRAPHS)


def _refuse(options: dict[str, Any]) -> None:
    if options.get("position_bias") is not None:
        raise NotImplementedError("packed attention has no position_bias")
