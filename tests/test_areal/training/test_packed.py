from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from areal.extensions.selftest import references
from areal.samples.trajectory import Group, Trajectory
from areal.training import attention as attention_file
from areal.training.attention import (
    PACKED_FLEX,
    PACKED_SDPA,
    _compiled_flex,
    attention_kwargs,
    block_mask,
    choose_attention,
    packed_flex,
    packed_sdpa,
)
from areal.training.head import linear_logprobs
from areal.training.packed import FlatBatch, empty_row, pack

CPU = torch.device("cpu")


def attend(kind, query, key, value, row, **options):
    functions = {PACKED_SDPA: packed_sdpa, PACKED_FLEX: packed_flex}
    about = attention_kwargs(row, kind)
    return functions[kind](torch.nn.Module(), query, key, value, None, **about, **options)[0]


def trajectory(first, versions, reward=0.0):
    T = len(versions)
    return Trajectory(
        np.arange(first, first + T, dtype=np.int32),
        np.linspace(-1, -2, T, dtype=np.float32),
        np.array(versions, np.int32),
        reward,
        "stop",
    )


def batch():
    groups = [
        Group("a", 0, (trajectory(10, [-1, -1, 3, 4], 1.0), trajectory(20, [-1, 4, -1, 4]))),
        Group("b", 1, (trajectory(30, [-1, 2]),)),
    ]
    return FlatBatch.of(groups, minibatches=2)


def test_a_row_has_the_sampled_tokens_and_the_places_that_predict_them():
    flat = batch()
    row = pack(flat, flat.trained(None), [2, 1], CPU)
    assert row.tokens.tolist() == [[30, 31, 20, 21, 22, 23]]
    assert row.positions.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert row.lengths == [2, 4]
    assert row.targets.tolist() == [31, 21, 23]
    assert row.predicts.tolist() == [0, 2, 4]
    row.set_columns(flat.columns)
    assert row.columns["versions"].tolist() == [2, 4, 4]
    assert row.batch_index.tolist() == [9, 5, 7]
    assert row.sequence.tolist() == [0, 1, 1]


def test_a_sample_without_a_column_has_what_the_declaration_says_and_inputs_of_the_model_stay_apart():
    with_returns = replace(trajectory(10, [-1, 3, 3], 1.0), returns=[0.0, 2.0, 3.0], pictures=np.zeros((3, 16)))
    groups = [Group("a", 0, (with_returns, trajectory(20, [-1, 4], 0.5)))]
    flat = FlatBatch.of(groups, minibatches=1)
    assert flat.columns["returns"].tolist() == [0, 2, 3, 0.5, 0.5]
    assert flat.columns.keys() == {"tokens", "logprobs", "versions", "returns"}
    row = pack(flat, flat.trained(None), [1, 0], CPU)
    row.set_columns(flat.columns)
    assert row.columns["returns"].tolist() == [0.5, 2, 3] and row.columns["returns"].dtype == torch.float32


def test_a_batch_is_the_same_after_its_way_as_arrays():
    flat = batch()
    again = FlatBatch.of_arrays(flat.arrays())
    assert again.arrays().keys() == flat.arrays().keys() >= {"columns.tokens", "lengths"}
    for name, array in flat.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array)


def test_tokens_that_are_too_old_are_not_trained():
    flat = batch()
    assert pack(flat, flat.trained(4), [0, 1, 2], CPU).targets.tolist() == [13, 21, 23]


def test_a_rank_without_work_has_a_row_without_targets():
    flat = batch()
    row = pack(flat, flat.trained(None), [], CPU)
    assert row.tokens.shape == (1, 1)
    assert len(row.targets) == 0


def test_groups_stay_whole_in_a_minibatch():
    assert batch().minibatch.tolist() == [0, 0, 1]


def test_a_batch_smaller_than_the_number_of_minibatches_has_one_for_each_group():
    groups = [Group("a", 0, (trajectory(10, [-1, 0]),)), Group("b", 1, (trajectory(20, [-1, 0]),))]
    assert FlatBatch.of(groups, minibatches=4).minibatch.tolist() == [0, 1]


def test_a_trajectory_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="group c"):
        FlatBatch.of([Group("c", 0, (trajectory(0, [1, 1]),))], minibatches=1)


