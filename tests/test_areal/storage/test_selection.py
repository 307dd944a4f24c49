from itertools import starmap

from areal.storage.selection import RolloutSample, chosen, groups_of, pair


def sample(reward: float, finish: str = "stop") -> RolloutSample:
    return RolloutSample(reward, finish, [])


GROUP = list(starmap(sample, [(0, "stop"), (0.5, "stop"), (1, "length"), (0.5, "stop"), (0, "length")]))


def test_the_best_sample_is_the_first_with_the_highest_reward_that_was_not_cut():
    assert chosen(GROUP)[0] is GROUP[1]
    assert len(chosen(GROUP)) == 1
    assert chosen(GROUP, best=False) == [GROUP[1], GROUP[3]]
    assert chosen(GROUP, least=0.6) == []
    assert chosen([sample(0), sample(-1)]) == []
    assert chosen([sample(-2), sample(-1)], least=-3) == [sample(-1)]


def test_a_pair_is_the_best_and_the_worst_sample_if_their_rewards_differ():
    results = pair(GROUP)
    assert results is not None
    assert [id(item) for item in results] == [id(GROUP[1]), id(GROUP[0])]
    assert pair([sample(1), sample(1), sample(2, "length")]) is None
    assert pair([sample(0.73105860), sample(0.73105863)]) is None
    assert pair(GROUP, least=0.6) is None


def test_rows_of_a_sample_and_samples_of_a_group_stay_together():
    places = [("a", 0), ("a", 1), ("a", 1), ("b", 1)]
    rows = [{"group": group, "sample": n, "reward": n, "finish": "stop"} for group, n in places]
    assert [[len(item.rows) for item in group] for group in groups_of(rows)] == [[1, 2], [1]]
