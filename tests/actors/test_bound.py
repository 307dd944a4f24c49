"""The trainer looks at the tokens of a batch before it trains them."""

from __future__ import annotations

import numpy as np
import pytest

from actors.trainer import breach_of_bound
from areal.config import Config
from areal.trajectory import Group, Trajectory


def group(number: int, *versions: int) -> Group:
    places = np.zeros(len(versions) + 1, np.float32)
    tokens = np.arange(len(versions) + 1, dtype=np.int32)
    sample = Trajectory(tokens, places, np.array([-1, *versions], np.int32), 1.0, "stop")
    return Group(f"g{number}.0", number, (sample,))


def config_with(on_straggler: str) -> Config:
    return Config.model_construct(max_staleness=2, on_straggler=on_straggler)


@pytest.mark.parametrize("on_straggler", ["wait", "requeue"])
def test_a_token_that_is_older_than_the_bound_allows_is_named_with_its_group(on_straggler):
    config = config_with(on_straggler)
    assert breach_of_bound(config, 9, [group(1, 7, 9), group(2, 9)], None) is None
    breach = breach_of_bound(config, 10, [group(2, 9), group(1, 9, 7)], None)
    assert breach == "group g1.0 has tokens of version 7, and max_staleness = 2 allows none older than version 8"


def test_with_mask_old_tokens_have_to_be_out_of_the_loss():
    assert breach_of_bound(config_with("mask"), 10, [group(1, 0, 9)], 8) is None
    assert "not masked" in str(breach_of_bound(config_with("mask"), 10, [group(1, 0, 9)], 7))
    assert "not masked" in str(breach_of_bound(config_with("mask"), 10, [group(1, 9)], None))


def test_the_paper_promises_no_bound():
    assert breach_of_bound(config_with("admission_only"), 10, [group(1, 0)], None) is None