@pytest.mark.parametrize("attention", [PACKED_SDPA, PACKED_FLEX])
def test_attention_that_is_not_supported_is_refused(attention):
    q, flat = torch.zeros(1, 2, 4, 8), batch()
    row = pack(flat, flat.trained(None), [0], CPU)
    with pytest.raises(NotImplementedError, match="position_bias"):
        attend(attention, q, q, q, row, position_bias=torch.zeros(2))


# --- prefix trees

TEMPERATURE = 0.8


def sample(tokens, prompt):
    """A trajectory with a prompt of so many tokens."""
    T = len(tokens)
    versions = np.where(np.arange(T) < prompt, -1, 3).astype(np.int32)
    return Trajectory(np.array(tokens, np.int32), np.zeros(T, np.float32), versions, 0.0, "stop")


def flat_tree(*groups):
    """Of (tokens, prompt) pairs."""
    result = [Group(str(g), g, tuple(sample(*pair) for pair in group)) for g, group in enumerate(groups)]
    return FlatBatch.of(result, minibatches=1, prefix_tree=True)


def whole_row(flat):
    return pack(flat, flat.trained(None), range(len(flat.lengths)), CPU)


def test_tokens_that_samples_of_a_group_begin_with_stand_in_the_row_once():
    flat = flat_tree([([5, 6, 7, 9], 2), ([5, 6, 7, 8, 1], 2), ([5, 6, 7, 8], 2)], [([5, 6], 1)])
    assert flat.shared.tolist() == [0, 4, 3, 0]
    row = whole_row(flat)
    assert row.tokens.tolist() == [[5, 6, 7, 8, 1, 9, 5, 6]]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert row.added == [4, 1, 1, 2]
    assert row.targets.tolist() == [7, 8, 7, 8, 1, 7, 9, 6]
    assert row.sequence.tolist() == [0, 0, 1, 1, 1, 2, 2, 3]
    assert row.predicts[row.distribution].tolist() == [1, 2, 1, 2, 3, 1, 2, 6]
    assert len(row.predicts) == 4


def test_a_prefix_is_shared_only_with_the_neighbour_that_has_it():
    flat = flat_tree([([5, 6, 1], 1), ([5, 6, 2], 1), ([5, 6, 3], 1)])
    assert pack(flat, flat.trained(None), [0, 2], CPU).added == [3, 3]
    assert pack(flat, flat.trained(None), [1, 2], CPU).added == [3, 1]


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    choose_attention("float32")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=7,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        attn_implementation=PACKED_SDPA,
    )
    return Qwen3ForCausalLM(config)


def logps_of(model, row, attention=PACKED_SDPA):
    model.set_attn_implementation(attention)
    about = attention_kwargs(row, attention)
    hidden = model.model(input_ids=row.tokens, position_ids=row.positions, use_cache=False, **about)[0][0]
    head = model.lm_head.weight
    return linear_logprobs(hidden[row.predicts], head, None, row.distribution, row.targets, TEMPERATURE)[0]


def logps_alone(model, flat):
    """Of every trained token, from its sequence by itself and with the model's own attention."""
    model.set_attn_implementation("eager")
    results = []
    for tokens, versions in zip(
        *(np.split(a, flat.lengths.cumsum()[:-1]) for a in (flat.tokens, flat.columns["versions"])), strict=True
    ):
        tokens = torch.from_numpy(tokens).long()
        logps = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
        results.append(logps.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(versions[1:] >= 0)])
    return torch.cat(results)


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


