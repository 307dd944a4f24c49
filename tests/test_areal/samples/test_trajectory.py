"""What a workflow may return as a sample."""

from dataclasses import fields, replace

import numpy as np
import pytest
from support.stored_samples import BRANCHED

from areal.samples.table import pack, unpack
from areal.samples.trajectory import Branch, Group, Trajectory

SAMPLE = Trajectory(np.arange(3), np.array([0, -0.5, -1]), np.array([-1, 4, 5]), 1, "stop")


def test_a_sample_has_the_types_that_travel():
    lists = replace(SAMPLE, tokens=[0, 1, 2], reward=np.float32(1))
    for sample in (SAMPLE, lists):
        sample.validate()
        assert (sample.tokens.dtype, sample.logprobs.dtype, sample.versions.dtype) == (np.int32, np.float32, np.int32)
        assert sample.tokens.tolist() == [0, 1, 2] and sample.start_version == 4
        assert type(sample.reward) is float


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"reward": float("nan")}, "no score"),
        ({"reward": 1e30}, "no score"),
        ({"logprobs": np.array([0, -np.inf, -1])}, "not finite"),
        ({"versions": np.array([-2, 4, 5])}, "version"),
        ({"versions": np.array([-1, -1, -1])}, "nothing was sampled"),
        ({"tokens": np.zeros((3, 1))}, "tokens of a sample has 2 dimensions"),
        ({"finish": "eos"}, "'eos'"),
        ({"versions": np.array([3, 4, 5])}, "without a prompt"),
        ({"returns": np.array([0, 1, np.nan])}, "return"),
    ],
    ids=str,
)
def test_what_cannot_be_learned_from_is_no_sample(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SAMPLE, **change).validate()


def test_each_branch_is_a_sequence_and_each_sampled_token_is_in_one_of_them():
    sequences = list(BRANCHED.sequences())
    assert [item.tokens.tolist() for item in sequences] == [[0, 1, 2, 3], [0, 1, 2, 7, 8], [9, 5]]
    assert [item.versions.tolist() for item in sequences] == [[-1, -1, 4, 4], [-1, -1, -1, -1, 5], [-1, 3]]
    assert [item.logprobs.tolist() for item in sequences] == [[0, 0, -2, -3], [0, 0, 0, 0, -8], [0, -5]]
    assert [item.returns.tolist() for item in sequences] == [[0, 1, 2, 3], [0, 1, 2, 4, 5], [6, 7]]
    assert BRANCHED.start_version == 3
    assert [item.tokens.tolist() for item in SAMPLE.sequences()] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("branches", "sentence"),
    [
        ((Branch(1, 8),), "share 1 of 0"),
        ((Branch(0, 4), Branch(5, 4)), "share 5 of 4"),
        ((Branch(0, 8), Branch(3, 0)), "0 of its own"),
        ((Branch(0, 4), Branch(0, 2)), "8 tokens together"),
        ((Branch(0, 2), Branch(0, 6)), "without a prompt"),
    ],
)
def test_branches_that_do_not_fit_are_refused(branches, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(BRANCHED, branches=branches).validate()


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([0.1 + 0.2, 0.3], False),
        ([3e8 * (0.1 + 0.2), 9e7], False),
        ([np.float32(0.7), np.float32(0.6) + np.float32(0.1)], False),
        ([0.73105860, 0.73105863], False),  # a reward model on one text in two batches
        ([1e-12, 0.0], True),
        ([1.0, 1.0 + 1e-4], True),
    ],
)
def test_rewards_that_differ_by_rounding_are_no_signal(rewards, signal):
    assert len(set(rewards)) == 2
    samples = tuple(replace(SAMPLE, reward=reward, returns=None) for reward in rewards)
    assert Group("g", 0, samples).has_signal == signal


def test_a_group_whose_tokens_are_credited_differently_has_signal():
    alike = replace(BRANCHED, returns=np.ones(8))
    assert not Group("g", 0, (alike, replace(SAMPLE, reward=1.0))).has_signal
    assert Group("g", 0, (replace(alike, returns=BRANCHED.returns),)).has_signal
    assert not Group("g", 0, (replace(alike, returns=np.where(BRANCHED.sampled, 1.0, 7.0)),)).has_signal  # the prompt


def test_log_probs_of_a_scorer_are_those_of_each_branchs_own_tokens():
    sequences = list(BRANCHED.sequences())
    lengths = [len(sequence) for sequence in sequences]
    branches = [np.arange(1, length, dtype=np.float32) + 10 * b for b, length in enumerate(lengths)]
    scored = replace(BRANCHED, teacher_logprobs=None).with_scores("teacher_logprobs", branches)
    assert scored.teacher_logprobs.tolist() == [0, 0, 2, 3, 0, 14, 0, 21]
    likely = [np.stack([branch, -branch], 1) for branch in branches]
    scored = scored.with_scores("teacher_top_logprobs", likely)
    assert scored.teacher_top_logprobs.tolist() == [[x, -x] for x in scored.teacher_logprobs.tolist()]
    with pytest.raises(ValueError, match="the column teacher_top_tokens of a sample has 1 dimensions"):
        scored.with_scores("teacher_top_tokens", branches)
    with pytest.raises(ValueError, match="one of the teacher_top_tokens is below 0"):
        scored.with_scores("teacher_top_tokens", [row.astype(np.int32) for row in likely])
    with pytest.raises(ValueError, match="one of the teacher_logprobs is not finite"):
        scored.with_scores("teacher_logprobs", [branch * np.inf for branch in branches])


def test_a_penalty_lowers_the_reward_and_every_return():
    lowered = BRANCHED.lowered(0.5)
    assert (lowered.reward, lowered.returns.tolist()) == (0.5, (np.arange(8) - 0.5).tolist())
    assert SAMPLE.lowered(0.5).returns is None


def test_every_field_of_a_sample_comes_back_from_its_frame():
    again = Trajectory.of_frame(BRANCHED.frame())
    for name in (field.name for field in fields(Trajectory)):
        np.testing.assert_array_equal(getattr(again, name), getattr(BRANCHED, name))


def test_a_sample_without_branches_comes_back_with_the_columns_that_it_has():
    again = Trajectory.of_frame(memoryview(SAMPLE.frame()))
    assert (again.reward, again.finish, again.branches, again.columns.keys()) == (
        1.0,
        "stop",
        (),
        {"tokens", "logprobs", "versions"},
    )
    for name, array in SAMPLE.columns.items():
        np.testing.assert_array_equal(again.columns[name], array)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"own": np.array([4], np.int32)}, "argument 2 is shorter"),
        ({"own": None}, "lacks own"),
        ({"shared": np.zeros(3)}, "shared of a sample is float64"),
        ({"finish": np.array([2], np.uint8)}, "unknown finish"),
        ({"finish": np.zeros(0, np.uint8)}, "not enough values"),
        ({"returns": np.zeros(1)}, r"returns is float64 \(1,\)"),
        ({"versions": np.zeros(len(BRANCHED), np.int64)}, "versions is int64"),
        ({"tokens": np.zeros(2, np.int32)}, "should have 2"),
        ({"logprobs": None}, "other columns than they should: logprobs"),
        ({"mine": np.zeros(2)}, "other columns than they should: mine"),
        ({"reward": np.array([np.inf])}, "inf is no score"),
    ],
)
def test_a_frame_of_no_sample_is_refused(wrong, sentence):
    arrays = {name: array for name, array in (unpack(BRANCHED.frame()) | wrong).items() if array is not None}
    with pytest.raises(ValueError, match=sentence):
        Trajectory.of_frame(pack(arrays))
