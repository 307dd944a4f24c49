"""The training engine on DeepSpeed, and what a step consists of: micro-batches, packing, advantages, objectives.

The names in `__all__` are public: a user's own objective may import them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.config.trainer_section import TrainerConfig
    from areal.training.objectives import TokenLoss, Tokens, behaviour_weight, ratio

__all__ = ["TokenLoss", "Tokens", "TrainerConfig", "behaviour_weight", "ratio"]


def __getattr__(name: str) -> Any:
    """Import `objectives` at first use only: it imports torch, and actors without an engine import this package too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from areal.training import objectives

    return getattr(objectives, name)
