"""The trainer looks at the tokens of a batch before it trains them."""

from __future__ import annotations

import numpy as np

from actors.trainer.trainer import breach_of_bound
from areal.samples.trajectory import Group, Trajectory


def group(number: int, *versions: int) -> Group:
    places = np.zeros(len(versions) + 1, np.float32)
    tokens = np.arange(len(versions) + 1, dtype=np.int32)
    sample = Trajectory(tokens, places, np.array([-1, *versions], np.int32), 1.0, "stop")
    return Group(f"g{number}.0", number, (sample,))


def test_a_token_that_is_older_than_the_bound_allows_is_named_with_its_group():
    groups = [group(2, 9), group(1, 9, 7)]
    assert breach_of_bound(groups, 7) is None
    assert breach_of_bound(groups, None) is None
    breach = breach_of_bound(groups, 8)
    assert breach == "group g1.0 has tokens of version 7: max_staleness allows none before 8"
