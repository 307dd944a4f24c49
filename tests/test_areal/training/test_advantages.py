from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.config.trainer_section import TrainerConfig
from areal.training.algorithms.advantages import Credits, estimate, normalised

MEANS = ["batch", "group", "leave_one_out", "none"]
STDS = ["batch", "group", "none"]


def of(rewards, groups, penalties=None, lengths=None, returns=None, sampled=None, *, mean, std="none"):
    samples = np.repeat(np.arange(len(rewards)), 1 if lengths is None else lengths)
    penalties, returns = (None if values is None else np.array(values, np.float64) for values in (penalties, returns))
    sampled = np.ones(len(samples), bool) if sampled is None else np.array(sampled)
    rewards, groups = np.array(rewards, np.float64), np.array(groups)
    credits = Credits(rewards, groups, samples, sampled, returns, penalties, {})
    return estimate(lambda credits: normalised(credits, mean, std), credits, "normalised")


PAIRS = [("batch", "batch"), *((mean, std) for mean in ("group", "leave_one_out") for std in STDS), ("batch", "none")]
"""Of a mean and a standard deviation, as a configuration may have them; and none of both."""


def baseline(values, groups, i, of):
    """What trajectory i is compared with, counted out."""
    everyone = [v for v, g in zip(values, groups, strict=True) if of == "batch" or g == groups[i]]
    remainder = [v for j, (v, g) in enumerate(zip(values, groups, strict=True)) if g == groups[i] and j != i]
    return {"none": [0.0], "leave_one_out": remainder or [values[i]]}.get(of, everyone)


def reference(rewards, groups, lengths, penalties, mean, std):
    ends = np.cumsum(lengths)
    costs = [penalties[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    returns = [r - sum(c) for r, c in zip(rewards, costs, strict=True)]
    gains = [[r - sum(c[t:]) for t in range(len(c))] for r, c in zip(rewards, costs, strict=True)]
    results = []
    for i, own_gain in enumerate(gains):
        center = 0.0 if std == "none" else np.mean(baseline(returns, groups, i, std))
        spread = [np.mean([(g - center) ** 2 for g in gain]) for gain in gains]
        scale = 1.0 if std == "none" else np.sqrt(np.mean(baseline(spread, groups, i, std))) or 1.0
        results += [(g - np.mean(baseline(returns, groups, i, mean))) / scale for g in own_gain]
    return results


@st.composite
def batches(draw, costly=True):
    """Trajectories in groups of any size, whose members stand anywhere."""
    n = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    quarters = st.integers(-8, 8).map(lambda x: x / 4)
    return (
        draw(st.lists(quarters, min_size=n, max_size=n)),
        draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)),
        draw(st.lists(quarters if costly else st.just(0.0), min_size=sum(lengths), max_size=sum(lengths))),
        lengths,
    )


