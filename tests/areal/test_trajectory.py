"""What a workflow may return as a sample."""

from dataclasses import replace

import numpy as np
import pytest

from areal.trajectory import Trajectory

SAMPLE = Trajectory(np.arange(3), np.array([0, -0.5, -1]), np.array([-1, 4, 5]), 1, "stop")


def test_a_checked_sample_has_the_types_that_travel():
    lists = replace(SAMPLE, tokens=[0, 1, 2], reward=np.float32(1))
    for sample in (SAMPLE.checked(), lists.checked()):
        assert (sample.tokens.dtype, sample.logprobs.dtype, sample.versions.dtype) == (np.int32, np.float32, np.int32)
        assert sample.tokens.tolist() == [0, 1, 2] and sample.start_version == 4
        assert type(sample.reward) is float


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": float("nan")}, "no score"),
        ({"reward": 1e300}, "no score"),
        ({"logprobs": np.array([0, -np.inf, -1])}, "not finite"),
        ({"versions": np.array([-2, 4, 5])}, "version"),
        ({"versions": np.array([-1, -1, -1])}, "nothing was sampled"),
        ({"tokens": np.zeros((3, 1))}, "one-dimensional"),
        ({"finish": "eos"}, "'eos'"),
    ],
    ids=str,
)
def test_what_cannot_be_learned_from_is_no_sample(change, said):
    with pytest.raises(ValueError, match=said):
        replace(SAMPLE, **change).checked()
