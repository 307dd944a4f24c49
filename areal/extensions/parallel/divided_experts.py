"""Expert parallelism by DeepSpeed's AutoEP: the ranks of a group share out the experts of each layer.

AutoEP replaces each layer of experts by its own layer, which sends a token to the ranks with the token's experts. All
other weights stay unchanged. The parameters of a replaced layer are a rank's experts, `w1`, `w2` and `w3`
[experts / size, ...]: in transformers `w1` is the first half of `gate_up_proj` [experts, 2 intermediate, hidden],
`w3` the second, and `w2` is `down_proj` [experts, hidden, intermediate].
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.extensions.parallel.checks import PRESETS, check_experts
from areal.extensions.parallel.norms import clip_divided
from areal.extensions.routing.expert_routing import Routing
from areal.extensions.routing.routes import RouteReplay
from areal.models import mixture_of
from areal.training.division import Division, Fragment
from areal.weights.folders import saved_buffers

HALVES = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None)}
"""For each parameter of experts: the tensor of transformers with the parameter, and its half of the tensor."""


class DividedExperts(Division):
    """The division of a model's experts. Raises UserError if the model in `folder` cannot be divided."""

    def __init__(self, config: TrainerConfig, folder: Path) -> None:
        check_experts(config, folder, dist.get_world_size())
        kind, self._experts = mixture_of(folder)
        self._preset, self._size = PRESETS[str(kind)], config.expert_parallel
        # Products of all experts at once have kernels for bf16 on GPUs alone.
        self._at_once = torch.cuda.is_available() and config.dtype == "bfloat16"
        self._names: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    @property
    def options(self) -> dict[str, Any]:
        division = {"autoep_size": self._size, "preset_model": self._preset, "use_grouped_mm": self._at_once}
        return {"expert_parallel": {"enabled": True, **division}}

    def name_groups(self, groups: list[dict[str, Any]]) -> None:
        for number, group in enumerate(groups):
            group.setdefault("name", f"group {number}")  # DeepSpeed divides groups with experts, by name

    def begin(self, module: torch.nn.Module) -> None:
        self._before = {name: id(tensor) for name, tensor in _tensors(module).items()}

    def find(self, engine: Any) -> None:
        from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
        from deepspeed.utils import groups

        self._group = groups._get_expert_parallel_group(f"ep_size_{self._size}")
        self._holders = groups._get_expert_data_parallel_group(f"ep_size_{self._size}")
        layers = [name for name, part in engine.module.named_modules() if isinstance(part, AutoEPMoELayer)]
        names = {number: name for name, number in self._before.items()}
        for name, tensor in _tensors(engine.module).items():
            if layer := next((layer for layer in layers if name.startswith(f"{layer}.")), None):
                self._names[name] = names.get(id(tensor)) or self._source(layer, name)
                if _is_divided(tensor):
                    self._sizes[name] = prod(getattr(tensor, "ds_shape", tensor.shape)[1:])
        del self._before

    def _source(self, layer: str, name: str) -> str:
        """Return the undivided model's name for a tensor that AutoEP made in `layer`, in its experts or its router."""
        last = name.rpartition(".")[2]
        if last in HALVES:
            return f"{layer}.experts.{HALVES[last][0]}"
        (source,) = (
            source
            for source in self._before
            if source.startswith(f"{layer}.gate.") and source.rpartition(".")[2] == last
        )
        return source

    def route_replay(self, module: torch.nn.Module, routing: Routing) -> RouteReplay:
        return DividedRouteReplay(module, routing)

    def whole_size(self, tensor: Tensor) -> int:
        return super().whole_size(tensor) * (self._size if _is_divided(tensor) else 1)

    def whole(self, tensor: Tensor) -> Tensor:
        if not _is_divided(tensor):
            return tensor
        joined = tensor.new_empty(len(tensor) * self._size, *tensor.shape[1:])
        dist.all_gather(list(joined.chunk(self._size)), tensor.detach().contiguous(), group=self._group)
        return joined

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        joined = {}
        for name, tensor in tensors.items():
            layer, _, last = name.rpartition(".")
            if name in self._sizes and last == "w1":
                tensor = torch.cat([tensor, tensors[f"{layer}.w3"]], 1)
            if name not in self._sizes or last != "w3":
                joined[self.name(name)] = tensor
        return joined

    def clip(self, parameters: Iterable[torch.nn.Parameter], largest: float) -> Tensor:
        return clip_divided(parameters, _is_divided, largest, self._group)

    def holders(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        if not _is_divided(parameter):
            return super().holders(parameter)
        return dist.get_rank(self._holders), dist.get_world_size(self._holders)

    def name(self, parameter: str) -> str:
        return self._names.get(parameter, parameter)

    def shapes(self, name: str, parameter: torch.nn.Parameter) -> dict[str, list[int]]:
        ((stored, shape),) = super().shapes(name, parameter).items()
        if _is_divided(parameter):
            shape = [self._experts, shape[1] * (1 if name.endswith("w2") else 2), *shape[2:]]
        return {stored: shape}

    def place(self, part: Fragment) -> Iterator[Fragment]:
        if (size := self._sizes.get(part.name)) is None:
            yield from super().place(part)
            return
        name = self.name(part.name)
        half = HALVES[part.name.rpartition(".")[2]][1]
        step, skipped = (size, 0) if half is None else (2 * size, half * size)
        first = dist.get_rank(self._group) * (self._experts // self._size)
        for expert in range(part.start // size, -(-part.stop // size)):
            start, stop = max(part.start, expert * size), min(part.stop, (expert + 1) * size)
            offset = (first + expert) * step + skipped - expert * size
            yield Fragment(name, start + offset, stop + offset)


class DividedRouteReplay(RouteReplay):
    """Replay for AutoEP's routers: they return the chosen experts' weights and numbers, and each expert's tokens."""

    def _replace(self, layer: int, router: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if self._routes is None:
            return None
        chosen = self._chosen(layer, output[1])
        scores = router.gate(inputs[0]).float()
        scores = scores.sigmoid() if router.score_func == "sigmoid" else scores.softmax(-1)
        weights = scores.gather(1, chosen)
        if router.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        counts = torch.bincount(chosen.flatten(), minlength=router.num_experts).to(output[2].dtype)
        return weights * router.route_scale, chosen, counts


def _tensors(module: torch.nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors of the model's files."""
    return {**dict(module.named_parameters()), **saved_buffers(module)}


def _is_divided(tensor: Tensor) -> bool:
    """Return whether AutoEP has marked a parameter as a parameter of experts."""
    return getattr(tensor, "allreduce", True) is False
