"""The training engine on DeepSpeed, and the parts of a step: micro-batches, packing, advantages, objectives.

In: groups of a batch. Out: metrics of the step, new weights. Read `training_engine.py` first, then `packed.py`;
`algorithms/` has advantages and losses, as equations.

The names in `__all__` are public: an objective or an estimator of advantages of the user's own may import them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.config.trainer_section import TrainerConfig
    from areal.training.algorithms.advantages import Credits
    from areal.training.algorithms.token_loss import TokenLoss, Tokens, behaviour_weight, ratio

__all__ = ["Credits", "TokenLoss", "Tokens", "TrainerConfig", "behaviour_weight", "ratio"]


def __getattr__(name: str) -> Any:
    """Import a name at first use only: some need torch, and actors without an engine import this package too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"Credits": f"{__name__}.algorithms.advantages", "TrainerConfig": "areal.config.trainer_section"}
    return getattr(import_module(modules.get(name, f"{__name__}.algorithms.token_loss")), name)
