"""Curves are smoothed, and axes show zeros and are not flattened by single values."""

import math

import pytest

from areal.extensions.desk.curves import SMALLEST, linear_below, ramp, smoothed, upper_limit
from areal.extensions.desk.timeline import WAITING, WEIGHTS, WORK, TimelineSpan


def test_a_curve_is_the_mean_of_its_neighbourhood():
    assert smoothed([1.0, 5.0] * 9) == [1.0, 5.0] * 9  # few points stay
    values = [float(n % 2) for n in range(40)]  # two to either side
    curve = smoothed(values)
    assert curve[10] == pytest.approx(2 / 5) and curve[11] == pytest.approx(3 / 5)
    assert curve[0] == pytest.approx(1 / 3) and curve[-1] == pytest.approx(2 / 3)
    assert smoothed([float(n) for n in range(40)])[2:-2] == pytest.approx(list(range(2, 38)))


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ([], None),
        ([math.nan], None),
        ([0.0, 0.0], None),
        ([30.0], None),
        ([30.0, 2.0], 2.4),
        ([34.0] + [2.0, 2.5] * 10, 3.0),
        ([2.0, 2.5] * 10 + [4.0], None),  # a slow step is no outlier
        ([2.0] * 8 + [9.0] * 2, None),  # every fifth step saves a checkpoint
    ],
)
def test_single_large_values_are_cut_off(values, limit):
    assert upper_limit(values) == (limit and pytest.approx(limit))


def test_zero_has_a_place_below_all_positive_values():
    assert linear_below([0.0, 3e-7, 2e-5]) == pytest.approx(1e-7)
    assert linear_below([0.0, 0.0]) == pytest.approx(SMALLEST)


def test_a_scale_goes_from_its_first_colour_to_its_last():
    assert ramp(3)[::2] == ramp(2) and ramp(1) == ramp(2)[:1] and len({*ramp(9)}) == 9 and ramp(0) == []


@pytest.mark.parametrize(
    ("purpose", "names"),
    [
        (WORK, "train, fetch, training step 3, generating at version 2, scoring with addition, nobody waits"),
        (
            WEIGHTS,
            "load, pause, resume, write, snapshot, save, saving a checkpoint of version 9, loading version 3, "
            "receiving version 4, fetching version 4, checkpoint",
        ),
        (
            WAITING,
            "trainer_wait, publish_wait, save_wait, waiting for permits from the master, finished, "
            "the generators are full",
        ),
    ],
)
def test_each_span_is_work_weights_or_waiting(purpose, names):
    assert {TimelineSpan("a", name, 0.0, 1.0).purpose for name in names.split(", ")} <= {purpose}
