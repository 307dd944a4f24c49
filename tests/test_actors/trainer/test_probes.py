"""Which batches engines are asked about."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from support.small_runs import ten_steps

from actors.trainer.probes import Probes
from areal.training.model_checks import random_groups


def test_engines_are_not_asked_for_the_logprobs_of_prompts_with_pictures_since_they_get_tokens_alone():
    config, generator, begun = ten_steps(), SimpleNamespace(identity="generator/0#a"), []

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
