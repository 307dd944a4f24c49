import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.packing import microbatches, split_over_ranks

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
