from areal.weights.relay import AVOIDED_SECONDS, Sources


def source(index, generators, now=0.0):
    return Sources(index).choose(generators, now)


def test_the_trainer_is_asked_by_one_generator_and_each_of_the_others_by_two_at_most():
    requests = [source(index, range(20)) for index in range(20)]
    assert requests.count(None) == 1
    assert max(requests.count(index) for index in range(20)) == 2


def test_a_version_reaches_a_thousand_generators_in_ten_hops():
    hops = 0
    index = 999
    while index is not None:
        index, hops = source(index, range(1000)), hops + 1
    assert hops == 10


def test_the_tree_closes_up_where_generators_have_left_and_nobody_asks_one_above_himself():
    remaining = [3, 7, 8, 20]
    assert [source(index, remaining) for index in remaining] == [None, 3, 3, 7]


def test_one_that_failed_is_passed_over_for_a_while_and_the_trainer_never_is():
    sources = Sources(5)
    assert sources.choose(range(6), 0.0) == 2
    sources.failed(2, 0.0)
    assert sources.choose(range(6), 0.0) == 0
    sources.failed(0, 1.0)
    sources.failed(None, 1.0)
    assert sources.choose(range(6), 1.0) is None
    assert sources.choose(range(6), AVOIDED_SECONDS) == 2
    assert sources.choose(range(6), AVOIDED_SECONDS + 1.0) == 2
