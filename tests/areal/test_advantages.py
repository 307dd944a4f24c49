import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.advantages import advantages
from areal.trajectory import Group, Trajectory


def group(name, rewards):
    tokens, logprobs, versions = np.zeros(2, np.int32), np.zeros(2, np.float32), np.array([-1, 0], np.int32)
    return Group(name, 0, tuple(Trajectory(tokens, logprobs, versions, reward, "stop") for reward in rewards))


REWARDS = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=8), min_size=1, max_size=8)


def test_batch_norm_compares_with_all_samples_and_group_norm_with_its_own():
    groups = [group("easy", [1, 1, 1, 0]), group("hard", [0, 0])]
    batch, own = advantages(groups, "batch"), advantages(groups, "group")
    assert np.allclose(batch[0], [1, 1, 1, -1], atol=1e-5)
    assert np.allclose(batch[1], [-1, -1], atol=1e-5)
    assert np.allclose(own[0], [3**-0.5] * 3 + [-(3**0.5)], atol=1e-5)
    assert np.allclose(own[1], [0, 0])


@given(REWARDS)
def test_batch_advantages_have_mean_0_and_at_most_unit_variance(rewards):
    groups = [group(str(i), r) for i, r in enumerate(rewards)]
    flat = np.concatenate(advantages(groups, "batch"))
    assert abs(flat.mean()) < 1e-6
    assert flat.std() < 1 + 1e-6


@given(REWARDS, st.sampled_from(["batch", "group"]))
def test_groups_of_any_size_get_one_advantage_a_sample(rewards, norm):
    groups = [group(str(i), r) for i, r in enumerate(rewards)]
    assert [len(a) for a in advantages(groups, norm)] == [len(r) for r in rewards]


@given(REWARDS)
def test_group_advantages_do_not_depend_on_other_groups(rewards):
    groups = [group(str(i), r) for i, r in enumerate(rewards)]
    together = advantages(groups, "group")
    assert all(np.array_equal(a, advantages([g], "group")[0]) for g, a in zip(groups, together, strict=True))


def test_equal_rewards_teach_nothing():
    assert np.array_equal(advantages([group("a", [1.0] * 3)], "group")[0], np.zeros(3))


def test_a_reward_that_is_not_finite_is_an_error_that_names_the_group():
    with pytest.raises(ValueError, match="group bad"):
        advantages([group("good", [1.0]), group("bad", [float("nan")])], "batch")
