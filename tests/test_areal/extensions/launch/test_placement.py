"""Where `areal launch` puts the processes of a run: computed from what the configuration says, and refused in one
sentence where the nodes do not have it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from areal.base.errors import UserError
from areal.config import load_config
from areal.extensions.launch.cluster import ClusterConfig
from areal.extensions.launch.placement import Placement, place

CONFIG = "configs/deploy/run.yaml"
EIGHT = {"gpu": {"count": 2, "devices": 8}}


def placed(nodes: dict[str, Any], *overrides: str) -> Placement:
    return place(load_config(CONFIG, overrides), ClusterConfig(nodes=nodes))


def test_every_process_of_the_configuration_is_placed_once_and_no_device_twice():
    placement = placed(EIGHT)
    roles = Counter(process.role for process in placement.processes)
    assert roles == {"trainer": 1, "generator": 6, "rollout_manager": 1, "reward": 1, "evaluator": 1}
    used = Counter((process.node, device) for process in placement.processes for device in process.devices)
    assert used == {(node, device): 1 for node in (0, 1) for device in range(8)}


def test_a_trainer_larger_than_a_node_takes_equal_parts_of_the_fewest_nodes():
    ranks = placed({"gpu": {"count": 4, "devices": 8}}, "trainer.ranks=12", "generator.count=2").of("trainer")
    assert [(part.node, len(part.devices)) for part in ranks] == [(0, 6), (1, 6)]


def test_roles_keep_to_the_nodes_of_their_kind():
    nodes = {"big": {"count": 3, "devices": 8, "roles": ["trainer", "generator"]}, "small": {"devices": 0}}
    placement = placed(nodes, "rollout_manager.count=2")
    assert {process.node for role in ("reward", "rollout_manager") for process in placement.of(role)} == {3}


def test_a_scorer_has_devices_of_its_own_and_its_name():
    scorers = ["scorers.wise={model: m, kind: logprobs, tensor_parallel: 2}", "trainer.teacher=wise"]
    placement = placed(EIGHT, *scorers, "trainer.teacher_coef=1", "generator.count=5")
    (scorer,) = placement.of("scorer")
    assert (scorer.node, scorer.devices, scorer.options) == (1, (6, 7), ("--scorer", "wise"))


@pytest.mark.parametrize(
    ("nodes", "overrides", "sentence"),
    [
        (EIGHT, ["generator.count=7"], "7 generators need 2 each .*have 0, 0 free in this order: add nodes"),
        (EIGHT, ["generator.tensor_parallel=16"], "One generator needs 16 devices of one node, but the largest"),
        (EIGHT, ["trainer.ranks=17"], "trainer.ranks is 17, which cluster.nodes cannot hold as equal parts of"),
        (EIGHT, ["colocate=true"], "colocate=true shares the devices of one machine"),
        (
            {"gpu": {"count": 2, "devices": 8, "roles": ["trainer", "generator"]}},
            [],
            "No node of cluster.nodes takes the role reward",
        ),
    ],
)
def test_nodes_that_do_not_fit_the_run_give_one_sentence(nodes, overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        placed(nodes, *overrides)
