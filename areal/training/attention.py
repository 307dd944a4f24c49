"""Attention over packed rows (areal.training.packed), which keeps the sequences of a row apart.

A token attends to its ancestors in the row's prefix tree and to itself. In layers with a *window* of W tokens, as in
transformers and vLLM, a token attends only to the last W of these tokens.

`packed_sdpa` makes one kernel call per sequence: queries are the tokens that the sequence adds, keys are its path. On
trees of the quickstart, on one core, three alternatives make a training step 1.2 times as long: a dense mask for each
group; whole paths for queries too; paths of similar length gathered into padded blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from areal.training.packed import PackedRow
from areal.training.row_groups import Attention, RowGroup

log = structlog.get_logger()

FLASH, PACKED_FLEX, PACKED_SDPA = "flash_attention_2", "packed_flex", "packed_paths"
"""Names in transformers. For a name with "sdpa", transformers would require a support of its own."""
MASK_BLOCK = 128
"""Tokens a block of flex attention's mask, PyTorch's default."""
FLEX_KERNEL = {"BACKEND": "TRITON"}
"""For rows below 128 tokens, torch would choose its kernel for decoding. The kernel does not compile if a head of keys
has more than MASK_BLOCK queries: from 33 tokens on if four heads share a key."""
FLEX_GRAPHS = 64
"""Most graphs of flex attention. A run has 6 to 12; PyTorch's own limit is 8."""
QUERIES_AT_ONCE = 512
"""Tokens per kernel call of `packed_sdpa` in layers with a window, together with the keys in the window."""
Attend = Callable[..., Tensor]


def choose_attention(dtype: str, *, flash: bool = True) -> str:
    """Return the name in transformers of the fastest installed attention. Registers packed attention there. flash:
    whether flash attention 2 can compute the model's attention."""
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


def look_before(name: str) -> None:
    """Wrap the attention function `name` of transformers: the wrapper reports windows, and computes by a `RowGroup`."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not isinstance(function := ALL_ATTENTION_FUNCTIONS[name], partial):
        AttentionInterface.register(name, partial(_attend, function))


def _attend(
    attention: Attention, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, *, together: RowGroup | None = None,
    note_window: Callable[[int | None], None] | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Call an attention function of transformers. together: None if this rank has the whole row. note_window: called
    with the window that the layer asks for."""
    if note_window is not None:
        note_window(options.get("sliding_window"))
    if together is not None:
        attention, options = together.attention(attention, query, key, options)
    return attention(module, query, key, value, attention_mask, **options)


def compile_layers(module: Any, attention: str) -> None:
    """Have torch compile each layer of a model, in place, on the first pass. Parameters keep their names.

    attention: the name of the attention, which is not compiled, since its work differs from row to row.
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
    """Return the keyword arguments that describe a row's sequences to `attention` and other layers."""
    boundaries = {} if row.added != row.lengths else _boundaries(row)  # a tree has none
    if attention == FLASH:
        return boundaries
    if attention == PACKED_FLEX:
        return {"row": row, "mask_of": cache(partial(block_mask, row)), **boundaries}
    longest = max((length for length, added in zip(row.lengths, row.added, strict=True) if added < length), default=0)
    mask = torch.ones(longest, longest, dtype=torch.bool, device=row.tokens.device).tril()
    return {"row": row, "mask": mask, **boundaries}


