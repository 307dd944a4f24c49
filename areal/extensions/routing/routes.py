"""Gives routers the experts chosen in sampling (R3, arXiv 2510.11370)."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.extensions.routing.expert_routing import Routing
from areal.samples.table import NOT_SAMPLED
from areal.samples.trajectory import Branch, Trajectory, paths


class RouteReplay:
    """Has the routers of `module` send tokens to the experts of their routes. The router's own logits weigh the
    experts, so the router has its gradient. `routing`: the model's kind of routing."""

    def __init__(self, module: torch.nn.Module, routing: Routing) -> None:
        self._routing = routing
        self._routes: Tensor | None = None
        self._has_routes = torch.zeros(0, dtype=torch.bool)
        for name, part in module.named_modules():
            if "Router" in type(part).__name__ and (layer := re.search(r"\blayers\.(\d+)\.", name)):
                part.register_forward_hook(partial(self._replace, int(layer[1])))

    def follow(self, routes: Tensor | None) -> None:
        """Set the routes of the next forward pass, and of its recomputation: uint8 [T, width]; None: routers choose."""
        self._routes = routes
        if routes is not None:
            numbers = routes.view(torch.uint8 if self._routing.dtype == "u1" else torch.uint16)
            self._routes = numbers.view(len(routes), self._routing.layers, self._routing.chosen)
            self._has_routes = (routes != 0).any(1, keepdim=True)

    def _replace(
        self, layer: int, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the logits of all experts [T, experts], and weights and numbers of the chosen experts [T, chosen]."""
        if self._routes is None:
            return None
        logits, weights, by_router = output
        chosen = self._chosen(layer, by_router)
        return logits, self._weights(router, logits, chosen).to(weights.dtype), chosen

    def _chosen(self, layer: int, by_router: Tensor) -> Tensor:
        """Return the numbers of each token's experts, [T, chosen]: its route's, or the router's without a route."""
        assert self._routes is not None
        return torch.where(self._has_routes, self._routes[:, layer].to(by_router.dtype), by_router)

    def _weights(self, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of the chosen experts, computed as in transformers' routers."""
        if self._routing.gates == "logits":
            return logits.gather(1, chosen).softmax(-1)
        scores = logits.sigmoid() if self._routing.gates == "sigmoid" else logits.softmax(-1, torch.float32)
        weights = scores.gather(1, chosen)
        if getattr(router, "norm_topk_prob", True):  # routers without this key always normalise
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * getattr(router, "routed_scaling_factor", 1.0)


def routes_of_branches(trajectory: Trajectory, *, keeps_cache: bool) -> Iterator[np.ndarray]:
    """Yield the routes of each branch. A pass that sampled no token of this branch has the routes of another branch.
    keeps_cache: as in `areal.training.packed.FlatBatch.of`."""
    assert trajectory.routes is not None
    every = [*paths(trajectory.branches or [Branch(0, len(trajectory))])]
    after = np.full(len(trajectory), -1)  # by place of a pass, the place of the sampled token
    for path in reversed(every):
        after[path[:-1]] = np.where(trajectory.sampled[path[1:]], path[1:], after[path[:-1]])
    for path in every:
        made = after[path]
        made[:-1] = np.where(trajectory.sampled[path[1:]], path[1:], made[:-1])
        versions = np.where(made >= 0, trajectory.versions[made], NOT_SAMPLED)
        last = trajectory.versions[path][trajectory.sampled[path]][-1:]
        routed = (versions != NOT_SAMPLED) & (keeps_cache | (versions == last))
        yield np.where(routed[:, None], trajectory.routes[made], 0).astype(np.uint8)
