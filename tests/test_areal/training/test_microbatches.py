from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.training.microbatches import fixed_number, microbatches, split_over_ranks

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
CAPS = st.integers(1, 500)


def test_the_worked_example_of_the_algorithm():
    # 5 opens; 4 does not fit beside it; 3 and 2 go where the fewest sequences are and they fit; 1 as well.
    assert microbatches([1, 2, 3, 4, 5], cap=8) == [[4, 2], [3, 1, 0]]


@given(LENGTHS, CAPS, st.integers(1, 8))
def test_every_sequence_is_in_exactly_one_microbatch(lengths, cap, k_min):
    packed = microbatches(lengths, cap, k_min)
    assert sorted(i for indices in packed for i in indices) == list(range(len(lengths)))


@given(LENGTHS, CAPS, st.integers(1, 8))
def test_only_a_single_long_sequence_exceeds_the_cap(lengths, cap, k_min):
    for indices in microbatches(lengths, cap, k_min):
        assert sum(lengths[i] for i in indices) <= cap or len(indices) == 1


@given(LENGTHS, CAPS, st.integers(1, 8))
def test_there_are_at_least_k_min_microbatches_and_none_is_empty(lengths, cap, k_min):
    packed = microbatches(lengths, cap, k_min)
    assert all(packed)
    assert len(packed) >= min(k_min, len(lengths))


@given(LENGTHS, CAPS)
def test_packing_is_deterministic(lengths, cap):
    assert microbatches(lengths, cap) == microbatches(tuple(lengths), cap)


@pytest.mark.parametrize(("lengths", "cap", "k_min"), [([1], 0, 1), ([1], 1, 0), ([0], 1, 1)])
def test_nonsense_is_refused(lengths, cap, k_min):
    with pytest.raises(ValueError, match="at least 1"):
        microbatches(lengths, cap, k_min)


@given(LENGTHS, st.integers(1, 9), CAPS)
def test_ranks_share_all_sequences_under_the_cap(lengths, ranks, cap):
    dealt = split_over_ranks(lengths, ranks, cap)
    rows = [indices for rank in dealt for indices in rank]
    assert sorted(i for indices in rows for i in indices) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in indices) <= cap or len(indices) == 1 for indices in rows)


@given(LENGTHS, st.integers(1, 9), CAPS)
def test_every_rank_has_the_same_number_of_microbatches(lengths, ranks, cap):
    dealt = split_over_ranks(lengths, ranks, cap)
    assert len(dealt) == ranks
    assert len({len(rank) for rank in dealt}) == 1


@given(st.lists(st.integers(1, 100), min_size=9, max_size=60), st.integers(1, 9))
def test_no_rank_is_idle_while_there_are_sequences_enough(lengths, ranks):
    assert all(rank[0] for rank in split_over_ranks(lengths, ranks, 200))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 9), CAPS)
def test_ranks_differ_by_at_most_the_longest_sequence(lengths, ranks, cap):
    tokens = [sum(lengths[i] for row in rank for i in row) for rank in split_over_ranks(lengths, ranks, cap)]
    assert max(tokens) - min(tokens) <= max(lengths)


@st.composite
def shared_lines(draw):
    """(lengths, shared): a line of sequences of which each may begin like the one before it."""
    lengths = draw(LENGTHS)
    shared = [draw(st.integers(0, min(pair))) for pair in zip(lengths[:-1], lengths[1:], strict=True)]
    return lengths, [0, *shared][: len(lengths)]


def computed(row, lengths, shared):
    """Tokens of a micro-batch, with what neighbours in the line share counted once."""
    return sum(lengths[i] for i in row) - sum(shared[i] for previous, i in pairwise(row) if previous + 1 == i)


@given(shared_lines(), st.integers(1, 9), CAPS)
def test_the_cap_counts_shared_tokens_once(line, ranks, cap):
    rows = [row for rank in split_over_ranks(line[0], ranks, cap, line[1]) for row in rank]
    assert sorted(i for row in rows for i in row) == list(range(len(line[0])))
    assert all(computed(row, *line) <= cap or len(row) == 1 for row in rows)


@given(shared_lines(), st.integers(1, 9), CAPS)
def test_sharing_never_makes_the_fullest_rank_fuller(line, ranks, cap):
    def fullest(lengths, shared):
        dealt = split_over_ranks(line[0], ranks, cap, shared)
        return max(sum(computed(row, lengths, shared) for row in rank) for rank in dealt)

    assert fullest(*line) <= fullest(line[0], [0] * len(line[0]))


def test_sequences_that_share_stay_together_and_are_cut_where_least_is_shared():
    lengths, shared = [9, 9, 9, 9, 5], [0, 8, 2, 8, 0]
    assert split_over_ranks(lengths, 1, 100, shared) == [[[0, 1, 2, 3, 4]]]
    assert split_over_ranks(lengths, 1, 15, shared) == [[[0, 1, 4], [2, 3]]]


def test_ranks_that_would_idle_get_a_part_of_a_group():
    assert split_over_ranks([20, 20, 20, 20], 2, 100, [0, 5, 5, 5]) == [[[0, 1]], [[2, 3]]]


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 40))
def test_a_fixed_number_of_microbatches_has_equally_many_sequences_in_each(sequences, ranks, count):
    dealt = fixed_number(sequences, ranks, count)
    rows = [row for rank in dealt for row in rank]
    assert [len(rank) for rank in dealt] == [max(1, min(count, ceil(sequences / ranks)))] * ranks
    assert sorted(i for row in rows for i in row) == list(range(sequences))
    assert all(
        following == previous + 1 for row in rows for previous, following in pairwise(row)
    )  # what shares tokens is together
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