def _boundaries(row: PackedRow) -> dict[str, Any]:
    """Return the boundaries of a row's sequences, by their names in transformers.

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
    """Causal attention along each path of a packed row; an attention function for transformers.

    query: [1, heads, T, D], key and value: [1, kv heads, T, D]; returns [1, T, heads, D]. mask: bool, lower triangle as
    large as the longest sequence with a shared prefix. sliding_window: the most tokens that a token attends to,
    including itself; None: no limit. softcap: scores become cap * tanh(score / cap). s_aux: [heads], attention sinks,
    scores of a token without a value. With softcap or sinks, the scores of all pairs of tokens exist until the backward
    pass, and no kernel computes them. Raises NotImplementedError for unsupported kinds of attention instead of ignoring
    them.
    """
    _refuse(options)
    if row.added != row.lengths:
        key, value = key.index_select(2, row.paths), value.index_select(2, row.paths)
    repeats = query.shape[1] // key.shape[1]  # each head of queries gets its own keys and values
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
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention by scores, as in the models' functions in transformers. query: scaled. attn_mask: bool [n, m]."""
    scores = query @ key.transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~attn_mask, -torch.inf)
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, extra], 3)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def chunk_of(module: torch.nn.Module) -> int | None:
    """Return the tokens of a chunk in an attention layer that attends within chunks (Llama 4), else None. A chunked
    layer gets its chunks by a mask, and does not pass them to the attention function."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    index = getattr(module, "layer_idx", len(kinds))
    chunked = index < len(kinds) and kinds[index] == "chunked_attention"
    return int(module.config.attention_chunk_size) if chunked else None


def _chunks(chunk: int | None, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the queries of a path chunk by chunk, with the keys and values of the chunk.

    query: [1, heads, n, D], of the path's last tokens; key and value: [1, heads, length, D].
    """
    length = key.shape[2]
    first, size = length - query.shape[2], chunk or max(1, length)
    for start in range(first - first % size, length, size):
        keys = slice(start, min(start + size, length))
        yield query[:, :, max(0, start - first) : keys.stop - first], key[:, :, keys], value[:, :, keys]


def _within(window: int, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Iterator[Tensor]:
    """Attention of the last tokens of a path, each to the `window` tokens up to itself, in parts.

    query: [1, heads, n, D], key and value: [1, heads, length, D].
    """
    length, size = key.shape[2], min(QUERIES_AT_ONCE, query.shape[2])
    band = torch.ones(size, size + window - 1, dtype=torch.bool, device=key.device).triu().tril(window - 1)
    for start, q in zip(range(length - query.shape[2], length, size), query.split(size, 2), strict=True):
        count, first = q.shape[2], start - window + 1  # the first key that the first query sees
        keys = slice(max(0, first), start + count)
        seen = band[:count, max(0, -first) : count + window - 1]
        yield attend(q, key[:, :, keys], value[:, :, keys], attn_mask=seen)


def block_mask(row: PackedRow, window: int | None = None, chunk: int | None = None) -> BlockMask:
    """Return the mask of a row for flex attention: the pairs of tokens that attend. window: as in `packed_sdpa`. chunk:
    as in `chunk_of`; a layer has either or none.

    A token and its descendants are an interval of the row that begins with the token. Only tokens of the interval
    attend to the token. So a block of keys concerns a later block of queries if the longest interval of its keys
    reaches the block of queries, and concerns all of the queries if the shortest interval covers them. PyTorch's
    `create_block_mask` would compute the mask of every pair of tokens, 3 T^2 bytes. A window or a chunk excludes blocks
    of keys that are outside the window or chunk of every token in a block of queries.
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
    starts = torch.arange(0, T, MASK_BLOCK, device=below.device)[:, None]  # first query of a block
    earlier = starts > starts.T
    full = earlier & (intervals.amin(1) >= starts + MASK_BLOCK)
    some = earlier & (intervals.amax(1) > starts)
    limited = window is not None or chunk is not None
    if limited:
        depth = row.positions[0]
        # The depth of the first token that a token sees on its path. The depth rises with the token's own depth.
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
    """Return how many blocks of keys each block of queries has, and their numbers, as in `BlockMask`."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def packed_flex(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    row: PackedRow, mask_of: Callable[[int | None, int | None], BlockMask], scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **options: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """`packed_sdpa` with one kernel call for the whole row. mask_of: the row's `block_mask`, by window and chunk."""
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
        # With a sink of score s, each share becomes exp(score) / (exp(lse) + exp(s)).
        share = torch.sigmoid(normaliser.lse - s_aux.to(normaliser.lse.dtype)[None, :, None])
        output = output * share[..., None].to(output.dtype)
    return output.transpose(1, 2).contiguous(), None


@cache
def _softcapped(cap: float) -> Callable[..., Tensor]:
    """Return a modification of scores for flex attention. Cached by cap: torch would compile a new function again."""

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return modify


@cache
def _compiled_flex() -> Any:
    """Compile flex attention for rows of any length. Other differences (heads, gradients, rows of one block) get a
    graph each. Beyond the limit, fullgraph raises an error: uncompiled attention would hold all pairs' scores."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, recompile_limit=FLEX_GRAPHS)


def _refuse(options: dict[str, Any]) -> None:
    if options.get("position_bias") is not None:
        raise NotImplementedError("packed attention has no position_bias")