SEQUENCES = st.lists(st.integers(0, 1), min_size=2, max_size=9)
PAIRS = SEQUENCES.flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(1, len(tokens) - 1)))
TREES = st.lists(st.lists(PAIRS, min_size=1, max_size=6), min_size=1, max_size=3)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=TREES, seed=st.integers(0, 99))
def test_any_tree_has_the_log_probs_and_gradients_of_its_sequences_alone(model, groups, seed):
    flat = flat_tree(*groups)
    expected, computed = logps_alone(model, flat), logps_of(model, whole_row(flat))
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(len(computed), generator=torch.Generator().manual_seed(seed))
    our_values, their_values = gradients(model, computed @ weights), gradients(model, expected @ weights)
    # Both sum the same numbers in another order. The rounding errors of fp32 are in proportion to what is summed, also
    # where the sum is 0: in 250 trees, up to 3e-6 of the largest gradient, which is between 0.6 and 54.
    largest = max(float(gradient.abs().max()) for gradient in their_values)
    for first, second in zip(our_values, their_values, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=5e-6 * largest)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=TREES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_sees_the_same_tree(model, groups):
    row = whole_row(flat_tree(*groups))
    torch.testing.assert_close(logps_of(model, row, PACKED_FLEX), logps_of(model, row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [13, 127])
def test_short_rows_do_not_take_the_kernel_for_decoding_which_lacks_their_shapes(monkeypatch, T):
    kernels = []
    monkeypatch.setattr(attention_file, "flex_attention", lambda query, *_, **options: kernels.append(options) or query)
    query, row = torch.randn(1, 8, T, 16), empty_row(CPU, T)
    packed_flex(None, query, query[:, :2], query[:, :2], None, **attention_kwargs(row, PACKED_FLEX))
    assert kernels[0]["kernel_options"] == {"BACKEND": "TRITON"}


def compiled_flex(monkeypatch):
    """As on a GPU, but compiled to what CPUs can do."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # a generator's process has it
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    _compiled_flex.cache_clear()
    return _compiled_flex()


def attend_to_rows(attend, heads, kv_heads):
    """Rows of all kinds that a run computes with a model of so many heads."""
    for T, window in ((1, None), (24, None), (13, None), (1195, None), (105, None), (1345, None), (1345, 400)):
        mask = block_mask(empty_row(CPU, T), window)
        for gradients in (False, True):
            query, key, value = (torch.randn(1, n, T, 16, requires_grad=gradients) for n in (heads, kv_heads, kv_heads))
            with torch.set_grad_enabled(gradients):
                attend(query, key, value, block_mask=mask, scale=0.25, enable_gqa=heads != kv_heads)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
def test_flex_attention_stays_compiled_for_a_policy_its_reference_and_ranks_that_divide_heads(monkeypatch):
    attend = compiled_flex(monkeypatch)
    for heads in ((8, 2), (4, 4), (2, 1)):
        attend_to_rows(attend, *heads)


def test_flex_attention_never_goes_on_uncompiled(monkeypatch):
    monkeypatch.setattr(attention_file, "FLEX_GRAPHS", 2)
    attend = compiled_flex(monkeypatch)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        attend_to_rows(attend, 8, 2)


LENGTHS = st.lists(st.tuples(st.integers(2, 300), st.integers(0, 200)), min_size=1, max_size=6)
"""(tokens of its own, tokens shared with the others) of each sample."""


def row_of(lengths):
    """The samples as a tree, and then each by itself."""
    samples = [([0] * shared + [n + 1] * private, 1) for n, (private, shared) in enumerate(lengths)]
    return whole_row(flat_tree(samples, *[[sample] for sample in samples]))


@settings(max_examples=20)
@given(lengths=LENGTHS)
def test_the_mask_for_flex_attention_is_that_of_all_pairs_of_tokens(lengths):
    mask = block_mask(row_of(lengths))
    exact = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    for part in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, part), getattr(exact, part))
    assert torch.equal(mask.to_dense(), exact.to_dense())
    assert mask.to_string() == exact.to_string()


@settings(max_examples=20)
@given(lengths=LENGTHS, window=st.integers(1, 400), chunked=st.booleans())
def test_the_mask_of_a_window_or_of_chunks_has_all_blocks_with_pairs_of_tokens_in_it_and_says_which_are_whole(
    lengths, window, chunked
):
    limits = (None, window) if chunked else (window, None)
    mask = block_mask(row_of(lengths), *limits)
    exact = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    assert torch.equal(mask.full_kv_num_blocks, exact.full_kv_num_blocks)
    assert (mask.to_dense() >= exact.to_dense()).all()  # beside other sequences it may have some without such a pair
    mask = block_mask(whole_row(flat_tree([([0] * sum(lengths[0]), 1)])), *limits)
    exact = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    assert mask.to_string() == exact.to_string()


@settings(max_examples=15)
@given(lengths=LENGTHS, window=st.integers(1, 400), at_once=st.integers(1, 200))
@pytest.mark.parametrize("attention", [PACKED_SDPA, PACKED_FLEX])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_window_is_counted_along_the_path_in_any_tree(attention, lengths, window, at_once):
    row, make = (
        row_of([(private // 4 + 1, shared // 4) for private, shared in lengths]),
        torch.Generator().manual_seed(0),
    )
    q, k, v = torch.randn(3, 1, 2, row.tokens.shape[1], 4, generator=make, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_file, "QUERIES_AT_ONCE", at_once)
        out = attend(attention, q, k[:, :1], v[:, :1], row, sliding_window=window)
    torch.testing.assert_close(out, references.attention(q, k[:, :1], v[:, :1], row, window))


def exact_attention(query, key, value, row, *, cap, sinks, chunk, window):
    """Of each path by itself, as gpt-oss, Gemma 2 and Llama 4 have it in transformers, [1, T, heads, D]."""
    out = torch.zeros_like(query).transpose(1, 2)
    for path in row.paths.split(row.lengths):
        q, k, v = (x[0, :, path].expand(query.shape[1], -1, -1) for x in (query, key, value))
        places = torch.arange(len(path))
        ago, same = places[:, None] - places, places[:, None] // chunk == places // chunk
        seen = (ago >= 0) & (ago < (window or len(path))) & same
        scores = cap * torch.tanh(q @ k.transpose(1, 2) * 0.3 / cap)
        scores = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(-1, len(path), 1)], 2)
        out = out.index_put((torch.tensor(0), path), (scores.softmax(-1)[:, :, :-1] @ v).transpose(0, 1))
    return out


@settings(max_examples=15)
@given(lengths=LENGTHS, chunk=st.integers(1, 60), window=st.none() | st.integers(1, 60), at_once=st.integers(1, 200))
@pytest.mark.parametrize("attention", [PACKED_SDPA, PACKED_FLEX])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_softcapping_sinks_and_chunks_are_those_of_each_path_alone_in_any_tree(
    attention, lengths, chunk, window, at_once
):
    """Values and gradients, those of the sinks included."""
    row, make = (
        row_of([(private // 8 + 1, shared // 8) for private, shared in lengths]),
        torch.Generator().manual_seed(0),
    )
    sizes = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=chunk)
    layer = SimpleNamespace(config=sizes, layer_idx=0) if window is None else torch.nn.Module()
    T = row.tokens.shape[1]
    inputs_of_heads = [torch.randn(1, heads, T, 4, generator=make, dtype=torch.float64) for heads in (2, 1, 1)]
    inputs = [x.requires_grad_() for x in (*inputs_of_heads, torch.randn(2, generator=make, dtype=torch.float64))]
    toward = torch.randn(1, T, 2, 4, generator=make, dtype=torch.float64)
    *qkv, sinks = inputs
    function, about = {PACKED_SDPA: packed_sdpa, PACKED_FLEX: packed_flex}[attention], attention_kwargs(row, attention)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_file, "QUERIES_AT_ONCE", at_once)
        patch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)
        out, _ = function(layer, *qkv, None, scaling=0.3, softcap=1.5, s_aux=sinks, sliding_window=window, **about)
    exact = exact_attention(*qkv, row, cap=1.5, sinks=sinks, chunk=T if window else chunk, window=window)
    torch.testing.assert_close(out, exact)
    for gradient, reference in zip(
        *(torch.autograd.grad((x * toward).sum(), inputs) for x in (out, exact)), strict=True
    ):
        torch.testing.assert_close(gradient, reference)


def test_private_tokens_of_one_sequence_are_nothing_to_the_others(model):
    results = []
    for private in (2, 3):
        flat = flat_tree([([5, 6, 1, 1], 2), ([5, 6, 4, private, private], 2), ([5, 6, 4, 5], 2)])
        row = whole_row(flat)
        assert row.added == [4, 3, 1]
        logps = logps_of(model, row)
        others_now = logps[row.sequence != 1]
        results.append([others_now, logps[row.sequence == 1], *gradients(model, others_now.sum())])
    (others_now, own_now, *gradient), (others_then, own_then, *gradient_then) = results
    assert not torch.allclose(own_now, own_then)
    for first, second in zip([others_now, *gradient], [others_then, *gradient_then], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
