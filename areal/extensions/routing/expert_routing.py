"""The routing of a mixture of experts: which mixtures replay experts, and how a token's routes are stored."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from areal.base.errors import UserError
from areal.models import EXPERTS, sizes_of

if TYPE_CHECKING:
    import numpy as np  # starts threads at import: see ENGINE_ENVIRONMENT in areal/config/roles.py

Gates = Literal["softmax", "sigmoid", "logits"]
GATES: dict[str, Gates] = {
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), "softmax"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), "sigmoid"),
    "gpt_oss": "logits",
}
"""The function of router logits that gives the weights of chosen experts, by model_type, for mixtures whose routers can
replay experts."""


class Routing(NamedTuple):
    """How a model routes: in each of `layers`, dense layers included, to `chosen` of `experts`.

    The routes of a token are the numbers of its experts, layer by layer, in one byte each or, beyond 256 experts, in
    two (little-endian): `width` bytes. A dense layer has zeros; a token without routes has only zeros.

        >>> Routing("softmax", layers=48, experts=128, chosen=8).width
        384
    """

    gates: Gates
    layers: int
    experts: int
    chosen: int

    @property
    def dtype(self) -> str:
        return "u1" if self.experts <= 256 else "<u2"

    @property
    def width(self) -> int:
        return self.layers * self.chosen * int(self.dtype[-1])

    def check(self, routes: "np.ndarray | None", sampled: "np.ndarray") -> None:
        """Raise ValueError if tokens lack routes of this model. routes: uint8 [T, any]. sampled: bool [T]."""
        import numpy as np

        if routes is None:
            raise ValueError("its tokens have no routes, which trainer.routing=replay needs")
        if routes.shape[1] != self.width:
            raise ValueError(
                f"its tokens have {routes.shape[1]} bytes of routes, but the model has {self.width}: {self.chosen} "
                f"experts in each of {self.layers} layers"
            )
        if not routes[sampled].any(1).all():
            raise ValueError("one of its sampled tokens has no routes, which trainer.routing=replay needs")
        if routes.size and np.ascontiguousarray(routes).view(self.dtype).max() >= self.experts:
            raise ValueError(f"one of its routes names an expert that is not one of the model's {self.experts}")


def routing_of(folder: Path) -> Routing:
    """Return the routing of the model in `folder`. Raises UserError if its experts cannot be replayed."""
    sizes = sizes_of(folder)
    experts = next((sizes[name] for name in EXPERTS if sizes.get(name)), 0)
    kind, chosen = sizes.get("model_type"), sizes.get("num_experts_per_tok") or 0
    if kind not in GATES or not chosen > 1 or not chosen < experts:
        raise UserError(
            f"trainer.routing is replay, but the model {folder} of the kind {kind} is no mixture of experts for which "
            f"that is possible ({', '.join(GATES)}, with at least two experts a token): set it to own."
        )
    return Routing(GATES[kind], sizes["num_hidden_layers"], experts, chosen)