@pytest.mark.parametrize(("mean", "std"), [*PAIRS, ("none", "none")])
@given(batch=batches())
def test_advantages_are_what_counting_out_gives(batch, mean, std):
    rewards, groups, penalties, lengths = batch
    expected = reference(rewards, groups, lengths, penalties, mean, std)
    np.testing.assert_allclose(of(*batch, mean=mean, std=std), expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize(("mean", "std"), PAIRS)
@given(batch=batches(), size=st.sampled_from([1e-9, 1.0, 3e8]))
def test_no_advantage_is_larger_than_the_numbers_of_samples_and_tokens_allow(batch, size, mean, std):
    rewards, groups, penalties, lengths = batch
    computed = of(np.array(rewards) * size, groups, np.array(penalties) * size, lengths, mean=mean, std=std)
    if std != "none":
        assert abs(computed).max() <= 2 * np.sqrt(sum(lengths) * len(rewards))
    np.testing.assert_allclose(computed / (size if std == "none" else 1), of(*batch, mean=mean, std=std), atol=1e-6)


@pytest.mark.parametrize(("mean", "std"), PAIRS)
def test_rewards_that_differ_by_rounding_teach_nothing(mean, std):
    rewards = [0.1 + 0.2, 0.3, 0.7 - 0.4]
    assert len(set(rewards)) == 3
    assert not of(rewards, [0] * 3, mean=mean, std=std).any()
    assert not of(3e8 * np.array(rewards), [0] * 3, mean=mean, std=std).any()
    single = [float(np.float32(0.7)), float(np.float32(0.6) + np.float32(0.1)), float(np.float32(0.7))]
    assert len(set(single)) == 2
    assert not of(single, [0] * 3, mean=mean, std=std).any()
    expected = np.array([1.0, -1.0]) * (1 if std != "none" else 5e-5) * (2 if mean == "leave_one_out" else 1)
    np.testing.assert_allclose(of([1 + 1e-4, 1.0], [0, 0], mean=mean, std=std), expected, rtol=1e-6)


def test_copies_with_a_penalty_within_them_are_divided_by_what_the_penalty_spreads():
    """All samples of the group have the same return; their tokens do not."""
    computed = of([1.0, 1.0], [0, 0], [0, 0.5, 0, 0, 0.5, 0], [3, 3], mean="group", std="group")
    spread = np.sqrt(np.mean([0, 0, 0.5**2]))
    np.testing.assert_allclose(computed, [0, 0, 0.5 / spread] * 2, rtol=1e-12)


@pytest.mark.parametrize(("mean", "std"), [("batch", "group"), ("none", "group"), ("none", "batch")])
def test_a_mean_and_a_deviation_of_levels_that_do_not_fit_are_refused(mean, std):
    with pytest.raises(ValueError, match=f"advantage_std={std} divides by 0 where .*advantage_mean={mean}"):
        TrainerConfig(advantage_mean=mean, advantage_std=std)
    for fits in [*PAIRS, ("none", "none")]:
        TrainerConfig(advantage_mean=fits[0], advantage_std=fits[1])


def test_batch_norm_compares_with_all_samples_and_group_norm_with_its_own():
    rewards, groups = [1, 1, 1, 0, 0, 0], [7, 7, 7, 7, 2, 2]
    np.testing.assert_allclose(of(rewards, groups, mean="batch", std="batch"), [1, 1, 1, -1, -1, -1], atol=1e-5)
    by_group = [3**-0.5] * 3 + [-(3**0.5), 0, 0]
    np.testing.assert_allclose(of(rewards, groups, mean="group", std="group"), by_group, atol=1e-5)


@given(batches(costly=False))
def test_without_penalties_all_tokens_of_a_trajectory_have_its_advantage(batch):
    rewards, groups, penalties, lengths = batch
    short = of(rewards, groups, mean="group", std="batch")
    for with_lengths in (
        of(*batch, mean="group", std="batch"),
        of(rewards, groups, None, lengths, mean="group", std="batch"),
    ):
        np.testing.assert_allclose(with_lengths, np.repeat(short, lengths), rtol=1e-12, atol=1e-12)


@given(batches(costly=False))
def test_where_members_of_a_group_stand_makes_no_difference(batch):
    rewards, groups, _, _ = batch
    order = np.argsort(groups, kind="stable")
    computed = of(rewards, groups, mean="leave_one_out", std="group")
    together = of(np.array(rewards)[order], np.array(groups)[order], mean="leave_one_out", std="group")
    np.testing.assert_allclose(computed[order], together, rtol=1e-12, atol=1e-12)


@given(batches(costly=False))
def test_a_group_does_not_depend_on_other_groups_and_its_advantages_cancel(batch):
    rewards, groups, _, _ = batch
    computed = of(rewards, groups, mean="group", std="group")
    for group in set(groups):
        selected = np.array(groups) == group
        alone = of(np.array(rewards)[selected], np.array(groups)[selected], mean="group", std="group")
        np.testing.assert_allclose(computed[selected], alone, rtol=1e-9, atol=1e-9)
        assert abs(computed[selected].sum()) < 1e-6


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_leaving_oneself_out_is_the_group_mean_with_a_larger_step(rewards):
    n, groups = len(rewards), [0] * len(rewards)
    left_out, mean = (of(rewards, groups, mean=m) for m in ("leave_one_out", "group"))
    np.testing.assert_allclose(left_out, n / (n - 1) * mean, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mean", ["group", "leave_one_out"])
def test_a_sample_alone_in_its_group_and_equal_rewards_teach_nothing(mean):
    assert np.array_equal(of([3.0], [0], mean=mean, std="group"), [0])
    assert np.array_equal(of([1.0] * 3, [0] * 3, mean=mean, std="group"), np.zeros(3))


def test_a_penalty_counts_for_the_tokens_up_to_it():
    computed = of([1.0, 0.0], [0, 0], [0, 0.5, 0, 0, 0, 0.25], [3, 3], mean="none")
    assert computed.tolist() == [0.5, 0.5, 1.0, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    ("mean", "std"), [("batch", "batch"), ("batch", "none"), *(("group", std) for std in STDS), ("none", "none")]
)
@given(batch=batches(costly=False), data=st.data())
def test_a_sample_with_returns_of_its_tokens_weighs_as_much_as_any_other(batch, data, mean, std):
    rewards, groups, _, lengths = batch
    n = sum(lengths)
    returns = data.draw(st.lists(st.integers(-8, 8).map(lambda x: x / 4), min_size=n, max_size=n))
    sampled = [True] * n
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):  # the first tokens are a prompt
        sampled[end - length : end - 1] = data.draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))
    samples = np.repeat(np.arange(len(rewards)), lengths)
    # Every sample is repeated until all have the same number of sampled tokens; then each token counts by itself.
    limit = np.lcm.reduce([sum(np.array(sampled)[samples == i]) for i in range(len(rewards))])
    values = [np.array(returns)[(samples == i) & sampled] for i in range(len(rewards))]
    spread = [np.repeat(item, limit // len(item)) for item in values]

    def counted(i, of):
        return np.concatenate([v for v, g in zip(spread, groups, strict=True) if of == "batch" or g == groups[i]])

    expected = [
        (value - (0.0 if mean == "none" else counted(i, mean).mean()))
        / (1.0 if std == "none" or not counted(i, std).std() else counted(i, std).std())
        for value, i in zip(returns, samples, strict=True)
    ]
    computed = of(rewards, groups, None, lengths, returns, sampled, mean=mean, std=std)
    np.testing.assert_allclose(computed, expected, rtol=1e-6, atol=1e-6)


def test_returns_that_equal_the_rewards_change_nothing():
    rewards, groups, lengths = [1.0, 0.25, 0.5], [0, 0, 1], [2, 3, 1]
    for mean, std in [("leave_one_out", "none"), ("group", "group"), ("batch", "batch")]:
        plain = of(rewards, groups, [0.5, 0, 0, 0.25, 0, 0], lengths, mean=mean, std=std)
        given_ = of(rewards, groups, [0.5, 0, 0, 0.25, 0, 0], lengths, np.repeat(rewards, lengths), mean=mean, std=std)
        np.testing.assert_allclose(given_, plain, rtol=1e-12)


@pytest.mark.parametrize("penalty", [0.0, np.inf])
def test_a_return_that_is_not_finite_is_an_error(penalty):
    with pytest.raises(ValueError, match="finite"):
        of([1.0, np.nan if not penalty else 0.0], [0, 0], [0, penalty], mean="batch", std="batch")


def test_each_of_several_agents_is_compared_with_itself_alone():
    agents = np.array([0, 5, 5, 9, 0, 5, 9, 9])
    returns = np.array([0, 0.5, 0.5, 3.0, 0, 0.0, 4.0, 4.0])
    samples, sampled = np.array([0, 0, 0, 0, 1, 1, 1, 1]), agents > 0
    columns = {"agents": agents, "tokens": np.arange(8)}
    credits = Credits(np.zeros(2), np.zeros(2, int), samples, sampled, returns, None, columns)
    of_group = partial(normalised, mean="group", std="none")
    assert estimate(of_group, credits, "it").tolist() == [0, 0.25, 0.25, -0.5, 0, -0.25, 0.5, 0.5]
