import math

from areal.staleness.standstills import Standstills


def test_a_kind_of_work_that_has_never_ended_has_the_time_of_the_unknown():
    assert Standstills(10.0, 300.0).limit("load") == 300.0


def test_the_limit_is_ten_times_the_longest_standstill_so_far_and_at_least_the_floor():
    standstills = Standstills(10.0, 300.0)
    standstills.end("load", 0.5)
    assert standstills.limit("load") == 10.0
    standstills.end("load", 40.0)
    standstills.end("load", 2.0)
    assert standstills.limit("load") == 400.0
    assert standstills.limit("train") == 300.0


def test_work_that_was_ended_as_hung_has_twice_the_time_the_next_time_until_one_ends_well():
    standstills = Standstills(10.0, 300.0)
    standstills.end("load", 0.0)
    standstills.hang("load")
    standstills.hang("load")
    assert standstills.limit("load") == 40.0
    standstills.end("load", 1.0)
    assert standstills.limit("load") == 10.0


def test_a_floor_of_0_means_no_limit():
    standstills = Standstills(0.0, 0.0)
    assert standstills.limit("load") == math.inf
    standstills.end("load", 1.0)
    assert standstills.limit("load") == math.inf
