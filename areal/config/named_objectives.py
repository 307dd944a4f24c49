"""The objectives of this project: the loss of each objective, and its settings (docs/objectives.md).

A loss is an entry of the kind `objective` in the table of extensions. Settings are keys of `trainer` that the objective
sets unless the configuration does. Objectives with the same loss differ in their settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NamedObjective:
    """loss: the name of the loss's entry."""

    loss: str = "decoupled_ppo"
    settings: Mapping[str, Any] = field(default_factory=dict)


_GROUP = {"advantage_mean": "group", "advantage_std": "group"}
_SEQUENCES = {**_GROUP, "loss_mean": "sequence"}
_SUMS = {**_GROUP, "loss_mean": "constant"}
_GSPO = {"behaviour_weight_level": "geometric", "eps_clip": 3e-4, "eps_clip_higher": 4e-4}
_NO_STD = {"advantage_std": "none", "loss_mean": "constant"}
_PENALTY = {"kl_in": "reward", "kl_estimator": "k1"}
_OF_SEQUENCE = {"behaviour_weight_level": "sequence", "behaviour_weight_bounds": (0.0, 2.0)}

OBJECTIVES = {
    "decoupled_ppo": NamedObjective(),
    "ppo": NamedObjective("ppo", {"behaviour_weight": "none", "proximal": "interpolate"}),
    "grpo": NamedObjective(settings=_SEQUENCES),
    "dr_grpo": NamedObjective(settings={"advantage_mean": "group", **_NO_STD}),
    "rloo": NamedObjective(settings={"advantage_mean": "leave_one_out", **_NO_STD, **_PENALTY}),
    "reinforce_pp": NamedObjective(settings=_PENALTY),
    "dapo": NamedObjective(settings={**_GROUP, "eps_clip_higher": 0.28}),
    "gspo": NamedObjective("gspo", {**_SEQUENCES, **_GSPO}),
    "luspo": NamedObjective("gspo", {**_SUMS, **_GSPO}),
    "gmpo": NamedObjective("gmpo", {**_SEQUENCES, "behaviour_weight_level": "geometric", "eps_clip": 0.4}),
    "cispo": NamedObjective("cispo", {**_GROUP, "eps_clip": 1.0, "eps_clip_higher": 4.0}),
    "sapo": NamedObjective("sapo", _SEQUENCES),
    "dppo": NamedObjective("dppo", {**_SUMS, "eps_clip": 0.15}),
    "dppo_kl": NamedObjective("dppo_kl", {**_SUMS, "eps_clip": 0.05}),
    "vespo": NamedObjective("vespo", _GROUP),
    "tis": NamedObjective(settings={"behaviour_weight": "truncated", "behaviour_weight_bounds": (0.0, 2.0)}),
    "seq_tis": NamedObjective(settings={"behaviour_weight": "truncated", **_OF_SEQUENCE}),
    "seq_mis": NamedObjective(settings={"behaviour_weight": "masked", **_OF_SEQUENCE}),
    "icepop": NamedObjective(
        settings={**_SEQUENCES, "behaviour_weight": "masked", "behaviour_weight_bounds": (0.5, 5.0)}
    ),
    "kpop": NamedObjective(settings={**_GROUP, "behaviour_weight": "masked_kl", "behaviour_weight_bounds": (0.0, 2.0)}),
    "m2po": NamedObjective("m2po", _GROUP),
    "score_centring": NamedObjective(
        "score_centring",
        {"advantage_mean": "group", "advantage_std": "none", "behaviour_weight": "none", "proximal": "interpolate"},
    ),
    "sao": NamedObjective(
        "sao",
        {"behaviour_weight": "none", "proximal": "interpolate", "eps_clip": 0.3, "eps_clip_higher": 5.0},
    ),
    "flash_reinforce": NamedObjective(
        settings={
            "advantage_std": "none",
            "loss_mean": "sequence",
            "minibatches": 1,
            "sequence_mask": "kl",
            "sequence_mask_bounds": (0.0, 3e-3),
        }
    ),
    "distill": NamedObjective(settings={"teacher_coef": 1.0}),
}


def settings_of(objective: str) -> dict[str, Any]:
    """Return the settings of an objective; empty for a user's own objective."""
    return {**OBJECTIVES[objective].settings} if objective in OBJECTIVES else {}
