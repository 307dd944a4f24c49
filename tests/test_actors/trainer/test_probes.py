"""Which batches engines are asked about."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from actors.trainer.probes import Probes
from areal.config import Config
from areal.samples.trajectory import random_groups


def test_engines_are_not_asked_for_the_logprobs_of_prompts_with_pictures_since_they_get_tokens_alone():
    values = {"model": "m", "steps": 1, "batch_size": 4, "group_size": 2, "data": {"source": "addition"}}
    config = Config(**values, sampling={"max_new_tokens": 4}, reward={"functions": ["addition"]})
    generator, begun = SimpleNamespace(identity="generator/0#a"), []

    def spawn(work, name):
        work.close()
        begun.append(name)

    probes = Probes(config, SimpleNamespace(with_role=lambda role: [generator]), None, spawn)
    groups = random_groups(9, [[5, 5]])
    sample = groups[0].trajectories[0]
    seen = replace(sample, pictures=np.eye(len(sample), 16, dtype=np.uint8))
    probes.begin(0, 0, [replace(groups[0], trajectories=(seen,))])
    assert not begun
    probes.begin(0, 0, groups)
    assert begun == ["compare an engine"]
